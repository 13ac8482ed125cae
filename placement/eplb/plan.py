"""Plans every layer of a call: from nothing, or from what is there.

Responsible for cutting a layer into pools under the hierarchical rule, for sharing the slot writes
of a layer among them, and for the starts that the search works from. Must never check arguments
(`arguments`) or convert arrays (`tensors`). Called by `placement.eplb` and `placement.adapters`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from placement.eplb.arguments import Problem
from placement.eplb.errors import EplbError
from placement.eplb.nodes import aligned, nodes_of_experts
from placement.eplb.outlook import Outlook, outlook
from placement.eplb.pool import (
    BALANCE_ENOUGH,
    WRITE_GAIN_MIN,
    Pool,
    fill,
    hottest,
    improve,
    seat_missing,
)
from placement.eplb.tensors import FloatArray, IntArray
from placement.policy.eplb import eplb_matrix, repair_duplicates
from placement.scoring import Split


class Layer(NamedTuple):
    """One layer to plan. number: its ordinal. demand: float64 [scenarios, experts]. live: int64
    [gpus, slots] or None."""

    number: int
    demand: FloatArray
    live: IntArray | None


class Planned(NamedTuple):
    """rows: int64 [gpus, slots]. top: load of the hottest gpu. writes: slots that differ from the
    live ones."""

    rows: IntArray
    top: float
    writes: int


def plan(problem: Problem, split: Split) -> IntArray:
    """physical_to_logical: int64 [layers, replicas], every slot filled, every expert somewhere.

    Raises EplbError where the hierarchical rule asks for more writes than `max_moves`.
    """
    ahead = outlook(problem)
    counts = problem.counts
    shape = (counts.num_gpus, counts.slots)
    layers = [
        Layer(
            number,
            np.ascontiguousarray(ahead.demand[:, number]),
            None if problem.current is None else problem.current[number].reshape(shape),
        )
        for number in range(len(problem.load))
    ]
    fresh = Fresh(problem, ahead)
    rows = [_plan_layer(layer, problem, ahead, fresh, split) for layer in layers]
    return np.stack([row.reshape(-1) for row in rows])


class Fresh:
    """The published greedy on the weighted mean of the scenarios, all layers at once when first
    asked for."""

    def __init__(self, problem: Problem, ahead: Outlook) -> None:
        self._problem = problem
        load = np.tensordot(ahead.weights, ahead.demand, axes=1)
        # without load the greedy would give every further place to expert 0
        self._load = np.where(load.any(axis=1, keepdims=True), load, 1.0)
        self._matrix: IntArray | None = None

    def rows(self, layer: int) -> IntArray:
        """int64 [gpus, slots], no expert twice on a gpu where there are enough of them."""
        counts, num_experts = self._problem.counts, self._load.shape[1]
        per_node = num_experts // counts.num_nodes
        if self._matrix is None:
            self._matrix, _, _ = eplb_matrix(
                self._load,
                counts.num_replicas,
                counts.num_groups,
                counts.num_nodes,
                counts.num_gpus,
            )
        rows = self._matrix[layer].reshape(counts.num_gpus, counts.slots)
        if counts.slots < per_node:
            return repair_duplicates(rows, self._load[layer], counts.num_nodes)
        everything = []
        for node in np.split(rows, counts.num_nodes):
            own = np.unique(node)
            everything.append(np.tile(np.resize(own, counts.slots), (len(node), 1)))
        return np.concatenate(everything)


def _plan_layer(
    layer: Layer, problem: Problem, ahead: Outlook, fresh: Fresh, split: Split
) -> IntArray:
    counts = problem.counts
    pool = Pool(layer.demand, ahead.weights)
    if layer.live is None:
        start = fresh.rows(layer.number)
        return _improve_nodes(start, pool, problem, split, writes=None, enough=1.0)
    if counts.num_nodes == 1:
        return improve(layer.live, pool, split, writes=problem.max_moves, enough=BALANCE_ENOUGH)
    kept = None
    if nodes_of_experts(layer.live, counts, layer.demand.shape[1]) is not None:
        rows = _improve_nodes(
            layer.live, pool, problem, split, writes=problem.max_moves, enough=BALANCE_ENOUGH
        )
        kept = _planned(rows, layer.live, pool, split)
    return _regrouped(layer, pool, problem, fresh, split, kept)


def _regrouped(
    layer: Layer, pool: Pool, problem: Problem, fresh: Fresh, split: Split, kept: Planned | None
) -> IntArray:
    """Groups packed to nodes anew, where the live placement breaks the rule or where that pays."""
    live = layer.live
    assert live is not None, "only a live layer is regrouped"
    fair = float(pool.weights @ pool.demand.sum(axis=1)) / problem.counts.num_gpus
    if kept is not None and fair >= BALANCE_ENOUGH * kept.top:
        return kept.rows
    packed = _improve_nodes(fresh.rows(layer.number), pool, problem, split, writes=None, enough=1.0)
    target = aligned(packed, live, problem.counts.num_nodes)
    moved = _seated(live, target, pool, problem)
    found = [_planned(rows, live, pool, split) for rows in (target, moved)]
    better = _improve_nodes(moved, pool, problem, split, writes=None, enough=BALANCE_ENOUGH)
    found.append(_planned(better, live, pool, split))
    if kept is not None:
        found.append(kept)
    limit = live.size if problem.max_moves is None else problem.max_moves
    allowed = [each for each in found if each.writes <= limit]
    if not allowed:
        least = min(each.writes for each in found)
        raise EplbError(
            "max_moves",
            f"layer {layer.number}: current keeps the experts of a group on more than one node, or "
            f"more groups on a node than its share; putting that right takes {least} slot writes, "
            f"max_moves is {problem.max_moves}",
            f"pass max_moves {least} or None once, or num_groups 1 and num_nodes 1",
        )
    best = min(allowed, key=lambda each: each.top + WRITE_GAIN_MIN * fair * each.writes)
    return best.rows


def _seated(live: IntArray, target: IntArray, pool: Pool, problem: Problem) -> IntArray:
    """The groups on the nodes where `target` has them; every slot that may keep its expert does."""
    counts = problem.counts
    node_of = nodes_of_experts(target, counts, pool.demand.shape[1])
    assert node_of is not None, "a group is on several nodes"
    seated = []
    for node, rows in enumerate(np.split(live, counts.num_nodes)):
        own = np.flatnonzero(node_of == node)
        local = Pool(np.ascontiguousarray(pool.demand[:, own]), pool.weights)
        kept = _renumbered(np.where(np.isin(rows, own), rows, -1), own)
        full = fill(seat_missing(kept, local), kept, local)
        seated.append(own[full])
    return np.concatenate(seated)


def _planned(rows: IntArray, live: IntArray, pool: Pool, split: Split) -> Planned:
    writes = int(((rows != live) & (live >= 0)).sum())
    return Planned(rows, hottest(rows, pool, split), writes)


def _improve_nodes(
    rows: IntArray,
    pool: Pool,
    problem: Problem,
    split: Split,
    *,
    writes: int | None,
    enough: float,
) -> IntArray:
    """Each node's pool improved, the hottest node first; a node cooler than what the hottest came
    to is left alone, its writes would lower nothing."""
    counts = problem.counts
    node_of = nodes_of_experts(rows, counts, pool.demand.shape[1])
    assert node_of is not None, "a group is on several nodes"
    found = np.split(rows.copy(), counts.num_nodes)
    experts = [np.flatnonzero(node_of == node) for node in range(counts.num_nodes)]
    pools = [Pool(np.ascontiguousarray(pool.demand[:, own]), pool.weights) for own in experts]
    local = [_renumbered(found[node], experts[node]) for node in range(counts.num_nodes)]
    tops = [hottest(*pair, split) for pair in zip(local, pools, strict=True)]
    floor, left = 0.0, writes
    for node in sorted(range(counts.num_nodes), key=lambda n: (-tops[n], n)):
        budget = 0 if tops[node] <= floor else left
        better = improve(local[node], pools[node], split, writes=budget, enough=enough)
        floor = max(floor, hottest(better, pools[node], split))
        if left is not None:
            left -= int(((better != local[node]) & (local[node] >= 0)).sum())
        found[node] = experts[node][better]
    return np.concatenate(found)


def _renumbered(rows: IntArray, experts: IntArray) -> IntArray:
    return np.where(rows >= 0, np.searchsorted(experts, rows), -1)
