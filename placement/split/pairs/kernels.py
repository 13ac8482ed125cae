# ruff: noqa: PLR0913, PLR0917 - numba unpacks a structure slower than the work itself takes
"""The loops of the pair choice, compiled: which (token, k) pair goes to which replica.

Rows travel once a rank, so a token whose experts lie on few ranks sends fewer rows. Three passes
over the batch, the sure savings first: (1) pairs with one possible replica say on which ranks their
token is anyway, and other pairs of that token join them there; (2) pairs still open meet on the
rank that the most open pairs of their token share; (3) the rest goes where most quota remains.

Responsible for: this choice under exact quotas. Must never change a quota or raise. Called by
`placement.split.pairs` only.
"""

import numpy as np
from numba import njit

from placement.split.checks import ByteArray, Int32Array, Int64Array
from placement.split.kernels import frozen, turn

GOOD = 0
BAD_ID = 1
QUOTA_SHORT = 2
QUOTA_LEFT = 3
NEGATIVE_QUOTA = 4

_TOKEN_STEP = np.uint64(0x9E3779B97F4A7C15)


@njit(cache=True, nogil=True)
def count_pairs(topk_ids: Int32Array, pair_valid: ByteArray, counts: Int64Array) -> int:
    """Add the valid pairs to `counts` [E] -> -1, or the flat pair whose id is no expert."""
    experts = topk_ids.reshape(-1)
    valid = pair_valid.reshape(-1)
    for pair in range(experts.shape[0]):
        if valid[pair] == 0:
            continue
        expert = experts[pair]
        if expert < 0 or expert >= counts.shape[0]:
            return pair
        counts[expert] += 1
    return -1


@njit(cache=True, nogil=True)
def sole_replicas(quotas: Int64Array, replica_ptr: Int64Array, sole: Int64Array) -> int:
    """sole[expert] = its only replica with quota, -1 for none or several.

    -> -1, or a replica with a negative quota.
    """
    for expert in range(replica_ptr.shape[0] - 1):
        found = 0
        sole[expert] = -1
        for replica in range(replica_ptr[expert], replica_ptr[expert + 1]):
            if quotas[replica] < 0:
                return replica
            if quotas[replica] > 0:
                found += 1
                sole[expert] = replica
        if found > 1:
            sole[expert] = -1
    return -1


@njit(cache=True, nogil=True)
def join(
    pairs: Int64Array,
    experts: Int32Array,
    replica_ptr: Int64Array,
    replica_rank: Int64Array,
    used: Int64Array,
    mark: int,
    left: Int64Array,
    chosen: Int32Array,
) -> int:
    """Open pairs of one token onto ranks with used[rank] = mark -> pairs still open.

    These are moved to the front of `pairs`.
    """
    still_open = 0
    for i in range(pairs.shape[0]):
        pair = pairs[i]
        expert = experts[pair]
        best = -1
        most = 0
        for replica in range(replica_ptr[expert], replica_ptr[expert + 1]):
            if left[replica] > most and used[replica_rank[replica]] == mark:
                most = left[replica]
                best = replica
        if best < 0:
            pairs[still_open] = pair
            still_open += 1
        else:
            left[best] -= 1
            chosen[pair] = best
    return still_open


@njit(cache=True, nogil=True)
def meeting_rank(
    pairs: Int64Array,
    experts: Int32Array,
    replica_ptr: Int64Array,
    replica_rank: Int64Array,
    seen: Int64Array,
    cover: Int64Array,
    mark: int,
    left: Int64Array,
) -> int:
    """The rank that could serve most of one token's open pairs, or -1 if none could serve two.

    Ties: the first to reach that number in the order of pairs, then replicas.

    seen, cover: scratch [ranks]; `mark` is new to `seen`.
    """
    best = -1
    most = 1
    for i in range(pairs.shape[0]):
        expert = experts[pairs[i]]
        before = -1  # replicas of one host are neighbours: count the host once
        for replica in range(replica_ptr[expert], replica_ptr[expert + 1]):
            rank = replica_rank[replica]
            if left[replica] == 0 or rank == before:
                continue
            before = rank
            if seen[rank] != mark:
                seen[rank] = mark
                cover[rank] = 0
            cover[rank] += 1
            if cover[rank] > most:
                most = cover[rank]
                best = rank
    return best


