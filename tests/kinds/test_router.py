"""Routers and the ranks that come and go: calls that still go to a dead rank, and a loop that
stands still while many new ranks are announced."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest
import zmq

from moe_serve.ports import ShardChannel
from moe_serve.router.dispatch import RouterCore
from moe_serve.router.lanes import OPEN_AT_ONCE, OnDisconnect
from moe_serve.wire.channel import ZmqShardChannel
from placement.routing import RankAddress
from tests.fake_shards import router_settings, until
from tests.fakes.served import Served, a_request
from tests.fakes.served import check as served_check
from tests.unit.moe_serve.test_router_dispatch import a_core
from tests.unit.moe_serve.test_router_storm import a_world, assert_nothing_held, outcomes


@pytest.mark.asyncio
async def test_a_shard_killed_under_load_fails_no_request_and_gets_no_later_call() -> None:
    world = a_world(4)
    core = a_core(world)
    await core.start()
    gone = world.shards[1]
    calls_then = last_key = -1

    async def kill(number: int) -> None:
        nonlocal calls_then, last_key
        if number == 100:
            gone.connected = False
            world.channels[1].disconnect()
            calls_then = len(gone.calls)
            last_key = max(call.request_key for shard in world.shards for call in shard.calls)

    for shard in world.shards:
        shard.delay_s = 0.001
    assert await outcomes(core, 300, at_once=16, before_each=kill) == [None] * 300
    # What had been planned by then was lost at once; nothing was planned for it after.
    assert 0 < calls_then <= len(gone.calls) <= calls_then + 16
    assert max(call.request_key for call in gone.calls) <= last_key + 16
    assert_nothing_held(core)
    await core.stop()


REPLICAS = 500
DISPATCHES = 200


@asynccontextmanager
async def lag() -> AsyncIterator[list[float]]:
    """Seconds that the loop came late, looked at each two milliseconds."""
    late: list[float] = []

    async def look() -> None:
        while True:
            due_s = time.monotonic() + 0.002
            await asyncio.sleep(0.002)
            late.append(time.monotonic() - due_s)

    looking = asyncio.create_task(look())
    try:
        yield late
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


@pytest.mark.loopback
@pytest.mark.asyncio
async def test_many_new_ranks_at_once_leave_running_calls_alone() -> None:
    """A table that names 500 new ranks: calls to the known ones go on, and the loop is not held
    while connections to the others are made."""
    served = Served()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    context.set(zmq.MAX_SOCKETS, 4 * REPLICAS)
    listener = context.socket(zmq.ROUTER)
    port = listener.bind_to_random_port("tcp://127.0.0.1")
    made: list[ZmqShardChannel] = []

    def open_channel(address: RankAddress, on_disconnect: OnDisconnect) -> ShardChannel:
        if address.rank < len(served.shards):
            return served.open_channel(address, on_disconnect)
        made.append(ZmqShardChannel(address, context=context, on_disconnect=on_disconnect))
        return made[-1]

    table = served.table()
    router = RouterCore(router_settings(served.spec), open_channel)
    router.install_table(table)
    await router.start()

    async def dispatch(first: int) -> list[float]:
        took: list[float] = []
        for seed in range(first, first + DISPATCHES):
            request = a_request(4, seed=seed)
            began_s = time.monotonic()
            served_check(request, await router.forward(request, 10.0))
            took.append(time.monotonic() - began_s)
        return took

    await dispatch(0)
    async with lag() as late_before:
        before = await dispatch(1000)
    new = tuple(
        RankAddress(rank=3 + n, node="n", address=f"tcp://127.0.0.1:{port}", incarnation=1)
        for n in range(REPLICAS)
    )
    running = asyncio.create_task(dispatch(2000))
    async with lag() as late:
        await asyncio.sleep(0.01)
        newer = served.table()
        router.install_table(msgspec.structs.replace(newer, ranks=(*newer.ranks, *new)))
        assert len(made) <= OPEN_AT_ONCE, "the others are made beside running calls"
        await until(lambda: len(made) == REPLICAS, 20.0)
        after = await running
    p99 = [float(np.quantile(times, 0.99)) * 1e3 for times in (before, after)]
    print(
        f"{REPLICAS} ranks announced: loop late by {max(late) * 1e3:.1f} ms (bar 50 ms; "
        f"{max(late_before) * 1e3:.1f} ms before), dispatch p99 {p99[0]:.2f} -> {p99[1]:.2f} ms "
        "(bar 1.5x)"
    )
    assert router.role.applied_epoch == newer.epoch
    assert router.report(0).counters["failed"] == 0
    await router.stop()
    served.stop()
    listener.close(0)
    context.destroy(0)
