"""Tables that shards know of and the controller has not brought: fetched over the wire;
and what is said of a table that the role does not take.

Responsible for one fetch at a time, with a deadline. Must never decide whether a table is used (the
role does). Called by `dispatch`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from moe_serve.errors import InvalidArgument, MoeServeError, StaleTerm
from moe_serve.ports import ShardChannel
from placement.roles.router_records import Acceptance
from placement.routing import RoutingTable
from placement.topology import MoeSpec

FETCH_TIMEOUT_S = 1.0
"""Longest wait for a table."""


class TableFetch:
    """At most one fetch. `take` is given what came; it may refuse it with a typed error."""

    def __init__(self, take: Callable[[RoutingTable], None]) -> None:
        self._take = take
        self._running: asyncio.Task[None] | None = None

    def begin(self, channel: ShardChannel) -> None:
        """Fetch from this shard, unless a fetch is running."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._fetch(channel))

    async def settled(self) -> None:
        """Wait for the running fetch, if there is one."""
        if self._running is not None:
            await asyncio.wait({self._running})

    async def stop(self) -> None:
        """End the running fetch."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _fetch(self, channel: ShardChannel) -> None:
        # Not answering, or an odd table: the next reply or the controller will bring it.
        with contextlib.suppress(MoeServeError, TimeoutError):
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                table = await channel.fetch_table()
            if table is not None:
                self._take(table)


def check_accepted(accepted: Acceptance, table: RoutingTable, seen: int, spec: MoeSpec) -> None:
    """What is said to whoever brings a table that the rules do not take. seen: highest term.

    Raises StaleTerm for a term below one seen, InvalidArgument for another model shape.
    """
    if accepted is Acceptance.STALE_TERM:
        raise StaleTerm(f"term {table.term} is over, {seen} was seen", term=seen)
    if accepted is Acceptance.MISFIT:
        raise InvalidArgument(
            f"table of {table.num_layers} x {table.num_experts} experts, this router serves "
            f"{spec.num_layers} x {spec.num_experts}"
        )
