"""`moe-serve rollback`, `export` and `import`: placements from before a plan, into files and out of
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_serve.cli.admin import Admin
from moe_serve.cli.again import command_of
from moe_serve.cli.beside import refuse_beside
from moe_serve.cli.commands.plan import COMPUTING
from moe_serve.cli.exits import ExitCode
from moe_serve.cli.layouts import (
    LayoutFormat,
    holding_of,
    parse_layers,
    read_layout,
    save,
    text_of,
    written,
)
from moe_serve.cli.moving import UNKNOWN, Moved, wait_for_moves
from moe_serve.cli.options import AddressOption, OutputOption, ServiceOption, admin_of
from moe_serve.cli.output import Output, OutputFormat
from moe_serve.cli.progress import bar
from moe_serve.cli.rolling import NO_ANSWER
from moe_serve.cli.views.plan import plan_parts, plan_plain
from moe_serve.cli.whole_file import STANDARD_OUTPUT
from moe_serve.errors import (
    FailedPrecondition,
    InvalidArgument,
    MoeServeError,
    NotFound,
    ResourceExhausted,
)
from moe_serve.rpc import placement_pb2 as pb

NEWEST = "newest"
NOT_AGAIN = ("dry_run", "output")
"""Parameters that do not come again where a command is to be run for good."""
PAUSED = "automatic plans are paused; `moe-serve resume` lets them run again"
MAY_BE_PAUSED = (
    "automatic plans may be paused: `moe-serve status` says so, `moe-serve resume` lets them run"
)
WAIT_S = 120.0
UNNUMBERED = (
    "layers are numbered from 0 without a gap; where the model has dense layers, name its MoE "
    "layers with --layers, for the engine counts both"
)
NO_DENSE = "it counts MoE layers only"

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; for scripts.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show the plan and move nothing.")]
KeepOption = Annotated[
    bool,
    typer.Option(
        "--keep-automatic",
        help="Leave automatic plans on; they may move things away again. Default: they are paused.",
    ),
]
WaitOption = Annotated[
    float,
    typer.Option(
        min=0.0, metavar="SECONDS", help="Wait so long for its moves; exit 1 if not all ended."
    ),
]
LayersOption = Annotated[
    str,
    typer.Option(
        "--layers",
        metavar="NUMBERS",
        help='The MoE layers by their number in the model ("3-60"), where the file counts dense '
        "layers too.",
    ),
]


def rollback(  # noqa: PLR0913, PLR0917  # one parameter an option
    ctx: typer.Context,
    plan_id: Annotated[
        str,
        typer.Argument(metavar="PLAN", help="Back to before this plan. Default: the newest."),
    ] = NEWEST,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    keep_automatic: KeepOption = False,
    wait: WaitOption = WAIT_S,
    address: AddressOption = "",
    service: ServiceOption = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Go back to the placement from before a plan.

    Shows the plan, asks, pauses automatic plans and runs it. The placements from before the newest
    16 plans are known.
    """
    out = Output(output)
    terms = Terms(yes=yes, dry_run=dry_run, keep_automatic=keep_automatic, wait_s=wait)
    terms.check(out)
    with admin_of(ctx, address, service) as admin:
        placement = admin.placement()
        with bar(out, COMPUTING, None):
            answer = admin.plan_to(plan_id)
        goal = f"the placement before plan {answer.before_plan}"
        command = command_of(ctx, NOT_AGAIN, {"plan_id": answer.before_plan, "yes": ""})
        _carry_out(admin, answer, placement, Goal(goal, command), terms, out)


def export(
    ctx: typer.Context,
    form: Annotated[
        LayoutFormat, typer.Option("--format", help="Who is to read it.")
    ] = LayoutFormat.OWN,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            metavar="OUT",
            help="Write to this file, `-` = standard output; .pt: tensors, for SGLang.",
        ),
    ] = None,
    layers: LayersOption = "",
    address: AddressOption = "",
    service: ServiceOption = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Write down what lies where, for this service or another engine.

    Engines take a placement in which every rank has as many slots of every layer; any other is
    refused, and what differs is named. Without -f, or with `-f -`, the file's text goes to stdout;
    -o is about what is said of a file.
    """
    out = Output(output)
    if file == STANDARD_OUTPUT:
        file = None
    if file is None:
        refuse_beside(
            ctx, ("output",), "an export to stdout", "its text is that of the file; give --file"
        )
    if form in (LayoutFormat.OWN, LayoutFormat.VLLM):
        refuse_beside(ctx, ("layers",), f"--format {form.value}", NO_DENSE)
    with admin_of(ctx, address, service) as admin:
        placement = admin.placement()
    held = holding_of(placement)
    numbers = parse_layers(layers, held.num_layers)
    content = written(form, held, numbers)
    if numbers is None and form in (LayoutFormat.SGLANG, LayoutFormat.TRTLLM):
        out.note(f"note: {UNNUMBERED}")
    if placement.state == "moving":
        out.note("note: a plan is running; what is listed just now is written")
    if file is None:
        out.out.file.write(text_of(form, content))
        out.out.file.flush()
        return
    save(file, form, content)
    out.data(
        {
            "file": str(file),
            "format": form.value,
            "num_layers": held.num_layers,
            "num_ranks": len(held.ranks),
            "replicas": sum(map(len, held.rows)),
        },
        [
            f"{file}: {sum(map(len, held.rows))} replicas of {held.num_layers} layers on "
            f"{len(held.ranks)} ranks, for {form.value}"
        ],
    )


def import_file(  # noqa: PLR0913, PLR0917  # one parameter an option
    ctx: typer.Context,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="As `export` or an engine wrote it.")
    ],
    form: Annotated[
        LayoutFormat | None,
        typer.Option("--format", help="Whose it is. Default: told by what it holds."),
    ] = None,
    layers: LayersOption = "",
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    keep_automatic: KeepOption = False,
    wait: WaitOption = WAIT_S,
    address: AddressOption = "",
    service: ServiceOption = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Move to the placement that a file holds.

    Shows the plan, asks, pauses automatic plans and runs it. Refused where the ranks cannot hold
    it; what stands against it is named.
    """
    out = Output(output)
    terms = Terms(yes=yes, dry_run=dry_run, keep_automatic=keep_automatic, wait_s=wait)
    terms.check(out)
    with admin_of(ctx, address, service) as admin:
        placement = admin.placement()
        held = holding_of(placement)
        found = read_layout(file, form, held, parse_layers(layers, held.num_layers))
        if found.form is LayoutFormat.OWN:
            refuse_beside(ctx, ("layers",), "a file of this service", NO_DENSE)
        with bar(out, COMPUTING, None):
            answer = admin.plan_to("", found.rows)
        command = command_of(ctx, NOT_AGAIN, {"yes": ""})
        goal = Goal(f"the placement of {file}", command, found.notes)
        _carry_out(admin, answer, placement, goal, terms, out)


