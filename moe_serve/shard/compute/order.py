"""Pairs of a batch ordered by slot.

Responsible for the permutation every backend computes in. Must never look at rows or weights.
Called by the backends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_serve.shard.kernels import sort_by_key


@dataclass(frozen=True, slots=True)
class PairOrder:
    """Pairs of a batch grouped by slot, in the order of the batch within a slot.

    `order` int32 [P] are the positions of the pairs; group g holds order[begin[g]:end[g]], the
    pairs of slots[g]; `slots` int32 [G] ascend.

    Example: pair_slot [7, 2, 7] -> order [1, 0, 2], slots [2, 7], begin [0, 1], end [1, 3].
    """

    order: NDArray[np.int32]
    slots: NDArray[np.int32]
    begin: NDArray[np.int32]
    end: NDArray[np.int32]

    @property
    def pairs(self) -> NDArray[np.int64]:
        """Pairs of each group, int64 [G]."""
        return (self.end - self.begin).astype(np.int64)


def order_by_slot(pair_slot: NDArray[np.int32]) -> PairOrder:
    """Group pairs by slot with a counting sort; `pair_slot` int32 [P], none negative."""
    num_pairs = pair_slot.shape[0]
    num_keys = int(pair_slot.max()) + 1 if num_pairs else 0
    starts = np.empty(num_keys + 1, np.int32)
    order = np.empty(num_pairs, np.int32)
    used = np.empty(min(num_pairs, num_keys), np.int32)
    num_used = sort_by_key(pair_slot, starts, order, used)
    assert num_used >= 0, f"pair_slot {int(pair_slot.min())}"
    slots = used[:num_used]
    return PairOrder(order=order, slots=slots, begin=starts[slots], end=starts[slots + 1])
