"""Who may work now: a bounded first-in-first-out queue in front of a router's permits. Pure.

Responsible for bounds on requests and bytes at work, on requests waiting, and for deadlines while
they wait. Starts no work and reads no clock. Called by the router, which starts what `Admission`
says may start and tells it what ended.

A request holds one permit and its bytes from ADMITTED until `finish`. FIFO is strict: a small
request does not pass a large one that waits for bytes, so nobody starves. Worked example, two
permits: a and b are ADMITTED, c is WAITING; `finish(a)` admits c.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What becomes of a request that asks."""

    ADMITTED = "admitted"
    WAITING = "waiting"
    TOO_LARGE = "too_large"
    """More bytes than may ever be at work: waiting would not help."""
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
    size_bytes: int
    deadline_s: float


class Admission:
    """Bounds: `permits_max` requests and `bytes_max` bytes at work, `queue_max` requests
    waiting."""

    def __init__(self, *, permits_max: int, bytes_max: int, queue_max: int) -> None:
        if permits_max < 1 or bytes_max < 1 or queue_max < 0:
            raise ValueError(
                f"permits_max {permits_max} and bytes_max {bytes_max} must be >= 1, "
                f"queue_max {queue_max} >= 0"
            )
        self._permits_max = permits_max
        self._bytes_max = bytes_max
        self._queue_max = queue_max
        self._at_work: dict[int, int] = {}
        self._bytes = 0
        self._waiting: OrderedDict[int, _Asked] = OrderedDict()
        self._closed = False

    @property
    def at_work(self) -> int:
        """Requests that hold a permit."""
        return len(self._at_work)

    @property
    def bytes_at_work(self) -> int:
        """Bytes they hold."""
        return self._bytes

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def ask(self, request: int, size_bytes: int, deadline_s: float, at_s: float) -> Verdict:
        """Ask for a permit. `request`: a number not in use now; deadline_s: time after which it
        need not start."""
        assert request not in self._at_work, f"request {request} is at work"
        assert request not in self._waiting, f"request {request} is waiting"
        if self._closed:
            return Verdict.CLOSED
        if size_bytes > self._bytes_max:
            return Verdict.TOO_LARGE
        if at_s >= deadline_s:
            return Verdict.TOO_LATE
        asked = _Asked(size_bytes, deadline_s)
        if not self._waiting and self._fits(asked):
            self._start(request, asked)
            return Verdict.ADMITTED
        if len(self._waiting) >= self._queue_max:
            return Verdict.QUEUE_FULL
        self._waiting[request] = asked
        return Verdict.WAITING

    def finish(self, request: int, at_s: float) -> Admitted:
        """The request ended, however it did: its permit and bytes are free. Raises KeyError for one
        not at work."""
        self._bytes -= self._at_work.pop(request)
        return self._admit(at_s)

    def cancel(self, request: int, at_s: float) -> Admitted:
        """The caller gave up: takes a waiting request out, finishes one at work, and ignores an
        unknown one."""
        if request in self._at_work:
            return self.finish(request, at_s)
        if self._waiting.pop(request, None) is None:
            return Admitted()
        return self._admit(at_s)

    def expire(self, at_s: float) -> Admitted:
        """Take out waiting requests whose deadline is over; what stood behind a large one may
        start."""
        return self._admit(at_s)

    def next_deadline_s(self) -> float | None:
        """Earliest deadline among waiting requests: when `expire` should be called."""
        return min((asked.deadline_s for asked in self._waiting.values()), default=None)

    def close(self) -> tuple[int, ...]:
        """Admit nothing more; the requests that waited, to be refused."""
        self._closed = True
        waiting = tuple(self._waiting)
        self._waiting.clear()
        return waiting

    def _fits(self, asked: _Asked) -> bool:
        return (
            len(self._at_work) < self._permits_max
            and self._bytes + asked.size_bytes <= self._bytes_max
        )

    def _start(self, request: int, asked: _Asked) -> None:
        self._at_work[request] = asked.size_bytes
        self._bytes += asked.size_bytes

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
