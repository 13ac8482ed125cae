"""A controller that another one has fenced: whatever it was in the middle of has no effect any
more. Over a fleet in memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from moe_serve.controller import service
from moe_serve.controller.adoption import adopt, fence
from moe_serve.errors import StaleTerm
from placement.messages.effects import ReleaseSlot, ShardCommand
from placement.messages.events import BudgetAsked, ResidentSlot, ShardAnswer, SlotReleased
from placement.routing import RoutingTable
from tests.fakes.controller import controller, make_cluster, make_settings, shards, until
from tests.fakes.fleet import FakeCluster, FakeFleet, FakeRouterPort, FakeShardPort

HOT = {0: 400, 1: 10, 2: 10, 3: 10}
FENCES = 2
"""Term of the controller that fences."""


class Paused:
    """Stops whatever a controller of `term` sends, as SIGSTOP in the middle of it would, until
    `go_on`; then it arrives late. `late`: what arrived late, and whether it was refused."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, term: int) -> None:
        self.term = term
        self.stopped = False
        self.held: list[str] = []
        self.late: list[tuple[str, bool]] = []
        self._going = asyncio.Event()
        self._sent: list[asyncio.Future[object]] = []
        execute, shard_table = FakeShardPort._execute, FakeShardPort.install_table
        router_table = FakeRouterPort.install_table

        async def held_execute(
            port: FakeShardPort, term: int, command: ShardCommand
        ) -> ShardAnswer:
            return await self._late(type(command).__name__, term, execute(port, term, command))

        async def held_shard_table(port: FakeShardPort, table: RoutingTable) -> int:
            return await self._late("table", table.term, shard_table(port, table))

        async def held_router_table(
            port: FakeRouterPort, table: RoutingTable, *news: object
        ) -> int:
            call = router_table(port, table, *news)  # type: ignore[arg-type]
            return await self._late("table", table.term, call)

        monkeypatch.setattr(FakeShardPort, "_execute", held_execute)
        monkeypatch.setattr(FakeShardPort, "install_table", held_shard_table)
        monkeypatch.setattr(FakeRouterPort, "install_table", held_router_table)

    async def go_on(self) -> None:
        """Let everything arrive."""
        self._going.set()
        await asyncio.gather(*self._sent, return_exceptions=True)

    async def _late(self, what: str, term: int, call):  # type: ignore[no-untyped-def]
        if not self.stopped or term != self.term:
            return await call
        self.held.append(what)
        # It is on its way, whatever becomes of the task that sent it.
        sent = asyncio.ensure_future(self._arrive(what, call))
        self._sent.append(sent)
        return await asyncio.shield(sent)

    async def _arrive(self, what: str, call):  # type: ignore[no-untyped-def]
        await self._going.wait()
        try:
            answer = await call
        except StaleTerm:
            self.late.append((what, True))
            raise
        self.late.append((what, False))
        return answer


@pytest.mark.asyncio
@pytest.mark.parametrize("doing", ["replicating", "evicting"])
async def test_commands_under_way_when_another_controller_takes_over_have_no_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, doing: str
) -> None:
    cluster = make_cluster()
    paused = Paused(monkeypatch, term=1)
    async with controller(make_settings(tmp_path / "a"), cluster) as first:
        await first.ready()
        asking: asyncio.Future[object] | None = None
        if doing == "replicating":  # it stands still with reservations on their way
            paused.stopped = True
            cluster.demand = HOT
            await until(lambda: "ReserveSlot" in paused.held)
            cluster.demand = {}
        else:  # or with tables that unlist
            cluster.demand = HOT
            await until(lambda: len(first.listed(0)) >= 2 and first.state.run is None)
            cluster.demand = {}
            paused.stopped = True
            rank = min(first.listed(0))
            asking = asyncio.ensure_future(
                first.service.life.driver.ask(
                    lambda n: BudgetAsked(at_s=0.0, request_id=n, rank=rank, budget_bytes=1000)
                )
            )
            await until(lambda: paused.held.count("table") >= 2)
        async with controller(make_settings(tmp_path / "b"), cluster) as second:
            await second.ready()
            assert second.state.term == FENCES
            held = {s.rank: s.slots.ledger.resident() for s in shards(cluster)}
            slots = {s.rank: s.slots.ledger.num_slots for s in shards(cluster)}
            newest = second.service.life.publisher.newest
            assert newest is not None
            await paused.go_on()
            await asyncio.sleep(0.2)
            words = {what for what, _refused in paused.late}
            assert words & ({"ReserveSlot"} if doing == "replicating" else {"table"}), words
            assert all(refused for _what, refused in paused.late), paused.late
            assert {s.rank: s.slots.ledger.resident() for s in shards(cluster)} == held
            assert {s.rank: s.slots.ledger.num_slots for s in shards(cluster)} == slots
            router = cluster.router()
            assert router is not None
            assert router.table is not None
            assert router.table.term >= FENCES, "no fork: one newest table for all"
            assert all(s.slots.highest_term >= FENCES for s in shards(cluster))
            await second.ready()
        if asking is not None:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)


