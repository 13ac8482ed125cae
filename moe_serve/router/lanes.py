"""Channels to shards: one for each shard life that the newest table names.

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
        self._closing: set[asyncio.Task[None]] = set()

    def follow(self, addresses: Iterable[RankAddress]) -> None:
        """Have channels to exactly these shard lives."""
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
        for key, entry in wanted.items():
            if key not in self._lanes:
                self._lanes[key] = Lane(entry, self._factory(entry, self._lost))

    def use(self, rank: int, incarnation: int) -> Lane | None:
        """Channel of a shard life, None where it has gone; give it back with `leave`."""
        lane = self._lanes.get((rank, incarnation))
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
