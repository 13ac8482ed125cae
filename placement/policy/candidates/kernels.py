"""Which changes of one layer are worth trying, compiled.

The theory, in plain words. Only what relieves the hottest ranks helps, and only the coldest can
take it. So: experts of the hottest few ranks are candidates to be replicated on, or exchanged
with an expert of, the coldest few. There are many, so each is ranked by an estimate: the steepness
saved if pairs moved and nothing else did. The best few make the shortlist.

Responsible for the shortlist. Must never change hosts, use fastmath, or break a tie by anything but
the lowest id. Called by `policy.kernels`.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from placement.policy.leveled.drops.kernels import drop_estimate, may_leave
from placement.policy.leveled.kernels import (
    BoolArray,
    FloatArray,
    IntArray,
    Layer,
    World,
    relevel,
    scratch_for,
    steepness,
)

NONE = 0
REPLICATE_SPARE = 1
"""Write an expert into a slot that costs this layer nothing: an empty one, or another layer's
cheapest victim.
"""
REPLICATE_OVER = 2
"""Write an expert over a surplus replica of the same layer."""
EXCHANGE = 3
"""Two experts change ranks: two writes."""

HOT_RANKS = 4
COLD_RANKS = 10
SHORTLIST = 24
CONNECT = 2.0
"""Share by which a write counts more that connects ranks which share no expert, directly or
through others. High: the split levels over shared experts what nobody foresaw, but only as far as
ranks hang together.
"""


class Room(NamedTuple):
    """What writes into a rank cost besides this layer's own change, and the limits of a path."""

    free: IntArray
    """[R], slots that this layer may still fill; the path counts it down."""
    victim_loss: FloatArray
    """[R], value lost by the cheapest surplus replica of another layer there; inf where there is
    none.
    """
    near: BoolArray
    """[E, R], whether the rank's node has a live replica of the expert to copy from."""
    resident_price: float
    """Value that a further resident replica must bring."""
    gain_min: float
    """Value that a write must save."""
    slowest_enough: float
    """Seconds of the slowest rank at which the layer is left alone."""
    writes_left: int
    far_left: int
    """Writes from another node that are left."""


class Shortlist(NamedTuple):
    """Memory for the search of one layer."""

    place: IntArray
    """[E, R], place of a rank among an expert's hosts, or -1."""
    on_rank: IntArray
    """[R, E], experts of each rank, ascending; the first on_count[r] count."""
    on_count: IntArray
    """[R]."""
    gains: FloatArray
    """[SHORTLIST], estimates."""
    rows: IntArray
    """[SHORTLIST, 5]: kind, expert, hot rank, cold rank, other expert."""
    over: IntArray
    """[R], the layer's own cheapest victim on a rank, or -1."""
    over_loss: FloatArray
    """[R], its estimated loss."""
    component: IntArray
    """[R], lowest rank that the rank is connected to by shared experts."""
    seen: IntArray
    """[E], 1 where an expert was looked at for replication already."""
    ratio: FloatArray
    """[R, S], load over fair load."""
    steep: FloatArray
    """[R, S], its steepness."""
    unit: FloatArray
    """[R, S], ratio that one pair a second adds."""
    pairs: FloatArray
    """[R, E, S], pairs a second of the experts of each rank, by place in on_rank."""
    mean: FloatArray
    """[R, E], ratio that they add, mean over scenarios."""
    hottest: IntArray
    """[S], most loaded host of an expert."""
    most: FloatArray
    """[S], its pairs there."""
    barred: BoolArray
    """[SHORTLIST], candidates that disappointed."""


def shortlist_for(num_experts: int, num_ranks: int, num_scenarios: int) -> Shortlist:
    """Memory for the search of layers of this size."""
    return Shortlist(
        place=np.zeros((num_experts, num_ranks), np.int64),
        on_rank=np.zeros((num_ranks, num_experts), np.int64),
        on_count=np.zeros(num_ranks, np.int64),
        gains=np.zeros(SHORTLIST),
        rows=np.zeros((SHORTLIST, 5), np.int64),
        over=np.zeros(num_ranks, np.int64),
        over_loss=np.zeros(num_ranks),
        component=np.zeros(num_ranks, np.int64),
        seen=np.zeros(num_experts, np.int64),
        ratio=np.zeros((num_ranks, num_scenarios)),
        steep=np.zeros((num_ranks, num_scenarios)),
        unit=np.zeros((num_ranks, num_scenarios)),
        pairs=np.zeros((num_ranks, num_experts, num_scenarios)),
        mean=np.zeros((num_ranks, num_experts)),
        hottest=np.zeros(num_scenarios, np.int64),
        most=np.zeros(num_scenarios),
        barred=np.zeros(SHORTLIST, np.bool_),
    )


