"""Figures of the data path benchmark: medians with intervals, bars, expected bytes, the table.

Responsible for arithmetic on samples. Must never measure. Called by the other dataplane modules.

Worked example of a ratio: blocks of A took [2, 4, 3] ms (each the median of a block's calls), the
blocks of B beside them [10, 10, 10]; the ratios are [0.2, 0.4, 0.3] and the figure is 0.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

COVERAGE = 0.95
"""Least probability with which an interval covers the true median; few blocks may not reach it."""


@dataclass(frozen=True)
class Figure:
    """A median over blocks. [low, high] covers the true median with probability `coverage`."""

    median: float
    low: float
    high: float
    coverage: float
    blocks: int

    def scaled(self, factor: float) -> Figure:
        """The same in another unit; `factor` is positive."""
        return Figure(
            self.median * factor, self.low * factor, self.high * factor, self.coverage, self.blocks
        )

    def text(self, digits: int = 3) -> str:
        """For people: 0.300 [0.200..0.400]."""
        return f"{self.median:.{digits}f} [{self.low:.{digits}f}..{self.high:.{digits}f}]"


def figure(values: Sequence[float]) -> Figure:
    """Median and its interval from order statistics, which asks nothing of the distribution.

    The interval is the narrowest symmetric one [x_(r), x_(n+1-r)] whose coverage,
    1 - 2 P(Binomial(n, 1/2) < r), is at least COVERAGE; all of the values where none is.
    """
    assert values, "a figure needs a value"
    ordered = sorted(values)
    n = len(ordered)
    rank = 1
    while rank < (n + 1) // 2 and _coverage(n, rank + 1) >= COVERAGE:
        rank += 1
    return Figure(median(ordered), ordered[rank - 1], ordered[n - rank], _coverage(n, rank), n)


def exact(value: float) -> Figure:
    """A counted value: no spread."""
    return Figure(value, value, value, 1.0, 1)


def _coverage(n: int, rank: int) -> float:
    outside = sum(comb(n, i) for i in range(rank)) / 2**n
    return float(max(0.0, 1.0 - 2.0 * outside))


def ratios(over: Sequence[float], under: Sequence[float]) -> Figure:
    """Figure of over[i] / under[i], block by block."""
    return figure([a / b for a, b in zip(over, under, strict=True)])


def differences(left: Sequence[float], right: Sequence[float]) -> Figure:
    """Figure of left[i] - right[i], block by block."""
    return figure([a - b for a, b in zip(left, right, strict=True)])


@dataclass(frozen=True)
class Bar:
    """One promise: the figure of `name` is at most `at_most`."""

    name: str
    at_most: float
    measured: Figure

    @property
    def holds(self) -> bool:
        """Whether the median keeps the promise."""
        return self.measured.median <= self.at_most

    @property
    def verdict(self) -> str:
        """ "holds" or "misses"; "(unclear)" where the interval reaches over the bar."""
        word = "holds" if self.holds else "misses"
        unclear = self.measured.low <= self.at_most < self.measured.high
        return f"{word} (unclear)" if unclear else word


def rows_a_token(top_k: int, num_shards: int) -> float:
    """Expected shards a token goes to: S (1 - (1 - 1/S)^K), K experts over S shards at random."""
    return num_shards * (1.0 - (1.0 - 1.0 / num_shards) ** top_k)


def saved_rows(top_k: int, num_shards: int) -> float:
    """How many times the rows of k copies a token are those of one a shard: K / rows_a_token.

    saved_rows(8, 4) is 2.22, saved_rows(4, 4) is 1.46.
    """
    return top_k / rows_a_token(top_k, num_shards)


def relative_error(measured: float, expected: float) -> float:
    """|measured / expected - 1|."""
    return abs(measured / expected - 1.0)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column flush left, the others flush right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        others = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
        return "  " + "  ".join((first, *others)).rstrip()

    return [line(header), *(line(row) for row in rows)]
