"""Kernels of the roles: pairs of a batch grouped by rank, and compared with what is in slots.

Responsible for speed only; the rules they follow are told in `assignment` and `shard.ledger`, which
call them.
"""

import numpy as np
import numpy.typing as npt
from numba import njit, types

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@njit(cache=True, nogil=True)
def group_by_rank(
    chosen: Int32s, replica_rank: Int64s, num_ranks: int
) -> tuple[Int64s, Int64s, Int64s, Int32s, Int32s]:
    """Group pairs by the rank of their replica, each rank's in order of (row, k).

    chosen: int32 [n, k], replica of each pair or -1. Returns pair_ptr [ranks + 1], row_ptr [ranks +
    1], pair_flat int64 [P] (row * k + j), pair_row int32 [P] (index into the rank's rows) and rows
    int32 (row of each rank's rows).
    """
    num_rows, width = chosen.shape
    pair_ptr = np.zeros(num_ranks + 1, np.int64)
    row_ptr = np.zeros(num_ranks + 1, np.int64)
    last = np.full(num_ranks, -1, np.int64)
    for row in range(num_rows):
        for j in range(width):
            replica = chosen[row, j]
            if replica < 0:
                continue
            rank = replica_rank[replica]
            pair_ptr[rank + 1] += 1
            if last[rank] != row:
                last[rank] = row
                row_ptr[rank + 1] += 1
    for rank in range(num_ranks):
        pair_ptr[rank + 1] += pair_ptr[rank]
        row_ptr[rank + 1] += row_ptr[rank]
    pair_at = pair_ptr[:-1].copy()
    row_at = row_ptr[:-1].copy()
    pair_flat = np.empty(pair_ptr[num_ranks], np.int64)
    pair_row = np.empty(pair_ptr[num_ranks], np.int32)
    rows = np.empty(row_ptr[num_ranks], np.int32)
    last[:] = -1
    for row in range(num_rows):
        for j in range(width):
            replica = chosen[row, j]
            if replica < 0:
                continue
            rank = replica_rank[replica]
            if last[rank] != row:
                last[rank] = row
                rows[row_at[rank]] = row
                row_at[rank] += 1
            at = pair_at[rank]
            pair_flat[at] = row * width + j
            pair_row[at] = row_at[rank] - 1 - row_ptr[rank]
            pair_at[rank] = at + 1
    return pair_ptr, row_ptr, pair_flat, pair_row, rows


@njit(
    [
        types.void(
            types.Array(types.int64, 1, "C", readonly=True),
            types.Array(types.int32, 1, "C", readonly=True),
            types.Array(types.int64, 1, "C", readonly=True),
            types.Array(types.boolean, 1, "C"),
        )
    ],
    cache=True,
    nogil=True,
)
def match_tags(tags: Int64s, slot: Int32s, tag: Int64s, out: npt.NDArray[np.bool_]) -> None:
    """out[p]: whether tag[p] is a tag (not negative) and what `tags` int64 [slots] says of slot[p],
    which may be out of range. slot int32, tag int64, out bool, all [P].
    """
    for p in range(out.shape[0]):
        inside = slot[p] >= 0 and slot[p] < tags.shape[0] and tag[p] >= 0
        out[p] = inside and tags[slot[p]] == tag[p]


def warm() -> None:
    """Compile for the types of production, by one call on a tiny batch."""
    replica_rank = np.zeros(1, np.int64)
    replica_rank.flags.writeable = False
    pair_ptr, *_ = group_by_rank(np.zeros((1, 1), np.int32), replica_rank, 1)
    assert pair_ptr[1] == 1
