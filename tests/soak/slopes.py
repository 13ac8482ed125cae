"""Whether a process grows: readings of its lives, and the growth that they show.

A *life* is one process of one part. What is read after a restart belongs to another life, and a
life too short to show anything is not judged. Its warm-up (imports, kernels, caches, connections to
every peer) is left out.

Two questions are asked of a life. Memory is noisy and large: the readings are cut into blocks, and
the slope of the blocks' medians over the moves made meanwhile is estimated with its interval; it
leaks where even the lower end of the interval is above the bar. Counts (file descriptors, threads,
tasks) are small and jump with the load, with faults and with peers that come and go, but what has
leaked never comes back: it lifts every reading. So neither the lowest nor the median reading of a
third alone tells: both must be higher in the last third than in the first by more than the bar. And
a leak goes on: what rises in one step and stays (a pool's threads or a socket's context, made when
they are first needed) is none, so the greatest step is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

MB = 1e6
RSS_BAR = 1.0
"""MB of memory that 100 moves may cost."""
COUNT_BAR = 2.0
"""Descriptors, threads or tasks that a life may gain."""
WARM_UP_SHARE = 0.25
WARM_UP_S = 60.0
"""Left out of a life: the longer of these, but never more than half."""
COUNTS_LIFE_S = 300.0
"""Shortest life whose counts are judged: each third has seen several faults come and go ..."""
RSS_LIFE_S = 600.0
"""... and whose memory is: before, every process still fills its caches and pools."""
RSS_MOVES = 50
"""Fewest moves in such a life: their cost could not be told from noise."""
LEVELS = 8
"""Blocks of a life in which steps of its counts are looked for."""
BLOCKS = 10
Z = 1.96

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at a process. moves: of the whole service, since it began. counts: descriptors,
    threads, tasks, whatever could be counted then. slot_bytes: of a shard, -1 for other parts.
    kinds: what the counts are made of, by name of the count, to tell what grew."""

    at_s: float
    moves: int
    rss_bytes: int
    counts: dict[str, float]
    slot_bytes: float = -1.0
    kinds: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass
class Life:
    """One process of a part."""

    part: str
    pid: int
    readings: list[Reading] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.readings[-1].at_s - self.readings[0].at_s if self.readings else 0.0

    def warm(self) -> list[Reading]:
        """Readings after the warm-up."""
        if not self.readings:
            return []
        skipped_s = min(self.seconds / 2, max(WARM_UP_S, WARM_UP_SHARE * self.seconds))
        begin_s = self.readings[0].at_s + skipped_s
        return [one for one in self.readings if one.at_s >= begin_s]


@dataclass(frozen=True, slots=True)
class Slope:
    """Growth of y a unit of x, with the 95% interval of its estimate."""

    value: float
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Growth:
    """What one life shows. rss: MB a 100 moves; rss_per_h: MB an hour; both None where the life has
    too few readings or moves. counts: gain of each (`gain_of`). judged: what was held to a bar.
    leaks: in words."""

    part: str
    pid: int
    seconds: float
    moves: int
    rss: Slope | None
    rss_per_h: Slope | None
    rss_mb: float
    counts: dict[str, float]
    judged: tuple[str, ...]
    leaks: tuple[str, ...]


def slope_of(x: Sequence[float], y: Sequence[float], blocks: int = BLOCKS) -> Slope | None:
    """Median of the slopes between the medians of all pairs of blocks, and the interval that their
    rank order gives (Theil and Sen). None where x does not move or there are too few readings.

    Neighbouring readings are alike; between blocks little of that is left.
    """
    count = len(x)
    if count < 2 * blocks:
        return None
    edges = np.linspace(0, count, blocks + 1).astype(int)
    parts = [slice(a, b) for a, b in pairwise(edges)]
    mid_x: Floats = np.array([np.median(x[part]) for part in parts])
    mid_y: Floats = np.array([np.median(y[part]) for part in parts])
    low, high = np.triu_indices(blocks, 1)
    run = mid_x[high] - mid_x[low]
    moved = run > 0
    if not moved.any():
        return None
    slopes = np.sort((mid_y[high] - mid_y[low])[moved] / run[moved])
    n = len(slopes)
    spread = Z * math.sqrt(blocks * (blocks - 1) * (2 * blocks + 5) / 18)
    least = max(0, round((n - spread) / 2))
    most = min(n - 1, round((n + spread) / 2))
    return Slope(float(np.median(slopes)), float(slopes[least]), float(slopes[most]))


