"""Counts of expert load as other engines record them: the sizes and values they may have, and the
pairs of physical experts as those of logical ones.

Responsible for the one set of limits that every reader of recorded load keeps, here and in the
command line. Pure. Called by `sglang`, and by whoever opens recordings.

Example: two passes of one layer; its third slot is another replica of expert 0.

>>> to_logical("map", np.array([[[5, 2, 1]], [[0, 3, 4]]]), np.array([[0, 1, 0]])).tolist()
[[[6, 2]], [[4, 3]]]
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from placement.eplb.errors import EplbError
from placement.eplb.tensors import IntArray

CELLS_MAX: Final = 1 << 27
"""Counts of a recording (passes x layers x experts); each takes 8 bytes here."""
LAYERS_MAX: Final = 1024
EXPERTS_MAX: Final = 16_384
PAIRS_MAX: Final = 1 << 50
"""Pairs of what is counted together. A float64 counts them exactly, and so many from each of 4,096
ranks still add up within int64."""


class TooLarge(EplbError):
    """More than is kept in memory: less must be recorded, or the recording be cut."""


def check_sizes(where: str, *, layers: int, experts: int, steps: int = 1) -> None:
    """Refuse sizes that are those of no model. experts: logical or physical ones of a layer. steps:
    passes, or whatever else was counted together.

    Raises EplbError, and TooLarge where all of them are too many.
    """
    for name, value, most in (
        ("layers", layers, LAYERS_MAX),
        ("experts", experts, EXPERTS_MAX),
    ):
        if not 1 <= value <= most:
            raise EplbError(
                where, f"{value} {name}; 1 to {most} are read", "check the order of the axes"
            )
    if steps < 1:
        raise EplbError(where, "no step is recorded", "record some traffic first")
    if steps * layers * experts > CELLS_MAX:
        raise TooLarge(
            where,
            f"{steps} steps x {layers} layers x {experts} experts are more than {CELLS_MAX} counts",
            "cut the recording",
        )


def check_cells(where: str, values: object) -> None:
    """Refuse an array or tensor of more than CELLS_MAX numbers before anything is made of it: a
    stored tensor may repeat one number along an axis, so that the file it came in may be small.

    Raises TooLarge.
    """
    shape = getattr(values, "shape", ())
    cells = math.prod(shape) if isinstance(shape, tuple) else 0
    if cells > CELLS_MAX:
        raise TooLarge(where, f"{list(shape)} is more than {CELLS_MAX} numbers", "record less")


def whole_counts(where: str, array: npt.NDArray[Any]) -> IntArray:
    """Counts as int64, rounded where they are fractional.

    Raises EplbError for another kind of number, NaN, infinity, negative and absurd values, with the
    first place, and where they add up to more than PAIRS_MAX.
    """
    if array.dtype.kind not in "iuf":
        raise EplbError(where, f"counts must be numbers, got {array.dtype}", "record it again")
    if array.dtype.kind == "f":
        array = array.astype(np.float64)
    bad = ~((array >= 0) & (array <= PAIRS_MAX))  # NaN compares to nothing
    if bad.any():
        at = tuple(int(axis[0]) for axis in np.nonzero(bad))
        raise EplbError(
            f"{where}{list(at)}",
            f"counts must lie in [0, {PAIRS_MAX}], got {array[at]}",
            "record it again",
        )
    check_total(where, array, PAIRS_MAX)
    return (np.rint(array) if array.dtype.kind == "f" else array).astype(np.int64)


def check_total(where: str, counts: npt.NDArray[Any], most: int) -> None:
    """Raise EplbError where counts add up to more than `most`."""
    total = float(counts.sum(dtype=np.float64))
    if total > most:
        raise EplbError(
            where,
            f"the counts add up to {total:.3g} pairs, at most {most} are read",
            "cut the recording, or check its unit",
        )


def to_logical(
    where: str, physical: IntArray, mapping: npt.NDArray[Any], experts: int | None = None
) -> IntArray:
    """Counts [steps, layers, physical] of physical experts as those of logical ones [steps, layers,
    experts]. mapping: `physical_to_logical` [layers, physical]. experts: above every id of the map;
    None = the greatest id + 1.

    Raises EplbError.
    """
    if mapping.dtype.kind not in "iu" or mapping.shape != physical.shape[1:]:
        raise EplbError(
            where,
            f"the map must be integers [layers, physical] = {list(physical.shape[1:])}, got "
            f"{mapping.dtype} {list(mapping.shape)}",
            "pass the map that was live when this was counted",
        )
    if int(mapping.min()) < 0:
        at = [int(axis[0]) for axis in np.nonzero(mapping < 0)]
        raise EplbError(
            f"{where}{at}",
            f"experts must be >= 0, got {mapping[tuple(at)]}",
            "record without empty physical experts",
        )
    steps, layers, num_physical = physical.shape
    width = int(mapping.max()) + 1 if experts is None else experts
    check_sizes(where, layers=layers, experts=width, steps=steps)
    if experts is None and width > num_physical:
        # Each expert has a physical one at least; an id must not say how much memory is taken.
        raise EplbError(
            where,
            f"names expert {width - 1}, but {num_physical} physical experts hold at most as many",
            "pass the map that was live when this was counted",
        )
    logical = np.zeros((steps, layers, width), dtype=np.int64)
    for layer in range(layers):
        np.add.at(logical[:, layer].T, mapping[layer].astype(np.int64), physical[:, layer].T)
    return logical
