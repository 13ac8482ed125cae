"""Permits of a router: bounded in requests and rows, in order, each wait until its deadline."""

import asyncio
import time

import numpy as np
import pytest

from moe_serve.errors import DeadlineExceeded, MoeServeError, ResourceExhausted, Unavailable
from moe_serve.ports import DType
from moe_serve.router.checks import ForwardInput
from moe_serve.router.dispatch import RouterCore
from moe_serve.router.permits import BUSY_RETRY_S, Permits
from placement.roles.admission import Admission
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


def make(permits: int = 2, rows: int = 100, queue: int = 1) -> Permits:
    admission = Admission(permits_max=permits, rows_max=rows, queue_max=queue)
    return Permits(admission, time.monotonic)


def soon() -> float:
    return time.monotonic() + 5.0


@pytest.mark.asyncio
async def test_the_worked_example() -> None:
    permits = make()
    a, _b = await permits.take(1, soon()), await permits.take(1, soon())
    c = asyncio.create_task(permits.take(1, soon()))
    await until(lambda: permits.waiting == 1)
    with pytest.raises(ResourceExhausted, match="2 requests of 2 rows") as refused:
        await permits.take(1, soon())
    assert refused.value.retry_after_s == BUSY_RETRY_S
    permits.give_back(a)
    await c
    assert (permits.requests, permits.waiting, permits.refused) == (2, 0, 1)


@pytest.mark.asyncio
async def test_a_wait_ends_at_its_deadline_and_frees_who_stood_behind() -> None:
    permits = make(permits=9, queue=9)
    await permits.take(60, soon())
    large = asyncio.create_task(permits.take(60, time.monotonic() + 0.02))
    small = asyncio.create_task(permits.take(1, soon()))
    with pytest.raises(DeadlineExceeded):
        await large
    await small
    assert (permits.requests, permits.rows, permits.waiting) == (2, 61, 0)


@pytest.mark.asyncio
async def test_a_caller_that_goes_away_leaves_no_permit_behind() -> None:
    permits = make(permits=1, queue=9)
    first = await permits.take(1, soon())
    second = asyncio.create_task(permits.take(1, soon()))
    third = asyncio.create_task(permits.take(1, soon()))
    await until(lambda: permits.waiting == 2)
    permits.give_back(first)  # the second has it, and is cancelled before it hears of it
    second.cancel()
    await third
    assert second.cancelled()
    assert (permits.requests, permits.waiting) == (1, 0)


@pytest.mark.asyncio
async def test_closing_refuses_who_waits_and_who_comes() -> None:
    permits = make(permits=1)
    await permits.take(1, soon())
    waiting = asyncio.create_task(permits.take(1, soon()))
    await until(lambda: permits.waiting == 1)
    permits.close()
    with pytest.raises(Unavailable, match="shutting down"):
        await waiting
    with pytest.raises(Unavailable):
        await permits.take(1, soon())


@pytest.mark.asyncio
async def test_a_router_lets_rows_above_its_bound_wait_and_counts_it() -> None:
    world = FakeWorld(marker_spec())
    world.place()
    settings = router_settings(world.spec, max_open_rows=9, max_waiting_requests=1)
    core = RouterCore(settings, world.open_channel)
    core.install_table(world.table())
    hold = asyncio.Event()
    for shard in world.shards:
        shard.hold = hold
    first = asyncio.create_task(core.forward(a_request(rows=8), 5.0))
    await until(lambda: any(shard.calls for shard in world.shards))
    second = asyncio.create_task(core.forward(a_request(rows=2), 5.0))
    await until(lambda: core.report(0).counters["waiting_requests"] == 1.0)
    with pytest.raises(ResourceExhausted, match="retry"):
        await core.forward(a_request(rows=2), 5.0)
    counters = core.report(0).counters
    assert (counters["rejected"], counters["open_rows"], counters["failed"]) == (1.0, 8.0, 0.0)
    hold.set()
    await asyncio.gather(first, second)
    assert core.report(0).counters["open_rows"] == 0.0
    await core.stop()


@pytest.mark.asyncio
async def test_a_bug_of_ours_fails_its_request_typed() -> None:
    world = FakeWorld(marker_spec())
    world.place()
    core = RouterCore(router_settings(world.spec), world.open_channel)
    core.install_table(world.table())
    wrong = a_request(rows=2)
    wrong.topk_ids[:] = 99  # the edge would have refused it: a bug of a caller of ours
    with pytest.raises(MoeServeError, match="see its log") as failed:
        await core.forward(wrong, 5.0)
    assert failed.value.code == "INTERNAL"
    assert failed.value.__cause__ is not None
    assert core.report(0).counters["failed"] == 1.0
    await core.stop()
