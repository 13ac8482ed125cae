"""Who may work now: a bounded first-in-first-out queue in front of a router's permits. Pure.

Responsible for bounds on requests and rows at work, on requests waiting, and for deadlines while
they wait. Starts no work and reads no clock. Called by the router, which starts what `Admission`
says may start and tells it what ended.

A request holds one permit and its rows from ADMITTED until `finish`. FIFO is strict: a small
request does not pass a large one that waits for rows, so nobody starves. One with more rows than
may be at work together waits until it is alone: what a single request may hold is the message
limit's business. Worked example, two permits: a and b are ADMITTED, c is WAITING; `finish(a)`
admits c.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What becomes of a request that asks."""

    ADMITTED = "admitted"
    WAITING = "waiting"
    QUEUE_FULL = "queue_full"
    TOO_LATE = "too_late"
    """Its deadline is over."""
    CLOSED = "closed"
    """The router drains."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """Requests that may start now, and waiting ones whose deadline passed, each in the order they
    asked."""

    started: tuple[int, ...] = ()
    expired: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Asked:
    rows: int
    deadline_s: float


class Admission:
    """Bounds: `permits_max` requests and `rows_max` rows at work, `queue_max` requests waiting.
    Raises ValueError where a bound lets nothing through."""

    def __init__(self, *, permits_max: int, rows_max: int, queue_max: int) -> None:
        if permits_max < 1 or rows_max < 1 or queue_max < 0:
            raise ValueError(
                f"permits_max {permits_max} and rows_max {rows_max} must be >= 1, "
                f"queue_max {queue_max} >= 0"
            )
        self._permits_max = permits_max
        self._rows_max = rows_max
        self._queue_max = queue_max
        self._at_work: dict[int, int] = {}
        self._rows = 0
        self._waiting: OrderedDict[int, _Asked] = OrderedDict()
        self._closed = False

    @property
    def at_work(self) -> int:
        """Requests that hold a permit."""
        return len(self._at_work)

    @property
    def rows_at_work(self) -> int:
        """Rows they hold."""
        return self._rows

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def ask(self, request: int, rows: int, deadline_s: float, at_s: float) -> Verdict:
        """Ask for a permit. `request`: a number not in use now; deadline_s: time after which it
        need not start."""
        assert request not in self._at_work, f"request {request} is at work"
        assert request not in self._waiting, f"request {request} is waiting"
        if self._closed:
            return Verdict.CLOSED
        if at_s >= deadline_s:
            return Verdict.TOO_LATE
        asked = _Asked(rows, deadline_s)
        if not self._waiting and self._fits(asked):
            self._start(request, asked)
            return Verdict.ADMITTED
        if len(self._waiting) >= self._queue_max:
            return Verdict.QUEUE_FULL
        self._waiting[request] = asked
        return Verdict.WAITING

    def finish(self, request: int, at_s: float) -> Admitted:
        """The request ended, however it did: its permit and rows are free. Raises KeyError for one
        not at work."""
        self._rows -= self._at_work.pop(request)
        return self._admit(at_s)

    def cancel(self, request: int, at_s: float) -> Admitted:
        """The caller gave up, or its deadline passed: takes a waiting request out, finishes one at
        work, and ignores an unknown one. What stood behind it may start."""
        if request in self._at_work:
            return self.finish(request, at_s)
        if self._waiting.pop(request, None) is None:
            return Admitted()
        return self._admit(at_s)

    def close(self) -> tuple[int, ...]:
        """Admit nothing more; the requests that waited, to be refused."""
        self._closed = True
        waiting = tuple(self._waiting)
        self._waiting.clear()
        return waiting

    def _fits(self, asked: _Asked) -> bool:
        if not self._at_work:
            return True
        return len(self._at_work) < self._permits_max and self._rows + asked.rows <= self._rows_max

    def _start(self, request: int, asked: _Asked) -> None:
        self._at_work[request] = asked.rows
        self._rows += asked.rows

    def _admit(self, at_s: float) -> Admitted:
        expired = tuple(r for r, asked in self._waiting.items() if at_s >= asked.deadline_s)
        for request in expired:
            del self._waiting[request]
        started: list[int] = []
        while self._waiting:
            request, asked = next(iter(self._waiting.items()))
            if not self._fits(asked):
                break
            del self._waiting[request]
            self._start(request, asked)
            started.append(request)
        return Admitted(tuple(started), expired)
