"""What every ShardChannel does, on the fake and over ZeroMQ."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import zmq.asyncio

from moe_serve.errors import InvalidArgument, WireLost
from moe_serve.ports import RowStatus, ShardChannel
from moe_serve.shard.assembly import Shard
from moe_serve.wire.channel import ZmqShardChannel
from placement.routing import RankAddress, RoutingTable
from tests.fakes.marker_experts import MarkerBackend, add, marker_model, marker_shard, release
from tests.fakes.shard_channel import FakeShardChannel
from tests.fakes.sub_calls import sub_call


class Rig:
    """A shard, a channel to it, and what the channel reported."""

    def __init__(self, shard: Shard, backend: MarkerBackend) -> None:
        self.shard = shard
        self.backend = backend
        self.lost: list[tuple[RankAddress, str]] = []
        self.tags = {slot: add(shard, slot, slot) for slot in range(3)}
        self.channel: ShardChannel
        self.stop_shard: Callable[[], None]

    def on_disconnect(self, address: RankAddress, reason: str) -> None:
        self.lost.append((address, reason))

    def call(self, rows: Any, pairs: list[tuple[int, int]], **fields: Any) -> Any:
        """A sub-call whose pairs are (row, slot), gate 1, tags right, expert = slot."""
        full = [(row, slot, self.tags.get(slot, 99), 1.0, slot) for row, slot in pairs]
        return sub_call(rows, full, **fields)


@pytest_asyncio.fixture(params=["fake", "zmq"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    model = marker_model()
    backend = MarkerBackend(model.expert)
    shard = marker_shard(model=model, backend=backend)
    address = shard.start()
    rig = Rig(shard, backend)
    if request.param == "fake":
        fake = FakeShardChannel(shard.core, address, rig.on_disconnect)
        rig.channel, rig.stop_shard = fake, fake.cut
        yield rig
        await fake.close()
    else:
        context = zmq.asyncio.Context()
        channel = ZmqShardChannel(address, context=context, on_disconnect=rig.on_disconnect)
        rig.channel, rig.stop_shard = channel, shard.wire.stop
        yield rig
        await channel.close()
        context.term()
    shard.stop()


def assert_set(event: threading.Event) -> None:
    assert event.wait(10)


def rows(n: int) -> Any:
    return np.arange(1, n * 8 + 1, dtype=np.float32).reshape(n, 8)


@pytest.mark.asyncio
async def test_a_call_is_computed_by_the_experts_it_names(rig: Rig) -> None:
    x = rows(3)
    began_s = time.monotonic()
    reply = await rig.channel.forward(rig.call(x, [(0, 0), (0, 2), (2, 1)], call_id=5, sub_id=6))
    took_s = time.monotonic() - began_s
    assert (reply.call_id, reply.sub_id, reply.incarnation) == (5, 6, 1)
    assert reply.row_status.tolist() == [RowStatus.SERVED] * 3
    np.testing.assert_array_equal(reply.partial, np.stack([x[0] * 4, x[1] * 0, x[2] * 2]))
    assert reply.backlog_seq > 0
    assert reply.compute_s > 0
    assert reply.rest_s > 0
    assert reply.queue_s + reply.compute_s + reply.rest_s / 1.04 <= took_s
    assert rig.channel.connected


@pytest.mark.asyncio
async def test_rows_of_a_stale_tag_are_refused_whole_and_the_others_served(rig: Rig) -> None:
    x = rows(3)
    call = rig.call(x, [(0, 0), (1, 1), (1, 2), (2, 2)])
    tags = call.pair_tag.copy()
    tags[1] += 50
    stale = sub_call(
        x,
        [
            (0, 0, tags[0], 1, 0),
            (1, 1, tags[1], 1, 1),
            (1, 2, tags[2], 1, 2),
            (2, 2, tags[3], 1, 2),
        ],
    )
    reply = await rig.channel.forward(stale)
    assert reply.row_status.tolist() == [RowStatus.SERVED, RowStatus.STALE, RowStatus.SERVED]
    np.testing.assert_array_equal(reply.partial, np.stack([x[0], x[2] * 3]))
    assert "slot 1" in reply.detail


@pytest.mark.asyncio
async def test_replies_come_back_to_their_own_calls_whatever_their_order(rig: Rig) -> None:
    calls = [rig.call(rows(1) * i, [(0, i % 3)], call_id=i, sub_id=1, layer=0) for i in range(40)]
    replies = await asyncio.gather(*(rig.channel.forward(call) for call in calls))
    for i, reply in enumerate(replies):
        assert reply.call_id == i
        np.testing.assert_array_equal(reply.partial, rows(1) * i * (i % 3 + 1))


@pytest.mark.asyncio
@pytest.mark.parametrize("dtype", [np.float16, np.uint16])
async def test_partials_come_in_the_dtype_of_the_rows(rig: Rig, dtype: Any) -> None:
    one = {np.float16: np.float16(1.0), np.uint16: np.uint16(0x3F80)}[dtype]
    four = {np.float16: np.float16(4.0), np.uint16: np.uint16(0x4080)}[dtype]
    reply = await rig.channel.forward(rig.call(np.full((1, 8), one, dtype), [(0, 0), (0, 2)]))
    assert reply.partial.dtype == dtype
    assert (reply.partial == four).all()


@pytest.mark.asyncio
async def test_a_wrong_sub_call_is_refused_by_field_and_touches_no_other(rig: Rig) -> None:
    good = asyncio.create_task(rig.channel.forward(rig.call(rows(1), [(0, 0)], call_id=1)))
    with pytest.raises(InvalidArgument) as caught:
        await rig.channel.forward(rig.call(rows(1)[:, :4].copy(), [(0, 0)], call_id=2, layer=7))
    assert {v.field for v in caught.value.violations} == {"layer", "rows"}
    assert (await good).row_status.tolist() == [RowStatus.SERVED]


@pytest.mark.asyncio
async def test_no_rows_give_no_rows(rig: Rig) -> None:
    reply = await rig.channel.forward(rig.call(rows(0), []))
    assert reply.partial.shape == (0, 8)


@pytest.mark.asyncio
async def test_a_released_slot_is_stale(rig: Rig) -> None:
    release(rig.shard, 1, rig.tags[1], expert=1)
    reply = await rig.channel.forward(rig.call(rows(1), [(0, 1)]))
    assert reply.row_status.tolist() == [RowStatus.STALE]


@pytest.mark.asyncio
async def test_another_incarnation_is_stale(rig: Rig) -> None:
    reply = await rig.channel.forward(rig.call(rows(1), [(0, 1)], incarnation=9))
    assert reply.row_status.tolist() == [RowStatus.STALE]
    assert "incarnation 9" in reply.detail


@pytest.mark.asyncio
async def test_no_answer_in_time_is_a_lost_wire_and_the_channel_works_on(rig: Rig) -> None:
    blocked = asyncio.Event()
    loop = asyncio.get_running_loop()
    free = threading.Event()

    def block(_pairs: int) -> None:
        loop.call_soon_threadsafe(blocked.set)
        free.wait(10)

    rig.backend.on_forward = block
    with pytest.raises(WireLost, match="did not answer"):
        await rig.channel.forward(rig.call(rows(1), [(0, 0)], call_id=1, timeout_s=0.2))
    assert blocked.is_set()
    rig.backend.on_forward = lambda _n: None
    free.set()
    reply = await rig.channel.forward(rig.call(rows(1), [(0, 0)], call_id=2))
    assert reply.call_id == 2


@pytest.mark.asyncio
async def test_a_lost_shard_fails_what_is_in_flight_at_once_and_is_told(rig: Rig) -> None:
    free = threading.Event()
    began = threading.Event()

    def block(_pairs: int) -> None:
        began.set()
        free.wait(10)

    rig.backend.on_forward = block
    flying = asyncio.create_task(rig.channel.forward(rig.call(rows(1), [(0, 0)])))
    assert await asyncio.to_thread(began.wait, 5)
    loop = asyncio.get_running_loop()
    at_s = loop.time()
    rig.stop_shard()
    with pytest.raises(WireLost):
        await flying
    assert loop.time() - at_s < 1.0, "a disconnect is not a timeout"
    assert not rig.channel.connected
    assert [address.rank for address, _ in rig.lost] == [0]
    with pytest.raises(WireLost):
        await rig.channel.forward(rig.call(rows(1), [(0, 0)], call_id=9))
    free.set()


@pytest.mark.asyncio
async def test_the_newest_table_is_fetched(rig: Rig) -> None:
    assert await rig.channel.fetch_table() is None
    for epoch in (4, 3):
        rig.shard.install_table(_table(epoch))
    fetched = await rig.channel.fetch_table()
    assert fetched is not None
    assert fetched.order == (1, 4)
    reply = await rig.channel.forward(rig.call(rows(1), [(0, 0)], epoch=2))
    assert (reply.term, reply.epoch) == (1, 4)
    assert reply.row_status.tolist() == [RowStatus.SERVED], "an old epoch alone is never refused"


@pytest.mark.asyncio
async def test_close_ends_what_is_in_flight(rig: Rig) -> None:
    free = threading.Event()
    rig.backend.on_forward = lambda _n: assert_set(free)
    flying = asyncio.create_task(rig.channel.forward(rig.call(rows(1), [(0, 0)])))
    await asyncio.sleep(0.05)
    await rig.channel.close()
    with pytest.raises(WireLost):
        await flying
    with pytest.raises(WireLost):
        await rig.channel.forward(rig.call(rows(1), [(0, 0)], call_id=2))
    assert rig.lost == [], "a close is no loss"
    free.set()


def _table(epoch: int) -> RoutingTable:
    return RoutingTable(
        term=1,
        epoch=epoch,
        model="marker",
        weights_version="v1",
        num_layers=1,
        num_experts=1,
        replica_ptr=np.array([0, 1], np.int32),
        replica_rank=np.zeros(1, np.int32),
        replica_slot=np.zeros(1, np.int32),
        replica_tag=np.ones(1, np.int64),
        ranks=(),
    )