@dataclass(frozen=True, slots=True)
class Goal:
    """Where a plan leads, the command that leads there, and what is known of it."""

    words: str
    command: str
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Terms:
    """How far to go, and who is asked."""

    yes: bool
    dry_run: bool
    keep_automatic: bool
    wait_s: float

    def check(self, out: Output) -> None:
        """Raises InvalidArgument where a program reads the answer: it cannot be asked."""
        if out.for_programs and not (self.yes or self.dry_run):
            raise InvalidArgument(
                f"-o {out.form.value} cannot ask: add -y to move, or --dry-run to look"
            )


def _carry_out(
    admin: Admin,
    answer: pb.ComputePlanResponse,
    placement: pb.GetPlacementResponse,
    goal: Goal,
    terms: Terms,
    out: Output,
) -> None:
    """Show the plan, ask, apply, wait, and say what came of it."""
    plan = answer.plan
    report: dict[str, Any] = {
        "before_plan": answer.before_plan,
        "notes": [*goal.notes, *answer.notes],
        "plan": plan_plain(plan, placement),
        "applied": False,
        "paused": answer.paused,
        "message": "",
        "moves": {},
    }
    if not out.for_programs:
        *shown, _ = plan_parts(plan, placement)
        notes = [f"Note: {note}" for note in report["notes"]]
        out.data({}, [f"Towards {goal.words}", *shown, *notes])
    if not plan.moves:
        why = "what differs cannot be moved, see above" if plan.refused else "it is that already"
        out.data(report, [f"Nothing moves: {why}."])
        return
    if terms.dry_run:
        out.data(report, [f"Nothing moved. Run: {goal.command}"])
        return
    if not terms.yes:
        typer.confirm(f"Run these {len(plan.moves)} moves?", abort=True, err=True)
    report["message"] = _apply(admin, answer, goal, terms, out)
    report["applied"] = True
    report["paused"] = answer.paused or not terms.keep_automatic
    try:
        moved = wait_for_moves(admin, plan.plan_id, terms.wait_s, out) if terms.wait_s else None
    except (MoeServeError, KeyboardInterrupt):
        if report["paused"]:
            out.note(PAUSED)
        raise
    report["moves"] = {} if moved is None else moved.states
    out.data(report, _closing(report, moved, goal))
    if moved is not None and not moved.whole:
        raise typer.Exit(ExitCode.FAILED)


def _apply(
    admin: Admin, answer: pb.ComputePlanResponse, goal: Goal, terms: Terms, out: Output
) -> str:
    """Pause automatic plans and run the plan. Where it is refused they are as they were; where it
    is not known what came of it, it is said that they are paused."""
    pauses = not answer.paused and not terms.keep_automatic
    if pauses:
        try:
            admin.pause(f"towards {goal.words}"[:200])
        except (*NO_ANSWER, KeyboardInterrupt):
            out.note(MAY_BE_PAUSED)
            raise
    try:
        return admin.apply_plan(answer.plan.plan_id, False)
    except (FailedPrecondition, NotFound, ResourceExhausted):
        # Only where it is known that nothing moves: an answer that was lost may have been a yes.
        if pauses:
            _resume(admin, out)
        raise
    except (MoeServeError, KeyboardInterrupt) as error:
        if pauses:
            out.note(PAUSED)
        if isinstance(error, (*NO_ANSWER, KeyboardInterrupt)):
            out.note(UNKNOWN)
        raise


def _resume(admin: Admin, out: Output) -> None:
    try:
        admin.resume()
    except (MoeServeError, KeyboardInterrupt):
        out.note(PAUSED)
        raise
    out.note("automatic plans run as before; `moe-serve pause` first keeps things as shown")


def _closing(report: dict[str, Any], moved: Moved | None, goal: Goal) -> list[str]:
    plan_id = report["plan"]["plan_id"]
    if moved is None:
        lines = [f"plan {plan_id}: {report['message'] or 'accepted'}"]
    elif moved.whole:
        left = len(report["plan"]["refused"])
        reached = f"{goal.words} but for {left} moves" if left else goal.words
        lines = [f"plan {plan_id}: done, this is {reached}"]
    elif not moved.begun:
        lines = [f"plan {plan_id}: has not begun; see `moe-serve events`"]
    else:
        done = f"{moved.done} of {len(moved.states)} moves are done"
        lines = [f"plan {plan_id}: {done}; see `moe-serve events`"]
    if report["paused"]:
        lines.append(
            "Automatic plans are paused; `moe-serve resume` lets them run, and move things again."
        )
    else:
        lines.append("Automatic plans run, and may move things away from it again.")
    return lines
