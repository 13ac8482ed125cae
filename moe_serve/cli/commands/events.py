"""`moe-serve events`: what was decided, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from moe_serve.cli.options import (
    INT64_MAX,
    AddressOption,
    OutputOption,
    ServiceOption,
    admin_of,
)
from moe_serve.cli.output import Output, OutputFormat
from moe_serve.cli.plain import plain
from moe_serve.cli.views.events import event_line


def events(
    ctx: typer.Context,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with new records, until Ctrl-C.")
    ] = False,
    after: Annotated[
        int,
        typer.Option(
            min=0,
            max=INT64_MAX,
            metavar="SEQ",
            help="Only records after this number; all, where none is as high: a controller rebuilt "
            "without its journal counts anew.",
        ),
    ] = 0,
    rule: Annotated[
        str, typer.Option(metavar="NAME", help="Only records of this rule (plan_done, budget ...).")
    ] = "",
    address: AddressOption = "",
    service: ServiceOption = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Decisions with their reasons and numbers, oldest first.

    With -o json, one record a line.
    """
    out = Output(output)
    rules: set[str] = set()
    with admin_of(ctx, address, service) as admin:
        for record in admin.events(after, follow):
            rules.add(record.rule)
            if rule in ("", record.rule):
                out.line(plain(record), event_line(record))
    if rule and rule not in rules:
        out.note(f"no record of rule {rule!r}; rules there: {', '.join(sorted(rules)) or 'none'}")
