"""`moe-serve top`: what is hottest now."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer
from rich.console import RenderableType

from moe_serve.cli.admin import Admin
from moe_serve.cli.beside import refuse_beside
from moe_serve.cli.hotness import Hotness, hotness_of
from moe_serve.cli.options import (
    INT32_MAX,
    AddressOption,
    OutputOption,
    PhaseOption,
    ServiceOption,
    admin_of,
)
from moe_serve.cli.output import Output, OutputFormat
from moe_serve.cli.views.top import (
    NOTHING_ASKED,
    Kind,
    notes,
    top_plain,
    top_rows,
    top_table,
    window_line,
)
from moe_serve.cli.watching import Watch, keys_read, show_live
from moe_serve.documents.window import PhaseChoice
from moe_serve.errors import Unavailable
from moe_serve.rpc import placement_pb2 as pb

ROWS = 20
"""Rows where no terminal limits them."""
ROUND_TABLE = 6
"""Lines of the screen that are not rows."""
Seen = tuple[pb.GetPlacementResponse, pb.GetLoadResponse | None]


def top(  # noqa: PLR0913, PLR0917  # its parameters are the command's options
    ctx: typer.Context,
    kind: Annotated[
        Kind, typer.Argument(metavar="experts|ranks|layers", help="What is listed.")
    ] = Kind.EXPERTS,
    rows: Annotated[
        int | None,
        typer.Option(
            "--rows",
            "-n",
            min=1,
            max=INT32_MAX,
            help="Rows at most. Default: as many as the terminal holds, 20 in a pipe.",
        ),
    ] = None,
    phase: PhaseOption = PhaseChoice.ALL,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600.0, metavar="SECONDS", help="Between two looks.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one table and end.")] = False,
    address: AddressOption = "",
    service: ServiceOption = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show the hottest experts, ranks or layers, live; `q` or Ctrl-C ends.

    Figures are of the newest closed window. Experts and ranks are sorted by pairs a second, layers
    by imbalance. In a pipe, with --once or with another output than a table: one table. Where the
    controller goes away it says so and goes on trying.
    """
    out = Output(output)
    if alone := _prints_once(once, out):
        refuse_beside(ctx, ("interval",), alone, "one table is printed")
    with admin_of(ctx, address, service) as admin:
        if alone:
            _print_once((admin.placement(), admin.load()), kind, phase, rows, out)
            return

        def draw(seen: Seen, age_s: float) -> list[RenderableType]:
            room = max(1, out.out.size.height - ROUND_TABLE)
            return _parts(seen, kind, phase, min(rows or room, room), age_s)

        with Watch(partial(_look, admin), interval) as watch, keys_read() as wait_key:
            show_live(out.out, watch, draw, wait_key)


def _prints_once(once: bool, out: Output) -> str:
    """What makes it print one table and end, "" where it goes on."""
    if once:
        return "--once"
    if out.for_programs:
        return f"-o {out.form.value}"
    return "" if out.out.is_terminal else "a pipe"


def _look(admin: Admin) -> Seen:
    """Placement, and load once a window has closed."""
    placement = admin.placement()
    try:
        return placement, admin.load()
    except Unavailable:
        return placement, None


def _print_once(seen: Seen, kind: Kind, phase: PhaseChoice, rows: int | None, out: Output) -> None:
    placement, load = seen
    hot = hotness_of(load, placement, phase)
    listed = top_rows(kind, hot, placement, rows)
    out.data(top_plain(kind, hot, listed), _parts(seen, kind, phase, rows or ROWS, 0.0))


def _parts(
    seen: Seen, kind: Kind, phase: PhaseChoice, limit: int, age_s: float
) -> list[RenderableType]:
    placement, load = seen
    hot = hotness_of(load, placement, phase)
    listed = top_rows(kind, hot, placement, limit)
    if load is None:
        return [f"{placement.service_id} | {placement.state} | no window of load has closed yet"]
    head = window_line(hot, placement, hot.age_s + age_s)
    if kind is Kind.EXPERTS and not hot.pairs.any():
        return [head, "", NOTHING_ASKED]
    return [
        head,
        "",
        top_table(kind, listed),
        *notes(kind, hot, _total(kind, hot, placement), len(listed)),
    ]


def _total(kind: Kind, hot: Hotness, placement: pb.GetPlacementResponse) -> int:
    return {
        Kind.EXPERTS: hot.pairs.size,
        Kind.RANKS: len(placement.ranks),
        Kind.LAYERS: hot.num_layers,
    }[kind]
