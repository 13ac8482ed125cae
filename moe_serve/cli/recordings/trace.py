"""What every reader of traces returns, and the limits that all of them keep.

Responsible for one form: expert ids of tokens, or counts of steps. Pure. Called by the readers.

A *step* is what a recording counted together: a forward pass, or what a log wrote at once.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_serve.errors import InvalidArgument, MoeServeError, ResourceExhausted
from placement.topology import NUM_PHASES

IntArray = npt.NDArray[np.integer[Any]]

FILE_BYTES_MAX = 4 << 30
"""A recording on disk, and its arrays unpacked. Declared sizes are checked before anything is
read."""
CELLS_MAX = 1 << 27
"""Counts of a trace (steps x layers x experts); each takes 8 bytes here."""
LAYERS_MAX = 1024
EXPERTS_MAX = 16_384
TOP_K_MAX = 1024
PAIRS_MAX = 1 << 50
"""Pairs of what is counted together. A float64 counts them exactly, and so many from each rank of a
folder still add up within int64."""
TRACE_PAIRS_MAX = 1 << 62
"""Pairs of a trace: no sum over it leaves int64."""


@dataclass(frozen=True, slots=True)
class TokenTrace:
    """Expert ids [tokens, layers, top_k] in request order, and the phase of each token [tokens]
    where it was recorded. notes: what was left out, for people."""

    ids: IntArray
    phase: IntArray | None = None
    notes: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        """Layers that route."""
        return int(self.ids.shape[1])

    @property
    def num_experts(self) -> int:
        """The greatest id + 1: an expert that no token chose is not seen."""
        return int(self.ids.max()) + 1


@dataclass(frozen=True, slots=True)
class CountTrace:
    """Pairs of each step, int64 [steps, layers, experts], in order of time."""

    counts: npt.NDArray[np.int64]
    notes: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        """Layers that route."""
        return int(self.counts.shape[1])

    @property
    def num_experts(self) -> int:
        """Experts a layer."""
        return int(self.counts.shape[2])


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Every fault of a file as one typed error that names it. A damaged file may raise anything in
    the libraries that open it, down to an error of memory; typed errors pass as they are."""
    try:
        yield
    except MoeServeError:
        raise
    except OSError as error:
        raise InvalidArgument(
            f"{file} cannot be read: {error.strerror or error}; check the path and its rights"
        ) from error
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise InvalidArgument(
            f"{file} is damaged or not what its name says: {reason[0] if reason else error!r}; "
            "copy or record it again"
        ) from error


def check_file(file: Path) -> None:
    """Raise InvalidArgument where it is no regular file (a pipe or device may never end), and
    ResourceExhausted where it is larger than FILE_BYTES_MAX."""
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise InvalidArgument(f"{file} is no regular file; copy the recording into one")
    size = found.st_size
    if size > FILE_BYTES_MAX:
        raise ResourceExhausted(
            f"{file}: {size} bytes, at most {FILE_BYTES_MAX} are read; cut the recording"
        )


def check_sizes(where: str, *, layers: int, experts: int, steps: int = 1) -> None:
    """Raise InvalidArgument or ResourceExhausted where a declared size is no size of a model."""
    for name, value, most in (
        ("layers", layers, LAYERS_MAX),
        ("experts", experts, EXPERTS_MAX),
    ):
        if not 1 <= value <= most:
            raise InvalidArgument(
                f"{where}: {value} {name}; 1 to {most} are read; check the order of the axes"
            )
    if steps < 1:
        raise InvalidArgument(f"{where}: no step is recorded; record some traffic first")
    if steps * layers * experts > CELLS_MAX:
        raise ResourceExhausted(
            f"{where}: {steps} steps x {layers} layers x {experts} experts are more than "
            f"{CELLS_MAX} counts; cut the recording"
        )


