"""What a placement is worth on demand that came: balance under three splits, and what was written.

Responsible for the figures of the placement benchmark. Must never plan. Called by
`placement_runs`, for our planner and for peers alike; nothing in it depends on who planned.

Words and an example. *Balance* of a layer is mean / maximum rank load, 1 where nothing came. Two
ranks; expert 0 on both, expert 1 on rank 1; counts [6, 4]. `equal`: expert 0 gives 3 to each, loads
3 and 7, balance 5 / 7. `level`: our split gives 5 and 5, balance 1. `bound`: the same as `level`
when tokens may be cut to pieces, so the best that any split can do with this placement.
"""

from __future__ import annotations

from collections import Counter
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from placement.layout import ExpertLayout
from placement.split import CompiledLayer, compile_layer, rank_loads, split_counts

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

PIECES: Final = 1 << 16
"""Pieces that a pair is cut into for `bound`: the optimum is then met to 2^-16 of a pair."""
SPLITS: Final = ("equal", "level", "bound")


class LayerSlots(NamedTuple):
    """Filled slots of one layer: expert and rank of each, two int64 [slots]."""

    expert: IntArray
    rank: IntArray


class Placement(NamedTuple):
    """Filled slots of every layer. An expert may have two replicas on a rank, as peers allow."""

    layers: tuple[LayerSlots, ...]
    num_experts: int
    num_ranks: int

    @property
    def num_slots(self) -> int:
        """Filled slots, all layers."""
        return sum(len(layer.expert) for layer in self.layers)


class Scores(NamedTuple):
    """Balance under each split: float64 [n, layers] for n sets of counts."""

    equal: FloatArray
    level: FloatArray
    bound: FloatArray


def from_layout(layout: ExpertLayout) -> Placement:
    """The placement of a slot-pool layout."""
    slots = [LayerSlots(*layout.layer_slots(layer)) for layer in range(layout.num_layers)]
    return Placement(tuple(slots), layout.num_experts, layout.num_ranks)


def from_matrix(physical_to_logical: npt.ArrayLike, num_ranks: int, num_experts: int) -> Placement:
    """The placement of a matrix [layers, physical], every rank the same number of places in order.

    Raises ValueError where the places do not divide, an id is no expert, or an expert has none.
    """
    matrix = np.asarray(physical_to_logical).astype(np.int64)
    if matrix.ndim != 2 or matrix.shape[1] % num_ranks:
        raise ValueError(f"matrix of shape {matrix.shape} does not divide over {num_ranks} ranks")
    rank = np.repeat(np.arange(num_ranks, dtype=np.int64), matrix.shape[1] // num_ranks)
    for layer, row in enumerate(matrix):
        if not np.array_equal(np.unique(row), np.arange(num_experts)):
            raise ValueError(f"layer {layer}: not every expert in [0, {num_experts}) has a place")
    return Placement(tuple(LayerSlots(row, rank) for row in matrix), num_experts, num_ranks)


def score(placement: Placement, counts: IntArray) -> Scores:
    """Balance on each of n sets of counts, int64 [n, layers, experts]."""
    out = Scores(*(np.ones(counts.shape[:2], dtype=np.float64) for _ in SPLITS))
    for layer, slots in enumerate(placement.layers):
        compiled = compile_layer(
            slots.expert, slots.rank, placement.num_experts, placement.num_ranks
        )
        replicas = np.bincount(slots.expert, minlength=placement.num_experts)
        for row in range(len(counts)):
            came = np.ascontiguousarray(counts[row, layer])
            total = int(came.sum())
            if total == 0:
                continue
            share = (came / np.maximum(replicas, 1))[slots.expert]
            even = np.bincount(slots.rank, share, minlength=placement.num_ranks)
            fair = total / placement.num_ranks
            out.equal[row, layer] = fair / float(even.max())
            out.level[row, layer] = fair / _worst(compiled, came)
            out.bound[row, layer] = fair * PIECES / _worst(compiled, came * PIECES)
    return out


def slot_writes(before: Placement, after: Placement) -> int:
    """Slots that must be filled anew: replicas on a rank that were not on it before.

    The order of slots within a rank does not count, whoever planned.
    """
    return sum(
        (_replicas(new) - _replicas(old)).total()
        for old, new in zip(before.layers, after.layers, strict=True)
    )


def any_layout_bound(counts: IntArray, num_slots: int, num_ranks: int) -> FloatArray:
    """Balance that no layout of `num_slots` slots a layer can exceed: float64 [n, layers].

    A maximum of M needs ceil(load / M) replicas of each expert, as no rank takes more than M; the
    least M whose replicas fit the slots is the bound. It is necessary only: whether a layout meets
    it is another question. counts: int64 [n, layers, experts].
    """
    out = np.ones(counts.shape[:2], dtype=np.float64)
    for place in np.ndindex(*out.shape):
        came = counts[place]
        total = int(came.sum())
        if total == 0:
            continue
        fair = total / num_ranks
        low, high = fair, float(max(int(came.max()), fair))
        if _replicas_needed(came, low) <= num_slots:
            continue
        for _ in range(40):
            middle = (low + high) / 2
            if _replicas_needed(came, middle) <= num_slots:
                high = middle
            else:
                low = middle
        out[place] = fair / high
    return out


def _replicas_needed(came: IntArray, largest: float) -> int:
    return int(np.maximum(1, np.ceil(came / largest - 1e-9)).sum())


def _worst(compiled: CompiledLayer, came: IntArray) -> int:
    return int(rank_loads(compiled, split_counts(compiled, came)).max())


def _replicas(slots: LayerSlots) -> Counter[tuple[int, int]]:
    return Counter(zip(slots.expert.tolist(), slots.rank.tolist(), strict=True))