@pytest.mark.asyncio
async def test_a_router_whose_creation_outlasts_the_controllers_term_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller that took over would not know of it, nor wait for it."""
    cluster, create = make_cluster(), FakeFleet.create_router
    late: list[str] = []

    async def outlasting(fleet: FakeFleet, name: str, *place: object) -> FakeRouterPort:
        if cluster.router() is None and len(cluster.terms) == 1:
            late.append(name)
            cluster.terms.add(FENCES)  # claimed by another one meanwhile
        return await create(fleet, name, *place)  # type: ignore[arg-type]

    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        monkeypatch.setattr(FakeFleet, "create_router", outlasting)
        router = cluster.router()
        assert router is not None
        cluster.die(router.name)
        await until(lambda: bool(late) and late[0] in cluster.killed)
        told = cluster.parts[late[0]]
        assert isinstance(told, FakeRouterPort)
        assert told.table is None, "it never served"
        await until(lambda: rig.state.term > FENCES)


@pytest.mark.asyncio
async def test_a_fenced_controller_that_cannot_read_its_folder_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster()
    monkeypatch.setattr(service, "FENCED_PAUSE_S", 0.02)
    async with controller(make_settings(tmp_path / "a"), cluster) as first:
        await first.ready()
        folder, away = tmp_path / "a", tmp_path / "away"
        folder.rename(away)
        folder.write_text("no folder")
        async with controller(make_settings(tmp_path / "b"), cluster) as second:
            await second.ready()
            await until(lambda: "FileExistsError" in str(first.service.describe()["problems"]))
        folder.unlink()
        away.rename(folder)
        await first.ready()
        assert first.state.term > FENCES


@pytest.mark.asyncio
async def test_what_an_adopted_shard_holds_is_asked_once_older_terms_are_refused(
    tmp_path: Path,
) -> None:
    """A release that the old controller still had on its way lands after the shard described
    itself: the new one must not list what is gone by the time it commands."""
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as first:
        await first.ready()
        service_id = first.service.settings.service_id
        await first.service.stop()  # its parts live on
    adopted = await adopt(FakeFleet(cluster), service_id, None, patience_s=1.0)
    part = adopted.shards[0]
    gone, kept = part.info.resident[:2]

    def release(held: ResidentSlot) -> ReleaseSlot:
        return ReleaseSlot(
            step_id=10_000 + held.slot,
            rank=part.info.rank,
            incarnation=part.info.address.incarnation,
            slot=held.slot,
            slot_tag=held.tag,
            layer=held.layer,
            expert=held.expert,
        )

    answer = await part.port.execute(1, release(gone))
    assert isinstance(answer, SlotReleased)
    await fence(adopted, FENCES, patience_s=1.0)
    assert gone not in adopted.shards[0].info.resident
    assert kept in adopted.shards[0].info.resident
    with pytest.raises(StaleTerm):
        await part.port.execute(1, release(kept))
    with pytest.raises(StaleTerm):
        await fence(adopted, 1, patience_s=1.0)
    silent = shards(cluster)[0]
    silent.hang = True
    before = len(adopted.shards)
    await fence(adopted, FENCES, patience_s=0.1)
    assert len(adopted.shards) == before - 1, "who does not answer is not adopted"


class ReleasesLate(FakeFleet):
    """A release of the older controller arrives after the new one has asked what shards hold, and
    before its own term holds."""

    def __init__(self, cluster: FakeCluster, release: ReleaseSlot) -> None:
        super().__init__(cluster)
        self._release: ReleaseSlot | None = release

    async def claim_term(self, term: int) -> bool:
        if self._release is not None:
            shard = self.cluster.shard(self._release.rank)
            assert shard is not None
            assert isinstance(await shard.execute(1, self._release), SlotReleased)
            self._release = None
        return await super().claim_term(term)


@pytest.mark.asyncio
async def test_no_table_lists_what_was_released_while_the_term_was_claimed(tmp_path: Path) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path / "a"), cluster) as first:
        await first.ready()
        cluster.demand = HOT
        await until(lambda: len(first.listed(0)) >= 2 and first.state.run is None)
        cluster.demand = {}
        rank = min(first.listed(0))
        address = first.state.ranks[rank]
    shard = cluster.shard(rank)
    assert shard is not None
    held = next(r for r in shard.slots.ledger.resident() if (r.layer, r.expert) == (0, 0))
    release = ReleaseSlot(
        step_id=10_000,
        rank=rank,
        incarnation=address.incarnation,
        slot=held.slot,
        slot_tag=held.tag,
        layer=held.layer,
        expert=held.expert,
    )
    fleet = ReleasesLate(cluster, release)
    async with controller(make_settings(tmp_path / "b"), cluster, fleet=fleet) as second:
        await second.ready()  # tables are compared with what shards hold as they arrive
        assert second.state.term == FENCES
        assert rank not in second.listed(0)
