"""`moe-serve explain`: why it is slow now, and why a plan was made."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from moe_serve.cli.exits import CannotReach, ExitCode
from moe_serve.cli.options import AddressOption, OutputOption, ServiceOption, admin_of
from moe_serve.cli.output import Output, OutputFormat
from moe_serve.cli.plain import plain
from moe_serve.cli.views.explain import (
    away_parts,
    away_plain,
    explain_parts,
    explain_plain,
    plan_parts,
)
from moe_serve.errors import FailedPrecondition, InvalidArgument, Unavailable
from moe_serve.explain.finding import SECONDS_MAX, SLOW
from moe_serve.explain.words import NO_START


class What(StrEnum):
    """What is explained."""

    NOW = "now"
    PLAN = "plan"


def explain(  # its parameters are the command's options
    ctx: typer.Context,
    what: Annotated[
        What, typer.Argument(metavar="now|plan", help="Why it is slow now, or one plan.")
    ] = What.NOW,
    plan_id: Annotated[
        str, typer.Argument(metavar="PLAN_ID", help="With `plan`: which one. Default: the newest.")
    ] = "",
    seconds: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=SECONDS_MAX,
            metavar="SECONDS",
            help="How far to look back; 0 = the newest ten load windows.",
        ),
    ] = 0.0,
    check: Annotated[
        bool, typer.Option("--check", help="Exit 5 where something is slow, for scripts.")
    ] = False,
    address: AddressOption = "",
    service: ServiceOption = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Say why it is slow now: the causes that were measured, each with evidence and the next step,
    and where requests spend their time.

    A cause is named where it costs at least a fifth of the time of requests. `explain plan` shows
    what a plan was made on, what else was looked at, and what it brought.
    """
    out = Output(output)
    if what is What.NOW and plan_id:
        raise InvalidArgument(
            f"PLAN_ID {plan_id!r}: give it after `plan`, `explain plan {plan_id}`"
        )
    with admin_of(ctx, address, service) as admin:
        if what is What.PLAN:
            plan = admin.explain_plan(plan_id)
            out.data(plain(plan), plan_parts(plan))
            return
        try:
            answer = admin.explain(seconds)
        except (CannotReach, Unavailable, FailedPrecondition) as error:
            # It does not answer, is between two lives, or says that it does not start.
            if isinstance(error, FailedPrecondition) and NO_START not in error.message:
                raise
            out.data(away_plain(error.message), away_parts(error.message))
            raise typer.Exit(ExitCode.UNREACHABLE) from error
    out.data(explain_plain(answer), explain_parts(answer))
    if check and answer.verdict == SLOW:
        raise typer.Exit(ExitCode.DEGRADED)
