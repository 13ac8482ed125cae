"""Which replicas may go and what their going loses, compiled.

The theory, in plain words. A replica may go where another remains and the floor of failure domains
holds. What it loses is estimated as if its pairs moved to the expert's least loaded other host:
levelling afterwards can only help, so the estimate is a bound.

Responsible for this arithmetic. Must never change hosts, use fastmath, or break a tie by anything
but the lowest id. Called by `leveled` and by the kernels of `incremental`.
"""

import numpy as np
from numba import njit

from placement.policy.leveled.kernels import (
    FloatArray,
    IntArray,
    Layer,
    Scratch,
    World,
    steepness,
    tiny_layer,
    value_of,
)


@njit(cache=True, nogil=True, error_model="numpy")
def may_leave(layer: Layer, world: World, expert: int, rank: int, joins: int) -> bool:
    """Whether `expert` may leave `rank` (and join rank `joins`, -1 = none): never the last
    replica, never below floor.
    """
    count = layer.host_count[expert]
    if count < 2 and joins < 0:
        return False
    if world.floor < 2:
        return True
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


@njit(cache=True, nogil=True, error_model="numpy")
def shift_gain(layer: Layer, world: World, s: int, source: int, target: int, pairs: float) -> float:
    """Steepness saved in scenario s by moving `pairs` from one rank to another."""
    fair = layer.fair[s]
    if fair <= 0.0:
        return 0.0
    a, b = layer.load[s, source] / fair, layer.load[s, target] / fair
    down, up = pairs * world.pair_s[source] / fair, pairs * world.pair_s[target] / fair
    return steepness(a) - steepness(a - down) + steepness(b) - steepness(b + up)


@njit(cache=True, nogil=True, error_model="numpy")
def coldest_other(layer: Layer, s: int, expert: int, place: int) -> int:
    """Rank of the expert's least loaded other host in scenario s; -1 where it has none."""
    coldest = -1
    for i in range(layer.host_count[expert]):
        other = layer.host_rank[expert, i]
        if i != place and (coldest < 0 or layer.load[s, other] < layer.load[s, coldest]):
            coldest = other
    return coldest


@njit(cache=True, nogil=True, error_model="numpy")
def drop_estimate(layer: Layer, world: World, expert: int, place: int) -> float:
    """First-order loss if a replica goes and its pairs move to the expert's coldest other host."""
    rank = layer.host_rank[expert, place]
    loss = 0.0
    for s in range(layer.demand.shape[0]):
        pairs = layer.flow[s, expert, place]
        if pairs > 0.0:
            coldest = coldest_other(layer, s, expert, place)
            loss -= world.weights[s] * shift_gain(layer, world, s, rank, coldest, pairs)
    return loss


@njit(cache=True, nogil=True, error_model="numpy")
def drop_bound(layer: Layer, world: World, scratch: Scratch, expert: int, rank: int) -> float:
    """Most that the layer's value can lose if the expert's replica on `rank` goes; exactly 0 if no
    scenario uses it.

    The loss where all its pairs go to the coldest other host and nothing is levelled after.
    """
    place = 0
    while layer.host_rank[expert, place] != rank:
        place += 1
    loss = 0.0
    for s in range(layer.demand.shape[0]):
        pairs = layer.flow[s, expert, place]
        if pairs > 0.0:
            coldest = coldest_other(layer, s, expert, place)
            scratch.load[:] = layer.load[s]
            before = value_of(scratch.load, layer.fair[s], world.domain)
            scratch.load[rank] -= pairs * world.pair_s[rank]
            scratch.load[coldest] += pairs * world.pair_s[coldest]
            after = value_of(scratch.load, layer.fair[s], world.domain)
            loss += world.weights[s] * (after - before)
    return max(0.0, loss)


@njit(cache=True, nogil=True, error_model="numpy")
def cheapest_drops(
    layer: Layer, world: World, scratch: Scratch, loss: FloatArray, victim: IntArray
) -> None:
    """For each rank the surplus replica of this layer whose loss is least: `loss` [R], by
    `drop_bound` (inf = none), `victim` [R].
    """
    estimate = np.full(loss.shape[0], np.inf)
    loss[:] = np.inf
    victim[:] = -1
    for expert in range(layer.host_count.shape[0]):
        if layer.host_count[expert] < 2:
            continue
        for i in range(layer.host_count[expert]):
            rank = layer.host_rank[expert, i]
            if may_leave(layer, world, expert, rank, -1):
                guess = drop_estimate(layer, world, expert, i)
                if guess < estimate[rank]:
                    estimate[rank] = guess
                    victim[rank] = expert
    for rank in range(loss.shape[0]):
        if victim[rank] >= 0:
            loss[rank] = drop_bound(layer, world, scratch, victim[rank], rank)


def warm() -> None:
    """Compile what is called from Python, with the types it is called with."""
    layer, world, scratch = tiny_layer()
    cheapest_drops(layer, world, scratch, np.zeros(2), np.zeros(2, np.int64))
