"""Sending tables: until a part has it, and whose acknowledgement counts. Over a fleet in memory."""

from __future__ import annotations

import pytest

from moe_serve.controller import publisher as module
from moe_serve.controller.names import PartKind, PartName
from moe_serve.controller.parts import PartTable, RouterPart, ShardPart, router_part, shard_part
from moe_serve.controller.publisher import Publisher
from moe_serve.controller.tasks import Tasks
from moe_serve.errors import StaleTerm, Unavailable
from moe_serve.ports import NodeInfo
from placement.messages.events import AnyEvent, TableApplied
from placement.routing import RoutingTable
from tests.builders import PROFILE, make_spec
from tests.fake_shards import FakeWorld, marker_spec
from tests.fakes.controller import until
from tests.fakes.fleet import FakeCluster, FakeFleet, FakeShardPort


class Sending:
    """A publisher over one shard and one router."""

    def __init__(self) -> None:
        self.cluster = FakeCluster(
            make_spec(), PROFILE.name, [4], [NodeInfo("node0", True, {})], tables_come_late=True
        )
        self.parts, self.tasks = PartTable(), Tasks()
        self.posted: list[AnyEvent] = []
        self.publisher = Publisher(self.parts, self.tasks, self._post, self._fenced, 1.0)
        world = FakeWorld(marker_spec())
        world.place()
        self.table = world.table()

    async def _post(self, event: AnyEvent) -> None:
        self.posted.append(event)

    def _fenced(self, error: StaleTerm) -> None:
        raise AssertionError(error)

    async def shard(self) -> ShardPart:
        name = PartName("tiny", PartKind.SHARD, "0", 1)
        port = await FakeFleet(self.cluster).create_shard(str(name), 0, 1)
        part = shard_part(name, port, await port.describe(), 0.0)
        self.parts.add(part)
        return part

    async def router(self) -> RouterPart:
        name = PartName("tiny", PartKind.ROUTER, "router-0", 1)
        port = await FakeFleet(self.cluster).create_router(str(name), "router-0", 1)
        part = router_part(name, port, await port.describe(), 0.0)
        self.parts.add(part)
        return part


@pytest.mark.asyncio
async def test_a_table_that_a_shard_did_not_take_is_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Sending()
    part, taken = await rig.shard(), FakeShardPort.install_table
    tries: list[int] = []

    async def install_table(port: FakeShardPort, table: RoutingTable) -> int:
        tries.append(table.epoch)
        if len(tries) < 3:
            raise Unavailable("the call was lost")
        return await taken(port, table)

    monkeypatch.setattr(module, "RETRY_S", 0.001)
    monkeypatch.setattr(FakeShardPort, "install_table", install_table)
    rig.publisher.publish(rig.table)
    rig.publisher.follow(part)
    await until(lambda: part.table_order == rig.table.order)
    assert tries == [rig.table.epoch] * 3
    await rig.tasks.stop()


@pytest.mark.asyncio
async def test_only_a_router_in_the_acknowledging_set_acknowledges_by_taking_a_table() -> None:
    """A silent one has left the set, and joins again before what it says counts; one that is gone
    has another in its place."""
    rig = Sending()
    part = await rig.router()
    rig.publisher.publish(rig.table)
    part.silent = True
    assert await rig.publisher._send(part)
    assert (rig.posted, part.applied) == ([], -1)
    part.silent = False
    rig.parts.drop(part)
    assert await rig.publisher._send(part)
    assert (rig.posted, part.applied) == ([], -1)
    rig.parts.add(part)
    assert await rig.publisher._send(part)
    assert await rig.publisher._send(part), "once more, which tells nothing"
    assert [type(event) for event in rig.posted] == [TableApplied]
    assert part.applied == rig.table.epoch
