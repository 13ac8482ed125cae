"""Sends the newest table to every part until it has it; routers also get the addresses of all
routers, and the ranks that are suspected now.

Responsible for each part getting the newest, not each one: a slow part skips tables in between.
Must never decide what is published, nor who is suspected. Called by the executor and by polls;
parts are added by creation and adoption.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from moe_serve.controller.parts import AnyPart, PartTable, RouterPart, ShardPart
from moe_serve.controller.tasks import Bell, Tasks
from moe_serve.errors import MoeServeError, StaleTerm
from placement.engine import EngineFacts
from placement.messages.events import AnyEvent, TableApplied
from placement.routing import RoutingTable

RETRY_S = 0.5
"""Wait before a part that did not take the table is sent it again."""


class Publisher:
    """One sender a part. `fenced` is called with a higher term that a part named."""

    def __init__(
        self,
        parts: PartTable,
        tasks: Tasks,
        post: Callable[[AnyEvent], Awaitable[None]],
        fenced: Callable[[StaleTerm], None],
        call_timeout_s: float,
        facts: EngineFacts | None = None,
    ) -> None:
        self._facts = facts
        self._parts = parts
        self._tasks = tasks
        self._post = post
        self._fenced = fenced
        self._call_timeout_s = call_timeout_s
        self._changed = Bell()
        self.newest: RoutingTable | None = None

    def publish(self, table: RoutingTable) -> None:
        """Send this table from now on, unless a newer one is being sent: one that a full disk held
        back comes late, and what it said is in the newer one."""
        if not table.is_newer(self.newest):
            return
        self.newest = table
        if self._facts is not None:
            self._facts.published(table)
        self._changed.ring()

    def follow(self, part: AnyPart) -> None:
        """Keep a part up to date until its life ends."""
        self._tasks.spawn(self._serve(part))
        self._changed.ring()  # a new router changes the others' peers

    def gone(self) -> None:
        """A part left: senders end, peers change."""
        self._changed.ring()

    def suspects_changed(self) -> None:
        """A shard is suspected now, or not any more: routers are told at once."""
        self._changed.ring()

    async def _serve(self, part: AnyPart) -> None:
        seen = -1
        while self._parts.holds(part):
            seen = self._changed.version
            if self._behind(part) and not await self._send(part):
                await asyncio.sleep(RETRY_S)
                continue
            await self._changed.wait(seen)

    def _behind(self, part: AnyPart) -> bool:
        if self.newest is None:
            return False
        if isinstance(part, RouterPart) and part.told != self._news():
            return True
        return part.table_order < self.newest.order

    def _news(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        return self._parts.peers(), self._parts.suspects()

    async def _send(self, part: AnyPart) -> bool:
        table, news = self.newest, self._news()
        assert table is not None, "nothing to send"
        try:
            async with asyncio.timeout(self._call_timeout_s):
                if isinstance(part, ShardPart):
                    await part.port.install_table(table)
                else:
                    applied = await part.port.install_table(table, *news)
        except StaleTerm as error:
            self._fenced(error)
            return False
        except (TimeoutError, MoeServeError):
            return False  # supervision finds out why; the table is sent again
        part.table_order = table.order
        if isinstance(part, RouterPart):
            part.told = news
            if applied > part.applied and self._parts.holds(part) and not part.silent:
                part.applied = applied
                await self._post(TableApplied(at_s=0.0, router=part.name.place, epoch=applied))
        return True
