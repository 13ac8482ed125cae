"""What every reader of traces returns, and how a fault of a file is told.

Responsible for one form: expert ids of tokens, or counts of steps. The limits of counts are those
of `placement.adapters.counts`. Pure. Called by the readers.

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
from placement.adapters.counts import TooLarge, check_total
from placement.eplb import EplbError
from placement.topology import NUM_PHASES

IntArray = npt.NDArray[np.integer[Any]]

FILE_BYTES_MAX = 4 << 30
"""A recording on disk, and its arrays unpacked. Declared sizes are checked before anything is
read."""
TOP_K_MAX = 1024
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
    the libraries that open it, down to an error of memory; typed errors pass as they are, and those
    about counts name the file themselves."""
    try:
        yield
    except MoeServeError:
        raise
    except TooLarge as error:
        raise ResourceExhausted(str(error)) from error
    except EplbError as error:
        raise InvalidArgument(str(error)) from error
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


def count_trace(
    where: str, counts: npt.NDArray[np.int64], notes: tuple[str, ...] = ()
) -> CountTrace:
    """Counts [steps, layers, experts] as a trace: steps and layers without load are left out, and
    said (a dense layer routes nothing and would take slots).

    Raises InvalidArgument where nothing is left, EplbError for more than TRACE_PAIRS_MAX pairs.
    """
    check_total(where, counts, TRACE_PAIRS_MAX)
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