def whole_counts(where: str, array: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Counts as int64, rounded where they are fractional.

    Raises InvalidArgument for another kind of number, NaN, infinity, negative and absurd values,
    with the first place, and where they add up to more than PAIRS_MAX.
    """
    if array.dtype.kind not in "iuf":
        raise InvalidArgument(f"{where}: counts must be numbers, got {array.dtype}")
    if array.dtype.kind == "f":
        array = array.astype(np.float64)
    bad = ~((array >= 0) & (array <= PAIRS_MAX))  # NaN compares to nothing
    if bad.any():
        at = tuple(int(axis[0]) for axis in np.nonzero(bad))
        raise InvalidArgument(
            f"{where}{list(at)}: counts must lie in [0, {PAIRS_MAX}], got {array[at]}; record it "
            "again"
        )
    _check_total(where, array, PAIRS_MAX)
    return (np.rint(array) if array.dtype.kind == "f" else array).astype(np.int64)


def _check_total(where: str, counts: npt.NDArray[Any], most: int) -> None:
    total = float(counts.sum(dtype=np.float64))
    if total > most:
        raise InvalidArgument(
            f"{where}: the counts add up to {total:.3g} pairs, at most {most} are read; cut the "
            "recording, or check its unit"
        )


def count_trace(
    where: str, counts: npt.NDArray[np.int64], notes: tuple[str, ...] = ()
) -> CountTrace:
    """Counts [steps, layers, experts] as a trace: steps and layers without load are left out, and
    said (a dense layer routes nothing and would take slots).

    Raises InvalidArgument where nothing is left, or there are more than TRACE_PAIRS_MAX pairs.
    """
    _check_total(where, counts, TRACE_PAIRS_MAX)
    steps = counts.any(axis=(1, 2))
    layers = counts.any(axis=(0, 2))
    if not steps.any():
        raise InvalidArgument(f"{where}: every count is 0; record some traffic first")
    if not layers.all():
        idle = np.flatnonzero(~layers).tolist()
        shown = ", ".join(map(str, idle[:8])) + (", ..." if len(idle) > 8 else "")
        notes = (*notes, f"{len(idle)} layers without load left out: {shown}")
    if not steps.all():
        notes = (*notes, f"{int((~steps).sum())} steps without load left out")
    return CountTrace(counts[steps][:, layers], notes)


def to_logical(
    where: str, physical: npt.NDArray[np.int64], mapping: IntArray
) -> npt.NDArray[np.int64]:
    """Counts [steps, layers, physical] of physical experts as those of logical ones [steps, layers,
    experts]. mapping: `physical_to_logical` [layers, physical]; the greatest id + 1 are the
    experts.

    Raises InvalidArgument, ResourceExhausted.
    """
    if mapping.dtype.kind not in "iu" or mapping.shape != physical.shape[1:]:
        raise InvalidArgument(
            f"{where}: the map must be integers [layers, physical] = {list(physical.shape[1:])}, "
            f"got {mapping.dtype} {list(mapping.shape)}"
        )
    if int(mapping.min()) < 0:
        at = [int(axis[0]) for axis in np.nonzero(mapping < 0)]
        raise InvalidArgument(
            f"{where}{at}: experts must be >= 0, got {mapping[tuple(at)]}; record without empty "
            "physical experts"
        )
    steps, layers, _ = physical.shape
    experts = int(mapping.max()) + 1
    check_sizes(where, layers=layers, experts=experts, steps=steps)
    logical = np.zeros((steps, layers, experts), dtype=np.int64)
    for layer in range(layers):
        np.add.at(logical[:, layer].T, mapping[layer].astype(np.int64), physical[:, layer].T)
    return logical


def check_phase(where: str, phase: npt.NDArray[Any], tokens: int) -> IntArray:
    """Phase of each token, 0 prefill and 1 decode. Raises InvalidArgument."""
    if phase.shape != (tokens,) or phase.dtype.kind not in "iu":
        raise InvalidArgument(
            f"{where}: must be integers [{tokens}], one a token, got {phase.dtype} "
            f"{list(phase.shape)}"
        )
    if phase.size and (int(phase.min()) < 0 or int(phase.max()) >= NUM_PHASES):
        raise InvalidArgument(
            f"{where}: phases are 0 (prefill) and 1 (decode), got {phase.min()}..{phase.max()}"
        )
    return phase
