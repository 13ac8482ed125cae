"""One pool: the experts and slots that may be exchanged freely, and the split they are planned for.

Responsible for the sub-problem that the hierarchical rule cuts a layer into, its score, and the
call of the incremental policy. Must never see two pools at once. Called by `placement.eplb.plan`.

A pool is one layer of the whole fleet or, under the hierarchical rule, of one node: `rows` int64
[gpus, slots], experts numbered within the pool, -1 where a slot holds nothing. Each pool is a model
of one layer for the policy, every rank of which has exactly `slots` slots: what comes back has the
same number of slots a layer and rank by construction.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from placement.eplb.even import search_even
from placement.eplb.tensors import FloatArray, IntArray
from placement.layout import ExpertLayout
from placement.policy import PolicyInput, propose
from placement.scoring import Split, rank_load
from placement.topology import NUM_PHASES, DeviceProfile, MoeSpec, Phase, RankSpec, Topology

WRITE_GAIN_MIN: Final = 2e-3
"""Share of the even load of a gpu that one slot write must take off the hottest gpu."""
BALANCE_ENOUGH: Final = 0.98
"""Even load / load of the hottest gpu at or above which a live layer is left alone."""
ROUNDS_MAX: Final = 8
"""Calls of the policy on one pool; each ends where no write pays, the next sees the refilled
slots."""


class Pool(NamedTuple):
    """demand: float64 [scenarios, experts of the pool]. weights: float64 [scenarios]."""

    demand: FloatArray
    weights: FloatArray


def hottest(rows: IntArray, pool: Pool, split: Split) -> float:
    """Load of the hottest gpu, weighted over scenarios, in the unit of the demand."""
    layout = _layout(rows, pool)
    worst = [float(rank_load(layout, row[None], split).max()) for row in pool.demand]
    return float(np.dot(pool.weights, worst))


def fill(rows: IntArray, before: IntArray, pool: Pool) -> IntArray:
    """`rows` without empty slots: what was there before, else the expert with the most load a
    replica that the gpu lacks (of all experts where it lacks none)."""
    full = np.where((rows < 0) & (before >= 0), before, rows)
    load = pool.weights @ pool.demand
    for gpu, slot in np.argwhere(full < 0):
        count = np.bincount(full[full >= 0], minlength=len(load))
        lacking = np.setdiff1d(np.arange(len(load)), full[gpu])
        allowed = lacking if len(lacking) else np.arange(len(load))
        full[gpu, slot] = allowed[int(np.argmax((load / np.maximum(count, 1))[allowed]))]
    return full


def seat_missing(rows: IntArray, pool: Pool) -> IntArray:
    """`rows` with every expert of the pool somewhere: missing ones, the hottest first, on the gpu
    with the least load that has an empty slot, or one whose second replica serves least."""
    seated = rows.copy()
    load = pool.weights @ pool.demand
    missing = np.setdiff1d(np.arange(len(load)), seated)
    for expert in missing[np.argsort(-load[missing], kind="stable")]:
        count = np.bincount(seated[seated >= 0], minlength=len(load))
        share = np.append(load / np.maximum(count, 1), 0.0)  # the last for empty slots, id -1
        free = seated < 0
        if not free.any():
            surplus = np.append(count, 0)[seated] > 1
            free = surplus & (share[seated] == share[seated][surplus].min())
        gpu_load = share[seated].sum(axis=1)
        gpu = int(np.argmin(np.where(free.any(axis=1), gpu_load, np.inf)))
        seated[gpu, int(np.argmax(free[gpu]))] = expert
    return seated


def improve(
    rows: IntArray,
    pool: Pool,
    split: Split,
    *,
    writes: int | None,
    enough: float,
    rounds: int = ROUNDS_MAX,
) -> IntArray:
    """At most `writes` slots of `rows` written anew where that pays; slots that hold nothing are
    filled beyond it.

    enough: balance at which nothing is touched. The load is the weighted scenarios'.
    """
    now = fill(rows, rows, pool)
    if not pool.demand.any():
        return now
    if rows.shape[1] >= pool.demand.shape[1]:
        return _everything(now, pool, writes, enough, split)
    if split == "equal":
        return search_even(
            now, pool.demand, pool.weights, writes, enough=enough, gain_min=WRITE_GAIN_MIN
        )
    return _levelled(now, pool, writes, enough, rounds)


def _levelled(
    rows: IntArray, pool: Pool, writes: int | None, enough: float, rounds: int
) -> IntArray:
    """The incremental policy, again where it left slots empty: filled with what they held, they are
    room it has not seen."""
    now = rows
    for _ in range(rounds):
        left = None if writes is None else writes - int((now != rows).sum())
        if left == 0:
            break
        found = _incremental(now, pool, left, enough)
        full = fill(found, now, pool)
        settled = np.array_equal(found, full) or np.array_equal(full, now)
        now = full
        if settled:
            break
    assert writes is None or int((now != rows).sum()) <= writes, "more writes than allowed"
    return now


def _everything(
    rows: IntArray, pool: Pool, writes: int | None, enough: float, split: Split
) -> IntArray:
    """Where a gpu has a slot for every expert: missing ones over second replicas, the hottest
    first, until the layer is even or every gpu has every expert."""
    full = rows.copy()
    load = pool.weights @ pool.demand
    fair = float(load.sum()) / len(rows)
    left = rows.size if writes is None else writes
    for expert in np.argsort(-load, kind="stable"):
        for gpu in range(len(full)):
            if expert in full[gpu]:
                continue
            if left == 0 or fair >= enough * hottest(full, pool, split):
                return full
            firsts = np.unique(full[gpu], return_index=True)[1]
            full[gpu, np.setdiff1d(np.arange(full.shape[1]), firsts)[0]] = expert
            left -= 1
    return full


def _incremental(rows: IntArray, pool: Pool, writes: int | None, enough: float) -> IntArray:
    num_scenarios, num_experts = pool.demand.shape
    scenarios = np.zeros((num_scenarios, NUM_PHASES, 1, num_experts), dtype=np.float64)
    scenarios[:, Phase.PREFILL, 0] = pool.demand
    request = PolicyInput(
        spec=_spec(num_experts),
        topology=_topology(*rows.shape),
        layout=_layout(rows, pool),
        scenarios=scenarios,
        weights=pool.weights,
        staging_slots=0,
        max_moves=writes,
        balance_enough=enough,
    )
    return propose("incremental", request).slots.astype(np.int64)


def _layout(rows: IntArray, pool: Pool) -> ExpertLayout:
    return ExpertLayout(rows.astype(np.int32), 1, pool.demand.shape[1])


def _spec(num_experts: int) -> MoeSpec:
    """A model whose pairs and experts cost one unit each."""
    return MoeSpec(
        model="",
        weights_version="",
        num_layers=1,
        num_experts=num_experts,
        top_k=1,
        hidden_size=1,
        intermediate_size=1,
        expert_bytes=1,
        slot_bytes=1,
    )


def _topology(num_gpus: int, slots: int) -> Topology:
    profile = DeviceProfile(
        name="gpu", flops_per_s=6.0, memory_bytes_per_s=1.0, copy_bytes_per_s=1.0
    )
    ranks = tuple(
        RankSpec(rank=gpu, node="", failure_domain="", num_slots=slots, profile="gpu")
        for gpu in range(num_gpus)
    )
    return Topology(ranks=ranks, profiles=(profile,))
