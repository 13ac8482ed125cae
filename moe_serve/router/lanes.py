"""Channels to shards: one for each shard life that the newest table names.

Where a table names many new lives, the first few are connected to at once and the rest in the
background, a few a turn of the loop: making a connection takes a millisecond, and running calls
must not wait for hundreds. One that is needed meanwhile is made at once.

A channel whose shard left the table is closed when nothing uses it any more; one whose shard has a
new incarnation at once, so that what still waits on the old life fails and is retried.

Responsible for opening and closing. Must never choose a shard. Called by `dispatch`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from moe_serve.ports import ShardChannel
from placement.routing import RankAddress

OnDisconnect = Callable[[RankAddress, str], None]
ChannelFactory = Callable[[RankAddress, OnDisconnect], ShardChannel]
"""Makes a channel that connects in the background and calls back once for each loss of its
connection.
"""
OPEN_AT_ONCE = 2
"""Channels made in one turn of the loop."""


@dataclass(slots=True, eq=False)
class Lane:
    """One channel, how many sub-calls wait on it, and whether it is to be closed when they are
    done.
    """

    address: RankAddress
    channel: ShardChannel
    users: int = 0
    retired: bool = False
    broken: bool = False
    why_broken: str = "not connected"


class Lanes:
    """All channels of a router. `on_disconnect(rank, incarnation, reason)`."""

    def __init__(
        self, factory: ChannelFactory, on_disconnect: Callable[[int, int, str], None]
    ) -> None:
        self._factory = factory
        self._on_disconnect = on_disconnect
        self._lanes: dict[tuple[int, int], Lane] = {}
        self._to_open: dict[tuple[int, int], RankAddress] = {}
        self._opening: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def follow(self, addresses: Iterable[RankAddress]) -> None:
        """Have channels to exactly these shard lives, soon to those that are new."""
        wanted = {(entry.rank, entry.incarnation): entry for entry in addresses}
        alive = {rank: incarnation for rank, incarnation in wanted}
        for key, lane in list(self._lanes.items()):
            known = wanted.get(key)
            if known is not None and known.address == lane.address.address:
                lane.retired = False
                continue
            lane.retired = True
            replaced = key[0] in alive
            if replaced or lane.users == 0:
                self._close(key)
        self._to_open = {key: entry for key, entry in wanted.items() if key not in self._lanes}
        if self._opening is None or self._opening.done():
            self._open_some()
            if self._to_open:
                self._opening = asyncio.create_task(self._open_rest())

    async def _open_rest(self) -> None:
        while self._to_open:
            await asyncio.sleep(0)
            self._open_some()

    def _open_some(self) -> None:
        for key in list(self._to_open)[:OPEN_AT_ONCE]:
            self._open(key)

    def _open(self, key: tuple[int, int]) -> Lane:
        entry = self._to_open.pop(key)
        lane = self._lanes[key] = Lane(entry, self._factory(entry, self._lost))
        return lane

    def use(self, rank: int, incarnation: int) -> Lane | None:
        """Channel of a shard life, None where it has gone; give it back with `leave`."""
        key = (rank, incarnation)
        lane = self._open(key) if key in self._to_open else self._lanes.get(key)
        if lane is not None:
            lane.users += 1
        return lane

    def leave(self, lane: Lane) -> None:
        """Give a channel back."""
        lane.users -= 1
        key = (lane.address.rank, lane.address.incarnation)
        if lane.retired and lane.users == 0 and self._lanes.get(key) is lane:
            self._close(key)

    def take_recovered(self) -> list[tuple[int, int]]:
        """(rank, incarnation) of channels that had broken and are connected again, each once."""
        recovered = [
            (key, lane)
            for key, lane in self._lanes.items()
            if lane.broken and lane.channel.connected
        ]
        for _, lane in recovered:
            lane.broken = False
        return [key for key, _ in recovered]

    async def close(self) -> None:
        """Close all channels and wait for it."""
        self._to_open.clear()
        if self._opening is not None:
            await self._opening
        for key in list(self._lanes):
            self._close(key)
        if self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)

    def _lost(self, address: RankAddress, reason: str) -> None:
        lane = self._lanes.get((address.rank, address.incarnation))
        if lane is not None:
            lane.broken, lane.why_broken = True, reason
            self._on_disconnect(address.rank, address.incarnation, reason)

    def _close(self, key: tuple[int, int]) -> None:
        lane = self._lanes.pop(key)
        task = asyncio.create_task(lane.channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
