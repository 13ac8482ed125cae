# ruff: noqa: PLR1714 - numba would build a tuple or set where two comparisons do
"""Levelling a layer, and the value of small changes to it, compiled.

The theory, in plain words. A layer's replicas are given; the router levels every batch over them,
so the policy does too: each expert with several hosts pours its pairs over them like water, round
after round, until little moves. Loads are in seconds (pairs x seconds a pair of the rank), so a
slow rank fills sooner. The *value* of a layer is what its slowest rank takes plus a small steep
mean over ranks (a power mean). Without the second part two equally hot ranks would make a
plateau: no single write lowers the maximum.

A *trial* is one small change: other hosts of one or two experts, levelled in a copy of the
layer's flows.

Responsible for this arithmetic. Must never allocate what grows with the number of trials, use
fastmath, or break a tie by anything but lowest id. Called by `leveled` and by the kernels of
`incremental`.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

LEVEL_ROUNDS = 24
TRIAL_ROUNDS = 3
SETTLED = 1e-7
"""Rounds end when no load moved by more than this share of the fair one."""
STEEP_WEIGHT = 0.4
"""Weight of the power mean beside the maximum."""
STEEP = 12


class World(NamedTuple):
    """What is the same for all layers; R ranks, S scenarios."""

    weights: FloatArray
    """[S], sums to 1."""
    pair_s: FloatArray
    """[R], seconds of one pair."""
    domain: IntArray
    """[R], failure domain; -1 where the rank may hold nothing."""
    floor: int
    """Failure domains that every expert must keep, where it has them."""


class Layer(NamedTuple):
    """One layer under work; E experts."""

    demand: FloatArray
    """[S, E], pairs a second."""
    fair: FloatArray
    """[S], seconds of each rank if the load were even."""
    host_rank: IntArray
    """[E, R], ranks of the expert's replicas, the first host_count[e] count."""
    host_count: IntArray
    """[E]."""
    flow: FloatArray
    """[S, E, R], pairs a second of each host, by place in host_rank."""
    load: FloatArray
    """[S, R], seconds a second of each rank."""


class Scratch(NamedTuple):
    """Memory for trials."""

    flow: FloatArray
    """[E, R]."""
    load: FloatArray
    """[R]."""
    order: IntArray
    """[R]."""
    multi: IntArray
    """[E]."""
    saved_rank: IntArray
    """[2, R], hosts before the trial."""
    saved_count: IntArray
    """[2]."""


def scratch_for(num_experts: int, num_ranks: int) -> Scratch:
    """Memory for trials in layers of this size."""
    return Scratch(
        flow=np.zeros((num_experts, num_ranks)),
        load=np.zeros(num_ranks),
        order=np.zeros(num_ranks, np.int64),
        multi=np.zeros(num_experts, np.int64),
        saved_rank=np.zeros((2, num_ranks), np.int64),
        saved_count=np.zeros(2, np.int64),
    )


@njit(cache=True, nogil=True)
def pour(
    pairs: float,
    hosts: IntArray,
    count: int,
    pair_s: FloatArray,
    flow: FloatArray,
    load: FloatArray,
    order: IntArray,
) -> float:
    """Pour an expert's pairs over its hosts anew; returns the largest change of a rank's load."""
    for i in range(count):
        load[hosts[i]] -= flow[i] * pair_s[hosts[i]]
        j = i - 1
        while j >= 0 and load[hosts[order[j]]] > load[hosts[i]]:
            order[j + 1] = order[j]
            j -= 1
        order[j + 1] = i
    speed, work, level, filled = 0.0, pairs, 0.0, count
    for i in range(count):
        rank = hosts[order[i]]
        speed += 1.0 / pair_s[rank]
        work += load[rank] / pair_s[rank]
        level = work / speed
        if i + 1 == count or level <= load[hosts[order[i + 1]]]:
            filled = i + 1
            break
    moved = 0.0
    for i in range(count):
        rank = hosts[order[i]]
        give = max(0.0, (level - load[rank]) / pair_s[rank]) if i < filled else 0.0
        moved = max(moved, abs(give - flow[order[i]]) * pair_s[rank])
        flow[order[i]] = give
        load[rank] += give * pair_s[rank]
    return moved


@njit(cache=True, nogil=True)
def value_of(load: FloatArray, fair: float, domain: IntArray) -> float:
    """Seconds of the slowest rank plus STEEP_WEIGHT x power mean over ranks; 0 without load."""
    if fair <= 0.0:
        return 0.0
    slowest, steep, ranks = 0.0, 0.0, 0
    for rank in range(load.shape[0]):
        if domain[rank] >= 0:
            slowest = max(slowest, load[rank])
            steep += steepness(load[rank] / fair)
            ranks += 1
    steep_s: float = fair * (steep / ranks) ** (1.0 / STEEP)
    return slowest + STEEP_WEIGHT * steep_s