def gain_of(values: Sequence[float]) -> float:
    """By how much the lowest and the median value of the last third both exceed those of the first;
    0 with fewer than six."""
    third = len(values) // 3
    if third < 2:
        return 0.0
    first, last = values[:third], values[-third:]
    return min(min(last) - min(first), float(np.median(last) - np.median(first)))


def beside_one_step(values: Sequence[float]) -> float:
    """By how much a level has risen for good, its greatest single step left out; 0 with fewer than
    two values a block. A level is a block's median (the upper one of an even number: half of a step
    is none), and has risen for good where none later is lower."""
    if len(values) < 2 * LEVELS:
        return 0.0
    edges = np.linspace(0, len(values), LEVELS + 1).astype(int)
    levels = [sorted(values[a:b])[(b - a) // 2] for a, b in pairwise(edges)]
    lasting = list(accumulate(reversed(levels), min))[::-1]
    steps = [b - a for a, b in pairwise(lasting)]
    return sum(steps) - max(steps)


def growth_of(life: Life) -> Growth:
    """What a life shows, and where that is above a bar."""
    warm = life.warm()
    moves = warm[-1].moves - warm[0].moves if warm else 0
    rss_mb = [one.rss_bytes / MB for one in warm]
    rss = slope_of([one.moves / 100 for one in warm], rss_mb)
    rss_per_h = slope_of([one.at_s / 3600 for one in warm], rss_mb)
    names = sorted({name for one in warm for name in one.counts})
    values = {name: [one.counts[name] for one in warm if name in one.counts] for name in names}
    counts = {name: gain_of(of) for name, of in values.items()}
    judged: list[str] = []
    leaks: list[str] = []
    who = f"{life.part} (process {life.pid}, {life.seconds:.0f} s, {moves} moves)"
    if life.seconds >= COUNTS_LIFE_S:
        judged += names
        leaks += [
            f"{who}: {name} grew by {gain:.0f}, allowed are {COUNT_BAR:.0f}{_grown(warm, name)}"
            for name, gain in counts.items()
            if gain > COUNT_BAR and beside_one_step(values[name]) >= COUNT_BAR
        ]
    if life.seconds >= RSS_LIFE_S and moves >= RSS_MOVES and rss is not None:
        judged.append("rss")
        if rss.least > RSS_BAR:
            leaks.append(
                f"{who}: memory grows by {rss.value:.2f} MB (at least {rss.least:.2f}) a 100 "
                f"moves, allowed is {RSS_BAR:.0f}"
            )
    return Growth(
        part=life.part,
        pid=life.pid,
        seconds=life.seconds,
        moves=moves,
        rss=rss if moves >= RSS_MOVES else None,
        rss_per_h=rss_per_h,
        rss_mb=rss_mb[-1] if rss_mb else 0.0,
        counts=counts,
        judged=tuple(judged),
        leaks=tuple(leaks),
    )


def _grown(readings: Sequence[Reading], name: str) -> str:
    """Which kinds of a count are more at the end, in words."""
    told = [one.kinds[name] for one in readings if name in one.kinds]
    names = sorted({kind for one in told for kind in one})
    gains = {kind: gain_of([float(one.get(kind, 0)) for one in told]) for kind in names}
    grown = ", ".join(f"{kind} {gain:+.0f}" for kind, gain in gains.items() if gain)
    return f" ({grown})" if grown else ""
