"""`moe-serve heat`: heat of every expert, in the terminal or as a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType

from moe_serve.cli.admin import Admin
from moe_serve.cli.beside import refuse_beside
from moe_serve.cli.charts.heat import IMAGE_COLOURS, field_image, field_lines, legend
from moe_serve.cli.charts.png import write_image
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
from moe_serve.cli.views.heat import HeatMap, Mode, heat_map, heat_plain, pooled_line
from moe_serve.cli.views.top import window_line
from moe_serve.cli.whole_file import STANDARD_OUTPUT, check_binary_stdout, write_whole
from moe_serve.documents.experts import CSV_COLUMNS, csv_parts
from moe_serve.documents.window import PhaseChoice
from moe_serve.errors import InvalidArgument, Unavailable
from moe_serve.rpc import placement_pb2 as pb

AROUND_FIELD = 6
"""Lines of the screen beside the field: what it is, its scale, what was pooled, the prompt."""


def heat(  # noqa: PLR0913, PLR0917  # its parameters are the command's options
    ctx: typer.Context,
    layer: Annotated[
        int | None, typer.Option(min=0, max=INT32_MAX, help="Only this layer, expert by expert.")
    ] = None,
    phase: PhaseOption = PhaseChoice.ALL,
    mode: Annotated[
        Mode,
        typer.Option(
            help="What is shown: pairs a second (log scale), load / fair share, or replicas."
        ),
    ] = Mode.LOAD,
    png: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw every expert as a PNG; `-` = standard output."),
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=f"Write {CSV_COLUMNS}; `-` = standard output."),
    ] = None,
    address: AddressOption = "",
    service: ServiceOption = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show how hot every expert is: rows are layers, columns are experts.

    Of the newest closed window. Half blocks in colour where the terminal has 256 colours or more,
    digits 0 to 9 elsewhere. Where the terminal is too small a cell is the greatest of several. With
    --png or --csv the terminal shows only what was written.
    """
    out = Output(output)
    _check_stdout(png, csv, out)
    if mode is Mode.REPLICAS and csv is None and not out.for_programs:
        refuse_beside(ctx, ("phase",), "--mode replicas", "replicas serve the tokens of both")
    with admin_of(ctx, address, service) as admin:
        placement = admin.placement()
        load = _load(admin, mode)
    hot = hotness_of(load, placement, phase)
    if layer is not None and layer >= hot.num_layers:
        numbers = f", from 0 to {hot.num_layers - 1}" if hot.num_layers else ""
        raise InvalidArgument(f"--layer {layer}: the model has {hot.num_layers} layers{numbers}")
    shown = heat_map(hot, mode, layer)
    if png is not None:
        image = field_image(shown.field, shown.title, shown.low, shown.high)
        write_image(png, image, IMAGE_COLOURS)
        if png != STANDARD_OUTPUT:
            out.note(f"heat map written to {png}")
    if csv is not None:
        _write_csv(csv, hot, layer, out)
    if out.for_programs:
        out.data(heat_plain(hot, layer), [])
    elif png is None and csv is None:
        out.data(None, _parts(hot, placement, shown, layer, out.out))


def _check_stdout(png: Path | None, csv: Path | None, out: Output) -> None:
    """Raise InvalidArgument where two want standard output, or bytes would go to a terminal."""
    wanted = [
        *(["--png -"] if png == STANDARD_OUTPUT else []),
        *(["--csv -"] if csv == STANDARD_OUTPUT else []),
        *([f"-o {out.form.value}"] if out.for_programs else []),
    ]
    if len(wanted) > 1:
        raise InvalidArgument(f"{' and '.join(wanted)} both want standard output; give one")
    if png == STANDARD_OUTPUT:
        check_binary_stdout("--png")


def _load(admin: Admin, mode: Mode) -> pb.GetLoadResponse | None:
    """None before the first closed window, where replicas are asked for. Raises Unavailable."""
    try:
        return admin.load()
    except Unavailable:
        if mode is Mode.REPLICAS:
            return None
        raise


def _write_csv(file: Path, hot: Hotness, layer: int | None, out: Output) -> None:
    parts = csv_parts(hot.pairs, hot.ranks_of, layer)
    if file == STANDARD_OUTPUT:
        sys.stdout.writelines(parts)
        return
    write_whole(file, "".join(parts).encode(), "--csv")
    out.note(f"heat written to {file}")


def _parts(
    hot: Hotness,
    placement: pb.GetPlacementResponse,
    shown: HeatMap,
    layer: int | None,
    console: Console,
) -> list[RenderableType]:
    colour = has_colours(console)
    height = max(2, console.size.height - AROUND_FIELD) if console.is_terminal else None
    lines, field = field_lines(shown.field, width=console.width, height=height, colour=colour)
    said = pooled_line(shown.field, field, layer)
    return [
        window_line(hot, placement, hot.age_s),
        shown.title,
        *lines,
        legend(shown.low, shown.high, colour=colour),
        *([said] if said else []),
    ]


def has_colours(console: Console) -> bool:
    """Whether half blocks can be drawn: 256 colours or more, and an encoding that has them."""
    return (
        not console.no_color
        and console.color_system in ("truecolor", "256")
        and console.encoding.startswith("utf")
    )
