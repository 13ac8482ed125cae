"""What candidates would save, estimated, compiled.

The theory, in plain words. A candidate moves pairs between one hot and one cold rank; it saves
about the steepness of both before less that after, as if nothing else moved. What the estimates
read of the cold ranks lies side by side, one *lane* for each expert there, scenario by scenario, so
that the processor estimates several exchanges in one instruction. Sums over scenarios stay in the
order of scenarios: no figure depends on the width of a machine's registers.

Responsible for the memory of a search and this arithmetic. Must never change hosts, choose, or use
fastmath. Called by `candidates`.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from placement.policy.leveled.kernels import (
    BoolArray,
    FloatArray,
    IntArray,
    Layer,
    World,
    steepness,
    tiny_layer,
)

COLD_RANKS = 10
SHORTLIST = 24
LINE = 8
"""Numbers of a cache line: rows a power of two apart would share cache lines of one set."""


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
    """[E, S], pairs a second of the experts of the hot rank looked at, by place in on_rank."""
    mean: FloatArray
    """[E], ratio that they add, mean over scenarios."""
    lane_first: IntArray
    """[COLD_RANKS + 1], lanes of the n-th coldest rank: one for each expert there, by place."""
    lane_pairs: FloatArray
    """[S, lanes], pairs a second of the expert of a lane there."""
    lane_ratio: FloatArray
    """[S, lanes], ratio of the lane's rank; lane_steep, lane_unit: likewise."""
    lane_steep: FloatArray
    lane_unit: FloatArray
    lane_mean: FloatArray
    """[lanes], ratio that the expert adds, mean over scenarios."""
    lane_gain: FloatArray
    """[lanes], steepness saved by an exchange with the expert looked at."""
    cold_ratio: FloatArray
    """[S, COLD_RANKS], ratio of the n-th coldest rank; cold_steep, cold_unit: likewise."""
    cold_steep: FloatArray
    cold_unit: FloatArray
    cold_gain: FloatArray
    """[COLD_RANKS], steepness saved by a replica of the expert looked at."""
    hottest: IntArray
    """[S], most loaded host of an expert."""
    most: FloatArray
    """[S], its pairs there."""
    barred: BoolArray
    """[SHORTLIST], candidates that disappointed."""


def shortlist_for(num_experts: int, num_ranks: int, num_scenarios: int) -> Shortlist:
    """Memory for the search of layers of this size."""
    lanes = min(COLD_RANKS, num_ranks) * num_experts
    by_lane = (num_scenarios, lanes + LINE)
    by_cold = (num_scenarios, COLD_RANKS)
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
        pairs=np.zeros((num_experts, num_scenarios)),
        mean=np.zeros(num_experts),
        lane_first=np.zeros(COLD_RANKS + 1, np.int64),
        lane_pairs=np.zeros(by_lane),
        lane_ratio=np.zeros(by_lane),
        lane_steep=np.zeros(by_lane),
        lane_unit=np.zeros(by_lane),
        lane_mean=np.zeros(lanes),
        lane_gain=np.zeros(lanes),
        cold_ratio=np.zeros(by_cold),
        cold_steep=np.zeros(by_cold),
        cold_unit=np.zeros(by_cold),
        cold_gain=np.zeros(COLD_RANKS),
        hottest=np.zeros(num_scenarios, np.int64),
        most=np.zeros(num_scenarios),
        barred=np.zeros(SHORTLIST, np.bool_),
    )


@njit(cache=True, nogil=True, error_model="numpy")
def gather(layer: Layer, world: World, short: Shortlist) -> None:
    """Ratios of all ranks, scenarios next to each other."""
    for s in range(layer.demand.shape[0]):
        fair = layer.fair[s]
        for rank in range(world.domain.shape[0]):
            short.unit[rank, s] = world.pair_s[rank] / fair if fair > 0.0 else 0.0
            short.ratio[rank, s] = layer.load[s, rank] / fair if fair > 0.0 else 0.0
            short.steep[rank, s] = steepness(short.ratio[rank, s])


@njit(cache=True, nogil=True, error_model="numpy")
def gather_hot(layer: Layer, world: World, short: Shortlist, rank: int) -> None:
    """Pairs of a hot rank's experts, scenarios next to each other."""
    for k in range(short.on_count[rank]):
        expert = short.on_rank[rank, k]
        place, mean = short.place[expert, rank], 0.0
        for s in range(layer.demand.shape[0]):
            pairs = layer.flow[s, expert, place]
            short.pairs[k, s] = pairs
            mean += world.weights[s] * pairs * short.unit[rank, s]
        short.mean[k] = mean


