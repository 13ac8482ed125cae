"""Loops over rows and ids that numpy would do in several passes.

Responsible for speed only. Inputs that come from messages are read-only arrays, so every kernel is
compiled for those. Called by `checks` and `combine`.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

GOOD = 0
BELOW = 1
ABOVE = 2
TWICE = 3


@njit(cache=True, nogil=True)
def first_bad_id(
    ids: npt.NDArray[np.int32], valid: npt.NDArray[np.uint8], num_experts: int
) -> tuple[int, int]:
    """(what is wrong, flat pair) of the first valid id below 0, at or above num_experts, or twice
    in its row.
    """
    num_rows, width = ids.shape
    for row in range(num_rows):
        for j in range(width):
            if valid[row, j] == 0:
                continue
            expert = ids[row, j]
            if expert < 0:
                return BELOW, row * width + j
            if expert >= num_experts:
                return ABOVE, row * width + j
            for i in range(j):
                if valid[row, i] != 0 and ids[row, i] == expert:
                    return TWICE, row * width + j
    return GOOD, -1


@njit(cache=True, nogil=True)
def first_bad_gate(gates: npt.NDArray[np.float32], valid: npt.NDArray[np.uint8]) -> int:
    """Flat pair of the first valid gate weight that is NaN or infinite, -1 if none."""
    num_rows, width = gates.shape
    found = -1
    for row in range(num_rows):
        for j in range(width):
            if found < 0 and valid[row, j] != 0 and not np.isfinite(gates[row, j]):
                found = row * width + j
    return found


@njit(cache=True, nogil=True)
def gather_words(
    rows: npt.NDArray[Any], row_id: npt.NDArray[np.int32], out: npt.NDArray[Any]
) -> None:
    """out[i] = rows[row_id[i]]. Raw words: uint32 [T, H] or uint16 [T, H]."""
    for i in range(row_id.shape[0]):
        row = row_id[i]
        for h in range(rows.shape[1]):
            out[i, h] = rows[row, h]


@njit(cache=True, nogil=True)
def add_float32(
    out: npt.NDArray[np.float32],
    row_id: npt.NDArray[np.int32],
    take: npt.NDArray[np.int32],
    partial: npt.NDArray[np.float32],
) -> None:
    """out[row_id[i]] += partial[take[i]], in order of i."""
    for i in range(row_id.shape[0]):
        row = row_id[i]
        at = take[i]
        for h in range(out.shape[1]):
            out[row, h] += partial[at, h]


@njit(cache=True, nogil=True)
def add_bfloat16(
    out: npt.NDArray[np.float32],
    row_id: npt.NDArray[np.int32],
    take: npt.NDArray[np.int32],
    partial: npt.NDArray[np.uint16],
) -> None:
    """As add_float32, from bit patterns of bfloat16: the upper half of a float32."""
    words = np.empty(out.shape[1], np.uint32)
    values = words.view(np.float32)
    for i in range(row_id.shape[0]):
        row = row_id[i]
        at = take[i]
        for h in range(out.shape[1]):
            words[h] = np.uint32(partial[at, h]) << np.uint32(16)
        for h in range(out.shape[1]):
            out[row, h] += values[h]


@njit(cache=True, nogil=True)
def round_bfloat16(words: npt.NDArray[np.uint32], out: npt.NDArray[np.uint16]) -> None:
    """bfloat16 nearest to each float32 (given as its word), ties to even; NaN stays NaN."""
    for row in range(words.shape[0]):
        for h in range(words.shape[1]):
            word = words[row, h]
            if (word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
                out[row, h] = np.uint16((word >> np.uint32(16)) | np.uint32(0x0040))
            else:
                half = np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))
                out[row, h] = np.uint16((word + half) >> np.uint32(16))


def frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Read-only contiguous view of an array: the one form the kernels are compiled for."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


def warm() -> None:
    """Compile for the types of production, by calls on one row."""
    ids = frozen(np.zeros((1, 1), np.int32))
    valid = frozen(np.ones((1, 1), np.uint8))
    at = frozen(np.zeros(1, np.int32))
    out = np.zeros((1, 1), np.float32)
    assert first_bad_id(ids, valid, 1)[0] == GOOD
    assert first_bad_gate(frozen(np.zeros((1, 1), np.float32)), valid) == -1
    for word in (np.uint32, np.uint16):
        gather_words(frozen(np.zeros((1, 1), word)), at, np.zeros((1, 1), word))
    add_float32(out, at, at, frozen(np.zeros((1, 1), np.float32)))
    add_bfloat16(out, at, at, frozen(np.zeros((1, 1), np.uint16)))
    round_bfloat16(frozen(out.view(np.uint32)), np.zeros((1, 1), np.uint16))