@njit(cache=True, nogil=True)
def first_pass(
    topk_ids: Int32Array,
    pair_valid: ByteArray,
    sole: Int64Array,
    replica_ptr: Int64Array,
    replica_rank: Int64Array,
    start: int,
    used: Int64Array,
    left: Int64Array,
    chosen: Int32Array,
    open_pairs: Int64Array,
    open_ptr: Int64Array,
) -> tuple[int, int, int]:
    """Pass one: pairs with one possible replica, and those that join them.

    -> (status, flat pair at fault, tokens with open pairs). The open pairs of the i-th such token
    are open_pairs[open_ptr[i] : open_ptr[i + 1]].
    """
    tokens, width = topk_ids.shape
    experts = topk_ids.reshape(-1)
    valid = pair_valid.reshape(-1)
    opened = 0
    filled = 0
    open_ptr[0] = 0
    for i in range(tokens):
        token = start + i
        if token >= tokens:
            token -= tokens
        begin = filled
        for pair in range(token * width, (token + 1) * width):
            chosen[pair] = -1
            if valid[pair] == 0:
                continue
            expert = experts[pair]
            if expert < 0 or expert >= sole.shape[0]:
                return BAD_ID, pair, 0
            replica = sole[expert]
            if replica < 0:
                open_pairs[filled] = pair
                filled += 1
                continue
            if left[replica] == 0:
                return QUOTA_SHORT, pair, 0
            left[replica] -= 1
            chosen[pair] = replica
            used[replica_rank[replica]] = token + 1
        if filled > begin:
            filled = begin + join(
                open_pairs[begin:filled],
                experts,
                replica_ptr,
                replica_rank,
                used,
                token + 1,
                left,
                chosen,
            )
        if filled > begin:
            opened += 1
            open_ptr[opened] = filled
    return GOOD, 0, opened


@njit(cache=True, nogil=True)
def choose(
    topk_ids: Int32Array,
    pair_valid: ByteArray,
    quotas: Int64Array,
    replica_ptr: Int64Array,
    replica_rank: Int64Array,
    num_ranks: int,
    tie_offset: int,
    chosen: Int32Array,
) -> tuple[int, int]:
    """Fill chosen [T * k] with replicas, -1 where invalid.

    -> (status, flat pair or replica at fault).
    """
    tokens, width = topk_ids.shape
    experts = topk_ids.reshape(-1)
    sole = np.empty(replica_ptr.shape[0] - 1, np.int64)
    negative = sole_replicas(quotas, replica_ptr, sole)
    if negative >= 0:
        return NEGATIVE_QUOTA, negative
    left = quotas.copy()
    used = np.zeros(num_ranks, np.int64)
    open_pairs = np.empty(tokens * width, np.int64)
    open_ptr = np.empty(tokens + 1, np.int64)
    start = turn(tie_offset, 0, _TOKEN_STEP, tokens)
    status, at, opened = first_pass(
        topk_ids,
        pair_valid,
        sole,
        replica_ptr,
        replica_rank,
        start,
        used,
        left,
        chosen,
        open_pairs,
        open_ptr,
    )
    if status != GOOD:
        return status, at
    cover = np.empty(num_ranks, np.int64)
    mark = tokens
    for i in range(opened):
        pairs = open_pairs[open_ptr[i] : open_ptr[i + 1]]
        still_open = pairs.shape[0]
        while still_open > 1:
            mark += 1
            rank = meeting_rank(
                pairs[:still_open], experts, replica_ptr, replica_rank, used, cover, mark, left
            )
            if rank < 0:
                break
            mark += 1
            used[rank] = mark
            still_open = join(
                pairs[:still_open], experts, replica_ptr, replica_rank, used, mark, left, chosen
            )
        pairs[still_open:] = -1
    return last_pass(open_pairs[: open_ptr[opened]], experts, replica_ptr, left, chosen)


@njit(cache=True, nogil=True)
def last_pass(
    pairs: Int64Array,
    experts: Int32Array,
    replica_ptr: Int64Array,
    left: Int64Array,
    chosen: Int32Array,
) -> tuple[int, int]:
    """Pass three: open pairs (-1 = closed) onto the replica with most quota left.

    -> (status, flat pair or replica at fault).
    """
    for i in range(pairs.shape[0]):
        pair = pairs[i]
        if pair < 0:
            continue
        expert = experts[pair]
        best = -1
        most = 0
        for replica in range(replica_ptr[expert], replica_ptr[expert + 1]):
            if left[replica] > most:
                most = left[replica]
                best = replica
        if best < 0:
            return QUOTA_SHORT, pair
        left[best] -= 1
        chosen[pair] = best
    for replica in range(left.shape[0]):
        if left[replica] > 0:
            return QUOTA_LEFT, replica
    return GOOD, 0


def warm() -> None:
    """Compile every entry for the types of production, by one call each on a tiny layer."""
    topk_ids = np.zeros((1, 1), np.int32)
    pair_valid = np.ones((1, 1), np.uint8)
    assert count_pairs(topk_ids, pair_valid, np.zeros(1, np.int64)) == -1
    quotas = np.ones(1, np.int64)
    chosen = np.empty(1, np.int32)
    status, _ = choose(topk_ids, pair_valid, quotas, frozen(0, 1), frozen(0), 1, 0, chosen)
    assert status == GOOD
