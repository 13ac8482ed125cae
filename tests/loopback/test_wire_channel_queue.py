"""What a channel does while its peer reads nothing: calls wait for room, inside their deadline."""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
import zmq

from moe_serve.errors import WireLost
from moe_serve.ports import RowStatus, SubCall
from moe_serve.wire.channel import ZmqShardChannel
from moe_serve.wire.server import Reply, WireServer
from moe_serve.wire.sockets import WireOptions
from moe_serve.wire.wire_messages import WireMessage
from placement.routing import RankAddress
from tests.fakes.sub_calls import sub_call, sub_reply

ROWS = np.ones((16, 1024), np.float32)
CALLS = 700
"""44 MiB: more messages than a server's queue and more bytes than sockets hold besides."""
NARROW = WireOptions(queue_messages_max=1)


class Count:
    """Answers every sub-call with its first row, and remembers the sub-calls' ids."""

    def __init__(self) -> None:
        self.got: list[int] = []

    def __call__(self, message: WireMessage, reply: Reply) -> None:
        assert isinstance(message, SubCall)
        self.got.append(message.sub_id)
        statuses = [RowStatus.SERVED] + [RowStatus.REFUSED] * (len(message.rows) - 1)
        reply(sub_reply(message.rows[:1], statuses, call_id=message.call_id, sub_id=message.sub_id))


@pytest.fixture
def counted() -> Iterator[tuple[Count, WireServer]]:
    """A server that is bound and not yet reading."""
    handler = Count()
    server = WireServer(handler)
    server.bind()
    yield handler, server
    server.stop()


def channel_to(server: WireServer, context: zmq.Context[zmq.Socket[bytes]]) -> ZmqShardChannel:
    address = RankAddress(rank=0, node="n", address=server.address, incarnation=1)
    return ZmqShardChannel(address, context=context, options=NARROW)


@pytest.mark.asyncio
async def test_calls_wait_for_room_and_are_all_answered(
    counted: tuple[Count, WireServer],
) -> None:
    handler, server = counted
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    channel = channel_to(server, context)
    calls = [sub_call(ROWS, [], call_id=1, sub_id=i, timeout_s=20.0) for i in range(CALLS)]
    flying = [asyncio.create_task(channel.forward(call)) for call in calls]
    async with asyncio.timeout(5):
        while not channel.connected:  # noqa: ASYNC110 (the library's own thread connects)
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.1)
    assert not any(one.done() for one in flying)
    server.start()
    replies = await asyncio.gather(*flying)
    assert [reply.sub_id for reply in replies] == list(range(CALLS))
    assert sorted(handler.got) == list(range(CALLS))
    await channel.close()
    context.destroy(0)


@pytest.mark.asyncio
async def test_a_call_that_gave_up_before_there_was_room_is_never_sent(
    counted: tuple[Count, WireServer],
) -> None:
    handler, server = counted
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    channel = channel_to(server, context)
    calls = [sub_call(ROWS, [], call_id=1, sub_id=i, timeout_s=0.5) for i in range(CALLS)]
    ended = await asyncio.gather(*(channel.forward(c) for c in calls), return_exceptions=True)
    assert all(isinstance(one, WireLost) for one in ended)
    server.start()
    last = sub_call(ROWS, [], call_id=2, sub_id=CALLS, timeout_s=20.0)
    assert (await channel.forward(last)).sub_id == CALLS
    assert handler.got[-1] == CALLS
    assert len(handler.got) < CALLS, "what had to wait was dropped with its caller"
    await channel.close()
    context.destroy(0)
