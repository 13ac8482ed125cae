"""How far copies are, from a shard's reports to the engine: seldom, and only while they go on."""

from types import SimpleNamespace
from typing import Any

import pytest

from moe_serve.controller.parts import PartTable, ShardPart
from moe_serve.controller.polls import Polls
from moe_serve.controller.settings import SupervisionLimits
from moe_serve.controller.stages import StageFolder
from moe_serve.ports import RunningCopy, ShardReport
from placement.config import RebalanceConfig
from placement.messages.events import CopyProgress

WINDOW_S = 2.0


class Reported:
    """A Polls of one shard, whose reports are handed in at times of the test's choice."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.posted: list[Any] = []
        nobody: Any = SimpleNamespace(add_hotness=lambda *_: True, suspects_changed=lambda: None)
        clock: Any = SimpleNamespace(now_s=lambda: self.now_s)

        async def post(event: Any) -> None:
            self.posted.append(event)

        self.polls = Polls(
            nobody,
            term=1,
            config=RebalanceConfig(window_s=WINDOW_S),
            limits=SupervisionLimits(),
            clock=clock,
            parts=PartTable(),
            folder=nobody,
            stages=StageFolder(),
            host=nobody,
            post=post,
            fenced=lambda error: None,
        )
        absent: Any = None
        self.part = ShardPart(absent, absent, absent, self.now_s, self.now_s)

    async def at(self, seconds: float, *copies: tuple[int, int]) -> list[tuple[int, int]]:
        """(step, bytes) the engine is told when a report of these comes in."""
        self.now_s = 100.0 + seconds
        self.posted.clear()
        running = tuple(
            RunningCopy(step, 0, 0, 0, "checkpoint", done, 1000, 0.0) for step, done in copies
        )
        report = ShardReport(
            rank=0,
            incarnation=1,
            reports=(),
            backlog_s=0.0,
            resident_bytes=0,
            reserved_bytes=0,
            budget_bytes=0,
            highest_term=1,
            highest_epoch=0,
            busy=False,
            copies=running,
        )
        await self.polls._shard_reported(self.part, report)
        assert all(isinstance(event, CopyProgress) for event in self.posted)
        return [(event.step_id, event.copied_bytes) for event in self.posted]


@pytest.mark.asyncio
async def test_progress_is_told_twice_a_window_at_most() -> None:
    shard = Reported()
    told = [await shard.at(0.1 * i, (7, 10 * i)) for i in range(41)]
    assert [found for found in told if found] == [[(7, 100)], [(7, 200)], [(7, 300)], [(7, 400)]]


@pytest.mark.asyncio
async def test_a_copy_that_stands_still_tells_nothing() -> None:
    shard = Reported()
    await shard.at(0.0, (7, 50), (8, 0))
    assert await shard.at(1.5, (7, 50), (8, 0)) == [(7, 50)]
    assert await shard.at(3.0, (7, 50), (8, 0)) == []
    assert await shard.at(9.0, (7, 50), (8, 1)) == [(8, 1)]


@pytest.mark.asyncio
async def test_what_has_ended_is_forgotten() -> None:
    shard = Reported()
    await shard.at(0.0, (7, 50))
    await shard.at(1.5, (7, 50))
    await shard.at(2.0)
    assert shard.part.copied == {}
    await shard.at(3.0, (7, 10))  # begun anew: less is more
    assert await shard.at(4.5, (7, 10)) == [(7, 10)]
