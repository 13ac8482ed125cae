"""The wire over loopback: loss is seen at once, keys are asked for, limits hold, and one bad
message touches no other."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import zmq
import zmq.asyncio

from moe_serve.errors import InvalidArgument, ResourceExhausted, StartRefused, WireLost
from moe_serve.ports import RowStatus, SubCall
from moe_serve.wire.channel import ZmqShardChannel
from moe_serve.wire.codec import encode
from moe_serve.wire.security import CurveKeys, ServerSecurity
from moe_serve.wire.server import Reply, WireServer
from moe_serve.wire.sockets import WireOptions
from moe_serve.wire.wire_messages import CopyClose, WireMessage
from placement.routing import RankAddress
from tests.fakes.sub_calls import sub_call, sub_reply

ROWS = np.arange(16, dtype=np.float32).reshape(2, 8)


class Echo:
    """A handler that sends rows back, or holds what it got while `hold` is set."""

    def __init__(self) -> None:
        self.got: list[WireMessage] = []
        self.held: list[tuple[SubCall, Reply]] = []
        self.hold = False

    def __call__(self, message: WireMessage, reply: Reply) -> None:
        self.got.append(message)
        if isinstance(message, SubCall):
            self.held.append((message, reply))
            if not self.hold:
                self.answer_all()

    def answer_all(self) -> None:
        for call, reply in reversed(self.held):
            served = [RowStatus.SERVED] * len(call.rows)
            reply(sub_reply(call.rows, served, call_id=call.call_id, sub_id=call.sub_id))
        self.held.clear()


def address_of(server: WireServer, keys: CurveKeys | None = None) -> RankAddress:
    public = keys.public if keys else ""
    return RankAddress(rank=3, node="n", address=server.address, incarnation=1, public_key=public)


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def server(echo: Echo) -> Iterator[WireServer]:
    made = WireServer(echo)
    made.bind()
    made.start()
    yield made
    made.stop()


@pytest_asyncio.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    made = zmq.asyncio.Context()
    yield made
    made.destroy(0)


async def until(condition: Any, timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (what is waited for happens in another thread)
            await asyncio.sleep(0.002)


def test_a_server_that_gets_no_second_thread_keeps_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside, go = threading.Event(), threading.Event()

    def busy() -> None:
        inside.set()
        go.wait(5)

    def none(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    server = WireServer(Echo(), burst_ended=busy)
    server.bind()
    server.start()
    with zmq.Context() as plain, plain.socket(zmq.DEALER) as client:
        client.linger = 0
        client.connect(server.address)
        client.send_multipart(encode(sub_call(ROWS, [])))
        assert inside.wait(5)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", none)
            assert not server.replace_held(0.0)
        assert (server.alive, server.replaced_threads) == (True, 0)
        assert server.replace_held(0.0), "asked again it does"
        assert server.alive
        go.set()
        assert client.poll(5000)
    server.stop()


@pytest.mark.asyncio
async def test_answers_out_of_order_find_their_questions(
    echo: Echo, server: WireServer, context: zmq.asyncio.Context
) -> None:
    channel = ZmqShardChannel(address_of(server), context=context)
    echo.hold = True
    calls = [sub_call(ROWS * i, [], call_id=i % 3, sub_id=i) for i in range(9)]
    flying = [asyncio.create_task(channel.forward(call)) for call in calls]
    await until(lambda: len(echo.held) == 9)
    echo.answer_all()  # last first, from this thread
    for i, reply in enumerate(await asyncio.gather(*flying)):
        np.testing.assert_array_equal(reply.partial, ROWS * i)
    assert channel.late_answers == 0
    await channel.close()


@pytest.mark.asyncio
async def test_a_stopped_server_fails_what_is_in_flight_within_milliseconds_and_comes_back(
    echo: Echo, server: WireServer, context: zmq.asyncio.Context
) -> None:
    lost: list[str] = []
    channel = ZmqShardChannel(
        address_of(server), context=context, on_disconnect=lambda _a, reason: lost.append(reason)
    )
    await channel.forward(sub_call(ROWS, [], call_id=1))
    echo.hold = True
    flying = [
        asyncio.create_task(channel.forward(sub_call(ROWS, [], call_id=i))) for i in range(2, 5)
    ]
    await until(lambda: len(echo.held) == 3)
    at_s = time.monotonic()
    server.stop()
    results = await asyncio.gather(*flying, return_exceptions=True)
    took_s = time.monotonic() - at_s
    assert [type(result) for result in results] == [WireLost] * 3
    print(f"lost after {took_s * 1e3:.1f} ms")
    assert lost == ["disconnected"]
    assert not channel.connected
    with pytest.raises(WireLost):  # a channel that is down does not wait
        await channel.forward(sub_call(ROWS, [], call_id=9))

    port = int(server.address.rsplit(":", 1)[1])
    again = Echo()
    second = WireServer(again, port=port)
    second.bind()
    second.start()
    await until(lambda: channel.connected)
    reply = await channel.forward(sub_call(ROWS, [], call_id=10))
    assert reply.call_id == 10
    assert len(again.got) == 1, "nothing that was lost is sent later"
    await channel.close()
    second.stop()


@pytest.mark.asyncio
async def test_nobody_there_is_a_lost_wire_at_once(context: zmq.asyncio.Context) -> None:
    server = WireServer(Echo())
    server.bind()
    server.start()
    server.stop()
    channel = ZmqShardChannel(address_of(server), context=context)
    with pytest.raises(WireLost):
        await channel.forward(sub_call(ROWS, [], timeout_s=30.0))
    assert not channel.connected
    await channel.close()


@pytest.mark.asyncio
async def test_a_peer_that_stands_still_is_found_by_heartbeats(
    context: zmq.asyncio.Context,
) -> None:
    """A stopped process keeps its connection; only heartbeats tell."""
    program = (
        "import sys, zmq\n"
        "s = zmq.Context().socket(zmq.ROUTER)\n"
        "print(s.bind_to_random_port('tcp://127.0.0.1'), flush=True)\n"
        "while True: s.recv_multipart()\n"
    )
    with subprocess.Popen(  # noqa: ASYNC220 (starts at once)
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            options = WireOptions(heartbeat_s=0.1, heartbeat_timeout_s=0.3)
            address = RankAddress(
                rank=0, node="n", address=f"tcp://127.0.0.1:{port}", incarnation=1
            )
            channel = ZmqShardChannel(address, context=context, options=options)
            flying = asyncio.create_task(channel.forward(sub_call(ROWS, [], timeout_s=30.0)))
            await until(lambda: channel.connected)
            process.send_signal(signal.SIGSTOP)
            at_s = time.monotonic()
            with pytest.raises(WireLost):
                await flying
            assert time.monotonic() - at_s < 25.0
            assert not channel.connected
            await channel.close()
        finally:
            os.kill(process.pid, signal.SIGKILL)


@pytest.mark.asyncio
async def test_a_cancelled_call_leaves_nothing_and_its_answer_is_dropped(
    echo: Echo, server: WireServer, context: zmq.asyncio.Context
) -> None:
    channel = ZmqShardChannel(address_of(server), context=context)
    echo.hold = True
    flying = asyncio.create_task(channel.forward(sub_call(ROWS, [], call_id=1)))
    await until(lambda: len(echo.held) == 1)
    flying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await flying
    echo.answer_all()
    await until(lambda: channel.late_answers == 1)
    echo.hold = False
    assert (await channel.forward(sub_call(ROWS, [], call_id=1))).call_id == 1
    await channel.close()


@pytest.mark.asyncio
async def test_the_same_sub_call_twice_in_flight_is_refused(
    echo: Echo, server: WireServer, context: zmq.asyncio.Context
) -> None:
    channel = ZmqShardChannel(address_of(server), context=context)
    echo.hold = True
    flying = asyncio.create_task(channel.forward(sub_call(ROWS, [], call_id=1)))
    await until(lambda: len(echo.held) == 1)
    with pytest.raises(InvalidArgument, match="in flight"):
        await channel.forward(sub_call(ROWS, [], call_id=1))
    echo.answer_all()
    await flying
    await channel.close()


@pytest.mark.asyncio
async def test_a_message_at_the_limit_passes_and_one_byte_over_is_refused_before_it_is_sent(
    echo: Echo, context: zmq.asyncio.Context
) -> None:
    size = sum(len(bytes(frame)) for frame in encode(sub_call(ROWS, [])))
    server = WireServer(echo, options=WireOptions(message_bytes_max=size))
    server.bind()
    server.start()
    exact = ZmqShardChannel(
        address_of(server), context=context, options=WireOptions(message_bytes_max=size)
    )
    await exact.forward(sub_call(ROWS, []))
    with pytest.raises(ResourceExhausted, match=str(size)):
        await exact.forward(sub_call(ROWS, [], router="router-00"))
    assert len(echo.got) == 1
    assert exact.connected
    # A peer that ignores the limit: refused by field, its other calls and other peers unharmed.
    rude = ZmqShardChannel(address_of(server), context=context)
    with pytest.raises(InvalidArgument, match="limit"):
        await rude.forward(sub_call(ROWS, [], router="router-00"))
    assert (await exact.forward(sub_call(ROWS, [], call_id=2))).call_id == 2
    # One frame above the limit: the connection itself is dropped before the bytes are read.
    with pytest.raises(WireLost):
        await rude.forward(sub_call(np.zeros((4096, 8), np.float32), [], call_id=3))
    assert (await exact.forward(sub_call(ROWS, [], call_id=4))).call_id == 4
    assert server.alive
    await exact.close()
    await rude.close()
    server.stop()


@pytest.mark.asyncio
async def test_bytes_that_are_no_message_are_dropped_and_counted(
    echo: Echo, server: WireServer, context: zmq.asyncio.Context
) -> None:
    stranger = context.socket(zmq.DEALER)
    stranger.linger = 0
    stranger.connect(server.address)
    for parts in ([b""], [b"GET / HTTP/1.1"], [b"x"] * 9, [os.urandom(100)] * 3):
        await stranger.send_multipart(parts)
    broken = encode(CopyClose(7, 1))
    await stranger.send_multipart([broken[0][:24]])  # type: ignore[index]
    answer = await asyncio.wait_for(stranger.recv_multipart(), 5)
    assert answer[0][5] == 3, "an ERROR where the ids could be read"
    await until(lambda: server.malformed == 5)
    channel = ZmqShardChannel(address_of(server), context=context)
    assert (await channel.forward(sub_call(ROWS, []))).call_id == 1
    assert [type(message) for message in echo.got] == [SubCall]
    stranger.close(0)
    await channel.close()


@pytest.mark.asyncio
async def test_an_answer_to_a_peer_that_is_gone_is_dropped(
    echo: Echo, server: WireServer, context: zmq.asyncio.Context
) -> None:
    gone = ZmqShardChannel(address_of(server), context=context)
    echo.hold = True
    flying = asyncio.create_task(gone.forward(sub_call(ROWS, [])))
    await until(lambda: len(echo.held) == 1)
    await gone.close()
    with pytest.raises(WireLost):
        await flying
    await asyncio.sleep(0.1)
    echo.answer_all()
    await until(lambda: server.dropped_answers == 1)
    assert server.alive


class SlowToSend(WireServer):
    """Messages come between its last look at the socket and its sending."""

    def _flush(self, socket: zmq.Socket[bytes]) -> bool:
        if self._outbox:
            time.sleep(0.003)
        return super()._flush(socket)


@pytest.mark.asyncio
async def test_a_message_that_comes_while_answers_are_sent_is_seen(
    echo: Echo, context: zmq.asyncio.Context
) -> None:
    """Sending may take in the descriptor's only word of that message: without a second look the
    server would sleep on it until another one came."""
    slow = SlowToSend(echo)
    slow.bind()
    slow.start()
    channel = ZmqShardChannel(address_of(slow), context=context)
    echo.hold = True
    try:
        for i in range(20):
            first = asyncio.create_task(channel.forward(sub_call(ROWS, [], call_id=i, sub_id=0)))
            await until(lambda: len(echo.held) == 1)
            echo.answer_all()  # from this thread: the server is woken only to send
            await asyncio.sleep(0.001)
            second = asyncio.create_task(channel.forward(sub_call(ROWS, [], call_id=i, sub_id=1)))
            await until(lambda: len(echo.held) == 1, timeout_s=2.0)
            echo.answer_all()
            await asyncio.gather(first, second)
    finally:
        await channel.close()
        slow.stop()


def test_a_taken_port_is_refused_in_one_line(server: WireServer) -> None:
    port = int(server.address.rsplit(":", 1)[1])
    second = WireServer(Echo(), port=port)
    with pytest.raises(StartRefused, match=str(port)) as caught:
        second.bind()
    assert "\n" not in str(caught.value)
    second.stop()
    with pytest.raises(StartRefused, match="cannot bind"):
        WireServer(Echo(), host="198.51.100.7", security=some_security()).bind()


def some_security() -> ServerSecurity:
    own, client = CurveKeys.generate(), CurveKeys.generate()
    return ServerSecurity(own, frozenset({client.public}))


def test_it_binds_loopback_unless_told_otherwise(server: WireServer) -> None:
    assert server.address.startswith("tcp://127.0.0.1:")


def test_stop_is_idempotent_and_leaves_no_thread() -> None:
    made = WireServer(Echo())
    made.bind()
    made.start()
    made.stop()
    made.stop()
    assert not made.alive
    WireServer(Echo()).stop()


# ---------------------------------------------------------------------------------------- CURVE


@pytest.mark.asyncio
async def test_only_admitted_keys_get_in(echo: Echo, context: zmq.asyncio.Context) -> None:
    own, client, other = (CurveKeys.generate() for _ in range(3))
    server = WireServer(echo, security=ServerSecurity(own, frozenset({client.public})))
    server.bind()
    server.start()
    short = WireOptions(handshake_s=0.5)

    good = ZmqShardChannel(address_of(server, own), context=context, keys=client)
    assert (await good.forward(sub_call(ROWS, []))).call_id == 1

    refused = {
        "a client key that is not admitted": (address_of(server, own), other),
        "a wrong server key": (address_of(server, other), client),
        "no keys at all": (address_of(server), None),
    }
    for why, (address, keys) in refused.items():
        channel = ZmqShardChannel(address, context=context, keys=keys, options=short)
        with pytest.raises(WireLost):
            await channel.forward(sub_call(ROWS, [], timeout_s=3.0))
        assert not channel.connected, why
        await channel.close()
    assert len(echo.got) == 1
    assert (await good.forward(sub_call(ROWS, [], call_id=2))).call_id == 2
    await good.close()
    server.stop()


@pytest.mark.asyncio
async def test_keys_and_address_must_agree(
    server: WireServer, context: zmq.asyncio.Context
) -> None:
    keys = CurveKeys.generate()
    for address, held in ((address_of(server, keys), None), (address_of(server), keys)):
        with pytest.raises(InvalidArgument, match="rank 3") as caught:
            ZmqShardChannel(address, context=context, keys=held)
        assert keys.secret not in str(caught.value)
