"""Replacing a router that serves by a new one, on request.

Responsible for the order: another router serves, then this one ends its open calls, then it leaves
the acknowledging set, and the engine has it replaced as any that is gone. What has begun goes on
where whoever asked waits no more. Must never create a part. Called by the life.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from moe_serve.controller.creation import ROUTER_GRACE_S, Welcome, drain_router
from moe_serve.controller.parts import PartTable, RouterPart
from moe_serve.controller.tasks import Tasks
from moe_serve.errors import FailedPrecondition, Unavailable
from moe_serve.ports import Fleet
from placement.messages.events import AnyEvent, RouterLeft


class RouterReplacement:
    """Of one life of the controller. serves: whether a router is in use now, by its name."""

    def __init__(
        self,
        service_id: str,
        fleet: Fleet,
        *,
        parts: PartTable,
        host: Welcome,
        tasks: Tasks,
        post: Callable[[AnyEvent], Awaitable[None]],
        serves: Callable[[str], bool],
    ) -> None:
        self._service_id = service_id
        self._fleet = fleet
        self._parts = parts
        self._host = host
        self._tasks = tasks
        self._post = post
        self._serves = serves
        self._under_way: set[str] = set()

    async def replace(self, router: str, incarnation: int, *, accept_gap: bool) -> str:
        """End the router and have a new one made. Returns a sentence for people, once the old one
        has ended its open calls. incarnation: of the life that is to go, 0 = the present one.

        Raises FailedPrecondition where no other router serves or that life never was, Unavailable
        where it is not there.
        """
        part = self._parts.routers.get(router)
        if part is None or router in self._under_way:
            raise Unavailable(f"{router} is being started or ended; ask again")
        if incarnation and part.name.incarnation > incarnation:
            return f"{router} is a newer one already"
        if incarnation > part.name.incarnation:
            raise FailedPrecondition(
                f"{router} has no life {incarnation}; its newest is {part.name.incarnation}, look "
                "at the placement again"
            )
        leaving = {router, *self._under_way}
        others = [name for name in self._parts.routers.keys() - leaving if self._serves(name)]
        if not others and not accept_gap:
            raise FailedPrecondition(
                f"no other router serves, so calls would fail until {router} is back; start the "
                "service with two routers, or accept the gap"
            )
        self._under_way.add(router)
        await asyncio.shield(self._tasks.spawn(self._end(router, part)))
        return f"{router} has ended its calls and is replaced"

    async def _end(self, router: str, part: RouterPart) -> None:
        try:
            await drain_router(self._fleet, self._service_id, str(part.name), ROUTER_GRACE_S)
        finally:
            self._under_way.discard(router)
        if self._parts.holds(part):
            self._parts.drop(part)
            self._host.farewell(part)
            reason = "it is replaced on request"
            await self._post(RouterLeft(at_s=0.0, router=router, reason=reason, gone=True))