@njit(cache=True, nogil=True, error_model="numpy")
def prepare(layer: Layer, world: World, short: Shortlist) -> None:
    """Fill everything but gains and rows."""
    short.place[:] = -1
    short.on_count[:] = 0
    short.over[:] = -1
    short.over_loss[:] = np.inf
    short.seen[:] = 0
    for rank in range(short.component.shape[0]):
        short.component[rank] = rank
    for expert in range(layer.host_count.shape[0]):
        count = layer.host_count[expert]
        for i in range(count):
            rank = layer.host_rank[expert, i]
            short.place[expert, rank] = i
            short.on_rank[rank, short.on_count[rank]] = expert
            short.on_count[rank] += 1
            if i > 0:
                connect(short.component, layer.host_rank[expert, 0], rank)
            if count > 1 and may_leave(layer, world, expert, rank, -1):
                loss = drop_estimate(layer, world, expert, i)
                if loss < short.over_loss[rank]:
                    short.over_loss[rank] = loss
                    short.over[rank] = expert


@njit(cache=True, nogil=True, error_model="numpy")
def connect(component: IntArray, first: int, second: int) -> None:
    """Make two ranks one component."""
    low = min(component[first], component[second])
    high = max(component[first], component[second])
    if low == high:
        return
    for rank in range(component.shape[0]):
        if component[rank] == high:
            component[rank] = low


@njit(cache=True, nogil=True, error_model="numpy")
def order_by_heat(world: World, short: Shortlist) -> tuple[IntArray, int]:
    """(ranks that may hold replicas, hottest first, ties by lowest id; how many they are)."""
    num_ranks = world.domain.shape[0]
    heat = np.full(num_ranks, np.inf)
    usable = 0
    for rank in range(num_ranks):
        if world.domain[rank] >= 0:
            usable += 1
            heat[rank] = 0.0
            for s in range(world.weights.shape[0]):
                heat[rank] -= world.weights[s] * short.steep[rank, s]
    return np.argsort(heat, kind="mergesort"), usable


@njit(cache=True, nogil=True, error_model="numpy")
def note(short: Shortlist, found: int, gain: float, row: tuple[int, int, int, int, int]) -> int:
    """Keep a candidate if it is among the best; returns how many are kept.

    An estimate below zero is no reason to drop it: levelling gives back much of what it fears.
    """
    at = found
    if found == SHORTLIST:
        at = 0
        for i in range(1, SHORTLIST):
            # the later of equals makes room, so the first seen stays
            if short.gains[i] <= short.gains[at]:
                at = i
        if short.gains[at] >= gain:
            return found
        found -= 1
    short.gains[at] = gain
    for i in range(5):
        short.rows[at, i] = row[i]
    return found + 1


@njit(cache=True, nogil=True, error_model="numpy")
def replicate_estimate(
    short: Shortlist, weights: FloatArray, expert: int, cold: int, ranks: IntArray
) -> float:
    """Steepness saved if the expert's hottest host in use handed pairs to `cold` until both are
    level. ranks: [S], those hosts, -1 where there is none.
    """
    gain = 0.0
    ratio, steep, unit = short.ratio, short.steep, short.unit
    for s in range(weights.shape[0]):
        hottest = ranks[s]
        if hottest < 0 or ratio[hottest, s] <= ratio[cold, s]:
            continue
        pairs = (ratio[hottest, s] - ratio[cold, s]) / (unit[hottest, s] + unit[cold, s])
        pairs = min(pairs, short.most[s])
        after = steepness(ratio[hottest, s] - pairs * unit[hottest, s])
        after += steepness(ratio[cold, s] + pairs * unit[cold, s])
        gain += weights[s] * (steep[hottest, s] + steep[cold, s] - after)
    return gain


@njit(cache=True, nogil=True, error_model="numpy")
def hottest_hosts(layer: Layer, short: Shortlist, expert: int) -> None:
    """For each scenario the most loaded host that the expert uses into short.hottest (-1 = none),
    and its pairs there into short.most.
    """
    for s in range(short.most.shape[0]):
        short.hottest[s], short.most[s] = -1, 0.0
        for i in range(layer.host_count[expert]):
            rank = layer.host_rank[expert, i]
            if layer.flow[s, expert, i] > 0.0 and (
                short.hottest[s] < 0 or short.ratio[rank, s] > short.ratio[short.hottest[s], s]
            ):
                short.hottest[s], short.most[s] = rank, layer.flow[s, expert, i]


@njit(cache=True, nogil=True, error_model="numpy")
def exchange_estimate(
    short: Shortlist, weights: FloatArray, hot: int, away_at: int, cold: int, back_at: int
) -> float:
    """Steepness saved if an expert of `hot` and one of `cold`, given by their places on the ranks,
    change places with all their pairs there.
    """
    gain = 0.0
    ratio, steep, unit, pairs = short.ratio, short.steep, short.unit, short.pairs
    for s in range(weights.shape[0]):
        moved = pairs[hot, away_at, s] - pairs[cold, back_at, s]
        after = steepness(ratio[hot, s] - moved * unit[hot, s])
        after += steepness(ratio[cold, s] + moved * unit[cold, s])
        gain += weights[s] * (steep[hot, s] + steep[cold, s] - after)
    return gain


@njit(cache=True, nogil=True, error_model="numpy")
def far_writes(room: Room, kind: int, expert: int, hot: int, cold: int, other: int) -> int:
    """How many of a candidate's writes need a source on another node."""
    far = 0 if room.near[expert, cold] else 1
    if kind == EXCHANGE and not room.near[other, hot]:
        far += 1
    return far


