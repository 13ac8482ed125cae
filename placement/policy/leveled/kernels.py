# ruff: noqa: PLR0913, PLR0917 - numba unpacks a structure slower than the work itself takes
# ruff: noqa: PLR1714 - numba would build a tuple or set where two comparisons do
"""Levelling a layer, and the value of small changes to it, compiled.

The theory, in plain words. A layer's replicas are given; the router levels every batch over them,
so the policy does too: each expert with several hosts pours its pairs over them like water, round
after round, until little moves. Loads are in seconds (pairs x seconds a pair of the rank), so a
slow rank fills sooner. The *value* of a layer lies between what its slowest rank takes and a steep
mean over ranks (a power mean). Without the second part two equally hot ranks would make a
plateau: no single write lowers the maximum.

A *trial* is one small change: other hosts of one or two experts, levelled in a copy of the
layer's flows. Two rounds rank candidates well; the change that is taken is levelled from nothing.

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

LEVEL_ROUNDS = 16
TRIAL_ROUNDS = 2
RELAX = 1.3
"""How far an expert's pairs over two hosts are shifted towards level: beyond it, because levels
travel over many ranks in few rounds then (successive over-relaxation)."""
TRIAL_RELAX = 1.3
SETTLED = 1e-4
"""Rounds end when no load moved by more than this share of the fair one."""
STEEP_WEIGHT = 4.0
"""Weight of the power mean beside the maximum's 1. High: what relieves the second-hottest rank, or
a scenario's, is worth its write before it shows in the maximum."""
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
    """[S, E, R or more], pairs a second of each host, by place in host_rank."""
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


@njit(cache=True, nogil=True, error_model="numpy")
def pour(
    expert: int,
    pairs: float,
    host_rank: IntArray,
    count: int,
    pair_s: FloatArray,
    flow: FloatArray,
    load: FloatArray,
    order: IntArray,
) -> float:
    """Pour an expert's pairs over its hosts anew; returns the largest change of a rank's load.

    host_rank, flow: [E, R], all experts: a view of the expert's own rows would cost more than the
    pouring.
    """
    for i in range(count):
        rank = host_rank[expert, i]
        load[rank] -= flow[expert, i] * pair_s[rank]
        j = i - 1
        while j >= 0 and load[host_rank[expert, order[j]]] > load[rank]:
            order[j + 1] = order[j]
            j -= 1
        order[j + 1] = i
    speed, work, level, filled = 0.0, pairs, 0.0, count
    for i in range(count):
        rank = host_rank[expert, order[i]]
        speed += 1.0 / pair_s[rank]
        work += load[rank] / pair_s[rank]
        level = work / speed
        if i + 1 == count or level <= load[host_rank[expert, order[i + 1]]]:
            filled = i + 1
            break
    moved = 0.0
    for i in range(count):
        rank = host_rank[expert, order[i]]
        give = max(0.0, (level - load[rank]) / pair_s[rank]) if i < filled else 0.0
        moved = max(moved, abs(give - flow[expert, order[i]]) * pair_s[rank])
        flow[expert, order[i]] = give
        load[rank] += give * pair_s[rank]
    return moved


@njit(cache=True, nogil=True, error_model="numpy")
def pour_round(
    experts: IntArray,
    how_many: int,
    pairs: FloatArray,
    host_rank: IntArray,
    host_count: IntArray,
    pair_s: FloatArray,
    flow: FloatArray,
    load: FloatArray,
    order: IntArray,
    relax: float,
) -> float:
    """`pour` each of the first `how_many` experts named, once; returns the largest change.

    Experts with two hosts, nearly all, are poured here: a call for each would cost ten times the
    arithmetic. relax: how far they go towards level.
    """
    moved = 0.0
    for k in range(how_many):
        expert = experts[k]
        if host_count[expert] != 2:
            change = pour(
                expert, pairs[expert], host_rank, host_count[expert], pair_s, flow, load, order
            )
            moved = max(moved, change)
            continue
        a, b = host_rank[expert, 0], host_rank[expert, 1]
        pair_a, pair_b, before, both = pair_s[a], pair_s[b], flow[expert, 0], pairs[expert]
        load_a = load[a] - before * pair_a
        load_b = load[b] - flow[expert, 1] * pair_b
        half = (load_b - load_a + both * pair_b) / (pair_a + pair_b)
        half = min(max(before + relax * (half - before), 0.0), both)
        flow[expert, 0] = half
        flow[expert, 1] = both - half
        load[a] = load_a + half * pair_a
        load[b] = load_b + (both - half) * pair_b
        moved = max(moved, abs(half - before) * pair_a)
    return moved


