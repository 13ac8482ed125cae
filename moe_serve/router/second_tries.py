"""Retries, hedges and calls given up, as the role says and when it is time.

One timer serves all open requests: it is set while something is open that time could change, and
asks the role what that is.

Responsible for the waiting. Must never decide which call is sent again. Called by `dispatch`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from moe_serve.router.flight import Flight, error_of
from moe_serve.router.lines import RouterLines
from placement.roles.calls import Cause
from placement.roles.router import RouterRole
from placement.roles.router_records import Failure, PlanJob, Retry, Step

_PAUSE_LEAST_S = 0.001
_LATE_S = 0.01


class SecondTries:
    """Of the requests in `flights`, by request key. `launch` sends what a job planned; `settled`
    waits for a table that is being fetched; `refresh` tells the role which connections are back;
    `lines` is the router's log.
    """

    def __init__(
        self,
        role: RouterRole,
        flights: dict[int, Flight],
        clock: Callable[[], float],
        *,
        launch: Callable[[Flight, PlanJob], Awaitable[None]],
        settled: Callable[[], Awaitable[None]],
        refresh: Callable[[], bool],
        lines: RouterLines,
    ) -> None:
        self._role = role
        self._flights = flights
        self._clock = clock
        self._launch = launch
        self._settled = settled
        self._refresh = refresh
        self._lines = lines
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._stopped = False

    def apply(self, step: Step) -> None:
        """A sub-call ended: its request may have, and retries may start."""
        flight = self._flights.get(step.request_key)
        if flight is not None:
            if step.failure is not None:
                flight.fail(error_of(step.failure))
            elif step.finished:
                flight.finish()
        if self._role.waiting:
            self.start_retries()

    def start_retries(self) -> None:
        """Start what the role lets start now."""
        for retry in self._role.take_retries(self._clock()):
            flight = self._flights.get(retry.request_key)
            if flight is not None:
                flight.spawn(partial(self._retry, flight, retry))
        if self._role.waiting:
            self.arm()

    def arm(self) -> None:
        """Have the timer ring when the role wants to be asked again."""
        now_s = self._clock()
        wake_s = self._role.wake_at_s(now_s)
        if wake_s is None or self._stopped or (self._timer is not None and self._due_s <= wake_s):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due_s = max(wake_s, now_s + _PAUSE_LEAST_S)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._due_s - now_s, self._ring)

    def stop(self) -> None:
        """Ring no more."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def _ring(self) -> None:
        self._timer = None
        now_s = self._clock()
        # Where this loop itself is late, its calls look slow and are not.
        late = now_s - self._due_s > _LATE_S
        for call_id, key in () if late else self._role.hedges_due(now_s):
            flight = self._flights.get(key)
            if flight is not None:
                flight.spawn(partial(self._cover, flight, call_id, Cause.HEDGE))
        for step in self._role.overdue(now_s):
            flight = self._flights.get(step.request_key)
            if flight is not None and step.failure is not None:
                flight.fail(error_of(step.failure))
        self.start_retries()
        self.arm()

    async def _retry(self, flight: Flight, retry: Retry) -> None:
        await self._settled()
        if retry.wait_s > 0:
            await asyncio.sleep(retry.wait_s)
        await self._cover(flight, retry.call_id, Cause.RETRY)

    async def _cover(self, flight: Flight, call_id: int, cause: Cause) -> None:
        self._refresh()
        job = self._role.plan_cover(call_id, cause, self._clock())
        if isinstance(job, Failure):
            flight.fail(error_of(job))
        elif job is not None:
            request = flight.request
            self._lines.sent_again(request.request_id, request.layer, cause.name.lower())
            await self._launch(flight, job)
