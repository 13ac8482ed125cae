"""The placement from before each of the newest plans that began to move something, so that people
can go back to it, whatever became of the plan.

Responsible for keeping them in little space, in memory and in the journal's snapshots, and for
finding one again. Decides nothing. Filled by the driver, read by the admin port.

Most plans change few slots, so the newest placement is kept whole and each older one as what it has
more and less than the one after it: sixteen of 58 layers x 256 experts then take little more than
one, and at most 31 times as much, where every plan changes every slot.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from moe_serve.controller.clock import wall_s
from placement.engine.runs import QUIET_CAUSES
from placement.engine.state import PlanRun

KEPT_MAX: Final = 16
"""Placements that are kept, oldest forgotten first."""
NEWEST: Final = "newest"
"""What people call the newest plan whose placement is known; no id of a plan looks like it."""

Keys = tuple[tuple[int, ...], ...]
"""Keys (layer * num_experts + expert) by rank, ascending."""
Pairs = tuple[tuple[int, int], ...]
"""(rank, key), ascending."""
_KEY_BITS: Final = 32


class Before(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, and the placement as it was when it began, told from the next newer one: `more` holds
    (rank, key) that only this one has, `less` those that only the newer one has. The newest is told
    from an empty one."""

    plan_id: str
    cause: str
    wall_time_s: float
    num_ranks: int
    more: Pairs = ()
    less: Pairs = ()


class Befores:
    """See the module's text."""

    def __init__(self) -> None:
        self._kept: tuple[Before, ...] = ()  # newest first
        self._newest = _codes(())
        """The newest placement; `_kept` tells it only once somebody asks."""

    @property
    def kept(self) -> tuple[Before, ...]:
        """All that is known, newest first: for the journal."""
        if len(self._newest) and not self._kept[0].more:
            newest = msgspec.structs.replace(self._kept[0], more=_pairs(self._newest))
            self._kept = (newest, *self._kept[1:])
        return self._kept

    def recall(self, kept: tuple[Before, ...]) -> None:
        """Go on with what a journal's snapshot held; () = nothing is known any more."""
        self._kept = kept[:KEPT_MAX]
        self._newest = _codes(kept[0].more if kept else ())

    def note(self, run: PlanRun | None) -> None:
        """A plan is running: keep what was there before it, once. Plans that only fill what is
        empty or clean up are passed over: nobody wants to go back to before them."""
        if run is None or run.cause in QUIET_CAUSES:
            return
        if any(run.plan_id == known.plan_id for known in self._kept):
            return
        slots = run.before.slots
        rank, slot = np.nonzero(slots >= 0)
        now = _ascending(rank.astype(np.int64) << _KEY_BITS | slots[rank, slot])
        older = tuple(
            msgspec.structs.replace(
                known,
                more=_pairs(np.setdiff1d(self._newest, now, assume_unique=True)),
                less=_pairs(np.setdiff1d(now, self._newest, assume_unique=True)),
            )
            for known in self._kept[:1]
        )
        newest = Before(
            plan_id=run.plan_id,
            cause=run.cause,
            wall_time_s=wall_s(),
            num_ranks=len(slots),
        )
        self._kept = (newest, *older, *self._kept[1:])[:KEPT_MAX]
        self._newest = now

    def find(self, plan_id: str) -> Before | None:
        """What is known of this plan's beginning; `newest`: of the newest plan."""
        if plan_id == NEWEST:
            return self.kept[0] if self._kept else None
        return next((known for known in self.kept if known.plan_id == plan_id), None)

    def keys_of(self, before: Before) -> Keys:
        """Keys by rank of the placement before a plan that is kept."""
        pairs: set[tuple[int, int]] = set()
        for known in self.kept:
            pairs.difference_update(known.less)
            pairs.update(known.more)
            if known is before:
                break
        rows: list[list[int]] = [[] for _ in range(before.num_ranks)]
        for rank, key in sorted(pairs):
            if 0 <= rank < before.num_ranks:
                rows[rank].append(key)
        return tuple(map(tuple, rows))


def _codes(pairs: Pairs) -> npt.NDArray[np.int64]:
    """(rank, key) as one number each, ascending. What a damaged row names that can be neither is
    left out."""
    most = 1 << _KEY_BITS - 1
    known = [r << _KEY_BITS | key for r, key in pairs if 0 <= r < most and 0 <= key < most]
    return _ascending(np.array(known, np.int64))


def _ascending(codes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Each once. `np.unique` takes ten times as long."""
    ordered = np.sort(codes)
    found: npt.NDArray[np.int64] = ordered[np.diff(ordered, prepend=-1) > 0]
    return found


def _pairs(codes: npt.NDArray[np.int64]) -> Pairs:
    """The other way round, in the same order."""
    rank, key = codes >> _KEY_BITS, codes & ((1 << _KEY_BITS) - 1)
    return tuple(zip(rank.tolist(), key.tolist(), strict=True))
