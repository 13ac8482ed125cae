"""A field of values as coloured half blocks, as digits, or as an image. Pure.

Responsible for fitting it into the room there is: cells that do not fit are pooled, and what is
shown for several is the greatest of them, so that no hot one is lost. Knows nothing of experts.
Called by the heat command.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
import numpy.typing as npt
from rich.style import Style
from rich.text import Text

from moe_serve.cli.charts.ramp import NUM_STEPS, RAMP, steps_of
from moe_serve.cli.charts.raster import INK, LETTER, PAPER, Image, put_text

Levels = npt.NDArray[np.float64]

UPPER_HALF, LOWER_HALF = "▀▄"
WIDEN_MAX = 4
DIGIT_WIDEN_MAX = 2
"""Characters of a cell at most, where there is more room than cells; of a digit and its blank."""
DIGITS = 10
IMAGE_SIDE = 1200
"""Pixels that the longer side of an image is about; cells are whole pixels."""
CELL_MAX = 24
FIRST_STEP = 2
"""Numbers of the image's colours: paper, ink, then the ramp."""


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """levels float64 [rows, columns] in [0, 1], NaN = no cell. row_step, column_step: what a row or
    column counts for, in the numbers at the edges (4 = rows are numbered 0, 4, 8 ...)."""

    levels: Levels
    row_step: int = 1
    column_step: int = 1


def pooled(field: Field, rows: int, columns: int) -> Field:
    """The field in at most that many rows and columns, the greatest of each group."""
    by_row = max(1, ceil(field.levels.shape[0] / max(rows, 1)))
    by_column = max(1, ceil(field.levels.shape[1] / max(columns, 1)))
    if by_row == by_column == 1:
        return field
    high, wide = (
        ceil(n / by) for n, by in zip(field.levels.shape, (by_row, by_column), strict=True)
    )
    grown = np.full((high * by_row, wide * by_column), -np.inf)
    grown[: field.levels.shape[0], : field.levels.shape[1]] = np.nan_to_num(
        field.levels, nan=-np.inf
    )
    most = grown.reshape(high, by_row, wide, by_column).max(axis=(1, 3))
    levels = np.where(np.isneginf(most), np.nan, most)
    return Field(levels, field.row_step * by_row, field.column_step * by_column)


def field_lines(
    field: Field, *, width: int, height: int | None, colour: bool
) -> tuple[list[Text], Field]:
    """Lines of at most that width, and the field as it was pooled for them.

    height: lines at most, None = as many as there are rows. colour: two rows a line in colours,
    else one row a line in digits 0 to 9.
    """
    number = len(str(max((field.levels.shape[0] - 1) * field.row_step, 0)))
    room = max(1, width - number - 1)
    per_line = 2 if colour else 1
    limit = field.levels.shape[0] if height is None else max(1, height - 1) * per_line
    shown = pooled(field, limit, room)
    widest = WIDEN_MAX if colour else DIGIT_WIDEN_MAX
    wide = max(1, min(widest, room // max(shown.levels.shape[1], 1)))
    lines = [Text(" " * (number + 1) + _ticks(shown, wide, room))]
    steps = steps_of(shown.levels, NUM_STEPS if colour else DIGITS)
    for row in range(0, steps.shape[0], per_line):
        line = Text(f"{row * shown.row_step:>{number}} ")
        if colour:
            below = steps[row + 1] if row + 1 < steps.shape[0] else np.full(steps.shape[1], -1)
            _put_blocks(line, steps[row].tolist(), below.tolist(), wide)
        else:
            line.append("".join(f"{one if one >= 0 else '':<{wide}}" for one in steps[row]))
        lines.append(line)
    return lines, shown


def _ticks(field: Field, wide: int, room: int) -> str:
    """Numbers of columns, each over its column."""
    columns = field.levels.shape[1]
    last = (columns - 1) * field.column_step
    apart = _round_step(2 * (len(str(last)) + 1) / wide)
    text = ""
    for column in range(0, columns, apart):
        label = str(column * field.column_step)
        if column * wide + len(label) <= room:
            text = text.ljust(column * wide) + label
    return text


def _round_step(least: float) -> int:
    """The lowest power of two that is not below."""
    return 1 << max(0, ceil(least) - 1).bit_length()


def _put_blocks(line: Text, above: Sequence[int], below: Sequence[int], wide: int) -> None:
    for high, low in zip(above, below, strict=True):
        if high >= 0:
            style = Style(color=_named(high), bgcolor=_named(low) if low >= 0 else None)
            line.append(UPPER_HALF * wide, style)
        elif low >= 0:
            line.append(LOWER_HALF * wide, Style(color=_named(low)))
        else:
            line.append(" " * wide)


def _named(step: int) -> str:
    return "#{:02x}{:02x}{:02x}".format(*RAMP[step])


def legend(low: str, high: str, *, colour: bool) -> Text:
    """The scale: its ends, and what lies between."""
    line = Text(f"{low} ")
    if not colour:
        line.append("".join(map(str, range(DIGITS))))
    else:
        for place in range(24):
            line.append(" ", Style(bgcolor=_named(place * (NUM_STEPS - 1) // 23)))
    return line.append(f" {high}")


def field_image(field: Field, title: str, low: str, high: str) -> Image:
    """uint8 [height, width], numbers of `IMAGE_COLOURS`: title, field with numbers at its edges,
    scale."""
    rows, columns = field.levels.shape
    cell = max(1, min(CELL_MAX, IMAGE_SIDE // max(rows, columns, 1)))
    left = LETTER * (len(str(max((rows - 1) * field.row_step, 0))) + 1) + 8
    top, bottom, right = 56, 40, 24
    least = LETTER * max(len(title), len(low) + len(high) + 24) + left + right
    width = max(left + columns * cell + right, least)
    image: Image = np.full((top + rows * cell + bottom, width), PAPER, dtype=np.uint8)
    steps = steps_of(field.levels)
    colours = np.where(steps < 0, PAPER, steps + FIRST_STEP).astype(np.uint8)
    area = np.kron(colours, np.ones((cell, cell), dtype=np.uint8))
    image[top : top + area.shape[0], left : left + area.shape[1]] = area
    put_text(image, title, left, 8, INK)
    _number_edges(image, field, cell, left, top)
    below = top + rows * cell + 12
    put_text(image, low, left, below, INK)
    start = left + LETTER * (len(low) + 1)
    bar = np.arange(NUM_STEPS, dtype=np.uint8) + FIRST_STEP
    image[below : below + 14, start : start + NUM_STEPS] = bar[: image.shape[1] - start]
    put_text(image, high, start + NUM_STEPS + LETTER, below, INK)
    return image


def _number_edges(image: Image, field: Field, cell: int, left: int, top: int) -> None:
    rows, columns = field.levels.shape
    last = str((columns - 1) * field.column_step)
    apart = _round_step(LETTER * (len(last) + 1) / cell)
    for column in range(0, columns, apart):
        put_text(image, str(column * field.column_step), left + column * cell, top - 20, INK)
    for row in range(0, rows, _round_step(20 / cell)):
        label = str(row * field.row_step)
        put_text(image, label, left - 8 - LETTER * len(label), top + row * cell, INK)


IMAGE_COLOURS = ((255, 255, 255), (40, 40, 40), *RAMP)
"""Paper, ink, and the ramp."""
