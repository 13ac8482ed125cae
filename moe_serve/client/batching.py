"""Caller's arrays -> one or several requests that fit the message limit, and the outputs joined
again. Pure.

Responsible for cutting by rows and for element types. Must never change a value. Called by
AsyncClient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import ml_dtypes
import numpy as np

from moe_serve.client.checks import Array, invalid
from moe_serve.client.model_spec import ModelSpec
from moe_serve.errors import InvalidArgument
from moe_serve.rpc.codec import (
    BF16,
    FP16,
    FP32,
    REQUEST_NAMES_BYTES,
    ForwardArrays,
    numpy_type,
    rows_max,
)
from moe_serve.rpc.options import MAX_MESSAGE_BYTES

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def raw_rows(hidden: Array) -> tuple[Array, int]:
    """Raw array and element type of hidden states: float32, float16, or bfloat16 (as
    ml_dtypes.bfloat16 or as uint16 bit patterns). Raises InvalidArgument on anything else: values
    are never cast silently."""
    if hidden.dtype == np.float32:
        return np.ascontiguousarray(hidden), FP32
    if hidden.dtype == np.float16:
        return np.ascontiguousarray(hidden), FP16
    if hidden.dtype in (_BFLOAT16, np.dtype(np.uint16)):
        return np.ascontiguousarray(hidden).view(np.uint16), BF16
    raise invalid(
        "hidden",
        f"is {hidden.dtype}; want float32, float16, ml_dtypes.bfloat16, or its uint16 bit patterns",
    )


def like_input(output: Array, hidden: Array) -> Array:
    """Output viewed as the caller's own dtype (bfloat16 comes back as what was sent)."""
    return output.view(hidden.dtype) if hidden.dtype == _BFLOAT16 else output


def split_rows(arrays: ForwardArrays, max_rows: int) -> Iterator[ForwardArrays]:
    """The same rows in parts of at most `max_rows`, in order; one part where they fit (or are
    zero).

    Parts share the request id: they are one request, in several messages.
    """
    rows = arrays.hidden.shape[0]
    if rows <= max_rows:
        yield arrays
        return
    for low in range(0, rows, max_rows):
        part = slice(low, low + max_rows)
        yield replace(
            arrays,
            hidden=arrays.hidden[part],
            topk_ids=arrays.topk_ids[part],
            topk_weights=arrays.topk_weights[part],
            row_valid=None if arrays.row_valid is None else arrays.row_valid[part],
            pair_valid=None if arrays.pair_valid is None else arrays.pair_valid[part],
        )


def rows_per_message(spec: ModelSpec, data_type: int, top_k: int) -> int:
    """Rows of one request in this element type and k, with both bitmaps, that fit the advertised
    message limit and that of our own channels.

    With 1,024 float32 elements, top-4 and 64 MiB: 16,254 rows.

    Raises InvalidArgument where not one row fits.
    """
    limit = min(spec.max_message_bytes, MAX_MESSAGE_BYTES)
    element_bytes = numpy_type(data_type).itemsize
    bits = 8 * (element_bytes * spec.hidden_size + 8 * max(top_k, 1)) + 1 + max(top_k, 1)
    # Two bytes for the rounding of the two bitmaps.
    rows = min((limit - REQUEST_NAMES_BYTES - 2) * 8 // bits, rows_max(spec.top_k))
    if rows < 1:
        raise InvalidArgument(
            f"messages have at most {limit} bytes, less than one row of hidden_size "
            f"{spec.hidden_size} with k = {top_k}: raise limits.max_message_bytes of the service"
        )
    return rows


def join_outputs(parts: Sequence[Array]) -> Array:
    """Outputs of the parts as one read-only array, in order."""
    if len(parts) == 1:
        return parts[0]
    joined = np.concatenate(parts)
    joined.flags.writeable = False
    return joined
