"""Panels as an image of numbered colours. Pure. Called by `png`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from moe_serve.cli.charts.font import HEIGHT, WIDTH, dots
from moe_serve.cli.charts.panel import Panel, Scale, Series, binned, scale_of

Image = npt.NDArray[np.uint8]

PAPER, INK, GRID = 0, 1, 2
FIRST_LINE: Final = 3
# White, ink, grid; then lines that people with any colour vision tell apart.
PALETTE: Final = (
    (255, 255, 255),
    (40, 40, 40),
    (224, 224, 224),
    (140, 140, 140),
    (0, 114, 178),
    (213, 94, 0),
    (0, 158, 115),
    (204, 121, 167),
    (230, 159, 0),
    (86, 180, 233),
    (0, 0, 0),
)
NUM_COLOURS: Final = len(PALETTE) - FIRST_LINE

PAGE_WIDTH: Final = 960
PANEL_HEIGHT: Final = 300
LEFT, RIGHT, TOP, BOTTOM = 90, 20, 72, 40
SIZE: Final = 2
"""Pixels a dot of a letter."""
LETTER: Final = (WIDTH + 1) * SIZE


def draw(panels: Sequence[Panel]) -> Image:
    """The panels below each other: uint8 [height, width], numbers in PALETTE. A name has the same
    colour in all of them."""
    names = list(dict.fromkeys(one.name for panel in panels for one in panel.series))
    colours = {name: FIRST_LINE + at % NUM_COLOURS for at, name in enumerate(names)}
    image = np.full((PANEL_HEIGHT * len(panels), PAGE_WIDTH), PAPER, dtype=np.uint8)
    for number, panel in enumerate(panels):
        part = image[number * PANEL_HEIGHT : (number + 1) * PANEL_HEIGHT]
        scale = scale_of(panel)
        _axes(part, panel, scale)
        for one in panel.series:
            _line(part, one, scale, panel.num_places, colours[one.name])
        _legend(part, panel.series, colours)
    return image


def _x(place: int, places: int) -> float:
    return LEFT + (PAGE_WIDTH - LEFT - RIGHT - 1) * (place / (places - 1) if places > 1 else 0.5)


def _y(share: float) -> float:
    return PANEL_HEIGHT - BOTTOM - 1 - (PANEL_HEIGHT - TOP - BOTTOM - 1) * share


def _axes(part: Image, panel: Panel, scale: Scale) -> None:
    put_text(part, panel.title, LEFT, 8, INK)
    for tick in scale.ticks:
        row = round(_y(scale.share(tick)))
        part[row, LEFT : PAGE_WIDTH - RIGHT] = GRID
        label = scale.shown(tick)
        put_text(part, label, LEFT - 8 - LETTER * len(label), row - HEIGHT * SIZE // 2, INK)
    part[round(_y(1.0)) : round(_y(0.0)) + 1, LEFT - 1] = INK
    part[round(_y(0.0)), LEFT - 1 : PAGE_WIDTH - RIGHT] = INK
    last = str(max(panel.num_places - 1, 0))
    below = PANEL_HEIGHT - BOTTOM + 8
    put_text(part, "0", LEFT, below, INK)
    put_text(part, last, PAGE_WIDTH - RIGHT - LETTER * len(last), below, INK)


def _line(part: Image, one: Series, scale: Scale, places: int, colour: int) -> None:
    """Two pixels thick; a gap where a value is missing, a dot where it has no neighbour."""
    room = PAGE_WIDTH - LEFT - RIGHT
    values = binned(one.values, room)
    shown = min(places, room)
    before: tuple[float, float] | None = None
    for place, value in enumerate(values):
        if value is None:
            before = None
            continue
        here = (_x(place, shown), _y(scale.share(value)))
        from_x, from_y = here if before is None else before
        steps = 2 * int(max(abs(here[0] - from_x), abs(here[1] - from_y))) + 2
        x = np.rint(np.linspace(from_x, here[0], steps)).astype(np.int64)
        y = np.rint(np.linspace(from_y, here[1], steps)).astype(np.int64)
        for right, down in ((0, 0), (1, 0), (0, 1), (1, 1)):
            part[y + down, x + right] = colour
        before = here


def _legend(part: Image, series: Sequence[Series], colours: dict[str, int]) -> None:
    left, row = LEFT, 32
    for one in series:
        wide = 22 + LETTER * len(one.name) + 14
        if left + wide > PAGE_WIDTH:
            left, row = LEFT, row + HEIGHT * SIZE + 2
        part[row + 5 : row + 9, left : left + 16] = colours[one.name]
        put_text(part, one.name, left + 22, row, INK)
        left += wide


def put_text(part: Image, text: str, left: int, top: int, colour: int) -> None:
    """Write a text into an image, cut off at the edges; left, top: pixels of its corner."""
    seen = np.kron(dots(text), np.ones((SIZE, SIZE), dtype=np.bool_))
    seen = seen[max(-top, 0) :, max(-left, 0) :]
    top, left = max(top, 0), max(left, 0)
    seen = seen[: max(part.shape[0] - top, 0), : max(part.shape[1] - left, 0)]
    spot = part[top : top + seen.shape[0], left : left + seen.shape[1]]
    spot[seen] = colour
