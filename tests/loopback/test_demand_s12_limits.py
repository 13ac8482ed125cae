"""S12: limits hold before anything is allocated. A router and a wire, each in a process of its own,
are flooded by peers that keep no rule; their memory stays, and another client is served
meanwhile."""

import asyncio
import gzip
import os
import re
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import numpy as np
import pytest
import zmq
import zmq.asyncio

from moe_serve.rpc import codec, dispatch_pb2, dispatch_pb2_grpc
from moe_serve.rpc.options import RpcLimits, channel_options, server_options
from moe_serve.wire.channel import ZmqShardChannel
from moe_serve.wire.security import CurveKeys
from moe_serve.wire.sockets import WireOptions
from placement.routing import RankAddress
from tests.fake_shards import HIDDEN, oracle
from tests.fakes.raw_http2 import PREFACE, REFUSED_STREAM, Frame, Kind, RawHttp2, frame
from tests.fakes.sub_calls import sub_call

SERVICE = "/moe_serve.rpc.v1.DispatchService"
GROWTH_MAX = 64 << 20
HANDSHAKE_S = 1.0
HALF_OPEN = 300
CANCELLED = 4000
ROOT = Path(__file__).parents[2]


class Target:
    """A flooded process."""

    def __init__(self, what: str, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.flood_target", what, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self.process.stdout is not None
        self.address, *self.keys = self.process.stdout.readline().split()
        self.before = self.memory()

    def memory(self) -> int:
        """Greatest resident bytes so far: a peak counts even if it is given back."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", text)
        assert found is not None
        return int(found[1]) << 10

    def settle(self) -> None:
        """Growth counts from now on."""
        self.before = self.memory()

    def check(self, what: str) -> None:
        """Still there, and not grown."""
        assert self.process.poll() is None, "the flooded process ended"
        growth = self.memory() - self.before
        print(f"{what}: {growth / 2**20:.1f} MiB")
        assert growth <= GROWTH_MAX, f"{what}: {growth} bytes more"

    def descriptors(self) -> int:
        """Open files of the process."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def end(self) -> None:
        """End it by closing its input."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)


@pytest.fixture(scope="module")
def router() -> Iterator[Target]:
    target = Target("router", "--handshake-s", str(HANDSHAKE_S))
    yield target
    target.end()


def a_request() -> tuple[codec.ForwardArrays, dispatch_pb2.ForwardRequest]:
    rng = np.random.default_rng(1)
    made = codec.ForwardArrays(
        model="marker",
        layer=1,
        phase=int(dispatch_pb2.FORWARD_PHASE_DECODE),
        data_type=codec.FP32,
        hidden=rng.standard_normal((4, HIDDEN)).astype(np.float32),
        topk_ids=np.array([rng.permutation(6)[:2] for _ in range(4)], np.int32),
        topk_weights=rng.standard_normal((4, 2)).astype(np.float32),
    )
    return made, codec.forward_request(made)


@asynccontextmanager
async def served_meanwhile(target: Target, what: str) -> AsyncIterator[None]:
    """Another client calls all the time; each of its answers must be right."""
    made, request = a_request()
    want = oracle(made.hidden, made.topk_ids, made.topk_weights)
    times: list[float] = []
    async with grpc.aio.insecure_channel(target.address, options=channel_options()) as channel:
        stub = dispatch_pb2_grpc.DispatchServiceStub(channel)

        async def one() -> None:
            began_s = time.perf_counter()
            output, _ = codec.output_array(await stub.Forward(request, timeout=15))
            times.append(time.perf_counter() - began_s)
            np.testing.assert_allclose(output, want, rtol=1e-4, atol=1e-5)

        async def all_the_time() -> None:
            while True:
                await one()
                await asyncio.sleep(0.002)

        for _ in range(30):
            await one()
        target.settle()
        times.clear()
        calling = asyncio.create_task(all_the_time())
        try:
            yield
            assert not calling.done(), "a call of the other client failed"
        finally:
            calling.cancel()
            with suppress(asyncio.CancelledError):
                await calling
        await one()
    worst = f"median {statistics.median(times) * 1e3:.1f} ms, worst {max(times) * 1e3:.0f} ms"
    print(f"{what}: {len(times)} calls of another client, {worst}")
    target.check(what)


async def closed_by_peer(reader: asyncio.StreamReader, within_s: float) -> None:
    async with asyncio.timeout(within_s):
        with suppress(ConnectionError):
            while await reader.read(4096):
                pass


@pytest.mark.asyncio
async def test_half_open_connections_are_closed_by_the_handshake_limit(router: Target) -> None:
    async with served_meanwhile(router, "half-open"):
        host, _, port = router.address.rpartition(":")
        before = router.descriptors()
        streams = [await asyncio.open_connection(host, int(port)) for _ in range(HALF_OPEN)]
        for number, (_, writer) in enumerate(streams):
            # Nothing, half a preface, or a preface without the settings that belong to it.
            writer.write((b"", PREFACE[:12], PREFACE)[number % 3])
        waiting = (closed_by_peer(reader, HANDSHAKE_S + 8) for reader, _ in streams)
        await asyncio.gather(*waiting)
        for _, writer in streams:
            writer.close()
        async with asyncio.timeout(5):
            while router.descriptors() > before + 5:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)


@pytest.mark.asyncio
async def test_calls_opened_and_cancelled_at_once_leave_nothing(router: Target) -> None:
    async with served_meanwhile(router, "open and cancel"):
        _, request = a_request()
        body = request.SerializeToString()
        message = b"\0" + struct.pack(">I", len(body)) + body
        done = connections = 0
        while done < CANCELLED:
            peer = await RawHttp2.connect(router.address)
            connections += 1
            assert connections < 200, "the server lets nobody cancel more than a few calls"
            for number in range(done, CANCELLED):
                if peer.closed.is_set() or peer.seen[Kind.GOAWAY]:
                    break
                method = ("StreamForward", "Forward", "GetModelSpec", "NoSuchMethod")[number % 4]
                stream = peer.open_stream(f"{SERVICE}/{method}")
                if number % 3 == 0:
                    peer.data(stream, message)
                peer.reset(stream)
                done += 1
                if number % 100 == 0:
                    await peer.settled()
            await peer.settled()
            await peer.close()


@pytest.mark.asyncio
async def test_no_connection_has_more_streams_than_its_limit(router: Target) -> None:
    limit = RpcLimits().max_streams_per_connection
    assert limit == 256
    async with served_meanwhile(router, "streams"):
        peer = await RawHttp2.connect(router.address)
        streams = [peer.open_stream(f"{SERVICE}/StreamForward") for _ in range(limit + 60)]
        await peer.until(lambda: len(peer.resets) >= 60)
        assert peer.resets == dict.fromkeys(streams[limit:], REFUSED_STREAM)
        for stream in streams[:limit]:
            peer.reset(stream)
        await peer.drain()
        await peer.close()


@pytest.mark.asyncio
async def test_headers_above_8_kib_reach_no_handler(router: Target) -> None:
    assert RpcLimits().max_metadata_bytes == 8192

    async def answered(extra: list[tuple[bytes, bytes]]) -> bool:
        """True where the method answered with a message, False where it was refused before."""
        peer = await RawHttp2.connect(router.address)
        stream = peer.open_stream(f"{SERVICE}/GetModelSpec", extra)
        peer.data(stream, bytes(5), end=True)
        await peer.until(lambda: stream in peer.ended or peer.closed.is_set())
        found = peer.seen[Kind.DATA] > 0
        await peer.close()
        return found

    async with served_meanwhile(router, "headers"):
        assert await answered([(b"x-fill", b"x" * 6000)])
        assert not await answered([(b"x-fill", b"x" * 8192)])
        assert not await answered([(b"x-fill", b"x" * 2**20)])
        assert not await answered([(b"x-%d" % number, b"y" * 50) for number in range(100)])
        await asyncio.gather(*(answered([(b"x", b"x" * 200_000)]) for _ in range(50)))


@pytest.mark.asyncio
async def test_declared_sizes_allocate_nothing(router: Target) -> None:
    async with served_meanwhile(router, "declared sizes"):
        for size in (2**32 - 1, RpcLimits().max_message_bytes + (1 << 20)):
            peer = await RawHttp2.connect(router.address)
            stream = peer.open_stream(f"{SERVICE}/Forward")
            peer.data(stream, b"\0" + struct.pack(">I", size) + b"x" * 1000)
            await peer.until(lambda peer=peer, stream=stream: stream in peer.ended)
            assert peer.seen[Kind.DATA] == 0
            await peer.close()
        # At the limit nothing is refused yet: many such calls wait and hold only what has come.
        peers = [await RawHttp2.connect(router.address) for _ in range(20)]
        for peer in peers:
            for _ in range(10):
                stream = peer.open_stream(f"{SERVICE}/Forward")
                peer.data(stream, b"\0" + struct.pack(">I", 60 << 20) + b"x" * 1000)
            await peer.drain()
        await asyncio.sleep(0.5)
        for peer in peers:
            await peer.close()
        # A frame longer than HTTP/2 lets it be ends its connection, and no other.
        peer = await RawHttp2.connect(router.address)
        peer.raw(b"\xff\xff\xff" + frame(Kind.DATA, 0, 1)[3:])
        await peer.until(peer.closed.is_set)
        await peer.close()


@pytest.mark.asyncio
async def test_a_small_compressed_message_does_not_become_a_large_one(router: Target) -> None:
    bomb = gzip.compress(bytes(128 << 20), 1)
    async with served_meanwhile(router, "compressed"):
        for _ in range(3):
            peer = await RawHttp2.connect(router.address)
            stream = peer.open_stream(f"{SERVICE}/Forward", [(b"grpc-encoding", b"gzip")])
            peer.data(stream, b"\1" + struct.pack(">I", len(bomb)) + bomb, end=True)
            await peer.until(lambda peer=peer, stream=stream: stream in peer.ended)
            assert peer.seen[Kind.DATA] == 0
            await peer.close()
    assert router.memory() - router.before < 16 << 20, "the message was unpacked"


def test_every_limit_of_a_server_is_set() -> None:
    options = dict(server_options(RpcLimits()))
    assert options["grpc.server_handshake_timeout_ms"] == 10_000
    assert options["grpc.max_connection_idle_ms"] == 300_000
    assert options["grpc.max_concurrent_streams"] == 256
    assert options["grpc.absolute_max_metadata_size"] == 8192
    assert RpcLimits().max_concurrent_rpcs == 1024


def test_the_rude_peer_writes_what_http2_says() -> None:
    assert frame(Kind.SETTINGS, 1, 0) == bytes([0, 0, 0, 4, 1, 0, 0, 0, 0])
    assert Frame(1, 2, 3, b"").kind == Kind.HEADERS


# ------------------------------------------------------------------------------------- the wire

ROWS = np.arange(16, dtype=np.float32).reshape(2, 8)
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"


def zmtp(flags: int, size: int) -> bytes:
    """Header of a long frame. Flags: 1 = more frames follow, 4 = command."""
    return struct.pack(">BQ", flags | 2, size)


async def a_stranger(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A ZMTP peer by hand, without keys."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(GREETING)
    writer.write(zmtp(4, len(READY)) + READY)
    return reader, writer


@pytest.fixture(params=["open", "keys"])
def wire(request: pytest.FixtureRequest) -> Iterator[Target]:
    keys = ["--keys"] if request.param == "keys" else []
    target = Target("wire", "--handshake-s", str(HANDSHAKE_S), *keys)
    yield target
    target.end()


@asynccontextmanager
async def a_channel(target: Target) -> AsyncIterator[ZmqShardChannel]:
    keys = target.keys
    address = RankAddress(
        rank=0, node="n", address=target.address, incarnation=1, public_key=keys[0] if keys else ""
    )
    context = zmq.asyncio.Context()
    client = CurveKeys(keys[1], keys[2]) if keys else None
    channel = ZmqShardChannel(address, context=context, keys=client)
    try:
        for number in range(20):
            await channel.forward(sub_call(ROWS, [], call_id=number))
        target.settle()
        yield channel
        assert (await channel.forward(sub_call(ROWS, [], call_id=99))).call_id == 99
        assert channel.connected
    finally:
        await channel.close()
        context.destroy(0)


@pytest.mark.asyncio
async def test_half_open_wire_connections_are_closed(wire: Target) -> None:
    async with a_channel(wire) as channel:
        host, _, port = wire.address.removeprefix("tcp://").rpartition(":")
        streams = [await asyncio.open_connection(host, int(port)) for _ in range(HALF_OPEN)]
        for number, (_, writer) in enumerate(streams):
            writer.write((b"", GREETING[:10], GREETING)[number % 3])
        for number in range(100, 110):
            await channel.forward(sub_call(ROWS, [], call_id=number))
        waiting = (closed_by_peer(reader, HANDSHAKE_S + 8) for reader, _ in streams)
        await asyncio.gather(*waiting)
        for _, writer in streams:
            writer.close()
    wire.check("half-open wire")


@pytest.mark.asyncio
async def test_a_declared_frame_above_the_limit_ends_its_connection_unread(wire: Target) -> None:
    async with a_channel(wire):
        for size in (2**62, 2**63 - 1, WireOptions().message_bytes_max + 1):
            reader, writer = await a_stranger(wire.address)
            writer.write(zmtp(0, size) + b"x" * 1000)
            await closed_by_peer(reader, HANDSHAKE_S + 8)
            writer.close()
    wire.check("declared frames")


@pytest.mark.asyncio
async def test_a_message_of_many_frames_is_refused_and_given_back(wire: Target) -> None:
    """Frames are counted when the message is whole, so this bound is the codec's; its size is
    small here. With keys a stranger's frames are not even taken."""
    async with a_channel(wire) as channel:
        reader, writer = await a_stranger(wire.address)
        with suppress(ConnectionError):
            for last in [False] * 2000 + [True]:
                writer.write(zmtp(0 if last else 1, 4096) + bytes(4096))
            await writer.drain()
        for number in range(200, 210):
            await channel.forward(sub_call(ROWS, [], call_id=number))
        if wire.keys:
            await closed_by_peer(reader, HANDSHAKE_S + 8)
        writer.close()
    wire.check("many frames")


@pytest.mark.asyncio
@pytest.mark.parametrize("wire", ["keys"], indirect=True)
async def test_without_keys_an_endless_message_costs_nothing(wire: Target) -> None:
    async with a_channel(wire) as channel:
        reader, writer = await a_stranger(wire.address)
        sent = 0
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(HANDSHAKE_S + 3):
                while sent < 256 << 20:
                    writer.write(zmtp(1, 1 << 20) + bytes(1 << 20))
                    sent += 1 << 20
                    await writer.drain()
        writer.close()
        await channel.forward(sub_call(ROWS, [], call_id=300))
        assert not reader.at_eof() or sent < 256 << 20
    assert wire.memory() - wire.before < 16 << 20
    wire.check("endless message")
