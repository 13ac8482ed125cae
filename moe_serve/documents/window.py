"""A closed load window taken apart: its bytes as arrays, and the part that one phase has in it.

Worked example: 2 phases, 1 layer, 2 experts and demand bytes of [[[6, 2]], [[1, 1]]]: `counts_of`
gives that array, `of_phase(.., DECODE)` [[1, 1]] and `of_phase(.., ALL)` their sum [[7, 3]].

Responsible for refusing arrays that do not fit their declared shape. Called by page and command
line for every window that they show.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_serve.errors import FieldViolation, InvalidArgument, NotFound
from moe_serve.rpc import placement_pb2 as pb
from placement.topology import Phase

Counts = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]

CELLS_MAX = 4_194_304
"""Most cells of one array (phases x layers x experts, or ranks x slots) that are taken."""
BYTES_A_CELL = 8
_SIZES = {
    "demand": ("num_phases", "num_layers", "num_experts"),
    "executed": ("num_phases", "num_layers", "num_experts"),
    "rank_pairs": ("num_ranks", "num_layers"),
    "rank_busy": ("num_ranks", "num_phases"),
}
"""Fields with the shape of an array, by its own field."""


class PhaseChoice(StrEnum):
    """Which tokens count."""

    ALL = "all"
    PREFILL = "prefill"
    DECODE = "decode"


PHASES = {PhaseChoice.PREFILL: Phase.PREFILL, PhaseChoice.DECODE: Phase.DECODE}
"""Index of a phase in the arrays."""


def counts_of(load: pb.GetLoadResponse, field: str) -> Counts:
    """`demand` or `executed` [phases, layers, experts], or `rank_pairs` [ranks, layers], in pairs.
    Raises InvalidArgument naming the field."""
    counts: Counts = _array(load, field, "<i8").astype(np.int64)
    if counts.min(initial=0) < 0:
        raise InvalidArgument(f"{field} of window {load.window}: counts must not be negative")
    return counts


def busy_of(load: pb.GetLoadResponse) -> Seconds:
    """Seconds of compute [ranks, phases]. Raises InvalidArgument."""
    return _array(load, "rank_busy", "<f8").astype(np.float64)


def _array(load: pb.GetLoadResponse, field: str, kind: str) -> npt.NDArray[Any]:
    data: bytes = getattr(load, field)
    sizes = _SIZES[field]
    shape = tuple(getattr(load, size) for size in sizes)
    wanted = " x ".join(f"{size} {n}" for size, n in zip(sizes, shape, strict=True))
    cells = math.prod(shape)
    # A size beside one of zero is bounded too: sums over the one have the other's cells.
    if min(shape) < 0 or math.prod(max(1, size) for size in shape) > CELLS_MAX:
        raise InvalidArgument(
            f"{field} of window {load.window}: {wanted} must be 0 to {CELLS_MAX} cells"
        )
    if len(data) != BYTES_A_CELL * cells:
        raise InvalidArgument(
            f"{field} of window {load.window} has {len(data)} bytes, not {BYTES_A_CELL} for each "
            f"of {wanted}; is the service of another version?"
        )
    found: npt.NDArray[Any] = np.frombuffer(data, dtype=kind).reshape(shape)
    return found


def of_phase(array: npt.NDArray[Any], phase: PhaseChoice, *, axis: int = 0) -> npt.NDArray[Any]:
    """What one phase has in an array whose `axis` is phases, or the sum of all. An array without
    phases is of no window, and nothing is in it. Raises NotFound, field `phase`, where the service
    does not tell it apart."""
    number = PHASES.get(phase)
    counted = array.shape[axis]
    if number is None or not counted:
        return np.asarray(array.sum(axis=axis))
    if number >= counted:
        told = f"this service has no phase {phase.value}"
        raise NotFound(told, violations=(FieldViolation("phase", f"{told}, it counts {counted}"),))
    found: npt.NDArray[Any] = array.take(int(number), axis=axis)
    return found
