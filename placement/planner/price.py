"""What a layout costs and what its moves cost, in seconds.

Responsible for the planner's two figures: predicted seconds a second of serving (sum over layers of
the slowest rank, under the router's split), and seconds of the copies. Called by `make_plan` and by
the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from placement.cost import seconds_per_pair
from placement.layout import ExpertLayout
from placement.planner.kernels import slowest, slowest_by_layer
from placement.policy.base import PolicyInput
from placement.policy.incremental import priced_demand
from placement.scoring import balancedness, rank_load
from placement.split import CompiledLayer, compile_layer

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MEDIAN_DIFFERENCE = 1.0483
"""Standard deviation of a bell curve over the median difference of two draws from it."""


def slowest_seconds(
    compiled: CompiledLayer, demand: FloatArray, per_pair: FloatArray
) -> FloatArray:
    """Seconds a second of a layer's slowest rank under the router's split: float64 [rows].

    demand: float64 [rows, experts], pairs a second, >= 0; an expert without a replica is left out.
    per_pair: float64 [ranks], seconds of a pair; 0 = the rank does not count.
    """
    found = np.empty(len(demand), dtype=np.float64)
    slowest(
        np.ascontiguousarray(demand),
        per_pair,
        compiled.host_ptr,
        compiled.host_rank,
        compiled.host_expert,
        compiled.shared,
        compiled.rank_host_ptr,
        compiled.rank_host,
        compiled.first_slot,
        found,
    )
    return found


class StackedLayers(NamedTuple):
    """Layers indexed for the split, one after another, for loops over all of them: the fields of
    `CompiledLayer` in the order `slowest_by_layer` takes them."""

    host_ptr: IntArray
    host_at: IntArray
    host_rank: IntArray
    host_expert: IntArray
    shared_at: IntArray
    shared: IntArray
    rank_host_ptr: IntArray
    rank_host_at: IntArray
    rank_host: IntArray
    first_slot: IntArray


def stack(layers: Sequence[CompiledLayer]) -> StackedLayers:
    """Put layers (at least one) of the same experts and ranks together."""
    found = StackedLayers(
        host_ptr=np.stack([c.host_ptr for c in layers]),
        host_at=_starts([c.host_rank for c in layers]),
        host_rank=np.concatenate([c.host_rank for c in layers]),
        host_expert=np.concatenate([c.host_expert for c in layers]),
        shared_at=_starts([c.shared for c in layers]),
        shared=np.concatenate([c.shared for c in layers]),
        rank_host_ptr=np.stack([c.rank_host_ptr for c in layers]),
        rank_host_at=_starts([c.rank_host for c in layers]),
        rank_host=np.concatenate([c.rank_host for c in layers]),
        first_slot=np.stack([c.first_slot for c in layers]),
    )
    for array in found:
        array.setflags(write=False)
    return found


def _starts(arrays: Sequence[IntArray]) -> IntArray:
    return np.cumsum([0, *(len(array) for array in arrays)], dtype=np.int64)


def slowest_of_layers(
    stacked: StackedLayers, demand: FloatArray, per_pair: FloatArray
) -> FloatArray:
    """`slowest_seconds` of each layer for its own row of demand: float64 [layers]."""
    found = np.empty(len(demand), dtype=np.float64)
    slowest_by_layer(np.ascontiguousarray(demand), per_pair, *stacked, found)
    return found


def compiled_of(layout: ExpertLayout, layer: int) -> CompiledLayer:
    """A layer of the layout, indexed for the split."""
    expert, rank = layout.layer_slots(layer)
    return compile_layer(expert, rank, layout.num_experts, layout.num_ranks)


class LayerGain(NamedTuple):
    """Seconds a second of a layer: of its slowest rank before, what of it is saved (mean over
    scenarios), and by how much that differs from scenario to scenario by chance (standard
    deviation); the whole gain where there is but one."""

    before_s: float
    saved_s: float
    spread_s: float


def layer_gains(
    before: ExpertLayout, after: ExpertLayout, layers: Iterable[int], request: PolicyInput
) -> dict[int, LayerGain]:
    """Gain by layer, in the measure that the policy lowers; 0 where an expert had no replica:
    repairing is not a matter of gain."""
    demand, weights = priced_demand(request), request.weights
    per_pair = seconds_per_pair(request.spec, request.topology)
    gains: dict[int, LayerGain] = {}
    for layer in layers:
        if (before.replica_counts[layer] == 0).any():
            gains[layer] = LayerGain(0.0, 0.0, 0.0)
            continue
        was, now = (
            slowest_seconds(compiled_of(layout, layer), demand[:, layer], per_pair)
            for layout in (before, after)
        )
        saved = float(weights @ (was - now))
        gains[layer] = LayerGain(float(weights @ was), saved, _by_chance(was - now))
    return gains


def _by_chance(saved: FloatArray) -> float:
    """Standard deviation of what neighbours in time save, by the median of their differences: a
    change for good among them is one difference of many."""
    if len(saved) < 2:
        return float(np.abs(saved).sum())
    return MEDIAN_DIFFERENCE * float(np.median(np.abs(np.diff(saved))))


def mean_demand(request: PolicyInput) -> FloatArray:
    """Forecast pairs a second over phases and scenarios: float64 [layers, experts]."""
    mean: FloatArray = np.tensordot(request.weights, request.scenarios.sum(axis=1), axes=1)
    return mean


def served_load(layout: ExpertLayout, demand: FloatArray) -> FloatArray:
    """Load of each rank under the router's split: float64 [ranks, layers]; experts without a
    replica count no load."""
    return rank_load(layout, np.where(layout.replica_counts > 0, demand, 0.0))


def usable_balancedness(layout: ExpertLayout, demand: FloatArray, request: PolicyInput) -> float:
    """Balancedness over the ranks that may hold replicas."""
    loads = served_load(layout, demand)
    ranks = [r.rank for r in request.topology.ranks if r.alive and not r.draining]
    return balancedness(loads[ranks]) if ranks else 1.0
