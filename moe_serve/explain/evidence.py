"""Everything that causes are looked for in, as frozen data: the newest windows of a service.

Responsible for the form and the units. Holds no judgement. Made by the controller, or by a test
from numbers.

A *span* is cut into *slices*, one for each closed load window and one for what came since, because
copies and cold ranks come and go: what a rank did in the slices with a copy is compared with what
it did in the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_serve.stage_counts import StageCounts
from placement.topology import DeviceProfile, MoeSpec

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """What happened from start_s to end_s, driver times.

    stages: of the requests that were answered in it. rank_pairs int64 [ranks, layers],
    expert_pairs int64 [layers, experts], busy_s float64 [ranks]: of the load window; zeros where
    none has closed yet. batches int64 [ranks]: that shards computed, 0 = not known. copies: (source
    rank, or -1 for the checkpoint and host caches, target rank) of each copy that ran. cold: ranks
    that did not serve, or only just began to. missing: experts without a listed replica at its end.
    failed, refused: requests that ended with an error, and those that got no permit.
    """

    start_s: float
    end_s: float
    stages: StageCounts
    rank_pairs: Ints
    expert_pairs: Ints
    busy_s: Floats
    batches: Ints
    copies: tuple[tuple[int, int], ...] = ()
    cold: frozenset[int] = frozenset()
    missing: int = 0
    failed: int = 0
    refused: int = 0

    @property
    def copying(self) -> frozenset[int]:
        """Ranks that a copy ran into or out of. Copies into cold ranks belong to their start."""
        warm = [pair for pair in self.copies if pair[1] not in self.cold]
        return frozenset(rank for pair in warm for rank in pair if rank >= 0)


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank now. serving: there is a shard of it that has joined. usable: a plan may put
    replicas on it. memory_errors: batches in the span that it had too little memory for."""

    rank: int
    profile: DeviceProfile
    serving: bool = True
    usable: bool = True
    memory_errors: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """One span of one service.

    slices: oldest first. ranks: in order of rank, 0..n-1. hosts bool [keys, ranks]: who has a
    listed replica. layout_since_s: driver time from which the placement is what it is.
    open_requests, waiting_requests: now, in all routers. silent: ranks that do not answer now.
    spare_slots: that could be filled beyond one replica of each expert for each failure domain of
    the floor. wanted_memory: what the newest plan was refused for want of slots or bytes, in
    words.
    """

    spec: MoeSpec
    slices: tuple[Slice, ...]
    ranks: tuple[RankFacts, ...]
    hosts: Bools
    layout_since_s: float = float("-inf")
    open_requests: int = 0
    waiting_requests: int = 0
    silent: frozenset[int] = frozenset()
    spare_slots: int = 1
    wanted_memory: tuple[str, ...] = ()


def able_ranks(evidence: Evidence) -> list[int]:
    """Ranks that load could be spread over. What a rank that only just began does not hold yet, the
    others hold for it."""
    cold = evidence.slices[-1].cold
    return [r.rank for r in evidence.ranks if r.usable and r.serving and r.rank not in cold]
