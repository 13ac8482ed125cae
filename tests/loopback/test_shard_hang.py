"""A shard whose compute hangs: it goes on to answer, says so, and heals where the device does."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import zmq.asyncio

from moe_serve.errors import DeadlineExceeded, Unavailable, WireLost
from moe_serve.ports import FAULT_WORDS, RowStatus, SubReply
from moe_serve.shard import stall, watch
from moe_serve.shard.assembly import Shard
from moe_serve.shard.faults import FaultPoints
from moe_serve.wire.channel import ZmqShardChannel
from placement.messages.effects import CopySource
from placement.messages.events import SlotReleased, StepFailed
from tests.fakes.marker_experts import add, marker_shard, release
from tests.fakes.sub_calls import sub_call

HIDDEN = 8


class Rig:
    """A served shard with expert 0 in slot 0, and a channel to it."""

    def __init__(self, **settings: Any) -> None:
        self.shard: Shard = marker_shard(**settings)
        self.address = self.shard.start()
        self.tag = add(self.shard, 0, 0)
        self.context = zmq.asyncio.Context()
        self.channel = ZmqShardChannel(self.address, context=self.context)
        self.hanging: list[str] = []
        self._calls = 0

    async def call(self, rows: int = 1, timeout_s: float = 10.0) -> SubReply:
        self._calls += 1
        x = np.ones((rows, HIDDEN), np.float32)
        pairs = [(row, 0, self.tag, 1.0, 0) for row in range(rows)]
        return await self.channel.forward(
            sub_call(x, pairs, call_id=self._calls, timeout_s=timeout_s)
        )

    async def learn(self) -> None:
        """Have batches of a row computed until the receiving thread computes them itself."""
        for _ in range(5):
            await self.call()

    def hang(self) -> None:
        """Let every forward hang until the fault is taken back. `hanging` are the threads that
        do."""
        before_forward = self.shard.faults.before_forward

        def noted() -> None:
            self.hanging.append(threading.current_thread().name)
            before_forward()

        self.shard.order_faults(FaultPoints(hang_compute_s=30.0))
        self.shard.faults.before_forward = noted  # type: ignore[method-assign]

    def heal(self) -> None:
        self.shard.order_faults(FaultPoints())
        self.shard.faults.release()

    async def close(self) -> None:
        self.heal()
        await self.channel.close()
        self.context.term()
        await asyncio.to_thread(self.shard.stop)


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    await made.learn()
    yield made
    await made.close()


async def until(condition: Any, within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - figures of other threads
            await asyncio.sleep(0.005)


@pytest.mark.asyncio
async def test_a_small_batch_that_hangs_does_not_keep_the_thread_that_receives(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    rig.hang()
    hung = asyncio.ensure_future(rig.call())
    await until(lambda: rig.hanging)
    assert rig.hanging == ["moe-wire"], "computed by the thread that received it"
    began_s = time.monotonic()
    table = await rig.channel.fetch_table()
    took_s = time.monotonic() - began_s
    assert table is None
    assert took_s < 20.0
    assert rig.shard.wire.replaced_threads == 1
    assert not hung.done()
    with pytest.raises(WireLost):
        await rig.call(timeout_s=0.2)
    rig.heal()
    assert (await hung).row_status.tolist() == [RowStatus.SERVED], "sent by the new thread"
    assert (await rig.call()).row_status.tolist() == [RowStatus.SERVED]
    assert await asyncio.to_thread(rig.shard.probe) >= 0.0
    await until(
        lambda: [t.name for t in threading.enumerate()].count("moe-wire") == 1, within_s=2.0
    )
    with capsys.disabled():
        print(f"\na table asked for while a lent batch hangs came after {took_s * 1e3:.0f} ms")


@pytest.mark.asyncio
async def test_every_hang_of_several_is_survived(rig: Rig) -> None:
    for _ in range(3):
        rig.shard.order_faults(FaultPoints(hang_compute_s=0.4))
        reply = await rig.call()
        assert reply.row_status.tolist() == [RowStatus.SERVED]
        rig.shard.order_faults(FaultPoints())
        await rig.learn()
    assert rig.shard.wire.replaced_threads >= 1
    assert (await rig.call()).row_status.tolist() == [RowStatus.SERVED]


@pytest.mark.asyncio
@pytest.mark.parametrize("computed_by", ["the receiver", "the compute thread"])
async def test_a_hang_is_seen_by_the_probe_and_what_waits_is_refused(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, computed_by: str
) -> None:
    monkeypatch.setattr(stall, "STALL_LEAST_S", 0.3)
    rows = 1 if computed_by == "the receiver" else 200
    for _ in range(15 if rows > 1 else 0):
        await rig.call(rows)  # now it is known how long its like take
    rig.hang()
    hung = asyncio.ensure_future(rig.call(rows))
    await until(lambda: rig.hanging)
    waiting = asyncio.ensure_future(rig.call())
    reply = await asyncio.wait_for(waiting, 8.0)
    assert reply.row_status.tolist() == [RowStatus.REFUSED]
    assert reply.detail.partition(":")[0] in FAULT_WORDS
    refused_at_once = await asyncio.wait_for(rig.call(), 1.0)
    assert refused_at_once.row_status.tolist() == [RowStatus.REFUSED]
    report = await asyncio.to_thread(rig.shard.report, -1)
    assert report.stalled_s >= 0.3
    assert not report.busy, "a hang explains no silence"
    with pytest.raises(Unavailable, match="stalled"):
        await asyncio.to_thread(rig.shard.probe)
    rig.heal()
    assert (await hung).row_status.tolist() == [RowStatus.SERVED] * rows
    assert (await rig.call()).row_status.tolist() == [RowStatus.SERVED]
    assert (await asyncio.to_thread(rig.shard.report, -1)).stalled_s == 0.0
    assert await asyncio.to_thread(rig.shard.probe) >= 0.0


@pytest.mark.asyncio
async def test_a_probe_before_the_stall_is_declared_waits_behind_the_hang(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_serve.shard.assembly.PROBE_TIMEOUT_S", 0.2)
    rig.hang()
    hung = asyncio.ensure_future(rig.call())
    await until(lambda: rig.hanging)
    with pytest.raises(DeadlineExceeded):
        await asyncio.to_thread(rig.shard.probe)
    rig.heal()
    await hung


@pytest.mark.asyncio
async def test_experts_of_a_hung_shard_can_still_be_copied_from_it(rig: Rig) -> None:
    other = marker_shard(rank=1)
    await asyncio.to_thread(other.start)
    rig.hang()
    hung = asyncio.ensure_future(rig.call())
    await until(lambda: rig.shard.wire.replaced_threads == 1)
    source = CopySource(rank=0, slot=0, slot_tag=rig.tag, address=rig.address)
    await asyncio.to_thread(lambda: add(other, 2, 0, source=source))
    assert other.report(-1).counters["copies_from_ranks"] == 1
    rig.shard._commands._pin_wait_s = 0.05
    kept = await asyncio.to_thread(lambda: release(rig.shard, 0, rig.tag))
    assert isinstance(kept, StepFailed), "what hangs may still read it"
    rig.heal()
    await hung
    freed = await asyncio.to_thread(lambda: release(rig.shard, 0, rig.tag))
    assert isinstance(freed, SlotReleased)
    await asyncio.to_thread(other.stop)


@pytest.mark.asyncio
async def test_a_shard_that_hangs_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_serve.shard.core.STOP_TIMEOUT_S", 0.2)
    rig = Rig()
    await rig.learn()
    release_faults, rig.shard.faults.release = rig.shard.faults.release, lambda: None  # type: ignore[method-assign]
    rig.hang()
    hung = asyncio.ensure_future(rig.call(timeout_s=1.0))
    await until(lambda: rig.hanging)
    await asyncio.to_thread(rig.shard.stop)
    assert not rig.shard.wire.alive
    assert not rig.shard.core._thread.is_alive(), "it waits for nobody"
    with pytest.raises(WireLost):
        await hung
    release_faults()
    await rig.channel.close()
    rig.context.term()


def test_the_watch_looks_often_enough_for_its_bounds() -> None:
    assert watch.LOOK_S + watch.HELD_S < stall.STALL_LEAST_S / 10
