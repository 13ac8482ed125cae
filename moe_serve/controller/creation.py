"""Creating parts, and ending those that are to be replaced.

Responsible for the order: the name is in the journal before the part exists, and goes from it after
the part is ended; a router that serves is drained first. Tries again for as long as the part is
wanted, with growing pauses. A router that is created anew listens where its last life did, so that
what clients and the service record hold stays true. A part that comes to life after whoever asked
for it gave it up is ended as soon as it is seen. Must never decide whether a part is wanted. Called
by the executor and when a life begins.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Protocol

from moe_serve.controller.clock import DriverClock
from moe_serve.controller.journal import Journal
from moe_serve.controller.journal_rows import part_row
from moe_serve.controller.journal_store import JournalFull
from moe_serve.controller.names import Incarnations, PartKind, PartName, parse
from moe_serve.controller.parts import (
    AnyPart,
    PartTable,
    RouterPart,
    ShardPart,
    place_of,
    rank_joined,
    router_part,
    shard_part,
)
from moe_serve.controller.settings import SupervisionLimits
from moe_serve.controller.tasks import Tasks
from moe_serve.errors import MoeServeError, StaleTerm, StartRefused
from moe_serve.ports import FILE_PLACE, Fleet, RankPlace
from placement.messages.events import AnyEvent, RouterJoined

PAUSE_MAX_S = 30.0
"""Longest pause between two tries to create one part."""
KILL_TIMEOUT_S = 10.0
"""Longest wait for the cluster's word that a part is ended."""
DRAIN_SLACK_S = 2.0
"""Beyond its grace, how long a router's word is waited for that it has ended its calls."""
ROUTER_GRACE_S = 5.0
"""How long the open calls of a router may take that is ended while the service goes on."""


class Welcome(Protocol):
    """Who looks after a part once it answers."""

    def welcome(self, part: AnyPart) -> None:
        """Keep it supplied with tables and watch it."""
        ...

    def farewell(self, part: AnyPart) -> None:
        """Its life is over."""
        ...


