"""Arrays in, arrays out: numpy as it is, torch tensors by what they can do.

Responsible for: turning what callers hold into numpy and results into the kind that came in. Must
never import torch; a tensor is whatever has the methods of `TensorLike`. Called by `placement.eplb`
and `placement.adapters`.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from placement.eplb.errors import EplbError
from placement.split.checks import UNFIT

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@runtime_checkable
class TensorLike(Protocol):
    """What is used of a torch tensor."""

    def detach(self) -> Any:
        """Without gradient."""
        ...

    def cpu(self) -> Any:
        """In host memory."""
        ...

    def double(self) -> Any:
        """As float64: numpy knows no bfloat16."""
        ...

    def is_floating_point(self) -> bool:
        """Whether it holds real numbers that may be fractions."""
        ...

    def long(self) -> Any:
        """As int64."""
        ...

    def new_tensor(self, data: Any) -> Any:
        """A tensor of this one's dtype and device."""
        ...


def to_array(name: str, values: object) -> npt.NDArray[Any]:
    """What numpy makes of `values`; fractions of tensors as float64. Raises EplbError.

    Tensors without data, sparse ones, lists of unlike rows and objects of any kind fail in as many
    ways as there are libraries; all are the argument's fault.
    """
    try:
        if not isinstance(values, TensorLike):
            return np.asarray(values)
        tensor = values.detach().cpu()
        return np.asarray((tensor.double() if tensor.is_floating_point() else tensor).numpy())
    except UNFIT as fault:
        raise EplbError(
            name,
            f"is not an array ({str(fault) or type(fault).__name__})",
            "pass a dense array or tensor, or rows of equal length",
        ) from fault


def to_float(name: str, values: object) -> FloatArray:
    """`values` as float64, any shape. Raises EplbError where it is no array of real numbers."""
    array = to_array(name, values)
    if array.dtype.kind not in "biuf":
        raise EplbError(
            name, f"must hold real numbers, got dtype {array.dtype}", "pass integers or floats"
        )
    with np.errstate(over="ignore"):  # of a longer float: infinite here, which the caller refuses
        return array.astype(np.float64)


def summed(load: FloatArray) -> FloatArray:
    """[intervals, layers, experts] as one load [layers, experts], in shares of an interval: a sum
    may leave what a float holds."""
    with np.errstate(invalid="ignore"):  # infinities, which the caller refuses
        mean: FloatArray = (load / len(load)).sum(axis=0) if len(load) else load.sum(axis=0)
    return mean


def to_int(name: str, values: object) -> IntArray:
    """`values` as int64, any shape. Raises EplbError for other dtypes and for 2^63 and above."""
    array = to_array(name, values)
    if array.dtype.kind not in "iu":
        raise EplbError(name, f"must hold integers, got dtype {array.dtype}", "pass int64")
    if array.dtype == np.uint64 and array.size and int(array.max()) >= 1 << 63:
        raise EplbError(name, f"must stay below 2^63, got {int(array.max())}", "pass int64")
    return array.astype(np.int64)


def in_kind_of(model: object, array: IntArray) -> Any:
    """`array` as the kind `model` is: an int64 tensor in host memory for a tensor, else itself.

    The public function computes on the host and returns host tensors, whatever device `weight` is
    on; so does this one.
    """
    if isinstance(model, TensorLike):
        return model.detach().cpu().long().new_tensor(array)
    return array
