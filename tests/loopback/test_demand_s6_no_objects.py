"""S6: bytes from outside are never turned into objects, in whichever field they come. The static
half is in tests/architecture (no pickle, eval, torch.load or YAML object load in the packages),
checkpoints are in the tests of weights."""

import asyncio
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
import zmq
import zmq.asyncio
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from moe_serve.config.load import ConfigInvalid, parse_config
from moe_serve.router.dispatch import RouterCore
from moe_serve.router.service import RouterServer
from moe_serve.rpc import dispatch_pb2, placement_pb2
from moe_serve.shard.assembly import Shard
from moe_serve.wire.codec import encode
from moe_serve.wire.wire_messages import FetchTable
from placement.messages import codec as placement_codec
from tests.fake_shards import FakeWorld, marker_spec, router_settings
from tests.fakes.marker_experts import marker_shard
from tests.fakes.sub_calls import sub_call

BYTES, MESSAGE = FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_MESSAGE


class Canary:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.path, "unpickled")


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    """Path of a file that must not appear; the canary is shown to sing at the end."""
    path = tmp_path / "canary"
    yield path
    assert not path.exists(), "bytes from outside were unpickled"
    pickle.loads(pickle.dumps(Canary(path)))  # noqa: S301 - our own bytes
    assert path.exists()


def bombs(canary: Path) -> list[bytes]:
    return [pickle.dumps(Canary(canary), protocol=protocol) for protocol in range(6)]


def bytes_fields(kind: Descriptor, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of every bytes field below a message."""
    for field in kind.fields:
        if field.type == BYTES:
            yield (*path, field.name)
        elif field.type == MESSAGE and field.name not in path:
            yield from bytes_fields(field.message_type, (*path, field.name))


def set_path(message: Message, path: tuple[str, ...], value: bytes) -> None:
    for name in path[:-1]:
        message = getattr(message, name)
    setattr(message, path[-1], value)


REQUESTS = [
    (f"/{service.full_name}/{method.name}", method)
    for file in (dispatch_pb2, placement_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
IN_BYTES = [
    (name, method, path) for name, method in REQUESTS for path in bytes_fields(method.input_type)
]


def test_the_fields_are_found() -> None:
    assert {path for _, _, path in IN_BYTES} >= {
        ("hidden_states", "raw"),
        ("topk_ids", "raw"),
        ("topk_weights", "raw"),
        ("row_valid",),
        ("pair_valid",),
        ("request", "hidden_states", "raw"),
    }


@pytest.mark.asyncio
async def test_pickles_in_every_bytes_field_of_every_request(canary: Path) -> None:
    world = FakeWorld(marker_spec())
    world.place()
    core = RouterCore(router_settings(world.spec), world.open_channel)
    core.install_table(world.table())
    server = RouterServer(core)
    async with grpc.aio.insecure_channel(await server.start()) as channel:
        for name, method, path in IN_BYTES:
            for bomb in bombs(canary):
                request = GetMessageClass(method.input_type)()
                set_path(request, path, bomb)
                code = await code_of(channel, name, method, request.SerializeToString())
                assert code == grpc.StatusCode.INVALID_ARGUMENT.value[0], (name, path)
        for name, method in REQUESTS:
            for bomb in [] if method.client_streaming else bombs(canary):  # the whole message
                with pytest.raises(grpc.aio.AioRpcError):
                    await channel.unary_unary(name)(bomb, timeout=5)
    await server.stop(0.0)


async def code_of(
    channel: grpc.aio.Channel, name: str, method: MethodDescriptor, data: bytes
) -> int:
    """Number of the status that a request ends with, on a stream that of its item."""
    if method.client_streaming:
        call = channel.stream_stream(name)(timeout=5)
        await call.write(data)
        answer = dispatch_pb2.StreamForwardResponse.FromString(await call.read())
        call.cancel()
        return int(answer.error.code)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(name)(data, timeout=5)
    return int(caught.value.code().value[0])


@pytest.fixture
def shard() -> Iterator[Shard]:
    made = marker_shard()
    made.start()
    yield made
    made.stop()


@pytest.mark.asyncio
async def test_pickles_in_every_frame_of_the_wire(canary: Path, shard: Shard) -> None:
    messages = [
        [bytes(one) for one in encode(message)]
        for message in (sub_call(np.zeros((1, 8), np.float32), [(0, 0, 1, 1.0, 0)]), FetchTable(1))
    ]
    context = zmq.asyncio.Context()
    peer = context.socket(zmq.DEALER)
    peer.linger = 0
    peer.connect(shard.address.address)
    sent = 0
    try:
        for bomb in bombs(canary):
            for frames in messages:
                for number in range(len(frames)):
                    await peer.send_multipart([*frames[:number], bomb, *frames[number + 1 :]])
                    sent += 1
            await peer.send(bomb)
            sent += 1
        async with asyncio.timeout(10):
            while shard.wire.malformed < sent:  # noqa: ASYNC110 - counted in another thread
                await asyncio.sleep(0.01)
        assert shard.wire.alive
    finally:
        peer.close(0)
        context.destroy(0)


def test_pickles_between_our_own_parts(canary: Path) -> None:
    for bomb in bombs(canary):
        for decode in (placement_codec.decode_command, placement_codec.decode_event):
            with pytest.raises(Exception, match=r".") as caught:
                decode(bomb)
            assert type(caught.value).__module__.split(".")[0] in {"msgspec", "moe_serve"}


@pytest.mark.parametrize(
    "node",
    [
        "!!python/object/apply:pathlib.Path.write_text [{path}, x]",
        "!!python/object/new:os.system [touch {path}]",
        "!!python/name:os.system ''",
    ],
)
def test_a_service_file_makes_no_object(canary: Path, node: str) -> None:
    text = f"service: {node.format(path=canary)}\n"
    with pytest.raises(ConfigInvalid) as refused:
        parse_config(text.encode(), "service.yaml")
    assert "YAML tags" in str(refused.value)
