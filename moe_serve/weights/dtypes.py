"""Number formats: what a checkpoint may store and what experts may be served in.

Responsible for: names of dtypes, their numpy forms, and finding non-finite values bit by bit.
Must never: open files.
Called by: the other modules of `moe_serve.weights`, and users of canonical bytes.

Example: a checkpoint stores "BF16" (the safetensors code); it is served as "bfloat16".
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final, Literal, get_args

import ml_dtypes
import numpy as np
import numpy.typing as npt

from moe_serve.weights.errors import UnsupportedCheckpoint, shown

ServingDtype = Literal["float32", "float16", "bfloat16"]
"""Formats in which experts are held and computed."""

SERVING_DTYPES: Final[tuple[ServingDtype, ...]] = get_args(ServingDtype)

STORED_TO_SERVING: Final = MappingProxyType[str, ServingDtype](
    {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
)
"""Safetensors codes that an expert tensor may have, and the same format as a serving dtype."""

STORED_BITS: Final = MappingProxyType(
    {
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
        "BOOL": 8,
        "U8": 8,
        "I8": 8,
        "F8_E5M2": 8,
        "F8_E4M3": 8,
        "F8_E8M0": 8,
        "F8_E4M3FNUZ": 8,
        "F8_E5M2FNUZ": 8,
        "I16": 16,
        "U16": 16,
        "F16": 16,
        "BF16": 16,
        "I32": 32,
        "U32": 32,
        "F32": 32,
        "C64": 64,
        "I64": 64,
        "U64": 64,
        "F64": 64,
    }
)
"""Bits of one element for every safetensors code whose byte length can be checked."""

_READABLE: Final = MappingProxyType[str, npt.DTypeLike](
    {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "I16": np.int16,
        "U16": np.uint16,
        "I32": np.int32,
        "U32": np.uint32,
        "I64": np.int64,
        "U64": np.uint64,
        "F16": np.float16,
        "F32": np.float32,
        "F64": np.float64,
        "BF16": ml_dtypes.bfloat16,
    }
)

_SCAN_CHUNK = 1 << 18
"""Elements looked at in one step of the scan, so that its temporaries stay under 2 MiB."""


def serving_dtype(name: str) -> ServingDtype:
    """Check that `name` is a serving dtype and return it; else raise `UnsupportedCheckpoint`."""
    for known in SERVING_DTYPES:
        if name == known:
            return known
    raise UnsupportedCheckpoint(
        f"serving dtype {shown(name)} is not supported: choose one of {', '.join(SERVING_DTYPES)}"
    )


def numpy_dtype(dtype: ServingDtype) -> np.dtype[Any]:
    """The numpy dtype of a serving dtype (bfloat16 comes from `ml_dtypes`)."""
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def stored_numpy_dtype(code: str, tensor: str) -> np.dtype[Any]:
    """The numpy dtype for safetensors `code`; `UnsupportedCheckpoint` if numpy has none."""
    if code not in _READABLE:
        raise UnsupportedCheckpoint(
            f"tensor {shown(tensor)} has dtype {code}, which cannot be read as a plain array; "
            "convert the checkpoint to float32, float16 or bfloat16"
        )
    return np.dtype(_READABLE[code])


def first_non_finite(matrix: npt.NDArray[Any]) -> tuple[int, int] | None:
    """(row, column) of the first NaN or infinity of a float16, bfloat16 or float32 matrix, or None.

    A value is non-finite exactly if all its exponent bits are set. Comparing bits is several
    times faster than `isfinite` for bfloat16, and never converts.
    """
    bits, exponent = _bits_and_exponent(matrix.dtype)
    num_rows, num_columns = matrix.shape
    rows_a_step = max(1, _SCAN_CHUNK // max(1, num_columns))
    for start in range(0, num_rows, rows_a_step):
        chunk = matrix[start : start + rows_a_step].view(bits)
        bad = (chunk & exponent) == exponent
        if bad.any():
            row, column = divmod(int(bad.argmax()), num_columns)
            return start + row, column
    return None


def _bits_and_exponent(dtype: np.dtype[Any]) -> tuple[type[np.unsignedinteger[Any]], Any]:
    if dtype == np.dtype(np.float32):
        return np.uint32, np.uint32(0x7F800000)
    if dtype == np.dtype(np.float16):
        return np.uint16, np.uint16(0x7C00)
    assert dtype == np.dtype(ml_dtypes.bfloat16), f"no exponent mask for {dtype}"
    return np.uint16, np.uint16(0x7F80)
