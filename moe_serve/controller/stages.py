"""Where the time of requests went lately, by all routers together.

Routers tell totals since their start; what was new in each report is kept for a while, so that the
newest seconds can be looked at alone.

The first report of a router that this controller has not met before is where counting begins: it
may have run for hours under an earlier one. A later life of a router that is known begins at zero.

Worked example: r0 tells 100 requests at 10.0 s, 130 at 10.5 s and, in its next life, 20 at 40.0 s:
30 are new at 10.5 s and 20 at 40.0 s, so `since(30.0)` has 20 of them and `total` 50.

Responsible for these differences. Must never be read by anything that decides. Fed by polls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from moe_serve.stage_counts import STAGE_BOUNDS_S, STAGES, StageCounts
from placement.topology import NUM_PHASES

KEPT_S: Final = 600.0
"""How long what was new is kept."""
GRAIN_S: Final = 1.0
"""Reports of so much time are kept as one, whatever the number of routers."""
ENTRIES_MAX: Final = int(KEPT_S / GRAIN_S)
_SHAPE: Final = (NUM_PHASES, len(STAGES), len(STAGE_BOUNDS_S) + 1)
_COUNTS: Final = ("sub_calls", "pairs", "last")
_SECONDS: Final = ("late_s", "wire_s", "wait_s", "compute_s")


@dataclass(slots=True)
class _Entry:
    """What was new in the reports of `GRAIN_S` from `first_s` on."""

    first_s: float
    counts: StageCounts


class StageFolder:
    """Of one life of the controller. Times are driver times."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[int, StageCounts]] = {}
        """Router -> (its life, what it told last)."""
        self._entries: deque[_Entry] = deque(maxlen=ENTRIES_MAX)
        self.total = no_counts()
        """All that was new so far."""

    def add(self, router: str, incarnation: int, counts: StageCounts, at_s: float) -> None:
        """A router reported these totals. Those of another release, which counts other stages or
        in other buckets, are left out."""
        if not _ours(counts):
            return
        life, before = self._told.get(router, (incarnation, counts))
        if incarnation < life:
            return  # a late word of a life that is over
        self._told[router] = incarnation, counts
        new = difference(counts, before) if incarnation == life else counts
        if not new.requests.any():
            return
        self.total = together((self.total, new))
        self._forget(at_s)
        newest = self._entries[-1] if self._entries else None
        if newest is not None and at_s - newest.first_s < GRAIN_S:
            newest.counts = together((newest.counts, new))
        else:
            self._entries.append(_Entry(at_s, new))

    def since(self, at_s: float) -> StageCounts:
        """Sum of what was reported new after `at_s`, to `GRAIN_S`; at most the last `KEPT_S`."""
        found = []
        for entry in reversed(self._entries):
            if entry.first_s <= at_s:
                break
            found.append(entry.counts)
        return together(found)

    def _forget(self, at_s: float) -> None:
        while self._entries and self._entries[0].first_s <= at_s - KEPT_S:
            self._entries.popleft()


def no_counts() -> StageCounts:
    """Nothing counted, of no rank."""
    return together(())


def together(some: Iterable[StageCounts]) -> StageCounts:
    """Their sum; ranks as many as in the longest."""
    return _folded(tuple(some), lambda arrays: np.sum(arrays, axis=0))


def difference(later: StageCounts, earlier: StageCounts) -> StageCounts:
    """What `later` has more than `earlier`, totals of one life."""
    return _folded((later, earlier), lambda arrays: arrays[0] - arrays[1])


def _folded(
    some: tuple[StageCounts, ...], fold: Callable[[list[npt.NDArray[Any]]], npt.NDArray[Any]]
) -> StageCounts:
    """Field by field; what a rank has not done yet is 0."""
    num_ranks = max((len(one.sub_calls) for one in some), default=0)
    shapes = {"requests": _SHAPE, "seconds": _SHAPE[:2]}
    folded: dict[str, npt.NDArray[Any]] = {}
    for name in ("requests", "seconds", *_COUNTS, *_SECONDS):
        kind = np.int64 if name == "requests" or name in _COUNTS else np.float64
        shape = shapes.get(name, (num_ranks,))
        arrays = [_longer(getattr(one, name), shape, kind) for one in some]
        folded[name] = fold(arrays) if arrays else np.zeros(shape, kind)
    return StageCounts(**folded)


def _longer(
    array: npt.NDArray[Any], shape: tuple[int, ...], kind: type[np.generic]
) -> npt.NDArray[Any]:
    if array.shape == shape:
        return array
    longer = np.zeros(shape, kind)
    longer[: len(array)] = array
    return longer


def _ours(counts: StageCounts) -> bool:
    """Whether it counts by the stages and buckets of this release."""
    lengths = {getattr(counts, name).shape for name in (*_COUNTS, *_SECONDS)}
    return (
        counts.requests.shape == _SHAPE
        and counts.seconds.shape == _SHAPE[:2]
        and len(lengths) == 1
        and len(lengths.pop()) == 1
    )