@njit(cache=True, nogil=True)
def steepness(ratio: float) -> float:
    """ratio^STEEP of a load that is `ratio` times the fair one."""
    square = ratio * ratio
    fourth = square * square
    return fourth * fourth * fourth


@njit(cache=True, nogil=True)
def relevel(layer: Layer, world: World, scratch: Scratch) -> tuple[float, float]:
    """Level a layer from nothing into layer.flow and layer.load; returns (value, seconds of the
    slowest rank).

    The result depends on the hosts alone, not on what was there before.
    """
    value, slowest = 0.0, 0.0
    shared = list_shared(layer.host_count, -1, -1, scratch.multi)
    for s in range(layer.demand.shape[0]):
        load, flow = layer.load[s], layer.flow[s]
        load[:] = 0.0
        for expert in range(layer.demand.shape[1]):
            count = layer.host_count[expert]
            for i in range(count):
                rank = layer.host_rank[expert, i]
                flow[expert, i] = layer.demand[s, expert] / count
                load[rank] += flow[expert, i] * world.pair_s[rank]
        for _ in range(LEVEL_ROUNDS):
            moved = 0.0
            for k in range(shared):
                expert = scratch.multi[k]
                change = pour(
                    layer.demand[s, expert],
                    layer.host_rank[expert],
                    layer.host_count[expert],
                    world.pair_s,
                    flow[expert],
                    load,
                    scratch.order,
                )
                moved = max(moved, change)
            if moved <= SETTLED * layer.fair[s]:
                break
        value += world.weights[s] * value_of(load, layer.fair[s], world.domain)
        slowest += world.weights[s] * load.max()
    return value, slowest


@njit(cache=True, nogil=True)
def list_shared(host_count: IntArray, first: int, second: int, multi: IntArray) -> int:
    """Experts with several hosts into `multi`, `first` and `second` in front; returns how many."""
    found = 0
    if first >= 0 and host_count[first] > 0:
        multi[found] = first
        found += 1
    if second >= 0 and host_count[second] > 0:
        multi[found] = second
        found += 1
    for expert in range(host_count.shape[0]):
        if host_count[expert] > 1 and expert != first and expert != second:
            multi[found] = expert
            found += 1
    return found


@njit(cache=True, nogil=True)
def save_hosts(layer: Layer, slot: int, expert: int, scratch: Scratch) -> None:
    """Remember an expert's hosts as number `slot` (0 or 1) of the trial."""
    scratch.saved_count[slot] = layer.host_count[expert]
    scratch.saved_rank[slot, :] = layer.host_rank[expert, :]


@njit(cache=True, nogil=True)
def restore_hosts(layer: Layer, slot: int, expert: int, scratch: Scratch) -> None:
    """Undo what a trial did to an expert's hosts."""
    layer.host_count[expert] = scratch.saved_count[slot]
    layer.host_rank[expert, :] = scratch.saved_rank[slot, :]


@njit(cache=True, nogil=True)
def add_host(layer: Layer, expert: int, rank: int) -> None:
    """Append a host."""
    layer.host_rank[expert, layer.host_count[expert]] = rank
    layer.host_count[expert] += 1


@njit(cache=True, nogil=True)
def drop_host(layer: Layer, expert: int, rank: int) -> None:
    """Take a host away; the others keep their order."""
    kept = 0
    for i in range(layer.host_count[expert]):
        if layer.host_rank[expert, i] != rank:
            layer.host_rank[expert, kept] = layer.host_rank[expert, i]
            kept += 1
    layer.host_count[expert] = kept


@njit(cache=True, nogil=True)
def trial_value(
    layer: Layer, world: World, scratch: Scratch, first: int, second: int, limit: float
) -> float:
    """Value of the layer with the changed hosts of `first` and `second` (-1 = none), whose old
    ones are saved.

    Stops early, with what it has, once that exceeds `limit`.
    """
    shared = list_shared(layer.host_count, first, second, scratch.multi)
    value = 0.0
    for s in range(layer.demand.shape[0]):
        load, flow = scratch.load, scratch.flow
        load[:] = layer.load[s]
        for k in range(shared):
            expert = scratch.multi[k]
            if expert != first and expert != second:
                for i in range(layer.host_count[expert]):
                    flow[expert, i] = layer.flow[s, expert, i]
        for slot in range(2):
            expert = first if slot == 0 else second
            if expert >= 0:
                for i in range(scratch.saved_count[slot]):
                    rank = scratch.saved_rank[slot, i]
                    load[rank] -= layer.flow[s, expert, i] * world.pair_s[rank]
                flow[expert, :] = 0.0
        for _ in range(TRIAL_ROUNDS):
            for k in range(shared):
                expert = scratch.multi[k]
                pour(
                    layer.demand[s, expert],
                    layer.host_rank[expert],
                    layer.host_count[expert],
                    world.pair_s,
                    flow[expert],
                    load,
                    scratch.order,
                )
        value += world.weights[s] * value_of(load, layer.fair[s], world.domain)
        if value > limit:
            break
    return value


