"""Conversion of rows and weights between the dtypes of the wire and float32.

Responsible for bit-exact widening and for rounding to nearest, ties to even. Must never convert
through float64 or change a shape. Called by the shard's server (rows in, partial sums out) and by
the compute backends (weights).

bfloat16 has no numpy dtype, so its raw form here is `uint16` holding the bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_serve.shard.kernels import narrow_bfloat16, widen_bfloat16
from moe_serve.weights.dtypes import SERVING_DTYPES, ServingDtype


def raw_dtype(dtype: ServingDtype) -> np.dtype[Any]:
    """Numpy dtype in which raw elements of `dtype` travel: float32, float16, or uint16 for
    bfloat16.

    Raises:
        ValueError: `dtype` is none of SERVING_DTYPES.
    """
    if dtype == "float32":
        return np.dtype(np.float32)
    if dtype == "float16":
        return np.dtype(np.float16)
    if dtype == "bfloat16":
        return np.dtype(np.uint16)
    raise ValueError(f"dtype: must be one of {', '.join(SERVING_DTYPES)} (got {dtype!r})")


def element_bytes(dtype: ServingDtype) -> int:
    """Bytes of one element: 4 for float32, else 2."""
    return raw_dtype(dtype).itemsize


def to_float32(
    raw: NDArray[Any], dtype: ServingDtype, out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """Widen raw elements to float32, exactly; any shape, kept.

    `raw` has the dtype of `raw_dtype(dtype)` and may be read-only. Without `out`, contiguous
    float32 input is returned as it is, everything else as a new array; with `out` (C-contiguous
    float32 of the same shape) the result is written there.

    Raises:
        TypeError: `raw` has another dtype.
        ValueError: `out` has another shape, another dtype, or is not C-contiguous.
    """
    _check_dtype("raw", raw, raw_dtype(dtype))
    if out is None and dtype == "float32":
        return np.require(raw, requirements=["C", "A"])
    result = _result(out, raw.shape, np.dtype(np.float32))
    if dtype == "bfloat16":
        bits = np.require(raw, requirements=["C", "A"]).reshape(-1)
        widen_bfloat16(bits, result.reshape(-1).view(np.uint32))
    else:
        np.copyto(result, raw)
    return result


def from_float32(
    values: NDArray[np.float32], dtype: ServingDtype, out: NDArray[Any] | None = None
) -> NDArray[Any]:
    """Round float32 to `dtype`, to nearest, ties to even; any shape, kept. What overflows becomes
    infinite.

    Returns an array of `raw_dtype(dtype)`. Without `out`, contiguous float32 asked for as float32
    is returned as it is; with `out` (C-contiguous, of that dtype and the same shape) the result is
    written there.

    Raises:
        TypeError: `values` is not float32.
        ValueError: `out` has another shape, another dtype, or is not C-contiguous.
    """
    _check_dtype("values", values, np.dtype(np.float32))
    if out is None and dtype == "float32":
        return np.require(values, requirements=["C", "A"])
    result = _result(out, values.shape, raw_dtype(dtype))
    if dtype == "bfloat16":
        bits = np.require(values, requirements=["C", "A"]).reshape(-1).view(np.uint32)
        narrow_bfloat16(bits, result.reshape(-1))
    else:
        with np.errstate(
            over="ignore"
        ):  # documented: overflow gives infinity, as the hardware's cast does
            np.copyto(result, values, casting="same_kind")
    return result


def _check_dtype(name: str, array: NDArray[Any], expected: np.dtype[Any]) -> None:
    if array.dtype != expected:
        raise TypeError(f"{name}: must be an array of {expected} (got {array.dtype})")


def _result(out: NDArray[Any] | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    if out is None:
        return np.empty(shape, dtype)
    if out.shape != shape or out.dtype != dtype or not out.flags.c_contiguous:
        raise ValueError(
            f"out: must be C-contiguous {dtype} of shape {shape} "
            f"(got {out.dtype} of shape {out.shape})"
        )
    return out
