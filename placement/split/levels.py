"""How many tokens of a batch each replica gets, so that the hottest rank is as cool as can be.

Responsible for: the Python face of levelling. Must never choose pairs (`pairs`) or know seconds:
the caller turns backlog into the unit of counts. Called by the router (compiled once a table), by
policies scoring candidates, and by engines through `level`.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from placement.split.checks import RANKS_MAX, TOTAL_MAX, Int64Array, int64_vector, size, tie_word
from placement.split.compiled import CompiledLayer, compile_layer
from placement.split.errors import SplitError
from placement.split.kernels import (
    GOOD,
    NEGATIVE_BACKLOG,
    NEGATIVE_COUNT,
    NO_REPLICA,
    split_batch,
)


def split_counts(
    compiled: CompiledLayer,
    counts: npt.ArrayLike,
    backlog: npt.ArrayLike | None = None,
    tie_offset: int = 0,
) -> Int64Array:
    """Level *tokens* -> int64 [replicas]: tokens of each replica, adding up to `counts` by expert.

    counts: int64 [experts], tokens x k of this batch. backlog: int64 [ranks], work queued, in the
    unit of counts; None = none. max over ranks of (tokens of its replicas + backlog) is the least
    possible: the integer optimum, not a bound on it. Below the maximum the rest is levelled expert
    by expert. tie_offset: any integer that differs between routers and batches (router id + batch
    number); who takes an odd token turns with it. Same input, same output.

    >>> layer = compile_layer([0, 0, 1], [0, 1, 1], num_experts=2, num_ranks=2)
    >>> split_counts(layer, [10, 4]).tolist()
    [7, 3, 4]
    >>> split_counts(layer, [10, 4], backlog=[6, 0]).tolist()
    [4, 6, 4]

    Raises SplitError for shapes, dtypes, negative values, an expert with tokens but no replica, and
    sums of 2^62 or more.
    """
    return _split(compiled, counts, backlog, tie_offset, one_replica=False)


def split_activated(
    compiled: CompiledLayer,
    counts: npt.ArrayLike,
    backlog: npt.ArrayLike | None = None,
    tie_offset: int = 0,
) -> Int64Array:
    """Level *activated experts* -> int64 [replicas], all tokens of an expert on one replica.

    In a memory-bound batch the time of a rank is the weights it reads: a second replica in use
    costs what a second expert costs. The number of experts with tokens on the worst rank, plus its
    backlog in experts, is the least possible. Otherwise as `split_counts`.

    >>> layer = compile_layer([0, 0, 1], [0, 1, 1], num_experts=2, num_ranks=2)
    >>> split_activated(layer, [10, 4]).tolist()
    [10, 0, 4]
    """
    return _split(compiled, counts, backlog, tie_offset, one_replica=True)


def rank_loads(
    compiled: CompiledLayer, quotas: npt.ArrayLike, backlog: npt.ArrayLike | None = None
) -> Int64Array:
    """What a split puts on each rank, with its backlog: int64 [ranks].

    >>> layer = compile_layer([0, 0, 1], [0, 1, 1], num_experts=2, num_ranks=2)
    >>> rank_loads(layer, [7, 3, 4]).tolist()
    [7, 7]

    Raises SplitError for shapes and dtypes.
    """
    loads = _backlog(backlog, compiled.num_ranks).copy()
    np.add.at(
        loads, compiled.replica_rank, int64_vector("quotas", quotas, length=compiled.num_replicas)
    )
    return loads


def level(
    slot_expert: npt.ArrayLike,
    slot_rank: npt.ArrayLike,
    counts: npt.ArrayLike,
    num_ranks: int,
    backlog: npt.ArrayLike | None = None,
    tie_offset: int = 0,
) -> Int64Array:
    """`split_counts` for one call: int64 [slots], tokens for each slot, 0 for empty ones.

    slot_expert: int [S], -1 empty or -2 absent. slot_rank: int [S]. counts: int64 [E]. For many
    batches on one layout, compile once.

    Slots 0 and 1 on rank 0 hold experts 0 and 1, slots 2 and 3 on rank 1 hold expert 1 and nothing:

    >>> level([0, 1, 1, -1], [0, 0, 1, 1], counts=[2, 8], num_ranks=2).tolist()
    [2, 3, 5, 0]

    Raises SplitError as `compile_layer` and `split_counts` do.
    """
    return _by_slot(split_counts, slot_expert, slot_rank, counts, num_ranks, backlog, tie_offset)


def level_activated(
    slot_expert: npt.ArrayLike,
    slot_rank: npt.ArrayLike,
    counts: npt.ArrayLike,
    num_ranks: int,
    backlog: npt.ArrayLike | None = None,
    tie_offset: int = 0,
) -> Int64Array:
    """`split_activated` for one call: int64 [slots], all tokens of an expert on one of its slots.

    >>> level_activated([0, 1, 1, -1], [0, 0, 1, 1], counts=[2, 8], num_ranks=2).tolist()
    [2, 0, 8, 0]

    Raises SplitError as `compile_layer` and `split_activated` do. backlog is in experts.
    """
    return _by_slot(split_activated, slot_expert, slot_rank, counts, num_ranks, backlog, tie_offset)


def level_uniform(
    physical_to_logical_of_layer: npt.ArrayLike,
    counts: npt.ArrayLike,
    num_gpus: int,
    backlog: npt.ArrayLike | None = None,
    tie_offset: int = 0,
) -> Int64Array:
    """`level` for equal numbers of slots on every rank -> int64 [physical], tokens of each.

    physical_to_logical_of_layer: int [physical], one layer of `physical_to_logical`; rank g owns
    the g-th of num_gpus equal parts.

    >>> level_uniform([0, 1, 1, 2], counts=[2, 8, 0], num_gpus=2).tolist()
    [2, 3, 5, 0]

    Raises SplitError also when the physical experts do not divide by num_gpus.
    """
    experts = int64_vector("physical_to_logical_of_layer", physical_to_logical_of_layer)
    num_gpus = size("num_gpus", num_gpus, RANKS_MAX)
    if experts.shape[0] % num_gpus != 0:
        raise SplitError(
            "physical_to_logical_of_layer",
            f"{experts.shape[0]} physical experts do not divide by num_gpus {num_gpus}",
            "call level with the rank of each slot",
        )
    slots_per_rank = experts.shape[0] // num_gpus
    ranks = np.repeat(np.arange(num_gpus, dtype=np.int64), slots_per_rank)
    return level(experts, ranks, counts, num_gpus, backlog, tie_offset)


def _by_slot(
    split: Callable[[CompiledLayer, npt.ArrayLike, npt.ArrayLike | None, int], Int64Array],
    slot_expert: npt.ArrayLike,
    slot_rank: npt.ArrayLike,
    counts: npt.ArrayLike,
    num_ranks: int,
    backlog: npt.ArrayLike | None,
    tie_offset: int,
) -> Int64Array:
    weights = int64_vector("counts", counts)
    compiled = compile_layer(slot_expert, slot_rank, weights.shape[0], num_ranks)
    tokens = np.zeros(compiled.num_slots, np.int64)
    tokens[compiled.replica_slot] = split(compiled, weights, backlog, tie_offset)
    return tokens


def _split(
    compiled: CompiledLayer,
    counts: npt.ArrayLike,
    backlog: npt.ArrayLike | None,
    tie_offset: int,
    *,
    one_replica: bool,
) -> Int64Array:
    weights = int64_vector("counts", counts, length=compiled.num_experts)
    queued = _backlog(backlog, compiled.num_ranks)
    quotas = np.empty(compiled.num_replicas, np.int64)
    status, at = split_batch(
        weights,
        queued,
        tie_word(tie_offset),
        one_replica,
        compiled.host_ptr,
        compiled.host_rank,
        compiled.host_expert,
        compiled.host_replica_ptr,
        compiled.shared,
        compiled.rank_host_ptr,
        compiled.rank_host,
        compiled.first_slot,
        quotas,
    )
    if status != GOOD:
        raise _refusal(status, at, weights, queued)
    return quotas


def _backlog(backlog: npt.ArrayLike | None, num_ranks: int) -> Int64Array:
    if backlog is None:
        return np.zeros(num_ranks, np.int64)
    return int64_vector("backlog", backlog, length=num_ranks)


def _refusal(status: int, at: int, counts: Int64Array, backlog: Int64Array) -> SplitError:
    if status == NEGATIVE_COUNT:
        return SplitError(
            f"counts[{at}]", f"must be at least 0, got {int(counts[at])}", "pass counted pairs"
        )
    if status == NEGATIVE_BACKLOG:
        return SplitError(
            f"backlog[{at}]", f"must be at least 0, got {int(backlog[at])}", "clip it at 0"
        )
    if status == NO_REPLICA:
        return SplitError(
            f"counts[{at}]",
            f"expert {at} has {int(counts[at])} tokens but no replica",
            "restore a replica or mark its pairs invalid",
        )
    field = f"counts[{at}]" if at < counts.shape[0] else f"backlog[{at - counts.shape[0]}]"
    return SplitError(
        field, f"the sum of counts and backlog reaches {TOTAL_MAX} (2^62)", "use larger units"
    )
