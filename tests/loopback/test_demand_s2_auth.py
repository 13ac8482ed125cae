"""S2 and S4: every method of every service of both servers asks for a live token of its role; a
shard takes nothing but work from the wire."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
import zmq
import zmq.asyncio
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import MethodDescriptor
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from moe_serve.controller.admin_server import AdminServer
from moe_serve.errors import InvalidArgument
from moe_serve.router.dispatch import RouterCore
from moe_serve.router.service import RouterServer
from moe_serve.rpc import dispatch_pb2, dispatch_pb2_grpc
from moe_serve.rpc.auth import Role, bearer_metadata, method_roles
from moe_serve.rpc.options import channel_credentials
from moe_serve.wire.codec import decode, encode
from moe_serve.wire.frame import Kind
from moe_serve.wire.wire_messages import ErrorReply, Table
from placement.messages.codec import encode as encode_placement
from placement.messages.effects import AbortAdd, ReleaseSlot, SetRankSlots
from placement.routing import RoutingTable
from tests.fake_shards import HIDDEN, FakeWorld, marker_spec, router_settings
from tests.fakes.marker_experts import add, marker_model, marker_shard
from tests.fakes.secured import TOKENS, NobodyAtHome, controller_settings, tls_files, token_file

OPEN = "/grpc.health.v1.Health/Check"
OLD = "o" * 20


@asynccontextmanager
async def a_router(tokens: Path, **changes: Any) -> AsyncIterator[str]:
    world = FakeWorld(marker_spec())
    world.place()
    settings = router_settings(world.spec, token_file=tokens, **changes)
    core = RouterCore(settings, world.open_channel)
    core.install_table(world.table())
    server = RouterServer(core)
    try:
        yield await server.start()
        assert core.open_requests == 0
    finally:
        await server.stop(0.0)


@asynccontextmanager
async def a_controller(tokens: Path) -> AsyncIterator[str]:
    source = NobodyAtHome(controller_settings(tokens.parent, token_file=tokens))
    server = AdminServer(source)
    try:
        await server.start()
        yield server.address
    finally:
        await server.stop(0.0)


SERVERS = {"router": a_router, "controller": a_controller}


async def methods_of(channel: grpc.aio.Channel) -> dict[str, MethodDescriptor]:
    """Every method of every service that the server itself says it has."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)

    async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    metadata = bearer_metadata(TOKENS[Role.READ])
    found: dict[str, MethodDescriptor] = {}
    async for answer in stub.ServerReflectionInfo(ask(), metadata=metadata, timeout=5):
        for listed in answer.list_services_response.service:
            service = descriptor_pool.Default().FindServiceByName(listed.name)
            found |= {f"/{service.full_name}/{m.name}": m for m in service.methods}
    return found


async def code_of(
    channel: grpc.aio.Channel, name: str, method: MethodDescriptor | None, metadata: Any
) -> grpc.StatusCode:
    """Call with an empty message, or none on a stream, and say how it ended. A stream that goes on
    counts as OK."""

    async def nothing() -> AsyncIterator[bytes]:
        return
        yield b""

    asks = method is not None and method.client_streaming
    answers = method is not None and method.server_streaming
    kind = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }[asks, answers]
    call = kind(name)(nothing() if asks else b"", metadata=metadata, timeout=2)
    try:
        if answers:
            async for _ in call:
                break
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    call.cancel()
    return grpc.StatusCode.OK


