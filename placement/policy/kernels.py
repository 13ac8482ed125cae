"""The best small change of one layer, compiled.

The theory, in plain words. Only what relieves the hottest ranks helps, and only the coldest can
take it. So: experts of the hottest few ranks are candidates to be replicated on, or exchanged
with an expert of, the coldest few. There are many, so each is first ranked by an estimate (the
steepness saved if pairs moved and nothing else did); the best few are then levelled for real, and
the one that saves most value a slot write wins.

Responsible for proposing one change of one layer. Must never apply it, use fastmath, or break a
tie by anything but the lowest id. Called by `incremental`.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from placement.policy.leveled.kernels import (
    FloatArray,
    IntArray,
    Layer,
    Scratch,
    World,
    add_host,
    drop_estimate,
    drop_host,
    may_leave,
    restore_hosts,
    save_hosts,
    scratch_for,
    shift_gain,
    steepness,
    trial_value,
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

HOT_RANKS = 3
COLD_RANKS = 6
SHORTLIST = 24
CONNECT = 0.15
"""Share by which a write counts more that connects ranks which share no expert, directly or
through others.
"""


class Room(NamedTuple):
    """What a write into a rank costs besides this layer's own change."""

    free: IntArray
    """[R], slots that may still be filled."""
    victim_loss: FloatArray
    """[R], value lost by the cheapest surplus replica of another layer there; inf where there is
    none.
    """
    resident_price: float
    """Value that a further resident replica must bring."""
    writes_left: int


class Shortlist(NamedTuple):
    """Memory for the search of one layer."""

    place: IntArray
    """[E, R], place of a rank among an expert's hosts, or -1."""
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


def shortlist_for(num_experts: int, num_ranks: int) -> Shortlist:
    """Memory for the search of layers of this size."""
    return Shortlist(
        place=np.zeros((num_experts, num_ranks), np.int64),
        gains=np.zeros(SHORTLIST),
        rows=np.zeros((SHORTLIST, 5), np.int64),
        over=np.zeros(num_ranks, np.int64),
        over_loss=np.zeros(num_ranks),
        component=np.zeros(num_ranks, np.int64),
    )


@njit(cache=True, nogil=True)
def prepare(layer: Layer, world: World, short: Shortlist) -> None:
    """Fill place, over, over_loss and component."""
    short.place[:] = -1
    short.over[:] = -1
    short.over_loss[:] = np.inf
    for rank in range(short.component.shape[0]):
        short.component[rank] = rank
    for expert in range(layer.host_count.shape[0]):
        count = layer.host_count[expert]
        for i in range(count):
            rank = layer.host_rank[expert, i]
            short.place[expert, rank] = i
            if i > 0:
                connect(short.component, layer.host_rank[expert, 0], rank)
            if may_leave(layer, world, expert, rank, -1):
                loss = drop_estimate(layer, world, expert, i)
                if loss < short.over_loss[rank]:
                    short.over_loss[rank] = loss
                    short.over[rank] = expert


@njit(cache=True, nogil=True)
def connect(component: IntArray, first: int, second: int) -> None:
    """Make two ranks one component."""
    low = min(component[first], component[second])
    high = max(component[first], component[second])
    for rank in range(component.shape[0]):
        if component[rank] == high:
            component[rank] = low


@njit(cache=True, nogil=True)
def order_by_heat(layer: Layer, world: World) -> tuple[IntArray, int]:
    """(ranks that may hold replicas, hottest first, ties by lowest id; how many they are)."""
    num_ranks = world.domain.shape[0]
    heat = np.full(num_ranks, np.inf)
    usable = 0
    for rank in range(num_ranks):
        if world.domain[rank] >= 0:
            usable += 1
            heat[rank] = 0.0
            for s in range(layer.demand.shape[0]):
                if layer.fair[s] > 0.0:
                    ratio = layer.load[s, rank] / layer.fair[s]
                    heat[rank] -= world.weights[s] * steepness(ratio)
    return np.argsort(heat, kind="mergesort"), usable


@njit(cache=True, nogil=True)
def note(short: Shortlist, found: int, gain: float, row: tuple[int, int, int, int, int]) -> int:
    """Keep a candidate if it is among the best; returns how many are kept."""
    if gain <= 0.0:
        return found
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


@njit(cache=True, nogil=True)
def replicate_estimate(layer: Layer, world: World, expert: int, cold: int) -> float:
    """Steepness saved if the expert's hottest host in use handed pairs to `cold` until both are
    level.
    """
    gain = 0.0
    for s in range(layer.demand.shape[0]):
        hottest, pairs = -1, 0.0
        for i in range(layer.host_count[expert]):
            rank = layer.host_rank[expert, i]
            if layer.flow[s, expert, i] > 0.0 and (
                hottest < 0 or layer.load[s, rank] > layer.load[s, hottest]
            ):
                hottest, pairs = rank, layer.flow[s, expert, i]
        if hottest < 0 or layer.load[s, hottest] <= layer.load[s, cold]:
            continue
        even = (layer.load[s, hottest] - layer.load[s, cold]) / (
            world.pair_s[hottest] + world.pair_s[cold]
        )
        gain += world.weights[s] * shift_gain(layer, world, s, hottest, cold, min(pairs, even))
    return gain