@njit(cache=True, nogil=True, error_model="numpy")
def gather(layer: Layer, world: World, short: Shortlist, rank: int) -> None:
    """Ratios and pairs of a rank, scenarios next to each other."""
    for s in range(layer.demand.shape[0]):
        fair = layer.fair[s]
        unit = world.pair_s[rank] / fair if fair > 0.0 else 0.0
        short.unit[rank, s] = unit
        short.ratio[rank, s] = layer.load[s, rank] / fair if fair > 0.0 else 0.0
        short.steep[rank, s] = steepness(short.ratio[rank, s])
        for k in range(short.on_count[rank]):
            expert = short.on_rank[rank, k]
            pairs = layer.flow[s, expert, short.place[expert, rank]]
            short.pairs[rank, k, s] = pairs
            if s == 0:
                short.mean[rank, k] = 0.0
            short.mean[rank, k] += world.weights[s] * pairs * unit


@njit(cache=True, nogil=True, error_model="numpy")
def collect(layer: Layer, world: World, room: Room, short: Shortlist) -> int:
    """Fill the shortlist; returns how many candidates it holds."""
    for rank in range(world.domain.shape[0]):
        gather(layer, world, short, rank)
    order, usable = order_by_heat(world, short)
    found = 0
    for h in range(min(HOT_RANKS, usable)):
        hot = order[h]
        for k in range(short.on_count[hot]):
            expert = short.on_rank[hot, k]
            fresh = short.seen[expert] == 0
            if fresh:
                hottest_hosts(layer, short, expert)
                short.seen[expert] = 1
            for c in range(min(COLD_RANKS, usable - 1 - h)):
                cold = order[usable - 1 - c]
                if short.place[expert, cold] >= 0:
                    continue
                if fresh:
                    found = collect_replicas(world, room, short, found, expert, hot, cold)
                if room.writes_left > 1:
                    found = collect_exchanges(layer, world, room, short, found, k, hot, cold)
    return found


@njit(cache=True, nogil=True, error_model="numpy")
def collect_replicas(
    world: World, room: Room, short: Shortlist, found: int, expert: int, hot: int, cold: int
) -> int:
    """Note the ways to replicate an expert on a cold rank; returns how many are kept now."""
    spare = room.free[cold] > 0 or room.victim_loss[cold] < np.inf
    other = short.over[cold]
    if not spare and other < 0:
        return found
    if room.far_left < 1 and not room.near[expert, cold]:
        return found
    gain = replicate_estimate(short, world.weights, expert, cold, short.hottest)
    if short.component[hot] != short.component[cold]:
        gain *= 1.0 + CONNECT
    if spare:
        found = note(short, found, gain, (REPLICATE_SPARE, expert, hot, cold, -1))
    if other >= 0 and not (room.free[cold] > 0):
        row = (REPLICATE_OVER, expert, hot, cold, other)
        found = note(short, found, gain - short.over_loss[cold], row)
    return found


@njit(cache=True, nogil=True, error_model="numpy")
def collect_exchanges(
    layer: Layer,
    world: World,
    room: Room,
    short: Shortlist,
    found: int,
    at: int,
    hot: int,
    cold: int,
) -> int:
    """Note the exchanges of the expert at a place of a hot rank with experts of a cold one; returns
    how many are kept now.
    """
    expert = short.on_rank[hot, at]
    least = -np.inf
    if found == SHORTLIST:
        least = short.gains.min()
    for k in range(short.on_count[cold]):
        other = short.on_rank[cold, k]
        # nor what would bring the hot rank more than it takes away
        if short.place[other, hot] >= 0 or short.mean[cold, k] >= short.mean[hot, at]:
            continue
        gain = 0.5 * exchange_estimate(short, world.weights, hot, at, cold, k)
        if gain <= least or far_writes(room, EXCHANGE, expert, hot, cold, other) > room.far_left:
            continue
        if may_leave(layer, world, expert, hot, cold) and may_leave(layer, world, other, cold, hot):
            found = note(short, found, gain, (EXCHANGE, expert, hot, cold, other))
            if found == SHORTLIST:
                least = short.gains.min()
    return found


def warm() -> None:
    """Compile what is called from Python, with the types it is called with."""
    world = World(np.ones(1), np.ones(2), np.zeros(2, np.int64), 1)
    layer = Layer(
        demand=np.ones((1, 2)),
        fair=np.ones(1),
        host_rank=np.array([[0, 1], [1, 0]], dtype=np.int64),
        host_count=np.ones(2, np.int64),
        flow=np.zeros((1, 2, 2)),
        load=np.zeros((1, 2)),
    )
    relevel(layer, world, scratch_for(2, 2))
    room = Room(
        np.ones(2, np.int64), np.full(2, np.inf), np.ones((2, 2), np.bool_), 0.0, 0.0, 0.0, 2, 2
    )
    short = shortlist_for(2, 2, 1)
    prepare(layer, world, short)
    collect(layer, world, room, short)
