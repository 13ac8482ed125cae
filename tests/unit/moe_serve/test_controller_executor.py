"""Carrying out commands: how many to one shard may be open, and what becomes of the others."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from moe_serve.controller.executor import CommandExecutor
from moe_serve.controller.names import PartKind, PartName
from moe_serve.controller.parts import PartTable, shard_part
from moe_serve.controller.publisher import Publisher
from moe_serve.controller.tasks import Tasks
from moe_serve.errors import StaleTerm, Unavailable
from moe_serve.ports import NodeInfo
from placement.config import RebalanceConfig
from placement.messages.effects import CopyExpert, CopySource, ReserveSlot, ShardCommand
from placement.messages.events import AnyEvent, ShardAnswer, SlotReserved, StepFailed
from tests.builders import PROFILE, make_spec
from tests.fakes.controller import until
from tests.fakes.fleet import FakeCluster, FakeFleet, FakeShardPort


class NoParts:
    """A maker that is never asked."""

    def replace_shard(self, rank: int, lost_incarnation: int) -> None:
        raise AssertionError(rank, lost_incarnation)

    def end_shard(self, rank: int) -> None:
        raise AssertionError(rank)

    def replace_router(self, router: str) -> None:
        raise AssertionError(router)


class OneShard:
    """An executor over rank 0, of incarnation 1. `told`: events that its answers became."""

    def __init__(self) -> None:
        self.cluster = FakeCluster(make_spec(), PROFILE.name, [4], [NodeInfo("node0", True, {})])
        self.parts, self.tasks = PartTable(), Tasks()
        self.told: list[AnyEvent] = []
        self.executor = CommandExecutor(
            1,
            RebalanceConfig(),
            parts=self.parts,
            publisher=Publisher(self.parts, self.tasks, self._post, self._fenced, 1.0),
            maker=NoParts(),
            tasks=self.tasks,
            post=self._post,
            fenced=self._fenced,
            commands_max=2,
        )

    async def begin(self) -> FakeShardPort:
        """Its shard."""
        name = PartName("tiny", PartKind.SHARD, "0", 1)
        port = await FakeFleet(self.cluster).create_shard(str(name), 0, 1)
        self.parts.add(shard_part(name, port, await port.describe(), 0.0))
        return port

    async def _post(self, event: AnyEvent) -> None:
        self.told.append(event)

    def _fenced(self, error: StaleTerm) -> None:
        raise AssertionError(error)


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
    rig = OneShard()
    await rig.begin()
    executor, told = rig.executor, rig.told
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
    await asyncio.wait_for(rig.tasks.stop(), 5)


@pytest.mark.asyncio
async def test_commands_that_failed_are_open_no_more() -> None:
    rig = OneShard()
    shard = await rig.begin()
    shard.alive = False
    for step_id in (0, 1):
        rig.executor.start(reserve(step_id))
    await until(lambda: len(rig.told) == 2)
    shard.alive = True
    for step_id in (2, 3):
        rig.executor.start(reserve(step_id))
    await until(lambda: len(rig.told) == 4)
    assert [type(event) for event in rig.told] == [StepFailed] * 2 + [SlotReserved] * 2
    await asyncio.wait_for(rig.tasks.stop(), 5)


@pytest.mark.asyncio
async def test_a_command_to_an_earlier_life_does_not_reach_the_one_that_lives() -> None:
    rig = OneShard()
    shard = await rig.begin()
    rig.executor.start(msgspec.structs.replace(reserve(0), incarnation=0))
    await until(lambda: len(rig.told) == 1)
    (failed,) = rig.told
    assert isinstance(failed, StepFailed)
    assert "that incarnation of the rank is gone" in failed.detail
    assert shard.executed == []
    await asyncio.wait_for(rig.tasks.stop(), 5)


@pytest.mark.asyncio
async def test_a_command_waits_for_a_quick_one_before_it_and_not_for_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig, held = OneShard(), asyncio.Event()
    await rig.begin()
    begun: list[type] = []

    async def execute(_port: FakeShardPort, _term: int, command: ShardCommand) -> ShardAnswer:
        begun.append(type(command))
        await held.wait()
        raise Unavailable("the shard is gone")

    monkeypatch.setattr(FakeShardPort, "execute", execute)
    copied = CopyExpert(
        step_id=0,
        rank=0,
        incarnation=1,
        slot=0,
        slot_tag=1,
        layer=0,
        expert=0,
        source=CopySource(rank=-1),
        timeout_s=60.0,
    )
    rig.executor.start(copied)
    rig.executor.start(reserve(1))
    await until(lambda: len(begun) == 2)
    assert begun == [CopyExpert, ReserveSlot], "the copy has not answered"
    held.set()
    await until(lambda: len(rig.told) == 2)
    held.clear()
    rig.executor.start(reserve(1))
    rig.executor.start(copied)
    for _ in range(50):
        await asyncio.sleep(0)
    assert begun[2:] == [ReserveSlot], "it has not answered"
    held.set()
    await until(lambda: len(rig.told) == 4)
    assert begun[2:] == [ReserveSlot, CopyExpert]
    await asyncio.wait_for(rig.tasks.stop(), 5)
