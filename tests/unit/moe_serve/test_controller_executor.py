"""Carrying out commands: how many to one shard may be open, and what becomes of the others."""

from __future__ import annotations

import asyncio

import pytest

from moe_serve.controller.executor import CommandExecutor
from moe_serve.controller.names import PartKind, PartName
from moe_serve.controller.parts import PartTable, shard_part
from moe_serve.controller.publisher import Publisher
from moe_serve.controller.tasks import Tasks
from moe_serve.errors import StaleTerm
from moe_serve.ports import NodeInfo
from placement.config import RebalanceConfig
from placement.messages.effects import ReserveSlot
from placement.messages.events import AnyEvent, SlotReserved, StepFailed
from tests.builders import PROFILE, make_spec
from tests.fake_shards import until
from tests.fakes.fleet import FakeCluster, FakeFleet


class NoParts:
    """A maker that is never asked."""

    def replace_shard(self, rank: int, lost_incarnation: int) -> None:
        raise AssertionError(rank, lost_incarnation)

    def replace_router(self, router: str) -> None:
        raise AssertionError(router)


def reserve(step_id: int) -> ReserveSlot:
    return ReserveSlot(
        step_id=step_id,
        rank=0,
        incarnation=1,
        slot=step_id % 4,
        layer=0,
        expert=step_id % 4,
        weights_version=make_spec().weights_version,
    )


@pytest.mark.asyncio
async def test_commands_beyond_the_bound_fail_and_those_before_are_carried_out() -> None:
    cluster = FakeCluster(make_spec(), PROFILE.name, [4], [NodeInfo("node0", True, {})])
    name, parts, tasks = PartName("tiny", PartKind.SHARD, "0", 1), PartTable(), Tasks()
    port = await FakeFleet(cluster).create_shard(str(name), 0, 1)
    parts.add(shard_part(name, port, await port.describe(), 0.0))
    told: list[AnyEvent] = []

    async def post(event: AnyEvent) -> None:
        told.append(event)

    def fenced(error: StaleTerm) -> None:
        raise AssertionError(error)

    executor = CommandExecutor(
        1,
        RebalanceConfig(),
        parts=parts,
        publisher=Publisher(parts, tasks, post, fenced, 1.0),
        maker=NoParts(),
        tasks=tasks,
        post=post,
        fenced=fenced,
        commands_max=2,
    )
    for step_id in range(4):
        executor.start(reserve(step_id))
    await until(lambda: len(told) == 4)
    failed = [event for event in told if isinstance(event, StepFailed)]
    assert [(event.step_id, event.code) for event in failed] == [(2, "io"), (3, "io")]
    assert "2 commands" in failed[0].detail
    done = [event.step_id for event in told if isinstance(event, SlotReserved)]
    assert done == [0, 1]
    executor.start(reserve(2))
    await until(lambda: len(told) == 5)
    assert isinstance(told[-1], SlotReserved), "room again"
    await asyncio.wait_for(tasks.stop(), 5)