@njit(cache=True, nogil=True, error_model="numpy")
def gather_cold(layer: Layer, world: World, short: Shortlist, colds: IntArray) -> None:
    """What estimates read of the cold ranks, coldest first, ranks and experts next to each other:
    one pass over all of them is several times cheaper than one for each.
    """
    lanes = 0
    short.lane_first[0] = 0
    for c in range(colds.shape[0]):
        lanes += short.on_count[colds[c]]
        short.lane_first[c + 1] = lanes
    for m in range(lanes):
        short.lane_mean[m] = 0.0
    for s in range(layer.demand.shape[0]):
        for c in range(colds.shape[0]):
            rank, first = colds[c], short.lane_first[c]
            ratio, steep, unit = short.ratio[rank, s], short.steep[rank, s], short.unit[rank, s]
            short.cold_ratio[s, c], short.cold_steep[s, c] = ratio, steep
            short.cold_unit[s, c] = unit
            for k in range(short.on_count[rank]):
                expert = short.on_rank[rank, k]
                pairs = layer.flow[s, expert, short.place[expert, rank]]
                short.lane_pairs[s, first + k] = pairs
                short.lane_ratio[s, first + k], short.lane_steep[s, first + k] = ratio, steep
                short.lane_unit[s, first + k] = unit
                short.lane_mean[first + k] += world.weights[s] * pairs * unit


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
def replicate_estimates(short: Shortlist, weights: FloatArray, colds: int) -> None:
    """Steepness saved if the hottest host in use of the expert looked at (short.hottest) handed
    pairs to one of the `colds` coldest ranks until both are level, into short.cold_gain.
    """
    gain = short.cold_gain
    ratio, steep, unit = short.cold_ratio, short.cold_steep, short.cold_unit
    for c in range(colds):
        gain[c] = 0.0
    for s in range(weights.shape[0]):
        hottest = short.hottest[s]
        if hottest < 0:
            continue
        weight, most = weights[s], short.most[s]
        ratio_h, steep_h, unit_h = (
            short.ratio[hottest, s],
            short.steep[hottest, s],
            short.unit[hottest, s],
        )
        for c in range(colds):
            pairs = min((ratio_h - ratio[s, c]) / (unit_h + unit[s, c]), most)
            after = steepness(ratio_h - pairs * unit_h)
            after += steepness(ratio[s, c] + pairs * unit[s, c])
            saved = weight * (steep_h + steep[s, c] - after)
            gain[c] += saved if ratio_h > ratio[s, c] else 0.0


@njit(cache=True, nogil=True, error_model="numpy")
def exchange_estimates(
    short: Shortlist, weights: FloatArray, hot: int, at: int, lanes: int
) -> None:
    """Steepness saved if the expert at a place of the hot rank changes places, with all its pairs
    there, with the expert of each of the first `lanes` lanes, into short.lane_gain.
    """
    gain = short.lane_gain
    pairs, ratio = short.lane_pairs, short.lane_ratio
    steep, unit = short.lane_steep, short.lane_unit
    for m in range(lanes):
        gain[m] = 0.0
    for s in range(weights.shape[0]):
        weight, away = weights[s], short.pairs[at, s]
        ratio_h, steep_h, unit_h = short.ratio[hot, s], short.steep[hot, s], short.unit[hot, s]
        for m in range(lanes):
            moved = away - pairs[s, m]
            after = steepness(ratio_h - moved * unit_h)
            after += steepness(ratio[s, m] + moved * unit[s, m])
            gain[m] += weight * (steep_h + steep[s, m] - after)


def warm() -> None:
    """Compile what `candidates` calls, with the types it calls it with."""
    layer, world, _ = tiny_layer()
    short = shortlist_for(2, 2, 1)
    gather(layer, world, short)
    order, usable = order_by_heat(world, short)
    gather_hot(layer, world, short, 0)
    gather_cold(layer, world, short, order[:usable])
    hottest_hosts(layer, short, 0)
    replicate_estimates(short, world.weights, 1)
    exchange_estimates(short, world.weights, 0, 0, 0)
