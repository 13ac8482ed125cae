"""`moe-serve events`: what was decided, and why."""

from __future__ import annotations

import re
from datetime import UTC, datetime
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
from moe_serve.cli.views.events import Fold, event_line, refused_lines
from moe_serve.documents.views import record_view
from moe_serve.errors import FieldViolation, InvalidArgument
from moe_serve.rpc import placement_pb2 as pb

SPAN = re.compile(r"(\d{1,9})\s*([smhd]?)")
UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


def events(  # noqa: PLR0913, PLR0917  # its parameters are the command's options
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
    since: Annotated[
        str, typer.Option(metavar="TIME", help="Only records of the last 90s, 10m, 2h or 1d.")
    ] = "",
    rule: Annotated[
        str, typer.Option(metavar="NAME", help="Only records of this rule (plan_done, budget ...).")
    ] = "",
    every: Annotated[
        bool,
        typer.Option(
            "--all", "-a", help="Show each window in which nothing moved, instead of a count."
        ),
    ] = False,
    why: Annotated[
        bool,
        typer.Option("--why", "-v", help="Also what else was looked at, and why it was refused."),
    ] = False,
    address: AddressOption = "",
    service: ServiceOption = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Decisions with their reasons and numbers, oldest first.

    Windows in which nothing moved for the same reason are one line and a count. With -o json, one
    record a line, each of them.
    """
    out = Output(output)
    earliest_s = _earliest_s(since)
    rules: set[str] = set()
    shown = _Lines(out, follow=follow, every=every, why=why)
    with admin_of(ctx, address, service) as admin:
        try:
            for record in admin.events(after, follow):
                rules.add(record.rule)
                if rule in ("", record.rule) and record.wall_time_s >= earliest_s:
                    shown.add(record)
        finally:
            shown.end()
    if rule and rule not in rules:
        out.note(f"no record of rule {rule!r}; rules there: {', '.join(sorted(rules)) or 'none'}")


def _earliest_s(since: str) -> float:
    """Seconds since the Unix epoch. Raises InvalidArgument."""
    if not since:
        return 0.0
    match = SPAN.fullmatch(since.strip())
    if match is None:
        text = f"{since!r} is no time; give seconds, or 90s, 10m, 2h, 1d"
        raise InvalidArgument("--since is wrong", violations=(FieldViolation("--since", text),))
    return datetime.now(UTC).timestamp() - int(match[1]) * UNITS_S[match[2]]


class _Lines:
    """Prints records, runs of alike ones folded. On a terminal that follows, the count of the run
    that goes on is written over; elsewhere it is written when the run has ended."""

    def __init__(self, out: Output, *, follow: bool, every: bool, why: bool) -> None:
        self._out = out
        self._live = follow and out.out.is_terminal and not out.for_programs
        self._every = every or out.for_programs
        self._why = why
        self._fold = Fold()

    def add(self, record: pb.DecisionRecord) -> None:
        """Show or count one more."""
        if not self._every:
            said = self._fold.line
            if self._fold.takes(record):
                self._count()
                return
            self._close(said)
        self._out.line(record_view(record), event_line(record))
        if self._why and not self._out.for_programs:
            for line in refused_lines(record):
                self._out.line(None, line)

    def end(self) -> None:
        """Show what was counted last."""
        self._close(self._fold.line)

    def _count(self) -> None:
        if self._live:
            # Raw, for the console takes control characters out.
            self._out.out.file.write(f"\r{self._fold.line}")
            self._out.out.file.flush()

    def _close(self, said: str) -> None:
        if not said:
            return
        if self._live:  # it stands there already
            self._out.out.print()
        else:
            self._out.line(None, said)