class PartCreator:
    """Creates the parts of one life. `host` is called with each part that answers. `routers`: those
    there are to be. `rank_place`: where a rank's shard belongs now, None where it is to have
    none."""

    def __init__(  # noqa: PLR0913  # it meets fleet, journal and driver
        self,
        service_id: str,
        fleet: Fleet,
        *,
        term: int,
        journal: Journal,
        clock: DriverClock,
        parts: PartTable,
        host: Welcome,
        tasks: Tasks,
        limits: SupervisionLimits,
        post: Callable[[AnyEvent], Awaitable[None]],
        fenced: Callable[[StaleTerm], None],
        routers: Collection[str],
        router_ports: Mapping[str, int],
        rank_place: Callable[[int], RankPlace | None],
    ) -> None:
        self._service_id = service_id
        self._fleet = fleet
        self._routers = routers
        self._router_ports = dict(router_ports)
        self._rank_place = rank_place
        self._journal = journal
        self._clock = clock
        self._parts = parts
        self._host = host
        self._tasks = tasks
        self._limits = limits
        self._post = post
        self._fenced = fenced
        self._term = term
        self._incarnations = Incarnations(term)
        self._making: set[tuple[PartKind, str]] = set()
        self._ending: set[str] = set()
        """Names of parts that must not live on: one that is only being made is not taken."""
        self._room = asyncio.Semaphore(limits.create_at_once)

    def replace_shard(self, rank: int, lost_incarnation: int) -> None:
        """Create a shard for a rank, ending the lost life where it still lives."""
        part = self._parts.shards.get(rank)
        if part is not None and part.name.incarnation > lost_incarnation:
            return  # replaced already
        self._make(PartKind.SHARD, str(rank), part)

    def replace_router(self, router: str) -> None:
        """Create a router, ending the life there was; none that is not to be."""
        if router not in self._routers:
            return
        self._make(PartKind.ROUTER, router, self._parts.routers.get(router))

    def end_shard(self, rank: int) -> None:
        """End a rank's shard, or the one that is being made; there is none afterwards. One that is
        wanted again by now ends when its next life is made."""
        if self._rank_place(rank) is not None:
            return
        part = self._parts.shards.get(rank)
        if part is not None:
            self._parts.drop(part)
            self._host.farewell(part)
        self._parts.forget_problem(f"rank {rank}")
        for name in self._names_of(PartKind.SHARD, str(rank)):
            self.end_soon(name)

    async def end_late(self, earlier_terms: bool) -> None:
        """For ever: end parts that live and are in no list. Their creation was given up, because
        the cluster gave no answer, and was done all the same.

        earlier_terms: also those of controllers before this one, as the journal knows all parts of
        theirs that count.
        """
        first = 0 if earlier_terms else Incarnations.last_before(self._term) + 1
        last = Incarnations.last_before(self._term + 1)
        while True:
            await asyncio.sleep(self._limits.strangers_s)
            try:
                async with asyncio.timeout(self._limits.call_timeout_s):
                    alive = await self._fleet.part_names()
                    claimed = await self._fleet.highest_term()
            except (TimeoutError, MoeServeError):
                continue  # the cluster's head may be away; the next look will tell
            if claimed > self._term:
                self._fenced(StaleTerm(f"term {claimed} was claimed", term=claimed))
                return  # whatever lives is another controller's now
            for name in sorted(set(alive) - self._parts.names.keys() - self._ending):
                part = parse(self._service_id, name)
                if part is not None and first <= part.incarnation <= last:
                    self.end_soon(name)

    async def end(self, name: str) -> None:
        """End a part and forget its name."""
        await self._fleet.kill(name)
        self._parts.names.pop(name, None)
        await self._journal.commit([part_row(name, self._clock.now_s(), gone=True)])

    def end_soon(self, name: str) -> None:
        """End a living part that must not live on, beside the rest. Tries again while the cluster
        gives no answer, until `end_within_s` is over; why it still lives is then a problem for
        people."""
        self._ending.add(name)
        self._tasks.spawn(self._end_noted(name))

    async def _end_noted(self, name: str) -> None:
        try:
            await self._end_stranger(name)
        finally:
            self._ending.discard(name)

    async def _end_stranger(self, name: str) -> None:
        await drain_router(self._fleet, self._service_id, name, ROUTER_GRACE_S)
        pause_s = self._limits.create_attempt_pause_s
        ends_s = self._clock.now_s() + self._limits.end_within_s
        while True:
            try:
                async with asyncio.timeout(KILL_TIMEOUT_S):
                    await self.end(name)
            except StaleTerm as error:
                self._fenced(error)
                return
            except (TimeoutError, MoeServeError) as error:
                why = error.message if isinstance(error, MoeServeError) else "no answer"
                self._parts.problems[name] = f"{name} must not live on and was not ended: {why}"
            else:
                self._parts.problems.pop(name, None)
                return
            if self._clock.now_s() + pause_s > ends_s:
                self._parts.problems[name] += "; end it by hand, or start the controller again"
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    def _make(self, kind: PartKind, place: str, old: AnyPart | None) -> None:
        if old is not None:
            self._parts.drop(old)
            self._host.farewell(old)
        if (kind, place) not in self._making:
            self._making.add((kind, place))
            self._tasks.spawn(self._until_made(kind, place))

    async def _until_made(self, kind: PartKind, place: str) -> None:
        pause_s = self._limits.create_attempt_pause_s
        try:
            while True:
                try:
                    await self._end_earlier(kind, place)
                    if not self._wanted(kind, place):
                        return
                    async with self._room:
                        part = await self._try(kind, place)
                    if not self._may_stay(part):
                        # Whether another is wanted is seen anew, with nothing awaited in between.
                        await self.end(str(part.name))
                        continue
                except StaleTerm as error:
                    self._fenced(error)
                    return
                except MoeServeError as error:
                    self._note(kind, place, error)
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, PAUSE_MAX_S)
                    continue
                break
        finally:
            self._making.discard((kind, place))
        self._parts.add(part)
        await self.introduce(part)

    async def introduce(self, part: AnyPart) -> None:
        """Tell the engine of a part that is in the table, then keep it supplied and watched. A
        router is in the acknowledging set before it gets a table."""
        if isinstance(part, ShardPart):
            await self._post(rank_joined(part.info))
        else:
            await self._note_port(part)
            await self._post(
                RouterJoined(at_s=0.0, router=part.name.place, incarnation=part.name.incarnation)
            )
        self._host.welcome(part)

    async def _note_port(self, part: RouterPart) -> None:
        port = port_of(part.info.grpc_address)
        if not port or self._router_ports.get(part.name.place) == port:
            return
        self._router_ports[part.name.place] = port
        with contextlib.suppress(JournalFull):  # its next life may listen elsewhere, that is all
            await self._journal.note_router_port(part.name.place, port)

    def _may_stay(self, part: AnyPart) -> bool:
        """Whether a part that was just made is wanted: its rank may have left meanwhile, and even
        have come back; then this life is being ended."""
        name = part.name
        given_up = str(name) in self._ending or str(name) not in self._parts.names
        return self._wanted(name.kind, name.place) and not given_up

    def _wanted(self, kind: PartKind, place: str) -> bool:
        return kind is not PartKind.SHARD or self._rank_place(int(place)) is not None

    def _names_of(self, kind: PartKind, place: str) -> list[str]:
        """Lives of the place that the journal names."""
        begin = f"{self._service_id}:{kind}:{place}:"
        return [name for name in self._parts.names if name.startswith(begin)]

    async def _end_earlier(self, kind: PartKind, place: str) -> None:
        """End every earlier life of the place that the journal names."""
        for name in self._names_of(kind, place):
            await self.end(name)

    async def _try(self, kind: PartKind, place: str) -> AnyPart:
        incarnation = self._incarnations.next()
        name = PartName(self._service_id, kind, place, incarnation)
        self._parts.names[str(name)] = None
        await self._journal.commit([part_row(str(name), self._clock.now_s())])
        if kind is PartKind.SHARD:
            belongs = self._rank_place(name.rank) or FILE_PLACE
            shard = await self._fleet.create_shard(str(name), name.rank, incarnation, belongs)
            await self._still_ours(str(name))
            return shard_part(name, shard, await shard.describe(), self._clock.now_s())
        last_port = self._router_ports.get(place, 0)
        router = await self._fleet.create_router(str(name), place, incarnation, last_port)
        await self._still_ours(str(name))
        return router_part(name, router, await router.describe(), self._clock.now_s())

    async def _still_ours(self, name: str) -> None:
        """End a part just created where another controller took over meanwhile: that one would not
        know of it, nor wait for a router that it does not know. Raises StaleTerm then."""
        claimed = 0
        with contextlib.suppress(MoeServeError):  # no word of a newer term: none is known
            claimed = await self._fleet.highest_term()
        if claimed > self._term:
            await self._fleet.kill(name)
            raise StaleTerm(f"term {claimed} was claimed while {name} was created", term=claimed)

    def _note(self, kind: PartKind, place: str, error: MoeServeError) -> None:
        if not self._wanted(kind, place):
            return
        where = place_of(PartName(self._service_id, kind, place, 0))
        self._parts.problems[where] = f"{where} does not start: {error.message}"
        if isinstance(error, StartRefused) and not isinstance(error, JournalFull):
            self._parts.refusals[where] = self._parts.refusals.get(where, 0) + 1


async def drain_router(fleet: Fleet, service_id: str, name: str, grace_s: float) -> None:
    """Let a router's open calls end, where `name` is one's and it answers. Best effort: the part is
    ended afterwards in any case."""
    part = parse(service_id, name)
    if part is None or part.kind is not PartKind.ROUTER:
        return
    with contextlib.suppress(TimeoutError, MoeServeError):
        async with asyncio.timeout(grace_s + DRAIN_SLACK_S):
            router = await fleet.find_router(name)
            if router is not None:
                await router.stop(grace_s)


async def end_parts(
    fleet: Fleet, service_id: str, journalled: Iterable[str], *, grace_s: float
) -> list[str]:
    """End every part a journal names and every other that lives, routers drained first while all
    shards still serve. Returns the names."""
    names = sorted({*journalled, *await fleet.part_names()})
    await asyncio.gather(*(drain_router(fleet, service_id, name, grace_s) for name in names))
    await asyncio.gather(*(fleet.kill(name) for name in names))
    return names


def port_of(address: str) -> int:
    """Port of host:port, 0 where there is none."""
    port = address.rpartition(":")[2]
    return int(port) if port.isascii() and port.isdecimal() else 0
