"""`moe-serve plan` and `moe-serve apply`: see a change of the placement first, then let it
happen."""

from __future__ import annotations

from typing import Annotated

import typer

from moe_serve.cli.beside import refuse_beside
from moe_serve.cli.exits import ExitCode
from moe_serve.cli.moving import UNKNOWN, wait_for_moves
from moe_serve.cli.options import (
    INT32_MAX,
    AddressOption,
    OutputOption,
    ServiceOption,
    admin_of,
)
from moe_serve.cli.output import Output, OutputFormat
from moe_serve.cli.progress import bar
from moe_serve.cli.unheard import told_if_unheard
from moe_serve.cli.views.plan import plan_parts, plan_plain

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
        if check:
            message = admin.apply_plan(plan_id, check)
        else:
            with told_if_unheard(out, UNKNOWN):
                message = admin.apply_plan(plan_id, check)
        moved = wait_for_moves(admin, plan_id, wait, out) if wait else None
    said = message or "accepted"
    if moved is not None:
        total = len(moved.states)
        if not moved.begun:
            said = f"has not begun after {wait:g} s; see `moe-serve events`"
        elif not moved.whole:
            said = f"{total - moved.done} of {total} moves are not done; see `moe-serve events`"
        else:
            said = f"done, {total} of {total} moves"
    states = {} if moved is None else moved.states
    out.data(
        {"plan_id": plan_id, "checked_only": check, "message": message, "moves": states},
        [f"plan {plan_id} still fits; nothing was started" if check else f"plan {plan_id}: {said}"],
    )
    if moved is not None and not moved.whole:
        raise typer.Exit(ExitCode.FAILED)
