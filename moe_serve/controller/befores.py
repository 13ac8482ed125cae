"""The placement from before each of the newest plans that moved something, so that people can go
back to it.

Responsible for keeping them in little space, in memory and in the journal's snapshots, and for
finding one again. Decides nothing. Filled by the driver, read by the admin port.

A plan changes few slots, so the newest placement is kept whole and each older one as what it has
more and less than the one after it: sixteen of 58 layers x 256 experts take little more than one.
"""

from __future__ import annotations

from typing import Final

import msgspec

from moe_serve.controller.clock import wall_s
from placement.engine.runs import QUIET_CAUSES
from placement.engine.state import PlanRun

KEPT_MAX: Final = 16
"""Placements that are kept, oldest forgotten first."""
NEWEST: Final = "newest"
"""What people call the newest plan whose placement is known; no id of a plan looks like it."""

Keys = tuple[tuple[int, ...], ...]
"""Keys (layer * num_experts + expert) by rank, ascending."""


class Before(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, and the placement as it was when it began, told from the next newer one: `more` holds
    (rank, key) that only this one has, `less` those that only the newer one has. The newest is told
    from an empty one."""

    plan_id: str
    cause: str
    wall_time_s: float
    num_ranks: int
    more: tuple[tuple[int, int], ...] = ()
    less: tuple[tuple[int, int], ...] = ()


class Befores:
    """See the module's text."""

    def __init__(self) -> None:
        self._kept: tuple[Before, ...] = ()  # newest first
        self._newest: frozenset[tuple[int, int]] = frozenset()

    @property
    def kept(self) -> tuple[Before, ...]:
        """All that is known, newest first: for the journal."""
        return self._kept

    def recall(self, kept: tuple[Before, ...]) -> None:
        """Go on with what a journal's snapshot held; () = nothing is known any more."""
        self._kept = kept[:KEPT_MAX]
        self._newest = frozenset(kept[0].more) if kept else frozenset()

    def note(self, run: PlanRun | None) -> None:
        """A plan is running: keep what was there before it, once. Plans that fill empty ranks or
        clean up move nothing and are passed over."""
        if run is None or run.cause in QUIET_CAUSES:
            return
        if any(run.plan_id == known.plan_id for known in self._kept):
            return
        slots = run.before.slots
        now = frozenset(
            (rank, key) for rank, row in enumerate(slots.tolist()) for key in row if key >= 0
        )
        older = tuple(
            msgspec.structs.replace(
                known,
                more=tuple(sorted(self._newest - now)),
                less=tuple(sorted(now - self._newest)),
            )
            for known in self._kept[:1]
        )
        newest = Before(
            plan_id=run.plan_id,
            cause=run.cause,
            wall_time_s=wall_s(),
            num_ranks=len(slots),
            more=tuple(sorted(now)),
        )
        self._kept = (newest, *older, *self._kept[1:])[:KEPT_MAX]
        self._newest = now

    def find(self, plan_id: str) -> Before | None:
        """What is known of this plan's beginning; `newest`: of the newest plan."""
        if plan_id == NEWEST:
            return self._kept[0] if self._kept else None
        return next((known for known in self._kept if known.plan_id == plan_id), None)

    def keys_of(self, before: Before) -> Keys:
        """Keys by rank of the placement before a plan that is kept."""
        pairs: set[tuple[int, int]] = set()
        for known in self._kept:
            pairs.difference_update(known.less)
            pairs.update(known.more)
            if known is before:
                break
        rows: list[list[int]] = [[] for _ in range(before.num_ranks)]
        for rank, key in sorted(pairs):
            if 0 <= rank < before.num_ranks:
                rows[rank].append(key)
        return tuple(map(tuple, rows))