@njit(cache=True, nogil=True)
def may_leave(layer: Layer, world: World, expert: int, rank: int, joins: int) -> bool:
    """Whether `expert` may leave `rank` (and join rank `joins`, -1 = none): never the last
    replica, never below floor.
    """
    count = layer.host_count[expert]
    if count < 2 and joins < 0:
        return False
    before, after = 0, 0
    for i in range(count):
        here = world.domain[layer.host_rank[expert, i]]
        first_before, first_after = True, layer.host_rank[expert, i] != rank
        for j in range(i):
            other = layer.host_rank[expert, j]
            if world.domain[other] == here:
                first_before = False
                if other != rank:
                    first_after = False
        before += first_before
        after += first_after
    if joins >= 0:
        new = True
        for i in range(count):
            other = layer.host_rank[expert, i]
            if other != rank and world.domain[other] == world.domain[joins]:
                new = False
        after += new
    return after >= min(world.floor, before)


@njit(cache=True, nogil=True)
def shift_gain(layer: Layer, world: World, s: int, source: int, target: int, pairs: float) -> float:
    """Steepness saved in scenario s by moving `pairs` from one rank to another."""
    fair = layer.fair[s]
    if fair <= 0.0:
        return 0.0
    a, b = layer.load[s, source] / fair, layer.load[s, target] / fair
    down, up = pairs * world.pair_s[source] / fair, pairs * world.pair_s[target] / fair
    return steepness(a) - steepness(a - down) + steepness(b) - steepness(b + up)


@njit(cache=True, nogil=True)
def drop_estimate(layer: Layer, world: World, expert: int, place: int) -> float:
    """First-order loss if a replica goes and its pairs move to the expert's coldest other host."""
    rank = layer.host_rank[expert, place]
    loss = 0.0
    for s in range(layer.demand.shape[0]):
        pairs = layer.flow[s, expert, place]
        if pairs <= 0.0:
            continue
        coldest = -1
        for i in range(layer.host_count[expert]):
            other = layer.host_rank[expert, i]
            if i != place and (coldest < 0 or layer.load[s, other] < layer.load[s, coldest]):
                coldest = other
        loss -= world.weights[s] * shift_gain(layer, world, s, rank, coldest, pairs)
    return loss


@njit(cache=True, nogil=True)
def drop_loss(
    layer: Layer, world: World, scratch: Scratch, expert: int, rank: int, value: float
) -> float:
    """Value lost if the expert's replica on `rank` goes; exactly 0 if no scenario uses it.
    `value` is the layer's now.
    """
    used = False
    for i in range(layer.host_count[expert]):
        if layer.host_rank[expert, i] == rank:
            for s in range(layer.demand.shape[0]):
                used = used or layer.flow[s, expert, i] > 0.0
    if not used:
        return 0.0
    save_hosts(layer, 0, expert, scratch)
    drop_host(layer, expert, rank)
    after = trial_value(layer, world, scratch, expert, -1, np.inf)
    restore_hosts(layer, 0, expert, scratch)
    return max(0.0, after - value)


@njit(cache=True, nogil=True)
def cheapest_drops(
    layer: Layer, world: World, scratch: Scratch, value: float, loss: FloatArray, victim: IntArray
) -> None:
    """For each rank the surplus replica of this layer whose loss is least: `loss` [R] (inf =
    none), `victim` [R].
    """
    estimate = np.full(loss.shape[0], np.inf)
    loss[:] = np.inf
    victim[:] = -1
    for expert in range(layer.host_count.shape[0]):
        for i in range(layer.host_count[expert]):
            rank = layer.host_rank[expert, i]
            if may_leave(layer, world, expert, rank, -1):
                guess = drop_estimate(layer, world, expert, i)
                if guess < estimate[rank]:
                    estimate[rank] = guess
                    victim[rank] = expert
    for rank in range(loss.shape[0]):
        if victim[rank] >= 0:
            loss[rank] = drop_loss(layer, world, scratch, victim[rank], rank, value)


def warm() -> None:
    """Compile what is called from Python, with the types it is called with."""
    world = World(np.ones(1), np.ones(2), np.zeros(2, np.int64), 1)
    layer = Layer(
        demand=np.ones((1, 2)),
        fair=np.ones(1),
        host_rank=np.array([[0, 1], [1, 0]], dtype=np.int64),
        host_count=np.array([2, 1], dtype=np.int64),
        flow=np.zeros((1, 2, 2)),
        load=np.zeros((1, 2)),
    )
    scratch = scratch_for(2, 2)
    value, _ = relevel(layer, world, scratch)
    cheapest_drops(layer, world, scratch, value, np.zeros(2), np.zeros(2, np.int64))
