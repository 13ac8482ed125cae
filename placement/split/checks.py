"""Turns arrays from callers into what the kernels were compiled for.

Responsible for: shapes, dtypes and limits of what crosses the Python face. Must never copy what
already fits (the router calls this once a batch), and never let a value change in a cast. Called by
`compiled`, `levels` and `pairs`.
"""

from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from placement.split.errors import SplitError

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
ByteArray = npt.NDArray[np.uint8]
Scalar = TypeVar("Scalar", bound=np.generic)

RANKS_MAX: Final = 1 << 16
"""Largest `num_ranks`: a guard against a mistaken argument, far above any EP group."""
EXPERTS_MAX: Final = 1 << 20
"""Largest `num_experts` of one layer, a guard of the same kind."""
TOTAL_MAX: Final = 1 << 62
"""Sum of counts and backlog must stay below this, so that no sum of loads leaves int64."""
_WORD: Final = (1 << 63) - 1
_INTEGERS: Final = (int, np.integer)
UNFIT: Final = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""All that libraries raise when numpy is handed what is no dense array."""


def size(field: str, value: int, most: int) -> int:
    """`value` as int, in [1, most]. Raises SplitError."""
    if isinstance(value, bool) or not isinstance(value, _INTEGERS):
        raise SplitError(field, f"must be an integer, got {type(value).__name__}", "pass an int")
    if not 1 <= value <= most:
        raise SplitError(field, f"must be in [1, {most}], got {value}", "pass the real size")
    return int(value)


def tie_word(tie_offset: int) -> int:
    """Any integer as the non-negative int64 that the kernels take. Raises SplitError."""
    if isinstance(tie_offset, _INTEGERS):
        return int(tie_offset) & _WORD
    raise SplitError(
        "tie_offset",
        f"must be an integer, got {type(tie_offset).__name__}",
        "pass router id + batch number",
    )


def int64_vector(field: str, values: npt.ArrayLike, length: int | None = None) -> Int64Array:
    """`values` as writable contiguous int64 [length]; itself when it is that already.

    Raises SplitError for floats, other shapes, and unsigned values of 2^63 and above.
    """
    array = _array(field, values)
    if array.ndim != 1 or (length is not None and array.shape[0] != length):
        wanted = "one axis" if length is None else f"shape ({length},)"
        raise SplitError(
            field, f"must have {wanted}, got shape {array.shape}", "pass one value for each index"
        )
    if array.dtype.kind not in "iu" and array.size > 0:
        raise SplitError(
            field, f"must hold integers, got dtype {array.dtype}", "round before the call"
        )
    if array.dtype == np.uint64 and array.size > 0 and int(array.max()) > _WORD:
        raise SplitError(
            field, f"must stay below 2^63, got {int(array.max())}", "use smaller units"
        )
    return _owned(array, np.dtype(np.int64))


def id_matrix(field: str, values: npt.ArrayLike) -> Int32Array:
    """Expert ids [T, k] as writable contiguous int32.

    An id outside int32 becomes -1, which no expert has; a cast would wrap it onto a real expert.
    Raises SplitError for other shapes and for floats.
    """
    array = _array(field, values)
    if array.ndim != 2:
        raise SplitError(
            field, f"must have shape (tokens, k), got {array.shape}", "pass one row a token"
        )
    if array.dtype.kind not in "iu" and array.size > 0:
        raise SplitError(field, f"must hold integers, got dtype {array.dtype}", "pass int32 ids")
    if array.dtype != np.int32:
        fits = (array >= 0) & (array <= np.iinfo(np.int32).max)
        ids = np.full(array.shape, -1, np.int32)
        ids[fits] = array[fits]
        return ids
    return _owned(array, np.dtype(np.int32))


def valid_matrix(values: npt.ArrayLike | None, shape: tuple[int, ...]) -> ByteArray:
    """`pair_valid` [T, k] as writable contiguous uint8; None = every pair is valid.

    Raises SplitError for other shapes and dtypes.
    """
    if values is None:
        return np.ones(shape, np.uint8)
    array = _array("pair_valid", values)
    if array.shape != shape:
        raise SplitError(
            "pair_valid", f"must have shape {shape}, got {array.shape}", "pass one flag a pair"
        )
    if array.dtype == np.bool_:
        array = array.view(np.uint8)
    elif array.dtype != np.uint8:
        raise SplitError(
            "pair_valid", f"must be bool or uint8, got {array.dtype}", "pass a boolean mask"
        )
    return _owned(array, np.dtype(np.uint8))


def _array(field: str, values: npt.ArrayLike) -> npt.NDArray[Any]:
    """What numpy makes of it. Tensors that need gradients, sparse ones, lists of unlike rows and
    objects of any kind fail in as many ways as there are libraries; all are the field's fault."""
    try:
        return np.asarray(values)
    except UNFIT as fault:
        raise SplitError(
            field,
            f"is not an array ({str(fault) or type(fault).__name__})",
            "pass a numpy array, or rows of equal length",
        ) from fault


def _owned(array: npt.NDArray[Any], dtype: np.dtype[Scalar]) -> npt.NDArray[Scalar]:
    # A read-only or strided array is another type to numba: it would compile inside a request.
    flags = array.flags
    if array.dtype == dtype and flags.c_contiguous and flags.writeable and flags.aligned:
        return array
    return np.array(array, dtype=dtype, order="C")
