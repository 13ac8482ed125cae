"""`moe-serve explain`: why it is slow now, and why a plan was made."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated

import typer

from moe_serve.cli.beside import refuse_beside
from moe_serve.cli.exits import ExitCode
from moe_serve.cli.options import AddressOption, OutputOption, ServiceOption, admin_of
from moe_serve.cli.output import Output, OutputFormat
from moe_serve.cli.views.explain import away_parts, explain_parts, plan_parts
from moe_serve.documents.explanation import controller_away, explanation, is_away
from moe_serve.documents.plans import is_priced, plan_document
from moe_serve.errors import InvalidArgument, MoeServeError
from moe_serve.explain.finding import SECONDS_MAX, SLOW


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
    if what is What.PLAN:
        why = "it tells of the plan and judges nothing; both are of `explain now`"
        refuse_beside(ctx, ("seconds", "check"), "`explain plan`", why)
    with admin_of(ctx, address, service) as admin:
        if what is What.PLAN:
            plan = admin.explain_plan(plan_id)
            out.data(plan_document(plan, priced=is_priced(plan)), plan_parts(plan))
            return
        try:
            answer = admin.explain(seconds)
        except MoeServeError as error:
            if not is_away(error):
                raise
            away = controller_away(error.message, wall_s=_wall_s(), age_s=None)
            out.data(away, away_parts(error.message))
            raise typer.Exit(ExitCode.UNREACHABLE) from error
    out.data(explanation(answer, wall_s=_wall_s(), age_s=0.0), explain_parts(answer))
    if check and answer.verdict == SLOW:
        raise typer.Exit(ExitCode.DEGRADED)


def _wall_s() -> float:
    """Seconds since the Unix epoch, now."""
    return datetime.now(UTC).timestamp()
