# ruff: noqa: PLR0913, PLR0917 - numba unpacks a structure slower than the work itself takes
"""The loops of the pair choice, compiled: which (token, k) pair goes to which replica.

Rows travel once a rank, so a token whose experts lie on few ranks sends fewer rows. Passes over the
batch, the sure savings first: (1) pairs with one possible replica say on which ranks their token is
anyway, and other pairs of that token join them there; (2) pairs still open meet on the rank that
the most open pairs of their token share; (3) the rest goes where most quota remains; (4) where
ranks have room beyond their quotas, a pair that is alone on its rank joins its token elsewhere.

Responsible for: this choice. Must never leave a quota but for room that was given, or raise. Called
by `placement.split.pairs` only.
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
def sole_replicas(
    quotas: Int64Array,
    replica_ptr: Int64Array,
    only_replica: Int64Array,
    plural: Int64Array,
    sole: Int64Array,
) -> int:
    """sole[expert] = its only replica with quota, -1 for none or several; one without a second
    replica is taken whatever its quota.

    -> -1, or a replica with a negative quota.
    """
    sole[:] = only_replica
    for i in range(plural.shape[0]):
        expert = plural[i]
        found = 0
        for replica in range(replica_ptr[expert], replica_ptr[expert + 1]):
            if quotas[replica] > 0:
                found += 1
                sole[expert] = replica
        if found > 1:
            sole[expert] = -1
    for replica in range(quotas.shape[0]):
        if quotas[replica] < 0:
            return replica
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
            # Without a branch: which rank the token uses cannot be foreseen.
            here = left[replica] * int(used[replica_rank[replica]] == mark)
            best = replica if here > most else best
            most = max(most, here)
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
            cover[rank] = cover[rank] * int(seen[rank] == mark) + 1
            seen[rank] = mark
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
    nowhere = used.shape[0] - 1
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
            # Without a branch: open or not cannot be foreseen. An open pair takes nothing of any
            # replica and marks no rank, but one beyond the last.
            replica = sole[expert]
            is_open = replica < 0
            open_pairs[filled] = pair
            filled += int(is_open)
            taken = max(replica, 0)
            left[taken] -= int(not is_open)
            if left[taken] < 0:
                return QUOTA_SHORT, pair, 0
            chosen[pair] = replica
            used[nowhere if is_open else replica_rank[taken]] = token + 1
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
    room: Int64Array,
    replica_ptr: Int64Array,
    replica_rank: Int64Array,
    only_replica: Int64Array,
    plural: Int64Array,
    num_ranks: int,
    tie_offset: int,
    chosen: Int32Array,
) -> tuple[int, int]:
    """Fill chosen [T * k] with replicas, -1 where invalid. room: [ranks], or [0] for none.

    -> (status, flat pair or replica at fault).
    """
    tokens, width = topk_ids.shape
    experts = topk_ids.reshape(-1)
    sole = np.empty(replica_ptr.shape[0] - 1, np.int64)
    negative = sole_replicas(quotas, replica_ptr, only_replica, plural, sole)
    if negative >= 0:
        return NEGATIVE_QUOTA, negative
    left = np.zeros(quotas.shape[0] + 1, np.int64)  # so that there is a first one
    left[:-1] = quotas
    used = np.zeros(num_ranks + 1, np.int64)
    open_pairs = np.empty(tokens * width + 1, np.int64)
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
    cover = np.zeros(num_ranks, np.int64)
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
    status, at = last_pass(open_pairs[: open_ptr[opened]], experts, replica_ptr, left, chosen)
    if status == GOOD and room.shape[0] > 0:
        # More room than there are pairs is as good as infinite, and this cannot overflow.
        spare = np.minimum(room, topk_ids.size)
        gather(topk_ids, start, replica_ptr, replica_rank, only_replica, spare, chosen)
    return status, at


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


@njit(cache=True, nogil=True)
def roomiest(
    first: int,
    last: int,
    replica_rank: Int64Array,
    seen: Int64Array,
    token: int,
    pairs_there: Int64Array,
    room: Int64Array,
) -> int:
    """The replica of first .. last - 1 with most room on a rank that serves pairs of the token, or
    -1.
    """
    best = -1
    most = 0
    for replica in range(first, last):
        rank = replica_rank[replica]
        here = room[rank] * int((seen[rank] == token) & (pairs_there[rank] > 0))
        best = replica if here > most else best
        most = max(most, here)
    return best


@njit(cache=True, nogil=True)
def gather(
    topk_ids: Int32Array,
    start: int,
    replica_ptr: Int64Array,
    replica_rank: Int64Array,
    only_replica: Int64Array,
    room: Int64Array,
    chosen: Int32Array,
) -> None:
    """Pass four: a pair alone on its rank joins the rank with most room among its token's others.

    room: pairs a rank may still take; a pair that leaves gives its rank room for one.
    """
    tokens, width = topk_ids.shape
    experts = topk_ids.reshape(-1)
    seen = np.full(room.shape[0], -1, np.int64)
    pairs_there = np.zeros(room.shape[0], np.int64)
    loose = np.empty(width + 1, np.int64)
    for i in range(tokens):
        token = start + i
        if token >= tokens:
            token -= tokens
        found = 0
        for pair in range(token * width, (token + 1) * width):
            replica = chosen[pair]
            if replica < 0:
                continue
            rank = replica_rank[replica]
            pairs_there[rank] = pairs_there[rank] * int(seen[rank] == token) + 1
            seen[rank] = token
            loose[found] = pair
            found += int(only_replica[experts[pair]] < 0)
        for j in range(found):
            pair = loose[j]
            rank = replica_rank[chosen[pair]]
            if pairs_there[rank] > 1:
                continue
            # Its own rank is out of the question with no other pair there.
            pairs_there[rank] = 0
            expert = experts[pair]
            best = roomiest(
                replica_ptr[expert],
                replica_ptr[expert + 1],
                replica_rank,
                seen,
                token,
                pairs_there,
                room,
            )
            if best < 0:
                pairs_there[rank] = 1
            else:
                chosen[pair] = best
                other = replica_rank[best]
                pairs_there[other] += 1
                room[rank] += 1
                room[other] -= 1


def warm() -> None:
    """Compile every entry for the types of production, by one call each on a tiny layer."""
    topk_ids = np.zeros((1, 1), np.int32)
    pair_valid = np.ones((1, 1), np.uint8)
    assert count_pairs(topk_ids, pair_valid, np.zeros(1, np.int64)) == -1
    quotas, room = np.ones(1, np.int64), np.zeros(1, np.int64)
    chosen = np.empty(1, np.int32)
    index = (frozen(0, 1), frozen(0), frozen(0), frozen())
    status, _ = choose(topk_ids, pair_valid, quotas, room, *index, 1, 0, chosen)
    assert status == GOOD
    assert chosen[0] == 0
