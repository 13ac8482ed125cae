"""A controller that another one has fenced: whatever it was in the middle of has no effect any
more. Over a fleet in memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from moe_serve.errors import StaleTerm
from moe_serve.ports import ShardAnswer, ShardCommand
from placement.messages.events import BudgetAsked
from placement.routing import RoutingTable
from tests.fakes.controller import controller, make_cluster, make_settings, shards, until
from tests.fakes.fleet import FakeRouterPort, FakeShardPort

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