STRANGERS = {
    "no header": (),
    "wrong token": bearer_metadata("w" * 20),
    "token of a rotation that is over": bearer_metadata(OLD),
    "beginning of a token": bearer_metadata(TOKENS[Role.ADMIN][:-1]),
    "token and more": bearer_metadata(TOKENS[Role.ADMIN] + "a"),
    "other scheme": (("authorization", f"Basic {TOKENS[Role.ADMIN]}"),),
    "bare token": (("authorization", TOKENS[Role.ADMIN]),),
    "other header": (("x-authorization", f"Bearer {TOKENS[Role.ADMIN]}"),),
    "bytes": (("authorization-bin", TOKENS[Role.ADMIN].encode()),),
    "wrong token first": (
        ("authorization", "Bearer " + "w" * 20),
        ("authorization", f"Bearer {TOKENS[Role.ADMIN]}"),
    ),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("server", SERVERS)
async def test_s2_every_method_refuses_every_stranger(tmp_path: Path, server: str) -> None:
    async with (
        SERVERS[server](token_file(tmp_path)) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        methods = await methods_of(channel)
        ours = {name for name in method_roles() if name in methods}
        of = "DispatchService" if server == "router" else "PlacementService"
        assert ours == {name for name in method_roles() if f".{of}/" in name}
        assert OPEN in methods
        assert len(methods) > len(ours) + 2, "health and reflection are served too"
        asks = [
            (name, method, why, metadata)
            for name, method in [*methods.items(), ("/no.such.Service/Method", None)]
            for why, metadata in STRANGERS.items()
            if name != OPEN
        ]
        codes = await asyncio.gather(*(code_of(channel, n, m, md) for n, m, _, md in asks))
        let_in = [
            (name, why, code)
            for (name, _, why, _), code in zip(asks, codes, strict=True)
            if code is not grpc.StatusCode.UNAUTHENTICATED
        ]
        assert let_in == []
        assert await code_of(channel, OPEN, methods[OPEN], ()) is grpc.StatusCode.OK


@pytest.mark.asyncio
@pytest.mark.parametrize("server", SERVERS)
async def test_s4_every_method_takes_its_role_and_no_other(tmp_path: Path, server: str) -> None:
    refused = grpc.StatusCode.PERMISSION_DENIED
    may = {
        Role.DISPATCH: {Role.DISPATCH},
        Role.READ: {Role.READ},
        Role.ADMIN: {Role.READ, Role.ADMIN},
    }
    async with (
        SERVERS[server](token_file(tmp_path)) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        for name, method in (await methods_of(channel)).items():
            needed = method_roles().get(name)
            for role, token in TOKENS.items():
                code = await code_of(channel, name, method, bearer_metadata(token))
                assert code is not grpc.StatusCode.UNAUTHENTICATED, (name, role)
                allowed = needed is None or needed in may[role]
                assert (code is not refused) is allowed, (name, role, code)


@pytest.mark.asyncio
async def test_s4_a_refused_call_does_not_reach_the_controller(tmp_path: Path) -> None:
    source = NobodyAtHome(controller_settings(tmp_path, token_file=token_file(tmp_path)))
    server = AdminServer(source)
    await server.start()
    async with grpc.aio.insecure_channel(server.address) as channel:
        methods = await methods_of(channel)
        changing = [n for n, role in method_roles().items() if role is Role.ADMIN and n in methods]
        assert len(changing) >= 7
        for name in changing:
            for token in (TOKENS[Role.DISPATCH], TOKENS[Role.READ]):
                await code_of(channel, name, methods[name], bearer_metadata(token))
        assert source.asked == 0
        resume = "/moe_serve.rpc.v1.PlacementService/Resume"
        await code_of(channel, resume, methods[resume], bearer_metadata(TOKENS[Role.ADMIN]))
        assert source.asked > 0
    await server.stop(0.0)


@pytest.mark.asyncio
async def test_s2_a_refusal_reads_nothing_of_the_request(tmp_path: Path) -> None:
    """A stranger's rows are not even parsed: bytes that are no message are refused as a stranger's,
    not as malformed."""
    async with (
        a_router(token_file(tmp_path)) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        call = channel.unary_unary("/moe_serve.rpc.v1.DispatchService/Forward")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"\xff" * 1000, timeout=5)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        text = f"{caught.value.details()} {caught.value.trailing_metadata()}"
        assert not any(token in text for token in TOKENS.values())


# ------------------------------------------------------------------------------------------- TLS


def shake_hands(port: int, newest: ssl.TLSVersion, oldest: ssl.TLSVersion) -> str:
    """Version agreed on, or why there is none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    context.set_ciphers("ALL:@SECLEVEL=0")  # a client willing to speak anything
    context.minimum_version, context.maximum_version = oldest, newest
    with socket.create_connection(("127.0.0.1", port), 5) as plain:
        try:
            with context.wrap_socket(plain) as wrapped:
                return str(wrapped.version())
        except (ssl.SSLError, ConnectionError) as error:
            return f"refused: {getattr(error, 'reason', error)}"


@pytest.mark.asyncio
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
async def test_s2_nothing_older_than_tls_1_2_is_spoken(tmp_path: Path) -> None:
    certificate, key = tls_files(tmp_path)
    version = ssl.TLSVersion
    tls = {"tls_certificate": certificate, "tls_key": key}
    async with a_router(token_file(tmp_path), **tls) as address:
        port = int(address.rpartition(":")[2])
        for newest, oldest, agreed in (
            (version.TLSv1_3, version.TLSv1_3, "TLSv1.3"),
            (version.TLSv1_2, version.TLSv1_2, "TLSv1.2"),
        ):
            assert await asyncio.to_thread(shake_hands, port, newest, oldest) == agreed
        old = await asyncio.to_thread(shake_hands, port, version.TLSv1_1, version.TLSv1)
        # The server's doing: an offer that our own side would not make fails in other words.
        ended = ("TLSV1_ALERT_PROTOCOL_VERSION", "UNEXPECTED_EOF_WHILE_READING")
        assert old in {f"refused: {word}" for word in ended}
        token = bearer_metadata(TOKENS[Role.DISPATCH])
        credentials = channel_credentials(certificate)
        async with grpc.aio.secure_channel(f"localhost:{port}", credentials) as channel:
            stub = dispatch_pb2_grpc.DispatchServiceStub(channel)
            request = dispatch_pb2.GetModelSpecRequest()
            assert (await stub.GetModelSpec(request, metadata=token, timeout=5)).top_k == 3
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetModelSpec(request, timeout=5)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        # Somebody else's certificate is not believed by our client.
        other = tmp_path / "other"
        other.mkdir()
        stranger, _ = tls_files(other)
        credentials = channel_credentials(stranger)
        async with grpc.aio.secure_channel(f"localhost:{port}", credentials) as channel:
            stub = dispatch_pb2_grpc.DispatchServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetModelSpec(request, metadata=token, timeout=5)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


# ------------------------------------------------------------------------------ shards, directly


@pytest.mark.asyncio
async def test_s4_a_shard_takes_no_command_and_no_table_from_the_wire() -> None:
    """Placement comes through the actor handle, which only the controller has. The wire has no
    words for it, and what only looks like it is refused."""
    asking = {Kind.FORWARD, Kind.FETCH_TABLE, Kind.COPY_OPEN, Kind.COPY_READ}
    answering = {Kind.REPLY, Kind.ERROR, Kind.TABLE, Kind.COPY_OPENED, Kind.COPY_CHUNK}
    assert asking | answering | {Kind.COPY_CLOSE} == set(Kind), "say here what a new kind may do"
    shard = marker_shard(model=marker_model(hidden=HIDDEN))
    address = shard.start()
    tag = add(shard, 0, 0)
    before = shard.describe()
    context = zmq.asyncio.Context()
    peer = context.socket(zmq.DEALER)
    peer.linger = 0
    peer.connect(address.address)
    try:
        table = RoutingTable(
            term=9,
            epoch=9,
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
        await peer.send_multipart(encode(Table(1, table)))
        answer = decode(await asyncio.wait_for(peer.recv_multipart(), 5))
        assert isinstance(answer, ErrorReply)
        assert isinstance(answer.error, InvalidArgument)
        for command in (
            ReleaseSlot(step_id=1, rank=0, incarnation=1, slot=0, slot_tag=tag, layer=0, expert=0),
            AbortAdd(step_id=1, rank=0, incarnation=1, slot=0, slot_tag=tag),
            SetRankSlots(rank=0, incarnation=1, num_slots=0, budget_bytes=0),
        ):
            await peer.send(encode_placement(command))
        async with asyncio.timeout(5):
            while shard.wire.malformed < 3:  # noqa: ASYNC110 - counted in another thread
                await asyncio.sleep(0.01)
        assert shard.describe() == before
        assert shard.core.slots.table is None
    finally:
        peer.close(0)
        context.destroy(0)
        shard.stop()
