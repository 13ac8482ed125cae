"""Sums over slices, and quantiles out of buckets.

Responsible for arithmetic on stage counts. Must never judge. Used by every module that finds
causes, and by the controller for what it shows beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from moe_serve.explain.evidence import Floats, Ints, Slice
from moe_serve.stage_counts import STAGE_BOUNDS_S, STAGES, StageCounts

_Number = TypeVar("_Number", np.int64, np.float64)
QUEUE: Final = STAGES.index("queue")
WAIT: Final = STAGES.index("wait")
COMPUTE: Final = STAGES.index("compute")
OTHER: Final = STAGES.index("other")


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Slices added up; arrays by rank are as long as the fleet. requests: that were answered.
    stage_s float64 [stages]."""

    requests: int
    stage_s: Floats
    sub_calls: Ints
    pairs: Ints
    batches: Ints
    last: Ints
    late_s: Floats
    wire_s: Floats
    wait_s: Floats
    compute_s: Floats

    @property
    def total_s(self) -> float:
        """Seconds of all requests."""
        return float(self.stage_s.sum())

    @property
    def service_s(self) -> float:
        """The same without the wait for a permit: how long that is follows from this."""
        return float(self.stage_s.sum() - self.stage_s[QUEUE])

    @property
    def shard_s(self) -> float:
        """Of these, seconds at shards: waiting and computing."""
        return float(self.stage_s[WAIT] + self.stage_s[COMPUTE])

    @property
    def at_rank_s(self) -> Floats:
        """Seconds of sub-calls at each rank: float64 [ranks]."""
        return self.wait_s + self.compute_s


def summed(slices: Iterable[Slice], num_ranks: int) -> Sums:
    """The slices added up, for `num_ranks` ranks."""
    parts = list(slices)
    stages = [one.stages for one in parts]
    zeros = np.zeros(num_ranks, np.int64)
    return Sums(
        requests=sum(answered(one) for one in stages),
        stage_s=sum((s.seconds.sum(axis=0) for s in stages), np.zeros(len(STAGES))),
        sub_calls=sum((_fit(s.sub_calls, num_ranks) for s in stages), zeros),
        pairs=sum((_fit(s.pairs, num_ranks) for s in stages), zeros),
        batches=sum((_fit(one.batches, num_ranks) for one in parts), zeros),
        last=sum((_fit(s.last, num_ranks) for s in stages), zeros),
        late_s=sum((_fit(s.late_s, num_ranks) for s in stages), np.zeros(num_ranks)),
        wire_s=sum((_fit(s.wire_s, num_ranks) for s in stages), np.zeros(num_ranks)),
        wait_s=sum((_fit(s.wait_s, num_ranks) for s in stages), np.zeros(num_ranks)),
        compute_s=sum((_fit(s.compute_s, num_ranks) for s in stages), np.zeros(num_ranks)),
    )


def answered(stages: StageCounts) -> int:
    """Requests counted."""
    return int(stages.requests[:, QUEUE].sum())


def _fit(array: npt.NDArray[_Number], length: int) -> npt.NDArray[_Number]:
    """As long as the fleet: ranks that were never met count nothing."""
    if len(array) == length:
        return array
    return np.pad(array[:length], (0, max(0, length - len(array))))


def quantile_s(buckets: Ints, share: float) -> float:
    """Seconds below which that share of what the buckets count lies, evenly within a bucket; 0
    where they count nothing. What is above the last bound counts as the bound.

    >>> counts = np.zeros(len(STAGE_BOUNDS_S) + 1, np.int64); counts[1] = 10
    >>> round(quantile_s(counts, 0.5), 6)
    0.00015
    """
    total = int(buckets.sum())
    if not total:
        return 0.0
    upto = np.cumsum(buckets)
    want = share * total
    at = int(np.searchsorted(upto, want))
    if at >= len(STAGE_BOUNDS_S):
        return float(STAGE_BOUNDS_S[-1])
    low, high = float(STAGE_BOUNDS_S[at - 1]) if at else 0.0, float(STAGE_BOUNDS_S[at])
    before = float(upto[at - 1]) if at else 0.0
    within = (want - before) / max(1.0, float(buckets[at]))
    return low + (high - low) * min(max(within, 0.0), 1.0)


def ratio(top: Floats | Ints, bottom: Floats | Ints) -> Floats:
    """top / bottom, NaN where bottom is 0."""
    top, bottom = np.asarray(top, np.float64), np.asarray(bottom, np.float64)
    found: Floats = np.divide(top, bottom, out=np.full(len(top), np.nan), where=bottom > 0)
    return found


def others_median(values: Floats, of: int, among: Sequence[int]) -> float:
    """Median of the known values of the ranks in `among` other than `of`; NaN without any, or where
    it is 0: nothing is so many times that."""
    known = [values[k] for k in among if k != of and np.isfinite(values[k])]
    return (float(np.median(known)) if known else 0.0) or float("nan")
