"""What a chart shows, and the scale of its axis. Pure. Called by both ways of drawing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, isclose, log10


@dataclass(frozen=True, slots=True)
class Series:
    """A line: one value a place on the x axis; None where there is none."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines over the same places. top, bottom: end of the y axis where it is known beforehand."""

    title: str
    series: Sequence[Series]
    top: float | None = None
    bottom: float | None = None

    @property
    def num_places(self) -> int:
        """Places on the x axis: the longest line."""
        return max((len(one.values) for one in self.series), default=0)


@dataclass(frozen=True, slots=True)
class Scale:
    """Y axis: its ends, and where it is marked, from below."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def share(self, value: float) -> float:
        """Height of a value between the ends, in [0, 1]."""
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)

    def shown(self, tick: float) -> str:
        """A tick with as many digits as tell it from the next."""
        return f"{tick:.{max(0, -floor(log10(self.ticks[1] - self.ticks[0]) + 1e-9))}f}"


def scale_of(panel: Panel, steps: int = 5) -> Scale:
    """An axis of about that many steps of 1, 2 or 5 x a power of ten that holds every value.

    >>> scale_of(Panel("", [Series("a", [0.82, 0.97])], top=1.0)).ticks
    (0.8, 0.85, 0.9, 0.95, 1.0)
    """
    values = [value for one in panel.series for value in one.values if value is not None]
    low = min(values, default=0.0) if panel.bottom is None else panel.bottom
    high = max(values, default=1.0) if panel.top is None else panel.top
    if not high > low:
        low, high = (high - 0.1, high) if panel.top is not None else (low, low + 1.0)
    step = _step((high - low) / steps)
    first, last = _below(low / step), _above(high / step)
    ticks = tuple(round(number * step, 12) for number in range(first, last + 1))
    return Scale(ticks[0], ticks[-1], ticks)


def _step(least: float) -> float:
    power = 10.0 ** floor(log10(least))
    return next(one * power for one in (1, 2, 5, 10) if one * power >= least * (1 - 1e-9))


def _below(value: float) -> int:
    near = round(value)
    return near if isclose(value, near, abs_tol=1e-9) else floor(value)


def _above(value: float) -> int:
    near = round(value)
    return near if isclose(value, near, abs_tol=1e-9) else ceil(value)


def binned(values: Sequence[float | None], places: int) -> list[float | None]:
    """The values as at most that many, each the mean of neighbours."""
    if len(values) <= places:
        return list(values)
    found: list[float | None] = []
    for place in range(places):
        low, high = place * len(values) // places, (place + 1) * len(values) // places
        part = [value for value in values[low:high] if value is not None]
        found.append(sum(part) / len(part) if part else None)
    return found
