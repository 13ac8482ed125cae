"""What a layout costs and what its moves cost, in seconds.

Responsible for the planner's two figures: predicted seconds a second of serving (sum over layers of
the slowest rank, under the router's split), and seconds of the copies. Called by `make_plan`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from placement.cost import seconds_per_pair
from placement.layout import ExpertLayout
from placement.policy.base import PolicyInput
from placement.scoring import balancedness, rank_load
from placement.split import CompiledLayer, compile_layer, split_counts

FloatArray = npt.NDArray[np.float64]
_UNITS = 1 << 30
"""Whole units a layer's fractional demand is cut into before it is levelled."""


def layer_seconds(layout: ExpertLayout, layer: int, request: PolicyInput) -> float:
    """Seconds a second of the layer's slowest rank, mean over scenarios; 0 where an expert has no
    replica yet.

    Experts without a replica have no cost that could be compared: repairing them is not a matter of
    gain.
    """
    if (layout.replica_counts[layer] == 0).any():
        return 0.0
    per_pair = seconds_per_pair(request.spec, request.topology)
    expert, rank = layout.layer_slots(layer)
    compiled = compile_layer(expert, rank, layout.num_experts, layout.num_ranks)
    seconds = 0.0
    for weight, scenario in zip(request.weights.tolist(), request.scenarios, strict=True):
        loads = leveled_pairs(compiled, scenario[:, layer].sum(axis=0))
        seconds += weight * float((loads * per_pair).max())
    return seconds


def leveled_pairs(compiled: CompiledLayer, demand: FloatArray) -> FloatArray:
    """Pairs of each rank under the router's split of a fractional demand [experts]: float64
    [ranks]."""
    total = float(demand.sum())
    if total <= 0.0:
        return np.zeros(compiled.num_ranks, dtype=np.float64)
    counts = np.rint(demand * (_UNITS / total)).astype(np.int64)
    tokens = split_counts(compiled, counts)
    loads = np.bincount(compiled.replica_rank, weights=tokens, minlength=compiled.num_ranks)
    return np.asarray(loads * (total / _UNITS), dtype=np.float64)


def layer_gains(
    before: ExpertLayout, after: ExpertLayout, layers: Iterable[int], request: PolicyInput
) -> dict[int, tuple[float, float]]:
    """(seconds a second before, of these saved) by layer; no gain for layers that had an expert
    without a replica."""
    gains: dict[int, tuple[float, float]] = {}
    for layer in layers:
        was = layer_seconds(before, layer, request)
        gains[layer] = (was, was - layer_seconds(after, layer, request) if was > 0.0 else 0.0)
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