@njit(cache=True, nogil=True)
def exchange_estimate(
    layer: Layer, world: World, short: Shortlist, expert: int, hot: int, cold: int, other: int
) -> float:
    """Steepness saved if `expert` on `hot` and `other` on `cold` change places with all their
    pairs there.
    """
    gain = 0.0
    for s in range(layer.demand.shape[0]):
        fair = layer.fair[s]
        if fair <= 0.0:
            continue
        away = layer.flow[s, expert, short.place[expert, hot]]
        back = layer.flow[s, other, short.place[other, cold]]
        before = steepness(layer.load[s, hot] / fair) + steepness(layer.load[s, cold] / fair)
        hot_after = layer.load[s, hot] + (back - away) * world.pair_s[hot]
        cold_after = layer.load[s, cold] + (away - back) * world.pair_s[cold]
        after = steepness(hot_after / fair) + steepness(cold_after / fair)
        gain += world.weights[s] * (before - after)
    return gain


@njit(cache=True, nogil=True)
def collect(layer: Layer, world: World, room: Room, short: Shortlist) -> int:
    """Fill the shortlist; returns how many candidates it holds."""
    order, usable = order_by_heat(layer, world)
    found = 0
    for h in range(min(HOT_RANKS, usable)):
        hot = order[h]
        for expert in range(layer.host_count.shape[0]):
            if short.place[expert, hot] < 0:
                continue
            for c in range(min(COLD_RANKS, usable - 1 - h)):
                cold = order[usable - 1 - c]
                if short.place[expert, cold] < 0:
                    found = collect_pair(layer, world, room, short, found, expert, hot, cold)
    return found


@njit(cache=True, nogil=True)
def collect_pair(
    layer: Layer,
    world: World,
    room: Room,
    short: Shortlist,
    found: int,
    expert: int,
    hot: int,
    cold: int,
) -> int:
    """Note what can be done with one expert of a hot rank and one cold rank; returns how many are
    kept now.
    """
    gain = replicate_estimate(layer, world, expert, cold)
    if short.component[hot] != short.component[cold]:
        gain *= 1.0 + CONNECT
    spare = room.free[cold] > 0 or room.victim_loss[cold] < np.inf
    if spare:
        found = note(short, found, gain, (REPLICATE_SPARE, expert, hot, cold, -1))
    other = short.over[cold]
    if other >= 0 and not (room.free[cold] > 0):
        row = (REPLICATE_OVER, expert, hot, cold, other)
        found = note(short, found, gain - short.over_loss[cold], row)
    if room.writes_left < 2:
        return found
    for other in range(layer.host_count.shape[0]):
        if other == expert or short.place[other, cold] < 0 or short.place[other, hot] >= 0:
            continue
        gain = 0.5 * exchange_estimate(layer, world, short, expert, hot, cold, other)
        if gain <= 0.0:
            continue
        if may_leave(layer, world, expert, hot, cold) and may_leave(layer, world, other, cold, hot):
            found = note(short, found, gain, (EXCHANGE, expert, hot, cold, other))
    return found


@njit(cache=True, nogil=True)
def change_hosts(layer: Layer, kind: int, expert: int, hot: int, cold: int, other: int) -> None:
    """Give the layer the hosts that a candidate would."""
    add_host(layer, expert, cold)
    if kind == EXCHANGE:
        drop_host(layer, expert, hot)
        add_host(layer, other, hot)
    if other >= 0:
        drop_host(layer, other, cold)


@njit(cache=True, nogil=True)
def best_change(
    layer: Layer, world: World, scratch: Scratch, room: Room, short: Shortlist, value: float
) -> tuple[float, float, int, int, int, int, int]:
    """(score, gain, kind, expert, hot rank, cold rank, other expert) of the best change; kind
    NONE if none gains.

    gain: value saved, net of what it costs other layers and of the resident price. score: gain a
    slot write, with the bonus for connecting ranks. `value` is the layer's now.
    """
    prepare(layer, world, short)
    found = collect(layer, world, room, short)
    best = (0.0, 0.0, NONE, -1, -1, -1, -1)
    for i in range(found):
        kind, expert, hot = short.rows[i, 0], short.rows[i, 1], short.rows[i, 2]
        cold, other = short.rows[i, 3], short.rows[i, 4]
        cost = 0.0
        if kind == REPLICATE_SPARE:
            cost = room.resident_price if room.free[cold] > 0 else room.victim_loss[cold]
        save_hosts(layer, 0, expert, scratch)
        if other >= 0:
            save_hosts(layer, 1, other, scratch)
        change_hosts(layer, kind, expert, hot, cold, other)
        after = trial_value(layer, world, scratch, expert, other, value)
        restore_hosts(layer, 0, expert, scratch)
        if other >= 0:
            restore_hosts(layer, 1, other, scratch)
        gain = value - after - cost
        score = gain / 2.0 if kind == EXCHANGE else gain
        if short.component[hot] != short.component[cold] and kind != EXCHANGE:
            score *= 1.0 + CONNECT
        if gain > 0.0 and score > best[0]:
            best = (score, gain, kind, expert, hot, cold, other)
    return best


def warm() -> None:
    """Compile what is called from Python, with the types it is called with."""
    world = World(np.ones(1), np.ones(2), np.zeros(2, np.int64), 1)
    layer = Layer(
        demand=np.ones((1, 2)),
        fair=np.ones(1),
        host_rank=np.zeros((2, 2), np.int64),
        host_count=np.ones(2, np.int64),
        flow=np.ones((1, 2, 2)),
        load=np.array([[2.0, 0.0]]),
    )
    room = Room(np.ones(2, np.int64), np.full(2, np.inf), 0.0, 2)
    best_change(layer, world, scratch_for(2, 2), room, shortlist_for(2, 2), 3.0)
