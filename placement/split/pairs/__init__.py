"""Which (token, k) pair is served by which replica, once the quota of every replica is known.

Responsible for: counting the pairs of a batch, and choosing replicas so that quotas are met exactly
and a token's experts lie on few ranks (rows travel once a rank). Must never choose how many tokens
a replica gets (`levels`). Called by the router's pure half, once a batch.
"""

import numpy as np
import numpy.typing as npt

from placement.split.checks import (
    EXPERTS_MAX,
    Int32Array,
    Int64Array,
    id_matrix,
    int64_vector,
    size,
    tie_word,
    valid_matrix,
)
from placement.split.compiled import CompiledLayer
from placement.split.errors import SplitError
from placement.split.pairs.kernels import (
    BAD_ID,
    GOOD,
    NEGATIVE_QUOTA,
    QUOTA_SHORT,
    choose,
    count_pairs,
)


def count_ids(
    topk_ids: npt.ArrayLike, pair_valid: npt.ArrayLike | None, num_experts: int
) -> Int64Array:
    """Valid pairs of each expert -> int64 [num_experts].

    topk_ids: int32 [T, k]. pair_valid: bool or uint8 [T, k], None = all; the id of an invalid pair
    is not looked at.

    >>> count_ids([[0, 2], [0, 1]], [[True, True], [True, False]], num_experts=3).tolist()
    [2, 0, 1]

    Raises SplitError for shapes, dtypes and ids that are no expert.
    """
    num_experts = size("num_experts", num_experts, EXPERTS_MAX)
    ids = id_matrix("topk_ids", topk_ids)
    counts = np.zeros(num_experts, np.int64)
    at = count_pairs(ids, valid_matrix(pair_valid, ids.shape), counts)
    if at >= 0:
        raise _bad_id(topk_ids, at, num_experts)
    return counts


def assign_pairs(
    compiled: CompiledLayer,
    topk_ids: npt.ArrayLike,
    pair_valid: npt.ArrayLike | None,
    quotas: npt.ArrayLike,
    tie_offset: int = 0,
    room: npt.ArrayLike | None = None,
) -> Int32Array:
    """Choose a replica for every valid pair -> int32 [T, k].

    The result indexes `compiled.replica_slot` and `replica_rank`; -1 where the pair is invalid.

    topk_ids: int32 [T, k]. pair_valid: bool or uint8 [T, k], None = all. quotas: int64 [replicas],
    from `split_counts` or `split_activated` on the counts of this batch; each is met exactly where
    no room is given. tie_offset turns the token that chooses first. room: int64 [ranks], pairs that
    each rank may take beyond its quotas where that saves a row. With room = the largest load less
    the rank's own, the largest load stays what it is.

    Expert 0 is on ranks 0 and 1, expert 1 on rank 1 only. Token 1 must go to rank 1 for expert 1,
    so its expert 0 is served there too, and token 0 takes the replica on rank 0:

    >>> layer = compile_layer([0, 0, 1], [0, 1, 1], num_experts=2, num_ranks=2)
    >>> pair_valid = [[True, False], [True, True]]
    >>> assign_pairs(layer, [[0, -1], [0, 1]], pair_valid, quotas=[1, 1, 1]).tolist()
    [[0, -1], [1, 2]]

    With room for one pair more on rank 1, a token sends one row instead of two:

    >>> layer = compile_layer([0, 0, 1], [0, 1, 1], num_experts=2, num_ranks=2)
    >>> assign_pairs(layer, [[0, 1]], None, quotas=[1, 0, 1]).tolist()
    [[0, 2]]
    >>> assign_pairs(layer, [[0, 1]], None, quotas=[1, 0, 1], room=[0, 1]).tolist()
    [[1, 2]]

    Raises SplitError for shapes, dtypes, ids that are no expert, and quotas that do not add up to
    the valid pairs of an expert.
    """
    ids = id_matrix("topk_ids", topk_ids)
    valid = valid_matrix(pair_valid, ids.shape)
    wanted = int64_vector("quotas", quotas, length=compiled.num_replicas)
    spare = (
        np.empty(0, np.int64)
        if room is None
        else int64_vector("room", room, length=compiled.num_ranks)
    )
    chosen = np.empty(ids.size, np.int32)
    status, at = choose(
        ids,
        valid,
        wanted,
        spare,
        compiled.replica_ptr,
        compiled.replica_rank,
        compiled.only_replica,
        compiled.plural,
        compiled.num_ranks,
        tie_word(tie_offset),
        chosen,
    )
    if status == GOOD:
        return chosen.reshape(ids.shape)
    if status == BAD_ID:
        raise _bad_id(topk_ids, at, compiled.num_experts)
    if status == NEGATIVE_QUOTA:
        raise SplitError(f"quotas[{at}]", f"must be at least 0, got {int(wanted[at])}", _REMEDY)
    if status == QUOTA_SHORT:
        expert = int(ids.flat[at])
        token, k = divmod(at, ids.shape[1])
        raise SplitError(
            "quotas",
            f"expert {expert} has fewer than its valid pairs: none left at pair ({token}, {k})",
            _REMEDY,
        )
    expert = int(np.searchsorted(compiled.replica_ptr, at, side="right")) - 1
    raise SplitError(f"quotas[{at}]", f"expert {expert} has more than its valid pairs", _REMEDY)


_REMEDY = "pass the quotas that split_counts gives for this batch's counts"


def _bad_id(topk_ids: npt.ArrayLike, at: int, num_experts: int) -> SplitError:
    array = np.asarray(topk_ids)
    token, k = divmod(at, array.shape[1])
    return SplitError(
        f"topk_ids[{token}, {k}]",
        f"must be in [0, {num_experts}), got {int(array[token, k])}",
        "mark the pair invalid or fix the gate",
    )