@njit(cache=True, nogil=True, error_model="numpy")
def value_of(load: FloatArray, fair: float, domain: IntArray) -> float:
    """Mean of the slowest rank's seconds, weight 1, and the power mean over ranks, weight
    STEEP_WEIGHT; 0 without load.
    """
    if fair <= 0.0:
        return 0.0
    slowest, steep, ranks = 0.0, 0.0, 0
    for rank in range(load.shape[0]):
        if domain[rank] >= 0:
            slowest = max(slowest, load[rank])
            steep += steepness(load[rank] / fair)
            ranks += 1
    # the twelfth root, by cheaper ones
    steep_s = fair * np.sqrt(np.sqrt(np.cbrt(steep / ranks)))
    value: float = (slowest + STEEP_WEIGHT * steep_s) / (1.0 + STEEP_WEIGHT)
    return value


@njit(cache=True, nogil=True, error_model="numpy")
def steepness(ratio: float) -> float:
    """ratio^STEEP of a load that is `ratio` times the fair one."""
    square = ratio * ratio
    fourth = square * square
    return fourth * fourth * fourth


@njit(cache=True, nogil=True, error_model="numpy")
def relevel(layer: Layer, world: World, scratch: Scratch) -> tuple[float, float]:
    """Level a layer from nothing into layer.flow and layer.load; returns (value, seconds of the
    slowest rank).

    The result depends on the hosts alone, not on what was there before.
    """
    # in names of their own: a field of a structure is counted as a reference at every use
    host_rank, host_count, demand = layer.host_rank, layer.host_count, layer.demand
    pair_s, multi, order = world.pair_s, scratch.multi, scratch.order
    value, slowest = 0.0, 0.0
    shared = list_shared(host_count, -1, -1, multi)
    for s in range(demand.shape[0]):
        load, flow, pairs, fair = layer.load[s], layer.flow[s], demand[s], layer.fair[s]
        load[:] = 0.0
        for expert in range(pairs.shape[0]):
            if host_count[expert] == 1:
                rank = host_rank[expert, 0]
                flow[expert, 0] = pairs[expert]
                load[rank] += flow[expert, 0] * pair_s[rank]
            else:
                for i in range(host_count[expert]):
                    flow[expert, i] = 0.0
        for number in range(LEVEL_ROUNDS):
            relax = RELAX if number > 0 else 1.0
            moved = pour_round(
                multi, shared, pairs, host_rank, host_count, pair_s, flow, load, order, relax
            )
            if moved <= SETTLED * fair:
                break
        value += world.weights[s] * value_of(load, fair, world.domain)
        slowest += world.weights[s] * load.max()
    return value, slowest


@njit(cache=True, nogil=True, error_model="numpy")
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


@njit(cache=True, nogil=True, error_model="numpy")
def save_hosts(layer: Layer, slot: int, expert: int, scratch: Scratch) -> None:
    """Remember an expert's hosts as number `slot` (0 or 1) of the trial."""
    scratch.saved_count[slot] = layer.host_count[expert]
    scratch.saved_rank[slot, :] = layer.host_rank[expert, :]


@njit(cache=True, nogil=True, error_model="numpy")
def restore_hosts(layer: Layer, slot: int, expert: int, scratch: Scratch) -> None:
    """Undo what a trial did to an expert's hosts."""
    layer.host_count[expert] = scratch.saved_count[slot]
    layer.host_rank[expert, :] = scratch.saved_rank[slot, :]


@njit(cache=True, nogil=True, error_model="numpy")
def add_host(layer: Layer, expert: int, rank: int) -> None:
    """Insert a host; hosts stand by ascending rank, so that figures do not depend on their
    history.
    """
    at = layer.host_count[expert]
    while at > 0 and layer.host_rank[expert, at - 1] > rank:
        layer.host_rank[expert, at] = layer.host_rank[expert, at - 1]
        at -= 1
    layer.host_rank[expert, at] = rank
    layer.host_count[expert] += 1


@njit(cache=True, nogil=True, error_model="numpy")
def drop_host(layer: Layer, expert: int, rank: int) -> None:
    """Take a host away; the others keep their order."""
    kept = 0
    for i in range(layer.host_count[expert]):
        if layer.host_rank[expert, i] != rank:
            layer.host_rank[expert, kept] = layer.host_rank[expert, i]
            kept += 1
    layer.host_count[expert] = kept


