"""Compiled loops of a shard: check and admit pairs, order them by slot, gather, multiply, SiLU,
gated add, count, bfloat16.

Responsible for arithmetic on arrays; all but `count_unsound` trust what is in them. Must never keep
state or decide anything. Called by `moe_serve.shard.compute`, by `rows`, and by the core and its
parts (`executed`, `sub_call_checks`); each kernel has a numpy reference in the tests.

Signatures are explicit: arguments that are only read are declared read-only (wire buffers are), so
that both kinds of array fit one compiled form, and no kernel is compiled while a request waits. No
kernel assumes finite values: a NaN stays in its row.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit, types

_Array = npt.NDArray[Any]
_F32 = types.float32
_ROWS_IN = types.Array(types.float32, 2, "C", readonly=True)
_GATES_IN = types.Array(types.float32, 1, "C", readonly=True)
_INDEX_IN = types.Array(types.int32, 1, "C", readonly=True)
_U16_IN = types.Array(types.uint16, 1, "C", readonly=True)
_U32_IN = types.Array(types.uint32, 1, "C", readonly=True)
_ROWS_OUT = types.Array(types.float32, 2, "C")
_INDEX_OUT = types.Array(types.int32, 1, "C")
_BOOL_OUT = types.Array(types.boolean, 1, "C")
_F64_IN = types.Array(types.float64, 1, "C", readonly=True)
_F64_OUT = types.Array(types.float64, 1, "C")
_I64_IN = types.Array(types.int64, 1, "C", readonly=True)
_I64_OUT = types.Array(types.int64, 1, "C")
_SLOT_COUNTS = types.Tuple([_INDEX_OUT, _I64_OUT])  # type: ignore[no-untyped-call]


@njit([types.int64(_INDEX_IN, _INDEX_OUT, _INDEX_OUT, _INDEX_OUT)], cache=True, nogil=True)
def sort_by_key(keys: _Array, starts: _Array, order: _Array, used: _Array) -> int:
    """Stable counting sort of `keys` [P]; returns how many different keys there are, or -1 when one
    is out of range.

    `starts` has num_keys + 1 elements. On return the positions of key k are
    order[starts[k]:starts[k + 1]], ascending, and used[:returned] are the keys that occur,
    ascending (`used` has at least min(P, num_keys) elements).

    Example: keys [2, 0, 2] of 3 -> order [1, 0, 2], starts [0, 1, 1, 3], used [0, 2], returned 2.
    """
    num_keys = starts.shape[0] - 1
    for k in range(num_keys + 1):
        starts[k] = 0
    for p in range(keys.shape[0]):
        key = keys[p]
        if key < 0 or key >= num_keys:
            return -1
        starts[key + 1] += 1
    num_used = 0
    for k in range(num_keys):
        if starts[k + 1] > 0:
            used[num_used] = k
            num_used += 1
        starts[k + 1] += starts[k]
    for p in range(keys.shape[0]):
        key = keys[p]
        order[starts[key]] = p
        starts[key] += 1
    # Every start now stands at its key's end: shift back by one key instead of keeping a second
    # array of cursors.
    for k in range(num_keys, 0, -1):
        starts[k] = starts[k - 1]
    starts[0] = 0
    return num_used


@njit([types.void(_ROWS_IN, _INDEX_IN, _ROWS_OUT)], cache=True, nogil=True)
def gather_rows(rows: _Array, index: _Array, out: _Array) -> None:
    """out[i] = rows[index[i]]; rows [R, H], index [n] in [0, R), out [n, H]."""
    width = rows.shape[1]
    for i in range(index.shape[0]):
        r = index[i]
        for j in range(width):
            out[i, j] = rows[r, j]


@njit([types.void(_ROWS_IN, _ROWS_IN, _ROWS_OUT)], cache=True, nogil=True, fastmath={"contract"})
def skinny_matmul(rows: _Array, weights: _Array, out: _Array) -> None:
    """out = rows @ weights for few rows; rows [n, K], weights [K, N], out [n, N].

    Reads the weights once, in the order they lie in memory, without packing them first as a BLAS
    does: for two to eight rows some BLAS libraries take twice as long. Eight rows of weights at a
    time, so that `out` is loaded and stored an eighth as often. Fused multiply-adds are allowed.
    """
    depth, width = weights.shape
    whole = depth - depth % 8
    for m in range(rows.shape[0]):
        for j in range(width):
            out[m, j] = np.float32(0.0)
    for k in range(0, whole, 8):
        for m in range(rows.shape[0]):
            a, b, c, d = rows[m, k], rows[m, k + 1], rows[m, k + 2], rows[m, k + 3]
            e, f, g, h = rows[m, k + 4], rows[m, k + 5], rows[m, k + 6], rows[m, k + 7]
            for j in range(width):
                low = (a * weights[k, j] + b * weights[k + 1, j]) + (
                    c * weights[k + 2, j] + d * weights[k + 3, j]
                )
                high = (e * weights[k + 4, j] + f * weights[k + 5, j]) + (
                    g * weights[k + 6, j] + h * weights[k + 7, j]
                )
                out[m, j] += low + high
    for k in range(whole, depth):
        for m in range(rows.shape[0]):
            a = rows[m, k]
            for j in range(width):
                out[m, j] += a * weights[k, j]


@njit([types.void(_ROWS_IN, _ROWS_OUT)], cache=True, nogil=True, error_model="numpy")
def silu_mul(gate_up: _Array, act: _Array) -> None:
    """act = silu(gate) * up, with gate_up [n, 2F] = gate | up and act [n, F].

    The exponential is a polynomial of degree six after range reduction, written out so that the
    compiler vectorises the loop (a call of `exp` for each element took four times as long); its
    relative error is below 2e-7. Below -88 silu is 0 in float32.
    """
    width = act.shape[1]
    for i in range(act.shape[0]):
        for j in range(width):
            g = gate_up[i, j]
            x = min(max(-g, np.float32(-87.0)), np.float32(88.0))
            n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
            # ln 2 in two parts: the first has few mantissa bits, so n * part is exact.
            r = x - n * np.float32(0.693359375)
            r = r - n * np.float32(-2.12194440e-4)
            p = np.float32(1.9875691500e-4)
            p = p * r + np.float32(1.3981999507e-3)
            p = p * r + np.float32(8.3334519073e-3)
            p = p * r + np.float32(4.1665795894e-2)
            p = p * r + np.float32(1.6666665459e-1)
            p = p * r + np.float32(0.5)
            p = p * r * r + r + np.float32(1.0)
            bits = (np.int32(n) + np.int32(127)) << np.int32(23)
            silu = g / (np.float32(1.0) + p * np.int32(bits).view(np.float32))
            if g < np.float32(-88.0):
                silu = np.float32(0.0)
            act[i, j] = silu * gate_up[i, width + j]


@njit([types.void(_ROWS_OUT, _INDEX_IN, _GATES_IN, _ROWS_IN)], cache=True, nogil=True)
def add_gated(out: _Array, index: _Array, gates: _Array, parts: _Array) -> None:
    """out[index[i]] += gates[i] * parts[i], in order of i; out [R, H], index and gates [n], parts
    [n, H].
    """
    width = out.shape[1]
    for i in range(index.shape[0]):
        r = index[i]
        gate = gates[i]
        for j in range(width):
            out[r, j] += gate * parts[i, j]


@njit(
    [types.void(_ROWS_IN, _INDEX_IN, _GATES_IN, _ROWS_OUT)],
    cache=True,
    nogil=True,
)
def scale_rows(rows: _Array, pair_row: _Array, gates: _Array, out: _Array) -> None:
    """out[r] = (sum of the gates of row r's pairs, added in float64) * rows[r], zero where a row
    has no pair. rows, out [R, H]; pair_row, gates [P].
    """
    sums = np.zeros(rows.shape[0], np.float64)
    named = np.zeros(rows.shape[0], np.bool_)
    for p in range(pair_row.shape[0]):
        sums[pair_row[p]] += gates[p]
        named[pair_row[p]] = True
    for r in range(rows.shape[0]):
        gate = np.float32(sums[r])
        if named[r]:
            for j in range(rows.shape[1]):
                out[r, j] = gate * rows[r, j]
        else:  # also where the row is not finite, and 0 times it is no 0
            for j in range(rows.shape[1]):
                out[r, j] = np.float32(0.0)


@njit([_SLOT_COUNTS(_INDEX_IN)], cache=True, nogil=True)
def count_by_slot(pair_slot: _Array) -> tuple[_Array, _Array]:
    """Slots that occur in pair_slot [P], ascending int32 [G], and how often, int64 [G]; none where
    one is negative."""
    least, most = 0, -1
    for p in range(pair_slot.shape[0]):
        least, most = min(least, pair_slot[p]), max(most, pair_slot[p])
    if least < 0:
        return np.empty(0, np.int32), np.empty(0, np.int64)
    counts = np.zeros(most + 1, np.int64)
    num_used = 0
    for p in range(pair_slot.shape[0]):
        num_used += counts[pair_slot[p]] == 0
        counts[pair_slot[p]] += 1
    slots = np.empty(num_used, np.int32)
    pairs = np.empty(num_used, np.int64)
    at = 0
    for slot in range(most + 1):
        if counts[slot] > 0:
            slots[at] = slot
            pairs[at] = counts[slot]
            at += 1
    return slots, pairs


@njit(
    [types.int64(*[_INDEX_IN] * 3, _GATES_IN, *[_INDEX_IN] * 2, *[types.int64] * 2)],
    cache=True,
    nogil=True,
)
def count_unsound(
    row_id: _Array,
    pair_row: _Array,
    pair_slot: _Array,
    gates: _Array,
    pair_k: _Array,
    pair_expert: _Array,
    num_experts: int,
    top_k: int,
) -> int:
    """How much of a sub-call's index block must be refused, 0 where it is sound: lengths that
    differ, values out of range, gates that are not finite, (row, k) named twice. Told apart in
    `sub_call_checks`.
    """
    num_rows, num_pairs = row_id.shape[0], pair_row.shape[0]
    if num_pairs > num_rows * top_k:
        return 1
    if (
        pair_slot.shape[0] != num_pairs
        or gates.shape[0] != num_pairs
        or pair_k.shape[0] != num_pairs
        or pair_expert.shape[0] != num_pairs
    ):
        return 1
    seen = np.zeros(num_rows * top_k, np.bool_)
    unsound = 0
    for r in range(num_rows):
        unsound += row_id[r] < 0 or row_id[r] == 2147483647
    for p in range(num_pairs):
        row, k, expert, slot = pair_row[p], pair_k[p], pair_expert[p], pair_slot[p]
        if row < 0 or row >= num_rows or k < 0 or k >= top_k:
            unsound += 1
            continue
        at = row * top_k + k
        unsound += seen[at] or expert < 0 or expert >= num_experts
        unsound += slot < 0 or slot == 2147483647 or not np.isfinite(gates[p])
        seen[at] = True
    return unsound


@njit(
    [types.int64(_BOOL_OUT, _BOOL_OUT, _INDEX_IN, _INDEX_IN, _INDEX_IN, types.int64)],
    cache=True,
    nogil=True,
)
def count_absent(
    resident: _Array,
    named: _Array,
    keys: _Array,
    pair_slot: _Array,
    pair_expert: _Array,
    first_key: int,
) -> int:
    """Clear `resident` bool [P] where the slot's key is not first_key + pair_expert, and set
    `named` bool [slots] for the slots of the others; returns how many are not resident then. `keys`
    int32 [slots]; slots of resident pairs are in range.
    """
    absent = 0
    for p in range(resident.shape[0]):
        if resident[p] and keys[pair_slot[p]] != first_key + pair_expert[p]:
            resident[p] = False
        if resident[p]:
            named[pair_slot[p]] = True
        else:
            absent += 1
    return absent


@njit(
    [types.void(_I64_OUT, _F64_OUT, types.int64, _INDEX_IN, _I64_IN, _F64_IN)],
    cache=True,
    nogil=True,
)
def add_work(
    pairs: _Array,
    seconds: _Array,
    first_key: int,
    key: _Array,
    new_pairs: _Array,
    new_seconds: _Array,
) -> None:
    """pairs[first_key + key[i]] += new_pairs[i], and the same for seconds; a key may occur more
    than once."""
    for i in range(key.shape[0]):
        pairs[first_key + key[i]] += new_pairs[i]
        seconds[first_key + key[i]] += new_seconds[i]


@njit([types.void(_U16_IN, types.Array(types.uint32, 1, "C"))], cache=True, nogil=True)
def widen_bfloat16(raw: _Array, out: _Array) -> None:
    """Bits of float32 from bits of bfloat16, element by element; exact."""
    for i in range(raw.shape[0]):
        out[i] = np.uint32(raw[i]) << np.uint32(16)


@njit([types.void(_U32_IN, types.Array(types.uint16, 1, "C"))], cache=True, nogil=True)
def narrow_bfloat16(bits: _Array, out: _Array) -> None:
    """Bits of bfloat16 from bits of float32, to nearest, ties to even; NaN becomes a quiet NaN of
    its sign.
    """
    for i in range(bits.shape[0]):
        b = np.uint32(bits[i])
        rounded = np.uint32(b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1)))
        if (b & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
            # Rounding could carry a NaN's mantissa away and leave an infinity.
            rounded = b | np.uint32(0x00400000)
        out[i] = np.uint16(rounded >> np.uint32(16))


def warm() -> None:
    """Run every kernel once on the smallest input. Compilation itself happens on import, for the
    declared signatures.
    """
    index = np.zeros(1, np.int32)
    rows = np.ones((1, 2), np.float32)
    sort_by_key(index, np.zeros(2, np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32))
    gather_rows(rows, index, np.empty((1, 2), np.float32))
    skinny_matmul(rows, np.ones((2, 2), np.float32), np.empty((1, 2), np.float32))
    silu_mul(rows, np.empty((1, 1), np.float32))
    add_gated(np.zeros((1, 2), np.float32), index, np.ones(1, np.float32), rows)
    flags, zeros = np.ones(1, np.bool_), np.zeros(1)
    gates = np.ones(1, np.float32)
    scale_rows(rows, index, gates, np.empty((1, 2), np.float32))
    count_by_slot(index)
    count_unsound(index, index, index, gates, index, index, 1, 1)
    count_absent(flags, flags.copy(), index, index, index, 0)
    add_work(np.zeros(1, np.int64), zeros, 0, index, np.ones(1, np.int64), zeros.copy())
    bits = np.zeros(1, np.uint32)
    narrow_bfloat16(bits, np.zeros(1, np.uint16))
    widen_bfloat16(np.zeros(1, np.uint16), bits)
