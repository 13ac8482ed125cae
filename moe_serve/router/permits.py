"""Permits of a router: who waits, who works, who is refused, as `placement.roles.admission` says.

Responsible for the waiting itself and for the errors that refusals are. Must never choose who is
next. Called by `dispatch`; only one loop may use it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from moe_serve.errors import DeadlineExceeded, MoeServeError, ResourceExhausted, Unavailable
from placement.roles.admission import Admission, Admitted, Verdict

BUSY_RETRY_S = 0.05
"""Wait that a refused caller is told."""


class Permits:
    """One permit a request between acceptance and answer.

    Worked example: two permits, one place to wait. a and b work, c waits, d is refused; when a
    gives its permit back, c has it.
    """

    def __init__(self, admission: Admission, clock: Callable[[], float]) -> None:
        self._admission = admission
        self._clock = clock
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._next = 0
        self.refused = 0
        """Requests that got no permit: the queue was full, their time was over, or the router
        stops."""

    @property
    def requests(self) -> int:
        """Requests at work."""
        return self._admission.at_work

    @property
    def rows(self) -> int:
        """Rows at work."""
        return self._admission.rows_at_work

    @property
    def waiting(self) -> int:
        """Requests that wait for a permit."""
        return self._admission.waiting

    def counters(self) -> dict[str, float]:
        """How many are at work and wait now, and how many were refused since the start."""
        return {
            "open_requests": float(self.requests),
            "open_rows": float(self.rows),
            "waiting_requests": float(self.waiting),
            "rejected": float(self.refused),
        }

    async def take(self, rows: int, deadline_at_s: float) -> int:
        """Wait for a permit, no longer than until `deadline_at_s`; give it back with `give_back`.

        Raises ResourceExhausted (the queue is full), DeadlineExceeded, Unavailable (closed).
        """
        self._next += 1
        permit = self._next
        verdict = self._admission.ask(permit, rows, deadline_at_s, self._clock())
        if verdict is Verdict.ADMITTED:
            return permit
        if verdict is not Verdict.WAITING:
            self.refused += 1
            raise self._refusal(verdict, rows)
        turn = self._waiting[permit] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(deadline_at_s - self._clock()):
                await turn
        except TimeoutError:
            self._leave(permit)
            self.refused += 1
            raise self._refusal(Verdict.TOO_LATE, rows) from None
        except MoeServeError:
            self.refused += 1
            raise
        except asyncio.CancelledError:
            self._leave(permit)
            raise
        finally:
            self._waiting.pop(permit, None)
        return permit

    def give_back(self, permit: int) -> None:
        """The request ended, however it did."""
        self._tell(self._admission.finish(permit, self._clock()))

    def close(self) -> None:
        """Give no more permits; who waits is refused."""
        for permit in self._admission.close():
            self._end(permit, self._refusal(Verdict.CLOSED, 0))

    def _leave(self, permit: int) -> None:
        self._tell(self._admission.cancel(permit, self._clock()))

    def _tell(self, admitted: Admitted) -> None:
        for permit in admitted.expired:
            self._end(permit, self._refusal(Verdict.TOO_LATE, 0))
        for permit in admitted.started:
            self._end(permit, None)

    def _end(self, permit: int, error: MoeServeError | None) -> None:
        """End a wait. One that was cancelled meanwhile takes itself out when it runs next."""
        turn = self._waiting[permit]
        if turn.done():
            return
        if error is None:
            turn.set_result(None)
        else:
            turn.set_exception(error)

    def _refusal(self, verdict: Verdict, rows: int) -> MoeServeError:
        if verdict is Verdict.CLOSED:
            return Unavailable("the router is shutting down; use another one")
        if verdict is Verdict.TOO_LATE:
            return DeadlineExceeded("the deadline passed before the router had room; try later")
        return ResourceExhausted(
            f"{self.requests} requests of {self.rows} rows are in work and {self.waiting} wait; "
            f"there is no room for {rows} rows more; retry or use another router",
            retry_after_s=BUSY_RETRY_S,
        )
