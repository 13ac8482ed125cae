"""Where the time of requests goes, as routers count it: the stages, their buckets, the counts.

No behaviour. Made by the router, carried in `ports.RouterReport`, read by controller, metrics and
`explain`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

STAGES: Final = ("queue", "split", "wire", "wait", "compute", "combine", "other")
"""Where the time of a request goes, in order: waiting for a permit, choosing replicas, then of the
sub-call that it waited for longest: the way there and back, waiting at the shard (everything there
but its own compute), its compute; adding up; and the rest (second tries, the event loop)."""
STAGE_BOUNDS_S: Final = tuple(0.0001 * 2**k for k in range(18))
"""Upper bounds of the buckets of each stage, 0.1 ms to 13 s; one bucket more is above them."""


@dataclass(frozen=True, slots=True, eq=False)
class StageCounts:
    """Where the time of answered requests went, totals since a router's start.

    requests int64 [phases, stages, bounds + 1], by seconds; seconds float64 [phases, stages], their
    sums. By rank, as far as ranks were met: sub_calls int64 [ranks] that were answered and served
    something, pairs int64 of them that were served; last int64: sub-calls that came back last of
    several of their request, late_s float64: seconds by which they were later than the last but
    one, though no longer than they were under way; wire_s, wait_s, compute_s float64: sums over the
    sub-calls.
    """

    requests: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.float64]
    sub_calls: npt.NDArray[np.int64]
    pairs: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64]
    late_s: npt.NDArray[np.float64]
    wire_s: npt.NDArray[np.float64]
    wait_s: npt.NDArray[np.float64]
    compute_s: npt.NDArray[np.float64]
