"""Tensors and bitmaps of the public API as arrays, both ways.

A tensor is its raw little-endian bytes, row-major, plus element type and shape; nothing declared is
trusted: the product of the shape is compared with the bytes that came before an array exists. BF16
has no numpy type, so its arrays are the uint16 bit patterns. A bitmap holds bit i in byte i // 8,
least significant first.

Responsible for the form of bytes. Must never judge ids, gates or sizes of a model (that is the
router's checks). Called by routers and clients. Element types are numbers of `DataType`;
`ports.DType` uses the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_serve.errors import FieldViolation, InvalidArgument
from moe_serve.rpc import dispatch_pb2

FP32 = int(dispatch_pb2.DATA_TYPE_FP32)
BF16 = int(dispatch_pb2.DATA_TYPE_BF16)
FP16 = int(dispatch_pb2.DATA_TYPE_FP16)
INT32 = int(dispatch_pb2.DATA_TYPE_INT32)

HIDDEN_TYPES = (FP32, BF16, FP16)
"""Element types of hidden states and outputs."""

_NUMPY: dict[int, np.dtype[Any]] = {
    FP32: np.dtype("<f4"),
    BF16: np.dtype("<u2"),
    FP16: np.dtype("<f2"),
    INT32: np.dtype("<i4"),
}
_AXES_MAX = 8
_SPAN_MAX = 1 << 40
"""Product of the lengths of all axes that are not empty."""
Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ForwardArrays:
    """What one Forward call holds, as arrays: T rows, k pairs a row, H elements.

    hidden: raw [T, H] of `data_type`. topk_ids: int32 [T, k]. topk_weights: float32 [T, k].
    row_valid: bool [T] and pair_valid: bool [T, k], None = all valid. phase: number of
    `ForwardPhase`.
    """

    model: str
    layer: int
    phase: int
    data_type: int
    hidden: Array
    topk_ids: npt.NDArray[np.int32]
    topk_weights: npt.NDArray[np.float32]
    request_id: str = ""
    attempt: int = 0
    row_valid: Mask | None = None
    pair_valid: Mask | None = None
    traceparent: str = ""
    tracestate: str = ""


def numpy_type(data_type: int) -> np.dtype[Any]:
    """dtype of raw arrays of an element type: float32, uint16 (BF16), float16 or int32.

    Raises InvalidArgument for numbers that are no element type.
    """
    found = _NUMPY.get(data_type)
    if found is None:
        raise InvalidArgument(f"data type {data_type} is unknown; use one of {type_names(_NUMPY)}")
    return found


def type_names(data_types: Iterable[int]) -> str:
    """Names of element types as people write them, for messages: "FP32, BF16"."""
    return ", ".join(
        dispatch_pb2.DataType.Name(dispatch_pb2.DataType.ValueType(t)).removeprefix("DATA_TYPE_")
        for t in data_types
    )


def tensor(array: Array, data_type: int) -> dispatch_pb2.Tensor:
    """Tensor message of an array that already has the element type's dtype. One copy.

    Raises InvalidArgument where the dtype differs: values are never cast silently.
    """
    wanted = numpy_type(data_type)
    if array.dtype != wanted:
        raise InvalidArgument(
            f"array is {array.dtype}, but {type_names([data_type])} travels as {wanted}; convert it"
        )
    return dispatch_pb2.Tensor(
        data_type=dispatch_pb2.DataType.ValueType(data_type),
        shape=list(array.shape),
        raw=array.tobytes(),
    )


def tensor_fault(
    field: str, message: dispatch_pb2.Tensor, raw_bytes: int, allowed: tuple[int, ...]
) -> FieldViolation | None:
    """Why a tensor's declaration does not fit its `raw_bytes`; None where it does.

    Allocates nothing. The product of the shape is taken in unbounded integers, so no shape
    overflows.
    """
    if message.data_type not in allowed:
        got = message.data_type
        known = got in dispatch_pb2.DataType.values()
        return FieldViolation(
            f"{field}.data_type",
            f"must be {type_names(allowed)}, got {type_names([got]) if known else got}",
        )
    shape = message.shape
    if len(shape) > _AXES_MAX:
        return FieldViolation(
            f"{field}.shape", f"has {len(shape)} axes, at most {_AXES_MAX} are read"
        )
    if any(n < 0 for n in shape):
        return FieldViolation(f"{field}.shape", f"must not be negative, got {list(shape)}")
    if 0 in shape and math.prod(n or 1 for n in shape) > _SPAN_MAX:
        # Without elements it has the bytes it declares, none, and still no array can have it.
        return FieldViolation(
            f"{field}.shape", f"{list(shape)} spans more than {_SPAN_MAX} elements; send fewer rows"
        )
    wanted = math.prod(shape) * numpy_type(message.data_type).itemsize
    if wanted != raw_bytes:
        kind = type_names([message.data_type])
        return FieldViolation(
            f"{field}.raw",
            f"shape {list(shape)} of {kind} needs {wanted} bytes, got {raw_bytes}",
        )
    return None


def tensor_array(
    field: str, message: dispatch_pb2.Tensor, allowed: tuple[int, ...], raw: bytes | None = None
) -> Array:
    """Read-only array over the tensor's bytes.

    `raw`: the bytes, where the caller holds them already (each access to the message copies).

    Raises InvalidArgument naming `field` where type, shape and bytes do not fit.
    """
    data = message.raw if raw is None else raw
    fault = tensor_fault(field, message, len(data), allowed)
    if fault is not None:
        raise InvalidArgument(f"{fault.field}: {fault.description}", violations=(fault,))
    shape = tuple(int(n) for n in message.shape)
    return np.frombuffer(data, dtype=numpy_type(message.data_type)).reshape(shape)


def bitmap_bytes(bits: int) -> int:
    """Bytes of a bitmap of that many bits. bitmap_bytes(9) is 2."""
    return -(-bits // 8)


def pack_bits(mask: Mask | None) -> bytes:
    """Bitmap of a mask in row-major order, bit 0 first; None gives b"", which means all valid.

    >>> pack_bits(np.array([True, False, True])).hex()
    '05'
    """
    if mask is None or mask.size == 0:
        return b""
    return np.packbits(mask.reshape(-1), bitorder="little").tobytes()


def unpack_bits(data: bytes, shape: tuple[int, ...]) -> Mask:
    """bool array of `shape` from a bitmap of bitmap_bytes(size) bytes; padding bits are ignored.

    >>> unpack_bits(bytes([5]), (3,)).tolist()
    [True, False, True]
    """
    size = math.prod(shape)
    assert len(data) == bitmap_bytes(size), "the caller compares the length first"
    bits = np.unpackbits(np.frombuffer(data, np.uint8), count=size, bitorder="little")
    return bits.view(np.bool_).reshape(shape)


def forward_request(arrays: ForwardArrays) -> dispatch_pb2.ForwardRequest:
    """Request message of arrays. Raises InvalidArgument where a dtype is not what travels.

    Nothing else is checked here: the router does.
    """
    return dispatch_pb2.ForwardRequest(
        model=arrays.model,
        layer=arrays.layer,
        phase=dispatch_pb2.ForwardPhase.ValueType(arrays.phase),
        hidden_states=tensor(arrays.hidden, arrays.data_type),
        topk_ids=tensor(arrays.topk_ids, INT32),
        topk_weights=tensor(arrays.topk_weights, FP32),
        request_id=arrays.request_id,
        attempt=arrays.attempt,
        row_valid=pack_bits(arrays.row_valid),
        pair_valid=pack_bits(arrays.pair_valid),
        traceparent=arrays.traceparent,
        tracestate=arrays.tracestate,
    )


def output_array(response: dispatch_pb2.ForwardResponse) -> tuple[Array, int]:
    """Output [T, H] of a response as a read-only raw array, and its element type.

    Raises InvalidArgument where type, shape and bytes do not fit: the router is broken or not ours.
    """
    return tensor_array("output", response.output, HIDDEN_TYPES), int(response.output.data_type)


def request_bytes(*, rows: int, top_k: int, hidden_size: int, element_bytes: int) -> int:
    """Upper bound of the bytes of a request with both bitmaps, `REQUEST_NAMES_BYTES` included."""
    row = hidden_size * element_bytes + 8 * top_k
    return rows * row + bitmap_bytes(rows) + bitmap_bytes(rows * top_k) + REQUEST_NAMES_BYTES


ROWS_MAX = 1 << 17
"""Most rows of a request."""
PAIRS_MAX = 1 << 20
"""Most pairs of a request, k of each row."""
REQUEST_NAMES_BYTES = 2048
"""Room for everything of a request that does not grow with its rows."""


def max_rows(*, top_k: int, hidden_size: int, max_message_bytes: int) -> int:
    """Greatest rows whose request, in the widest type and with both bitmaps, fits; at least 0."""
    bits_per_row = 8 * (4 * hidden_size + 8 * top_k) + 1 + top_k
    # Two bytes for the rounding of the two bitmaps.
    fit = max(0, (max_message_bytes - REQUEST_NAMES_BYTES - 2) * 8 // bits_per_row)
    return min(fit, rows_max(top_k))


def rows_max(top_k: int) -> int:
    """Most rows of a request with k = `top_k`, however small: all may go to one shard at once."""
    return min(ROWS_MAX, PAIRS_MAX // max(top_k, 1))
