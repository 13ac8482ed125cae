"""What a controller leaves behind when something dies in the middle: a step that was prepared and
never ended blocks every later one, and a first table after a restart that lacks who has not
answered yet."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from moe_serve.errors import Unavailable
from moe_serve.ports import ShardPort
from placement.messages.effects import (
    AbortAdd,
    CopyExpert,
    ReleaseSlot,
    ReserveSlot,
    ShardCommand,
    VerifyExpert,
)
from placement.messages.events import DrainAsked, ShardAnswer
from tests.fakes.controller import controller, make_cluster, make_settings, shards, until
from tests.fakes.fleet import FakeCluster, FakeFleet

HOT = {0: 400, 1: 10, 2: 10, 3: 10}


class Deaf:
    """A shard's port that gives no answer to one kind of command, `times` in all: after a while it
    raises, as a port whose time is up."""

    def __init__(self, port: ShardPort, fleet: DeafFleet) -> None:
        self._port = port
        self._fleet = fleet

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)

    async def execute(self, term: int, command: ShardCommand) -> ShardAnswer:
        if isinstance(command, self._fleet.kind) and self._fleet.times:
            self._fleet.times -= 1
            await asyncio.sleep(0.3)
            raise Unavailable("no answer within its time")
        return await self._port.execute(term, command)


class DeafFleet(FakeFleet):
    """A fleet of such shards."""

    def __init__(self, cluster: FakeCluster, kind: type) -> None:
        super().__init__(cluster)
        self.kind = kind
        self.times = 0

    async def create_shard(self, *args: Any, **more: Any) -> Any:
        return Deaf(await super().create_shard(*args, **more), self)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [ReserveSlot, CopyExpert, VerifyExpert, AbortAdd, ReleaseSlot])
async def test_a_step_without_an_answer_ends_and_the_next_for_the_same_expert_succeeds(
    tmp_path: Path, kind: type
) -> None:
    """Twice nobody answers: the step is ended by its deadline, what it had prepared is given back,
    and the same expert moves with no restart of anything."""
    cluster = make_cluster()
    fleet = DeafFleet(cluster, kind)
    async with controller(make_settings(tmp_path), cluster, fleet=fleet) as rig:
        await rig.ready()
        before = cluster.living()
        fleet.times = 2
        if kind is ReleaseSlot:
            rank = min(rig.listed(0))
            drained = await rig.service.life.driver.ask(
                lambda n: DrainAsked(at_s=0.0, request_id=n, rank=rank)
            )
            assert drained.code == "ok", drained.message
            await until(lambda: not fleet.times, wait_s=20.0)
            await rig.service.life.supervision.undrain(rank)
        elif kind is AbortAdd:  # only what hangs is aborted
            cluster.copy_s = 3600.0
            cluster.demand = dict(HOT)
            await until(lambda: not fleet.times, wait_s=20.0)
            cluster.copy_s = 0.0
        else:
            cluster.demand = dict(HOT)
            await until(lambda: not fleet.times, wait_s=20.0)
        cluster.demand = dict(HOT)
        await until(lambda: len(rig.listed(0)) >= 2, wait_s=30.0)
        await until(lambda: rig.state.run is None and not rig.state.parked, wait_s=30.0)
        assert cluster.living() == before
        held = {(s.rank, r.slot) for s in shards(cluster) for r in s.slots.ledger.resident()}
        listed = sum(len(rig.listed(expert)) for expert in range(4))
        assert len(held) == listed, "nothing is held that no table names"
        assert all(s.slots.ledger.reserved_bytes == 0 for s in shards(cluster))


@pytest.mark.asyncio
@pytest.mark.parametrize("slow_rank", range(3))
async def test_no_table_after_a_restart_lacks_an_expert_that_lives(
    tmp_path: Path, slow_rank: int
) -> None:
    """The controller is restarted again and again under load; one shard takes its time to answer
    each time. No router is ever given a table that lacks what a living shard holds."""
    cluster = make_cluster()
    cluster.demand = dict(HOT)

    class Slow(FakeFleet):
        async def find_shard(self, name: str) -> Any:
            shard = await super().find_shard(name)
            if shard is not None and shard.rank == slow_rank:
                await asyncio.sleep(0.1)
            return shard

    async with controller(make_settings(tmp_path, restarts_max=100), cluster) as rig:
        await rig.ready()
    names, first = cluster.living(), len(cluster.tables)
    for _ in range(4):
        settings = make_settings(tmp_path, restarts_max=100)
        async with controller(settings, cluster, fleet=Slow(cluster)) as rig:
            await rig.ready()
            router = cluster.router()
            assert router is not None
            await until(lambda router=router: router.applied == rig.state.epoch)
    assert cluster.living() == names, "the same parts serve on"
    assert cluster.faults == []
    newer = cluster.tables[first:]
    assert newer, "restarts publish"
    assert not any(table.missing() for table in newer)
