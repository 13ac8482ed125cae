"""What a layout costs and what its moves cost, in seconds.

Responsible for the planner's two figures: predicted seconds a second of serving (sum over layers of
the slowest rank, under the router's split), and seconds of the copies. Called by `make_plan` and by
the engine.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from placement.cost import seconds_per_pair
from placement.layout import ExpertLayout
from placement.planner.kernels import slowest
from placement.policy.base import PolicyInput
from placement.policy.incremental import priced_demand
from placement.scoring import balancedness, rank_load
from placement.split import CompiledLayer, compile_layer

FloatArray = npt.NDArray[np.float64]


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


def compiled_of(layout: ExpertLayout, layer: int) -> CompiledLayer:
    """A layer of the layout, indexed for the split."""
    expert, rank = layout.layer_slots(layer)
    return compile_layer(expert, rank, layout.num_experts, layout.num_ranks)


def layer_gains(
    before: ExpertLayout, after: ExpertLayout, layers: Iterable[int], request: PolicyInput
) -> dict[int, tuple[float, float]]:
    """(seconds a second before, of these saved) by layer, mean over scenarios, in the measure
    that the policy lowers; 0 where an expert had no replica: repairing is not a matter of gain."""
    demand = priced_demand(request)
    per_pair = seconds_per_pair(request.spec, request.topology)
    gains: dict[int, tuple[float, float]] = {}
    for layer in layers:
        if (before.replica_counts[layer] == 0).any():
            gains[layer] = (0.0, 0.0)
            continue
        was, now = (
            float(
                request.weights
                @ slowest_seconds(compiled_of(layout, layer), demand[:, layer], per_pair)
            )
            for layout in (before, after)
        )
        gains[layer] = (was, was - now)
    return gains


def mean_demand(request: PolicyInput) -> FloatArray:
    """Forecast pairs a second over phases and scenarios: float64 [layers, experts]."""
    mean: FloatArray = np.tensordot(request.weights, request.scenarios.sum(axis=1), axes=1)
    return mean


def usable_balancedness(layout: ExpertLayout, demand: FloatArray, request: PolicyInput) -> float:
    """Balancedness over the ranks that may hold replicas; experts without a replica count no
    load."""
    served = np.where(layout.replica_counts > 0, demand, 0.0)
    loads = rank_load(layout, served)
    ranks = [r.rank for r in request.topology.ranks if r.alive and not r.draining]
    return balancedness(loads[ranks]) if ranks else 1.0
