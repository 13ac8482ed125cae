"""Rows out to shards and partial sums back in: gather, add, round.

Partial sums are added in float32, always in the order (rank, sub-call), so the same table and batch
give the same bits.

Responsible for arithmetic on rows. Must never choose which partial sums count
(`placement.roles.calls` does). Called by `dispatch`, in a worker thread where the work is large.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_serve.ports import DType
from moe_serve.router.kernels import (
    add_bfloat16,
    add_float32,
    frozen,
    gather_words,
    round_bfloat16,
)
from placement.roles.calls import Contribution

Rows = npt.NDArray[Any]


def gather_rows(rows: Rows, row_id: npt.NDArray[np.int32]) -> Rows:
    """rows[row_id], raw [R, H] in the dtype of `rows`; values are never converted.

    `row_id` strictly ascends, so that as many as there are rows are all of them: those are not
    copied.
    """
    if row_id.shape[0] == rows.shape[0]:
        return rows
    word = np.dtype(np.uint32 if rows.dtype.itemsize == 4 else np.uint16)
    out = np.empty((row_id.shape[0], rows.shape[1]), word)
    gather_words(frozen(rows).view(word), frozen(row_id), out)
    return out.view(rows.dtype)


def combine_rows(
    num_rows: int, hidden_size: int, dtype: DType, contributions: Iterable[Contribution]
) -> Rows:
    """Sum of contributions, raw [num_rows, hidden_size] of `dtype`. Rows without any are zero."""
    out = np.zeros((num_rows, hidden_size), np.float32)
    for one in contributions:
        row_id, take, partial = frozen(one.row_id), frozen(one.take), frozen(one.partial)
        if dtype is DType.BFLOAT16:
            add_bfloat16(out, row_id, take, partial)
        else:
            add_float32(out, row_id, take, frozen(partial.astype(np.float32, copy=False)))
    return round_to(out, dtype)


def round_to(values: npt.NDArray[np.float32], dtype: DType) -> Rows:
    """Raw array of `dtype` nearest to float32 values, ties to even; what is too large becomes
    infinite.
    """
    if dtype is DType.FLOAT32:
        return values
    if dtype is DType.FLOAT16:
        with np.errstate(over="ignore", invalid="ignore"):
            return values.astype(np.float16)
    out = np.empty(values.shape, np.uint16)
    round_bfloat16(frozen(values).view(np.uint32), out)
    return out
