"""Overload and limits: calls that are cancelled keep their place for ever, and a limit that one
side does not know."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import msgspec
import numpy as np
import pytest

from moe_serve.errors import ResourceExhausted
from moe_serve.router.dispatch import RouterCore
from moe_serve.router.service import RouterServer
from moe_serve.rpc import codec, dispatch_pb2, dispatch_pb2_grpc
from moe_serve.rpc.options import RpcLimits, channel_options
from moe_serve.rpc.status import from_rpc_error
from placement.roles.router_records import RouterRules
from tests.fake_shards import FakeShard, FakeWorld, marker_spec, router_settings, until
from tests.unit.moe_serve.test_router_dispatch import a_core, a_request, check
from tests.unit.moe_serve.test_router_storm import a_world, assert_nothing_held


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("trouble", "repeats"),
    [
        ("none", 3),
        ("stale", 1),
        ("busy", 1),
        ("held", 1),
        pytest.param("none", 20, marks=pytest.mark.slow),
    ],
)
async def test_a_thousand_calls_cancelled_at_random_give_every_permit_back(
    trouble: str, repeats: int
) -> None:
    world = a_world()
    core = a_core(world, max_open_requests=400, rules=RouterRules(hedge_after_s=0.004))
    await core.start()
    rng = np.random.default_rng(7)
    for shard in world.shards:
        shard.delay_s = 0.008
    _trouble(world.shards[1], world, trouble)
    request = a_request(1)
    for _ in range(repeats):
        tasks = [asyncio.create_task(core.forward(request, 30.0)) for _ in range(1000)]
        loop = asyncio.get_running_loop()
        for task in tasks:
            loop.call_later(float(rng.uniform(0.0, 0.02)), task.cancel)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(end, asyncio.CancelledError) for end in ends) > 500
        await until(lambda: core.report(0).counters["open_requests"] == 0, 1.0)
        assert_nothing_held(core)
    _trouble(world.shards[1], world, "none")
    check(request, await core.forward(request, 5.0))
    own = asyncio.current_task()
    left = {task for task in asyncio.all_tasks() if task is not own}
    assert len(left) <= 2, "the ticker, and a fetch at most"
    await core.stop()


def _trouble(shard: FakeShard, world: FakeWorld, kind: str) -> None:
    shard.refuse = kind == "busy"
    shard.connected = kind != "held"
    if kind == "held":
        world.channels[shard.rank].disconnect()
    if kind == "stale":
        shard.change_reply = lambda reply: replace(
            reply, row_status=np.ones_like(reply.row_status), partial=reply.partial[:0]
        )
    else:
        shard.change_reply = None


MIB = 1 << 20
LIMIT = 6 * MIB
WIDTH = 24


def of_size(size: int) -> dispatch_pb2.ForwardRequest:
    """A request of exactly so many bytes: its id fills up what rows leave over."""
    rows = size // (4 * WIDTH + 8)
    while True:
        made = codec.forward_request(
            codec.ForwardArrays(
                model="marker",
                layer=1,
                phase=int(dispatch_pb2.FORWARD_PHASE_DECODE),
                data_type=codec.FP32,
                hidden=np.ones((rows, WIDTH), np.float32),
                topk_ids=np.arange(rows, dtype=np.int32)[:, None] % 6,
                topk_weights=np.ones((rows, 1), np.float32),
            )
        )
        left = size - made.ByteSize()
        if left > 2:
            made.request_id = "x" * (left - 2)  # its tag and its length take one byte each
            assert made.ByteSize() == size
            return made
        rows -= 1


@pytest.mark.loopback
@pytest.mark.asyncio
async def test_the_limit_holds_to_the_byte_on_both_sides_and_above_the_default_of_the_library() -> (
    None
):
    """Four MiB is what gRPC takes where nobody says otherwise. What comes back is above it too."""
    world = FakeWorld(msgspec.structs.replace(marker_spec(), hidden_size=WIDTH))
    world.place()
    settings = router_settings(world.spec, limits=RpcLimits(max_message_bytes=LIMIT))
    core = RouterCore(settings, world.open_channel)
    core.install_table(world.table())
    server = RouterServer(core)
    await server.start()
    channel = grpc.aio.insecure_channel(server.address, options=channel_options(LIMIT))
    stub = dispatch_pb2_grpc.DispatchServiceStub(channel)
    small = asyncio.create_task(_many_small(stub))
    for size in (4 * MIB - 1, 4 * MIB, LIMIT - 1, LIMIT):
        request = of_size(size)
        response = await stub.Forward(request, timeout=30)
        output, _ = codec.output_array(response)
        want = np.arange(len(output)) % 6 + 1
        np.testing.assert_allclose(output, np.repeat(want[:, None], WIDTH, axis=1), rtol=1e-5)
        assert size < 6 * MIB - 1 or response.ByteSize() > 4 * MIB
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Forward(of_size(LIMIT + 1), timeout=30)
    error = from_rpc_error(refused.value)
    assert isinstance(error, ResourceExhausted)
    assert str(LIMIT) in error.message
    assert await small == 20, "other calls of the channel go on"
    await channel.close()
    await server.stop(grace_s=0.0)


async def _many_small(stub: dispatch_pb2_grpc.DispatchServiceStub) -> int:
    for number in range(20):
        await stub.Forward(of_size(500 + number), timeout=30)
        await asyncio.sleep(0.01)
    return 20
