"""The whole answer: every cause that is named, and how each rank took part.

Responsible for the order of causes and for the verdict. Called by the controller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from moe_serve.explain.cause import Cause
from moe_serve.explain.evidence import Evidence
from moe_serve.explain.load import hot_expert, imbalance, memory, overload, skews_of
from moe_serve.explain.ranks import cold_start, copy, slow_rank, slowness
from moe_serve.explain.sums import summed

IDLE, SLOW, NOTHING_SLOW = "idle", "slow", "nothing_slow"
SECONDS_MAX: Final = 600.0
"""How far back may be looked: stage counts are kept so long."""


@dataclass(frozen=True, slots=True)
class RankPart:
    """How one rank took part in answering. slowness: seconds of compute against those of the others
    of its kind, 1 = as they; 0 where too little is known."""

    rank: int
    slowness: float


@dataclass(frozen=True, slots=True)
class Finding:
    """verdict: nothing_slow | slow | idle. causes: greatest share first."""

    verdict: str
    causes: tuple[Cause, ...]
    ranks: tuple[RankPart, ...]


def explain(evidence: Evidence) -> Finding:
    """What holds requests up in the span."""
    sums = summed(evidence.slices, len(evidence.ranks))
    tried = sums.requests + evidence.open_requests
    tried += sum(s.failed + s.refused for s in evidence.slices)
    if not tried:
        return Finding(IDLE, (), _parts(evidence))
    skews = skews_of(evidence)
    looked_for = (
        hot_expert(skews),
        imbalance(skews),
        slow_rank(evidence),
        copy(evidence),
        overload(evidence),
        cold_start(evidence),
        memory(evidence, skews),
    )
    found = [cause for cause in looked_for if cause is not None]
    found.sort(key=lambda cause: -cause.share)
    return Finding(SLOW if found else NOTHING_SLOW, tuple(found), _parts(evidence))


def _parts(evidence: Evidence) -> tuple[RankPart, ...]:
    slices = evidence.slices
    times = slowness(evidence, slices, summed(slices, len(evidence.ranks)))
    return tuple(
        RankPart(rank.rank, float(times[rank.rank]) if np.isfinite(times[rank.rank]) else 0.0)
        for rank in evidence.ranks
    )
