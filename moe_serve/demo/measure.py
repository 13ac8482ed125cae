"""Imbalance as served against what a static placement would have had on the same counts.

Responsible for the demo's balance figures. Pure. Counts are what shards executed, by window, so
that served and static are computed from the same pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from placement import scoring
from placement.layout import ExpertLayout


@dataclass(frozen=True, slots=True)
class WindowCounts:
    """Executed pairs of one window: `pairs` int64 [layers, experts], `rank_pairs` int64 [ranks,
    layers]."""

    pairs: npt.NDArray[np.int64]
    rank_pairs: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BalanceFigures:
    """Imbalance (1/balancedness - 1, 0 is even) over all windows, each layer and window weighing
    its slowest rank.

    static: contiguous experts with round-robin extras in the same slots, replicas split equally.
    static_leveled: the same layout under the split the router runs.
    """

    windows: int
    imbalance_static: float
    imbalance_static_leveled: float
    imbalance_served: float

    @property
    def gain(self) -> float:
        """Share by which served imbalance lies under static imbalance."""
        return (
            1.0 - self.imbalance_served / self.imbalance_static
            if self.imbalance_static > 0
            else 0.0
        )


def merged(windows: Mapping[int, WindowCounts], each: int) -> list[WindowCounts]:
    """Windows summed by `each` consecutive numbers: merged({4: a, 5: b, 6: c}, 2) is [a + b, c]."""
    groups: dict[int, WindowCounts] = {}
    for number in sorted(windows):
        window, before = windows[number], groups.get(number // each)
        groups[number // each] = (
            window
            if before is None
            else WindowCounts(before.pairs + window.pairs, before.rank_pairs + window.rank_pairs)
        )
    return [groups[number] for number in sorted(groups)]


def balance_figures(windows: Sequence[WindowCounts], static: ExpertLayout) -> BalanceFigures:
    """Figures over windows that hold any pair. Windows are stacked as further layers: the sum over
    layers and windows of the mean over ranks, by that of the slowest rank."""
    used = [window for window in windows if window.pairs.any()]
    if not used:
        return BalanceFigures(0, 0.0, 0.0, 0.0)
    equal = np.concatenate([scoring.rank_load(static, w.pairs, "equal") for w in used], axis=1)
    level = np.concatenate([scoring.rank_load(static, w.pairs, "level") for w in used], axis=1)
    served = np.concatenate([w.rank_pairs.astype(np.float64) for w in used], axis=1)
    return BalanceFigures(
        windows=len(used),
        imbalance_static=scoring.imbalance(equal),
        imbalance_static_leveled=scoring.imbalance(level),
        imbalance_served=scoring.imbalance(served),
    )
