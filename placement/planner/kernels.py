# ruff: noqa: PLR0913, PLR0917 - numba unpacks a structure slower than the work itself takes
"""The loop of the planner's price, compiled: fractional demand through the router's split.

Responsible for this arithmetic. Must never check its arguments. Called by `price`.
"""

import numpy as np
import numpy.typing as npt
from numba import njit

from placement.split.kernels import frozen, level_hosts

FloatArray = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

UNITS = 1 << 30
"""Whole units a layer's fractional demand is cut into before it is levelled."""


@njit(cache=True, nogil=True, error_model="numpy")
def slowest(
    demand: FloatArray,
    per_pair: FloatArray,
    host_ptr: Int64Array,
    host_rank: Int64Array,
    host_expert: Int64Array,
    shared: Int64Array,
    rank_host_ptr: Int64Array,
    rank_host: Int64Array,
    first_slot: Int64Array,
    found: FloatArray,
) -> None:
    """Seconds of the slowest rank under the exact split, for each row of demand.

    demand: [S, E], pairs a second, >= 0. per_pair: [D], seconds of a pair on each rank; 0 = the
    rank does not count. found: [S], results. Experts without a host are left out. The index is
    `CompiledLayer`'s.
    """
    counts = np.empty(demand.shape[1], np.int64)
    load = np.empty(per_pair.shape[0], np.int64)
    for row in range(demand.shape[0]):
        total = demand[row].sum()
        found[row] = 0.0
        if total <= 0.0:
            continue
        for expert in range(counts.shape[0]):
            counts[expert] = np.int64(np.rint(demand[row, expert] * (UNITS / total)))
        flow = np.zeros(host_rank.shape[0], np.int64)
        load[:] = 0
        level_hosts(
            counts,
            0,
            host_ptr,
            host_rank,
            host_expert,
            shared,
            rank_host_ptr,
            rank_host,
            first_slot,
            flow,
            load,
        )
        for rank in range(load.shape[0]):
            found[row] = max(found[row], load[rank] * per_pair[rank])
        found[row] *= total / UNITS


@njit(cache=True, nogil=True, error_model="numpy")
def slowest_by_layer(
    demand: FloatArray,
    per_pair: FloatArray,
    host_ptr: Int64Array,
    host_at: Int64Array,
    host_rank: Int64Array,
    host_expert: Int64Array,
    shared_at: Int64Array,
    shared: Int64Array,
    rank_host_ptr: Int64Array,
    rank_host_at: Int64Array,
    rank_host: Int64Array,
    first_slot: Int64Array,
    found: FloatArray,
) -> None:
    """`slowest` of one row of demand for each of many layers: demand [L, E], found [L].

    The index is that of `StackedLayers`: host_ptr [L, E + 1], rank_host_ptr [L, D + 1], first_slot
    [L, E]; the others one layer after another, layer l from `_at[l]` to `_at[l + 1]`.
    """
    for layer in range(demand.shape[0]):
        hosts, end = host_at[layer], host_at[layer + 1]
        slowest(
            demand[layer : layer + 1],
            per_pair,
            host_ptr[layer],
            host_rank[hosts:end],
            host_expert[hosts:end],
            shared[shared_at[layer] : shared_at[layer + 1]],
            rank_host_ptr[layer],
            rank_host[rank_host_at[layer] : rank_host_at[layer + 1]],
            first_slot[layer],
            found[layer : layer + 1],
        )


def warm() -> None:
    """Compile for the types of production, by one call on a tiny layer."""
    index = (
        frozen(0, 1),
        frozen(0),
        frozen(0),
        frozen(),
        frozen(0, 0),
        frozen(),
        frozen(0),
    )
    found = np.zeros(1)
    slowest(np.ones((1, 1)), np.ones(1), *index, found)
    assert found[0] == 1.0
    row, one, none = frozen(0, 1).reshape(1, 2), frozen(0), frozen()
    starts = frozen(0, 1)
    slowest_by_layer(
        np.ones((1, 1)),
        np.ones(1),
        row,
        starts,
        one,
        one,
        frozen(0, 0),
        none,
        frozen(0, 0).reshape(1, 2),
        frozen(0, 0),
        none,
        one.reshape(1, 1),
        found,
    )
    assert found[0] == 1.0
