"""What a router has in work is bounded in requests and in rows."""

import asyncio

import numpy as np
import pytest

from moe_serve.errors import ResourceExhausted
from moe_serve.ports import DType
from moe_serve.router.checks import ForwardInput
from moe_serve.router.dispatch import RouterCore
from moe_serve.router.open_work import BUSY_RETRY_S, OpenWork
from placement.topology import Phase
from tests.fake_shards import HIDDEN, FakeWorld, marker_spec, router_settings, until


def a_request(rows: int) -> ForwardInput:
    return ForwardInput(
        layer=1,
        phase=Phase.DECODE,
        dtype=DType.FLOAT32,
        hidden=np.ones((rows, HIDDEN), np.float32),
        topk_ids=np.tile(np.arange(2, dtype=np.int32), (rows, 1)),
        gates=np.ones((rows, 2), np.float32),
        valid=np.ones((rows, 2), np.uint8),
        request_id="",
        attempt=0,
    )


def take(work: OpenWork, rows: int) -> None:
    with work.taken(rows):
        pass


def test_the_worked_example() -> None:
    work = OpenWork(2, 100)
    with work.taken(60):
        with work.taken(40):
            assert (work.requests, work.rows) == (2, 100)
            with pytest.raises(ResourceExhausted, match="2 requests are open") as refused:
                take(work, 0)
            assert refused.value.retry_after_s == BUSY_RETRY_S
        with pytest.raises(ResourceExhausted, match="60 rows are in work, 41 more"):
            take(work, 41)
        take(work, 40)
    assert (work.requests, work.rows, work.refused) == (0, 0, 2)
    with work.taken(1000):
        assert work.rows == 1000, "a request alone always fits"


def test_what_fails_gives_its_rows_back() -> None:
    work = OpenWork(1, 10)
    with pytest.raises(ValueError, match="inside"), work.taken(5):
        raise ValueError("inside")
    assert (work.requests, work.rows) == (0, 0)


@pytest.mark.asyncio
async def test_a_router_refuses_rows_above_its_bound_and_counts_it() -> None:
    world = FakeWorld(marker_spec())
    world.place()
    core = RouterCore(router_settings(world.spec, max_open_rows=9), world.open_channel)
    core.install_table(world.table())
    for shard in world.shards:
        shard.hold = asyncio.Event()
    first = asyncio.create_task(core.forward(a_request(rows=8), 5.0))
    await until(lambda: any(shard.calls for shard in world.shards))
    with pytest.raises(ResourceExhausted, match="rows are in work"):
        await core.forward(a_request(rows=2), 5.0)
    counters = core.report(0).counters
    assert (counters["rejected"], counters["open_rows"], counters["failed"]) == (1.0, 8.0, 0.0)
    for shard in world.shards:
        assert shard.hold is not None
        shard.hold.set()
    await first
    assert core.report(0).counters["open_rows"] == 0.0
    await core.stop()
