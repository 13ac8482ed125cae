"""A channel to a shard through a proxy (`WireOptions.socks_proxy`): calls end while the way is cut,
and flow again once it is healed."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from moe_serve.errors import WireLost
from moe_serve.ports import RowStatus
from moe_serve.wire.channel import ZmqShardChannel
from moe_serve.wire.sockets import WireOptions
from tests.chaos.proxy import Proxy
from tests.fakes.marker_experts import MarkerBackend, add, marker_model, marker_shard
from tests.fakes.sub_calls import sub_call

HEAL_WAIT_S = 20.0


@pytest.mark.asyncio
async def test_a_channel_whose_way_is_cut_fails_its_calls_and_recovers() -> None:
    model = marker_model()
    shard = marker_shard(model=model, backend=MarkerBackend(model.expert))
    address = shard.start()
    tag = add(shard, 0, 0)
    target = address.address.removeprefix("tcp://")
    with Proxy() as proxy:
        options = WireOptions(socks_proxy=proxy.address, heartbeat_s=0.1, heartbeat_timeout_s=0.3)
        channel = ZmqShardChannel(address, options=options)
        numbers = iter(range(1, 1000))

        async def served() -> bool:
            rows = np.ones((1, 8), np.float32)
            call = sub_call(
                rows, [(0, 0, tag, 1.0, 0)], call_id=next(numbers), sub_id=1, timeout_s=1.0
            )
            try:
                reply = await channel.forward(call)
            except WireLost:
                await asyncio.sleep(0.05)  # it fails at once while it is not connected
                return False
            return bool(reply.row_status.tolist() == [RowStatus.SERVED])

        assert await served()
        assert proxy.opened[target] == 1
        proxy.cut(target)
        assert not await served()
        proxy.heal(target)
        async with asyncio.timeout(HEAL_WAIT_S):
            while not await served():  # until it is connected again
                continue
        await channel.close()
    shard.stop()
