# ruff: noqa: PLR0913, PLR0917 - numba unpacks a structure slower than the work itself takes
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

from placement.policy.candidates.estimates.kernels import (
    COLD_RANKS,
    SHORTLIST,
    Shortlist,
    exchange_estimates,
    gather,
    gather_cold,
    gather_hot,
    hottest_hosts,
    order_by_heat,
    replicate_estimates,
    shortlist_for,
)
from placement.policy.leveled.drops.kernels import drop_estimate, may_leave
from placement.policy.leveled.kernels import (
    BoolArray,
    FloatArray,
    IntArray,
    Layer,
    World,
    tiny_layer,
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
EXCHANGE_SHARE = 0.5
"""An exchange is two writes."""
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


@njit(cache=True, nogil=True, error_model="numpy")
def prepare(layer: Layer, world: World, short: Shortlist) -> None:
    """Find who is where, what hangs together, and the layer's own victims."""
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
def least_of(gains: FloatArray, found: int) -> float:
    """Estimate that a candidate must exceed to be kept."""
    if found < SHORTLIST:
        return -np.inf
    least: float = gains[0]
    for i in range(1, SHORTLIST):
        least = min(least, gains[i])
    return least


@njit(cache=True, nogil=True, error_model="numpy")
def note(
    gains: FloatArray,
    rows: IntArray,
    found: int,
    gain: float,
    kind: int,
    expert: int,
    hot: int,
    cold: int,
    other: int,
) -> int:
    """Keep a candidate if it is among the best; returns how many are kept.

    An estimate below zero is no reason to drop it: levelling gives back much of what it fears.
    """
    at = found
    if found == SHORTLIST:
        at = 0
        for i in range(1, SHORTLIST):
            # the later of equals makes room, so the first seen stays
            if gains[i] <= gains[at]:
                at = i
        if gains[at] >= gain:
            return found
        found -= 1
    gains[at] = gain
    rows[at, 0], rows[at, 1], rows[at, 2], rows[at, 3], rows[at, 4] = kind, expert, hot, cold, other
    return found + 1


@njit(cache=True, nogil=True, error_model="numpy")
def far_writes(room: Room, kind: int, expert: int, hot: int, cold: int, other: int) -> int:
    """How many of a candidate's writes need a source on another node."""
    far = 0 if room.near[expert, cold] else 1
    if kind == EXCHANGE and not room.near[other, hot]:
        far += 1
    return far


@njit(cache=True, nogil=True, error_model="numpy")
def collect(layer: Layer, world: World, room: Room, short: Shortlist) -> int:
    """Fill the shortlist; returns how many candidates it holds."""
    gather(layer, world, short)
    order, usable = order_by_heat(world, short)
    colds = order[:usable][::-1][: min(COLD_RANKS, usable)].copy()
    gather_cold(layer, world, short, colds)
    found = 0
    for h in range(min(HOT_RANKS, usable)):
        hot = int(order[h])
        gather_hot(layer, world, short, hot)
        many = min(COLD_RANKS, usable - 1 - h)
        found = collect_hot(layer, world, room, short, found, hot, colds[:many])
    return found


@njit(cache=True, nogil=True, error_model="numpy")
def collect_hot(
    layer: Layer,
    world: World,
    room: Room,
    short: Shortlist,
    found: int,
    hot: int,
    colds: IntArray,
) -> int:
    """Note what relieves one hot rank; returns how many candidates are kept now."""
    gains, rows, place, on_rank = short.gains, short.rows, short.place, short.on_rank
    over, over_loss, component, near = short.over, short.over_loss, short.component, room.near
    free, victim_loss, cold_gain, mean = room.free, room.victim_loss, short.cold_gain, short.mean
    lane_first, seen, lane_gain, lane_mean = (
        short.lane_first,
        short.seen,
        short.lane_gain,
        short.lane_mean,
    )
    lanes = int(lane_first[colds.shape[0]])
    least = least_of(gains, found)
    for k in range(short.on_count[hot]):
        expert = int(on_rank[hot, k])
        fresh = seen[expert] == 0
        if fresh:
            hottest_hosts(layer, short, expert)
            replicate_estimates(short, world.weights, colds.shape[0])
            seen[expert] = 1
        if room.writes_left > 1:
            exchange_estimates(short, world.weights, hot, k, lanes)
        for c in range(colds.shape[0]):
            cold = colds[c]
            if place[expert, cold] >= 0:
                continue
            spare = free[cold] > 0 or victim_loss[cold] < np.inf
            other = over[cold]
            if fresh and (spare or other >= 0) and (room.far_left > 0 or near[expert, cold]):
                gain = cold_gain[c]
                if component[hot] != component[cold]:
                    gain *= 1.0 + CONNECT
                if spare and gain > least:
                    found = note(gains, rows, found, gain, REPLICATE_SPARE, expert, hot, cold, -1)
                    least = least_of(gains, found)
                gain -= over_loss[cold]
                if other >= 0 and gain > least and not (free[cold] > 0):
                    found = note(gains, rows, found, gain, REPLICATE_OVER, expert, hot, cold, other)
                    least = least_of(gains, found)
            if room.writes_left < 2:
                continue
            first, last = lane_first[c], lane_first[c + 1]
            # a call with structures for every rank would cost ten times this look
            if lane_above(lane_gain, lane_mean, first, last, least, mean[k]):
                found = collect_exchanges(
                    layer, world, room, short, found, k, hot, cold, first, last
                )
                least = least_of(gains, found)
    return found


@njit(cache=True, nogil=True, error_model="numpy")
def lane_above(
    lane_gain: FloatArray, lane_mean: FloatArray, first: int, last: int, least: float, mean: float
) -> bool:
    """Whether an exchange with an expert in lanes first .. last - 1 may be kept."""
    for m in range(first, last):
        if EXCHANGE_SHARE * lane_gain[m] > least and lane_mean[m] < mean:
            return True
    return False


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
    first: int,
    last: int,
) -> int:
    """Note the exchanges of the expert at a place of a hot rank with experts of a cold one, which
    stand in lanes first .. last - 1; returns how many are kept now.
    """
    gains, rows, on_rank, place = short.gains, short.rows, short.on_rank, short.place
    lane_gain, lane_mean, near = short.lane_gain, short.lane_mean, room.near
    expert, mean, floor, far_left = on_rank[hot, at], short.mean[at], world.floor, room.far_left
    least = least_of(gains, found)
    for m in range(first, last):
        gain = EXCHANGE_SHARE * lane_gain[m]
        # nor what would bring the hot rank more than it takes away
        if gain <= least or lane_mean[m] >= mean:
            continue
        other = on_rank[cold, m - first]
        if place[other, hot] >= 0:
            continue
        far = (not near[expert, cold]) + (not near[other, hot])
        if far > far_left:
            continue
        if floor < 2 or (
            may_leave(layer, world, expert, hot, cold) and may_leave(layer, world, other, cold, hot)
        ):
            found = note(gains, rows, found, gain, EXCHANGE, expert, hot, cold, other)
            least = least_of(gains, found)
    return found


def tiny_room() -> Room:
    """Room of `tiny_layer`, to compile with."""
    near = np.ones((2, 2), np.bool_)
    return Room(np.ones(2, np.int64), np.full(2, np.inf), near, 0.0, 0.0, 0.0, 2, 2)


def warm() -> None:
    """Compile what is called from `policy.kernels`, with the types it is called with."""
    layer, world, _ = tiny_layer()
    short = shortlist_for(2, 2, 1)
    prepare(layer, world, short)
    collect(layer, world, tiny_room(), short)