@njit(cache=True, nogil=True, error_model="numpy")
def lend(
    s: int,
    shared: int,
    first: int,
    second: int,
    multi: IntArray,
    pair_s: FloatArray,
    host_rank: IntArray,
    host_count: IntArray,
    saved_rank: IntArray,
    saved_count: IntArray,
    flow_from: FloatArray,
    load_from: FloatArray,
    flow: FloatArray,
    load: FloatArray,
) -> None:
    """Loads and flows of scenario s, without those of the changed experts."""
    for rank in range(load.shape[0]):
        load[rank] = load_from[s, rank]
    for k in range(shared):
        expert = multi[k]
        if expert != first and expert != second:
            for i in range(host_count[expert]):
                flow[expert, i] = flow_from[s, expert, i]
    for slot in range(2):
        expert = first if slot == 0 else second
        if expert >= 0:
            for i in range(saved_count[slot]):
                rank = saved_rank[slot, i]
                load[rank] -= flow_from[s, expert, i] * pair_s[rank]
            for i in range(host_count[expert]):
                flow[expert, i] = 0.0


@njit(cache=True, nogil=True, error_model="numpy")
def trial_value(
    layer: Layer, world: World, scratch: Scratch, first: int, second: int, limit: float
) -> float:
    """Value of the layer with the changed hosts of `first` and `second` (-1 = none), whose old
    ones are saved.

    Stops early once the value must exceed `limit`, and returns at least `limit` then: no scenario
    can be better than even.
    """
    shared = list_shared(layer.host_count, first, second, scratch.multi)
    # in names of their own: a field of a structure is counted as a reference at every use
    load, flow, multi, order = scratch.load, scratch.flow, scratch.multi, scratch.order
    host_rank, host_count, pair_s = layer.host_rank, layer.host_count, world.pair_s
    weights, fair, domain, demand = world.weights, layer.fair, world.domain, layer.demand
    value, even = 0.0, 0.0
    for s in range(demand.shape[0]):
        even += weights[s] * fair[s]
    for s in range(demand.shape[0]):
        lend(
            s,
            shared,
            first,
            second,
            multi,
            pair_s,
            host_rank,
            host_count,
            scratch.saved_rank,
            scratch.saved_count,
            layer.flow,
            layer.load,
            flow,
            load,
        )
        pairs = demand[s]
        for _ in range(TRIAL_ROUNDS):
            pour_round(
                multi, shared, pairs, host_rank, host_count, pair_s, flow, load, order, TRIAL_RELAX
            )
        value += weights[s] * value_of(load, fair[s], domain)
        even -= weights[s] * fair[s]
        if value + even > limit:
            least: float = max(value + even, limit)
            return least
    return value


@njit(cache=True, nogil=True, error_model="numpy")
def level_all(
    demand: FloatArray,
    fair: FloatArray,
    host_rank: IntArray,
    host_count: IntArray,
    work: Layer,
    world: World,
    scratch: Scratch,
    value: FloatArray,
    slowest: FloatArray,
) -> None:
    """`relevel` of every layer. demand: [L, S, E]; fair: [L, S]; host_rank: [L, E, R]; host_count:
    [L, E]; value and slowest: [L], results. `work` lends its flow and load.
    """
    for number in range(demand.shape[0]):
        layer = Layer(
            demand[number],
            fair[number],
            host_rank[number],
            host_count[number],
            work.flow,
            work.load,
        )
        value[number], slowest[number] = relevel(layer, world, scratch)


def tiny_layer() -> tuple[Layer, World, Scratch]:
    """A layer to compile with: types of production, two experts on two ranks, one shared."""
    layer = Layer(
        demand=np.ones((1, 2)),
        fair=np.ones(1),
        host_rank=np.array([[0, 1], [1, 0]], dtype=np.int64),
        host_count=np.array([2, 1], dtype=np.int64),
        flow=np.zeros((1, 2, 2)),
        load=np.zeros((1, 2)),
    )
    return layer, World(np.ones(1), np.ones(2), np.zeros(2, np.int64), 1), scratch_for(2, 2)


def warm() -> None:
    """Compile what is called from Python, with the types it is called with."""
    layer, world, scratch = tiny_layer()
    relevel(layer, world, scratch)
    level_all(
        layer.demand[None],
        layer.fair[None],
        layer.host_rank[None],
        layer.host_count[None],
        layer,
        world,
        scratch,
        np.zeros(1),
        np.zeros(1),
    )
