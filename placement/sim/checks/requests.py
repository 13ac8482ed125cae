"""I10, every request ends in time, and I11, a bad one harms nobody.

Responsible for these two.
"""

from __future__ import annotations

from placement.messages.history import (
    Began,
    Died,
    Paused,
    RequestEnded,
    RequestOpened,
    Resumed,
    RouterHolds,
    RowsServed,
)
from placement.sim.checks.base import InvariantBroken, Rules

LATE_S = 0.05
"""A request may end so long after its deadline."""
CAUSES = frozenset({"fault", "left", "replaced", "fenced", "stray"})


class Termination:
    """I10: each request ends once, at most 50 ms after its deadline (or after the end of a pause of
    its router), unless its router died; a router at rest holds no permit, call or sub-call. late_s:
    another limit than 50 ms."""

    def __init__(self, *, late_s: float = LATE_S) -> None:
        self._late_s = late_s
        self._open: dict[str, dict[int, float]] = {}
        self._paused: set[str] = set()
        self._resumed_s: dict[str, float] = {}

    def rules(self) -> Rules:
        """See `Checker`."""
        return {
            RequestOpened: self._opened,
            RequestEnded: self._ended,
            Died: self._died,
            Paused: self._pause,
            Resumed: self._resume,
            RouterHolds: self._holds,
        }

    def _opened(self, fact: RequestOpened) -> None:
        self._open.setdefault(fact.who, {})[fact.request] = fact.deadline_at_s

    def _ended(self, fact: RequestEnded) -> None:
        deadline_s = self._open.get(fact.who, {}).pop(fact.request, None)
        if deadline_s is None:
            raise InvariantBroken(f"I10: request {fact.request} of {fact.who} ended without life")
        latest_s = max(deadline_s, self._resumed_s.get(fact.who, 0.0)) + self._late_s
        if fact.at_s > latest_s:
            raise InvariantBroken(
                f"I10: request {fact.request} of {fact.who} ended at {fact.at_s:.3f} s, its "
                f"deadline was {deadline_s:.3f} s"
            )

    def _died(self, fact: Died) -> None:
        self._open.pop(fact.who, None)

    def _pause(self, fact: Paused) -> None:
        self._paused.add(fact.who)

    def _resume(self, fact: Resumed) -> None:
        self._paused.discard(fact.who)
        self._resumed_s[fact.who] = fact.at_s

    def _holds(self, fact: RouterHolds) -> None:
        held = (fact.permits, fact.rows, fact.waiting, fact.calls, fact.sub_calls)
        if any(held):
            raise InvariantBroken(
                f"I10: {fact.who} at rest holds (permits, rows, waiting, calls, sub-calls) {held}"
            )

    def finish(self) -> None:
        """See `Checker`."""
        left = {who: sorted(those)[:4] for who, those in self._open.items() if those}
        if left:
            raise InvariantBroken(f"I10: requests never ended: {left}")


class Isolation:
    """I11: a request that names what does not exist is refused as such, and no shard works for it;
    no life ends but by a fault that was done to it, or because it was replaced."""

    def __init__(self) -> None:
        self._bad: set[int] = set()
        self._began: set[str] = set()

    def rules(self) -> Rules:
        """See `Checker`."""
        return {
            Began: self._life,
            Died: self._died,
            RequestOpened: self._opened,
            RowsServed: self._served,
            RequestEnded: self._ended,
        }

    def _life(self, fact: Began) -> None:
        if fact.who in self._began:
            raise InvariantBroken(f"I11: {fact.who} began twice")
        self._began.add(fact.who)

    def _died(self, fact: Died) -> None:
        if fact.cause not in CAUSES:
            raise InvariantBroken(f"I11: {fact.who} ended: {fact.cause}")

    def _opened(self, fact: RequestOpened) -> None:
        if not fact.sound:
            self._bad.add(fact.request)

    def _served(self, fact: RowsServed) -> None:
        if fact.request in self._bad:
            raise InvariantBroken(f"I11: {fact.who} worked for bad request {fact.request}")

    def _ended(self, fact: RequestEnded) -> None:
        bad = fact.request in self._bad
        if bad != (fact.outcome == "invalid_argument"):
            raise InvariantBroken(f"I11: request {fact.request}, bad: {bad}, ended {fact.outcome}")

    def finish(self) -> None:
        """See `Checker`."""
