"""`moe-serve plan` and `moe-serve apply`: see a change of the placement first, then let it
happen."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from moe_serve.cli.admin import Admin
from moe_serve.cli.beside import refuse_beside
from moe_serve.cli.exits import ExitCode
from moe_serve.cli.options import (
    INT32_MAX,
    AddressOption,
    OutputOption,
    ServiceOption,
    admin_of,
)
from moe_serve.cli.output import Output, OutputFormat
from moe_serve.cli.plain import enum_word
from moe_serve.cli.progress import bar, tally
from moe_serve.cli.views.plan import plan_parts, plan_plain

POLL_S = 0.2
ENDED = frozenset({"done", "aborted"})
COMPUTING = "computing a plan"
"""Said while the controller does, which it may for half a minute."""


def plan(
    ctx: typer.Context,
    policy: Annotated[
        str, typer.Option("--policy", "-p", help="Another policy than the configured one.")
    ] = "",
    max_moves: Annotated[
        int,
        typer.Option(min=0, max=INT32_MAX, help="Moves at most; 0 = the configured limit."),
    ] = 0,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit 4 where there is something to move.")
    ] = False,
    address: AddressOption = "",
    service: ServiceOption = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show a plan as a diff with reasons and prices; move nothing."""
    out = Output(output)
    with admin_of(ctx, address, service) as admin:
        placement = admin.placement()
        with bar(out, COMPUTING, None):
            view = admin.compute_plan(policy, max_moves)
    out.data(plan_plain(view, placement), plan_parts(view, placement))
    if exit_code and view.moves:
        raise typer.Exit(ExitCode.CHANGES)


def apply(
    ctx: typer.Context,
    plan_id: Annotated[str, typer.Argument(metavar="PLAN_ID", help="As `plan` printed it.")],
    check: Annotated[
        bool, typer.Option("--check", help="Only say whether the plan still fits.")
    ] = False,
    wait: Annotated[
        float,
        typer.Option(
            min=0.0, metavar="SECONDS", help="Wait until its moves have ended; exit 1 if not all."
        ),
    ] = 0.0,
    address: AddressOption = "",
    service: ServiceOption = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Run a plan that was computed before.

    Refused where a slot or an expert that it touches has changed since.
    """
    out = Output(output)
    if check:
        refuse_beside(ctx, ("wait",), "--check", "nothing is started that could end")
    with admin_of(ctx, address, service) as admin:
        message = admin.apply_plan(plan_id, check)
        done = wait_for_moves(admin, plan_id, wait, out) if wait else {}
    missed = sum(state != "done" for state in done.values())
    said = message or "accepted"
    if missed:
        said = f"{missed} of {len(done)} moves are not done; see `moe-serve events`"
    elif done:
        said = f"done, {len(done)} of {len(done)} moves"
    out.data(
        {"plan_id": plan_id, "checked_only": check, "message": message, "moves": done},
        [f"plan {plan_id} still fits; nothing was started" if check else f"plan {plan_id}: {said}"],
    )
    if missed:
        raise typer.Exit(ExitCode.FAILED)


def wait_for_moves(admin: Admin, plan_id: str, wait_s: float, out: Output) -> dict[int, str]:
    """State of each move of the plan by id, when all have ended or the time is over."""
    deadline = time.monotonic() + wait_s
    with tally(out) as told:
        while True:
            states = {
                move.move_id: enum_word(move, "state")
                for move in admin.placement().moves
                if move.plan_id == plan_id
            }
            ended = sum(state in ENDED for state in states.values())
            text = f"plan {plan_id}: {ended} of {len(states)} moves ended"
            told.tell(text, ended, len(states))
            over = bool(states) and ended == len(states)
            # A move is shown as ended before the last slot of its plan is released.
            if over and not any(step.plan_id == plan_id for step in admin.steps()):
                return states
            if time.monotonic() >= deadline:
                return states or {-1: "not started"}
            time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))
