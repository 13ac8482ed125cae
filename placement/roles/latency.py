"""How long calls take lately: quantiles from counts in bins, bounded whatever happens.

A *sketch* counts durations in bins that each end 10% above the last: a quantile is the end of its
bin, so never below the true one and at most 10% above. When 1,000 are counted all counts are
halved: old ones fade, and the memory is 172 numbers. Calls of different size are not alike, so
there is a sketch for each doubling of the pairs.

Durations that were cut short (a call that was given up, or that another answer made needless) are
counted as what they had taken: they were at least as long. Left out, each slow call that a hedge
answers would make the rest look faster, and the next hedge come earlier.

Responsible for these estimates. Must never decide what is done about a slow call. Called by
`placement.roles.router` and `placement.roles.router_hedges`.
"""

from __future__ import annotations

from math import log

_LOWEST_S = 1e-5
_GROWTH = 1.1
_LOG_GROWTH = log(_GROWTH)
_BINS = 172
"""Bins from 10 us to 120 s; what is outside counts in the first or last."""
_HIGHEST_S = _LOWEST_S * _GROWTH ** (_BINS - 1)
_COUNTED_MAX = 1_000
_REFRESH = 16
"""Durations between two looks at the bins: a quantile of hundreds moves little with fewer."""
SAMPLES_LEAST = 50
"""Durations of a size below which nothing is said of it."""


class LatencySketch:
    """Durations of one kind, in seconds."""

    def __init__(self) -> None:
        self._counts = [0] * _BINS
        self.total = 0
        """Durations counted, the faded ones less."""
        self.fresh = 0
        """Of them, those since somebody looked."""

    def add(self, seconds: float) -> None:
        """Count one. What is no number above 0 counts as the shortest."""
        place = 0
        if seconds >= _HIGHEST_S:
            place = _BINS - 1
        elif seconds > _LOWEST_S:
            place = int(log(seconds / _LOWEST_S) / _LOG_GROWTH)
        self._counts[place] += 1
        self.total += 1
        self.fresh += 1
        if self.total >= _COUNTED_MAX:
            self._counts = [count // 2 for count in self._counts]
            self.total = sum(self._counts)

    def quantile(self, share: float) -> float:
        """Least end of a bin that `share` of the durations do not exceed; 0 where none was counted.

        >>> sketch = LatencySketch()
        >>> for ms in range(1, 101):
        ...     sketch.add(ms / 1000)
        >>> 0.095 <= sketch.quantile(0.95) <= 0.095 * 1.1
        True
        """
        if self.total == 0:
            return 0.0
        # Of the durations, at most so many may lie above; counted down from the longest.
        above = self.total - share * self.total + 1e-9
        seen = 0
        for place in range(_BINS - 1, -1, -1):
            seen += self._counts[place]
            if seen > above:
                return _LOWEST_S * float(_GROWTH ** (place + 1))
        return _LOWEST_S


class CallLatencies:
    """The `share` quantile of recent calls by size: sizes 1, 2-3, 4-7 ... pairs apart."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._sketches: dict[int, LatencySketch] = {}
        self._known: dict[int, float] = {}
        self.least_s: float | None = None
        """Lowest quantile of any size, None before one is known."""

    def add(self, pairs: int, seconds: float) -> None:
        """A call of so many pairs took, or had taken, so long."""
        size = pairs.bit_length()
        sketch = self._sketches.get(size)
        if sketch is None:
            sketch = self._sketches[size] = LatencySketch()
        sketch.add(seconds)
        if sketch.fresh >= _REFRESH and sketch.total >= SAMPLES_LEAST:
            sketch.fresh = 0
            self._known[size] = sketch.quantile(self._share)
            self.least_s = min(self._known.values())

    def of(self, pairs: int) -> float | None:
        """Seconds that `share` of the calls of this size do not exceed, None before enough were
        counted."""
        return self._known.get(pairs.bit_length())
