"""The layout nobody planned: experts in contiguous blocks over the ranks, spare slots filled
round-robin.

Responsible for the baseline, and for a first layout when no load is known. Looks at no load and
at no live placement (a key that happens to stay on its rank keeps its slot); ignores `max_moves`
and `max_bytes`, it is a full re-plan.

Example: one layer of 8 experts on 4 ranks of 4 slots, one of them staging. Masters 0 1 | 2 3 | 4
5 | 6 7; the third slot of each rank takes, in turn, the expert with fewest replicas and lowest id
that the rank lacks: 2 | 0 | 1 | 3.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from placement.layout import ExpertLayout
from placement.policy.base import PolicyInput
from placement.policy.feasibility import check_request
from placement.policy.occupancy import Occupancy
from placement.policy.repair import EvenJudge, repair

IntArray = npt.NDArray[np.int64]


def propose_static(request: PolicyInput) -> ExpertLayout:
    """Contiguous masters, then the floor, then extras, every layer its share of each rank's slots.

    Raises PolicyError where the ranks cannot hold every expert.
    """
    floor = check_request(request)
    occupancy = Occupancy(request, floor, keep_live=False)
    _masters(occupancy)
    num_keys = occupancy.num_layers * occupancy.num_experts
    judge = EvenJudge(occupancy, np.ones(num_keys, dtype=np.float64))
    repair(occupancy, judge, list(range(num_keys)))
    _extras(occupancy)
    return occupancy.to_layout()


def _masters(occupancy: Occupancy) -> None:
    experts = np.full(occupancy.num_layers, occupancy.num_experts, dtype=np.int64)
    if occupancy.uniform:
        quotas = np.concatenate([shares(experts[:1], occupancy.free_of(0))] * len(experts))
    else:
        quotas = shares(experts, occupancy.capacity)
    for layer in range(occupancy.num_layers):
        owner = np.repeat(np.arange(occupancy.num_ranks), quotas[layer])
        for expert, rank in enumerate(owner):
            occupancy.add(layer * occupancy.num_experts + expert, int(rank))


def _extras(occupancy: Occupancy) -> None:
    """Fill what is free, the same number of extras in every layer of a rank as far as that
    divides.
    """
    free = occupancy.free()
    for layer in range(occupancy.num_layers):
        layers_left = occupancy.num_layers - layer
        for rank in np.nonzero(occupancy.domain >= 0)[0]:
            own = int(occupancy.free_of(layer)[rank])
            for _ in range(own if occupancy.uniform else -(-own // layers_left)):
                key = _next_extra(occupancy, layer, int(rank))
                if key is None:
                    break
                occupancy.add(key, int(rank))
    assert (occupancy.free() <= free).all()


def _next_extra(occupancy: Occupancy, layer: int, rank: int) -> int | None:
    hosted = occupancy.hosts_of_layer(layer)
    lacking = np.nonzero(~hosted[:, rank])[0]
    if not len(lacking):
        return None
    counts = hosted.sum(axis=1)
    expert = int(lacking[np.argmin(counts[lacking])])
    return layer * occupancy.num_experts + expert


def shares(totals: IntArray, capacity: IntArray) -> IntArray:
    """Cut each of `totals` [n] over ranks in proportion to `capacity` [ranks]: int64 [n, ranks],
    rows sum to `totals`.

    Whole numbers whose running sum stays within one of the exact share, so that over all rows no
    rank gets more than its capacity as long as the sum of totals is at most the sum of
    capacities.

    >>> shares(np.array([8, 8]), np.array([6, 6, 4])).tolist()
    [[3, 3, 2], [3, 3, 2]]
    """
    weight = capacity / capacity.sum()
    given = np.zeros(len(capacity), dtype=np.int64)
    rows = []
    for end, total in zip(np.cumsum(totals), totals, strict=True):
        wanted = weight * end - given
        row = np.clip(np.floor(wanted + 1e-9), 0, capacity - given).astype(np.int64)
        while row.sum() != total:
            step = 1 if row.sum() < total else -1
            short = step * (wanted - row)
            allowed = row < capacity - given if step > 0 else row > 0
            row[int(np.argmax(np.where(allowed, short, -np.inf)))] += step
        given += row
        rows.append(row)
    return np.array(rows, dtype=np.int64).reshape(len(totals), len(capacity))
