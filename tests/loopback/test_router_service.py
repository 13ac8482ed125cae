"""A real gRPC server on loopback over fake shards: bad input, limits, streams, health, tokens."""

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from moe_serve.errors import (
    FailedPrecondition,
    InvalidArgument,
    MoeServeError,
    PermissionDenied,
    ResourceExhausted,
    StartRefused,
    Unauthenticated,
    Unavailable,
)
from moe_serve.ports import DType
from moe_serve.router.dispatch import RouterCore
from moe_serve.router.service import SERVICE_NAME, RouterServer
from moe_serve.rpc import (
    codec,
    dispatch_pb2,
    dispatch_pb2_grpc,
    placement_pb2,
    placement_pb2_grpc,
)
from moe_serve.rpc.auth import bearer_metadata, method_roles
from moe_serve.rpc.options import RpcLimits, channel_credentials, channel_options
from moe_serve.rpc.status import DETAILS_KEY, from_item_error, from_rpc_error
from tests.fake_shards import HIDDEN, FakeWorld, marker_spec, oracle, router_settings, until

LIMIT = 100_000
Change = Callable[[dispatch_pb2.ForwardRequest], None]


class Rig:
    """One router and a client's channel to it."""

    def __init__(self, world: FakeWorld, core: RouterCore, server: RouterServer) -> None:
        self.world = world
        self.core = core
        self.server = server
        self.channel = grpc.aio.insecure_channel(server.address, options=channel_options(LIMIT))
        self.stub = dispatch_pb2_grpc.DispatchServiceStub(self.channel)


@asynccontextmanager
async def a_rig(*, placed: bool = True, **changes: object) -> AsyncIterator[Rig]:
    world = FakeWorld(marker_spec())
    world.place()
    settings = {"limits": RpcLimits(max_message_bytes=LIMIT), **changes}
    core = RouterCore(router_settings(world.spec, **settings), world.open_channel)
    if placed:
        core.install_table(world.table())
    server = RouterServer(core)
    await server.start()
    rig = Rig(world, core, server)
    try:
        yield rig
    finally:
        await rig.channel.close()
        await server.stop(grace_s=0.0)


def arrays(rows: int = 4, k: int = 2, *, seed: int = 0) -> codec.ForwardArrays:
    rng = np.random.default_rng(seed)
    return codec.ForwardArrays(
        model="marker",
        layer=1,
        phase=int(dispatch_pb2.FORWARD_PHASE_DECODE),
        data_type=codec.FP32,
        hidden=rng.standard_normal((rows, HIDDEN)).astype(np.float32),
        topk_ids=np.array([rng.permutation(6)[:k] for _ in range(rows)], np.int32).reshape(rows, k),
        topk_weights=rng.standard_normal((rows, k)).astype(np.float32),
    )


def a_request(**kwargs: int) -> dispatch_pb2.ForwardRequest:
    return codec.forward_request(arrays(**kwargs))


def check(made: codec.ForwardArrays, response: dispatch_pb2.ForwardResponse) -> None:
    output, data_type = codec.output_array(response)
    assert data_type == made.data_type
    want = oracle(made.hidden, made.topk_ids, made.topk_weights)
    np.testing.assert_allclose(output, want, rtol=1e-4, atol=1e-5)


async def refused(rig: Rig, request: dispatch_pb2.ForwardRequest) -> MoeServeError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.stub.Forward(request, timeout=5)
    return from_rpc_error(caught.value)


def set_tensor(field: str, array: np.ndarray, data_type: int) -> Change:
    def change(request: dispatch_pb2.ForwardRequest) -> None:
        getattr(request, field).CopyFrom(codec.tensor(array, data_type))

    return change


def set_shape(field: str, shape: list[int]) -> Change:
    def change(request: dispatch_pb2.ForwardRequest) -> None:
        getattr(request, field).shape[:] = shape

    return change


def set_id(value: int) -> Change:
    ids = np.array([[0, 1], [2, 3], [4, value], [0, 5]], np.int32)
    return set_tensor("topk_ids", ids, codec.INT32)


def set_gate(value: float) -> Change:
    gates = np.ones((4, 2), np.float32)
    gates[1, 1] = value
    return set_tensor("topk_weights", gates, codec.FP32)


def set_type(field: str, data_type: int) -> Change:
    def change(request: dispatch_pb2.ForwardRequest) -> None:
        getattr(request, field).data_type = data_type

    return change


def set_field(field: str, value: object) -> Change:
    def change(request: dispatch_pb2.ForwardRequest) -> None:
        setattr(request, field, value)

    return change


BAD = {
    "model": (set_field("model", "other"), "model"),
    "layer below": (set_field("layer", -1), "layer"),
    "layer above": (set_field("layer", 2), "layer"),
    "phase": (set_field("phase", 0), "phase"),
    "unknown phase": (set_field("phase", 9), "phase"),
    "request id": (set_field("request_id", "x" * 129), "request_id"),
    "attempt": (set_field("attempt", -1), "attempt"),
    "no dtype": (set_type("hidden_states", 0), "hidden_states.data_type"),
    "unknown dtype": (set_type("hidden_states", 77), "hidden_states.data_type"),
    "int hidden": (set_type("hidden_states", codec.INT32), "hidden_states.data_type"),
    "bf16 over fp32 bytes": (set_type("hidden_states", codec.BF16), "hidden_states.raw"),
    "float ids": (set_type("topk_ids", codec.FP32), "topk_ids.data_type"),
    "int gates": (set_type("topk_weights", codec.INT32), "topk_weights.data_type"),
    "hidden rank 1": (set_shape("hidden_states", [32]), "hidden_states.shape"),
    "hidden rank 3": (set_shape("hidden_states", [4, 4, 2]), "hidden_states.shape"),
    "hidden size": (set_shape("hidden_states", [8, 4]), "hidden_states.shape"),
    "byte length": (set_shape("hidden_states", [5, 8]), "hidden_states.raw"),
    "huge shape": (set_shape("hidden_states", [2**31, 2**31]), "hidden_states.raw"),
    "overflowing shape": (set_shape("hidden_states", [2**62, 8]), "hidden_states.raw"),
    "negative shape": (set_shape("hidden_states", [-4, -8]), "hidden_states.shape"),
    "zero by huge": (set_shape("hidden_states", [0, 2**62]), "hidden_states.shape"),
    "many axes": (set_shape("hidden_states", [1] * 9), "hidden_states.shape"),
    "ids rank": (set_shape("topk_ids", [8]), "topk_ids.shape"),
    "ids rows": (set_shape("topk_ids", [2, 4]), "topk_ids.shape"),
    "k of 0": (set_tensor("topk_ids", np.zeros((4, 0), np.int32), codec.INT32), "topk_ids.shape"),
    "k above top_k": (
        set_tensor("topk_ids", np.tile(np.arange(4, dtype=np.int32), (4, 1)), codec.INT32),
        "topk_ids.shape",
    ),
    "gates unlike ids": (set_shape("topk_weights", [8, 1]), "topk_weights.shape"),
    "id -1": (set_id(-1), "topk_ids[2][1]"),
    "id E": (set_id(6), "topk_ids[2][1]"),
    "id 2^31-1": (set_id(2**31 - 1), "topk_ids[2][1]"),
    "duplicate id": (set_id(4), "topk_ids[2][1]"),
    "gate nan": (set_gate(float("nan")), "topk_weights[1][1]"),
    "gate inf": (set_gate(float("inf")), "topk_weights[1][1]"),
    "row bitmap": (set_field("row_valid", b"\x01\x02"), "row_valid"),
    "pair bitmap": (set_field("pair_valid", b"\x01\x02\x03"), "pair_valid"),
}


@pytest.mark.asyncio
async def test_every_bad_input_is_refused_by_field_and_touches_nobody() -> None:
    async with a_rig() as rig:
        good = [arrays(seed=seed) for seed in range(len(BAD))]
        neighbours = [rig.stub.Forward(codec.forward_request(one), timeout=5) for one in good]
        for name, (change, field) in BAD.items():
            request = a_request()
            change(request)
            error = await refused(rig, request)
            assert isinstance(error, InvalidArgument), (name, error)
            assert field in [v.field for v in error.violations], (name, error.violations)
        for made, answer in zip(good, await asyncio.gather(*neighbours), strict=True):
            check(made, answer)
        report = rig.core.report(0)
        assert report.counters["refused_requests"] == len(BAD)
        assert sum(int(r.pairs.sum()) for r in report.reports) == len(good) * 8


@pytest.mark.asyncio
async def test_several_faults_are_told_at_once_as_bad_request_details() -> None:
    async with a_rig() as rig:
        request = a_request()
        request.layer = 9
        request.hidden_states.shape[:] = [8, 4]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.stub.Forward(request, timeout=5)
        details = dict(caught.value.trailing_metadata())[DETAILS_KEY]
        status = status_pb2.Status.FromString(details)
        bad = error_details_pb2.BadRequest()
        assert any(detail.Unpack(bad) for detail in status.details if detail.Is(bad.DESCRIPTOR))
        assert {"layer", "hidden_states.shape"} <= {v.field for v in bad.field_violations}


@pytest.mark.asyncio
async def test_invalid_pairs_may_hold_anything_and_rows_of_zero_come_back() -> None:
    async with a_rig() as rig:
        made = arrays()
        made.topk_ids[0] = 6
        made.topk_weights[0] = np.nan
        row_valid = np.array([False, True, True, True])
        made = codec.ForwardArrays(
            **{**{f: getattr(made, f) for f in made.__dataclass_fields__}, "row_valid": row_valid}
        )
        answer = await rig.stub.Forward(codec.forward_request(made), timeout=5)
        output, _ = codec.output_array(answer)
        assert not output[0].any()
        want = oracle(made.hidden[1:], made.topk_ids[1:], made.topk_weights[1:])
        np.testing.assert_allclose(output[1:], want, rtol=1e-4, atol=1e-5)
        answer = await rig.stub.Forward(a_request(rows=0), timeout=5)
        assert list(answer.output.shape) == [0, HIDDEN]
        assert answer.output.raw == b""


@pytest.mark.asyncio
async def test_nan_and_inf_in_hidden_states_stay_in_their_row() -> None:
    async with a_rig() as rig:
        made = arrays()
        made.hidden[2] = np.nan
        made.hidden[3, 0] = np.inf
        answer = await rig.stub.Forward(codec.forward_request(made), timeout=5)
        output, _ = codec.output_array(answer)
        assert np.isnan(output[2]).all()
        assert not np.isfinite(output[3, 0])
        assert np.isfinite(output[:2]).all()


def sized(size: int) -> dispatch_pb2.ForwardRequest:
    """A sound request of exactly `size` bytes: the request id takes the last ones."""
    rows = size // (HIDDEN * 4 + 16) - 8
    while True:
        request = a_request(rows=rows)
        missing = size - request.ByteSize()
        for fill in range(max(0, missing - 8), min(128, missing) + 1):
            request.request_id = "x" * fill
            if request.ByteSize() == size:
                return request
        rows += 1


@pytest.mark.asyncio
async def test_the_message_limit_is_advertised_and_exact() -> None:
    async with a_rig() as rig:
        spec = await rig.stub.GetModelSpec(dispatch_pb2.GetModelSpecRequest(), timeout=5)
        assert spec.max_message_bytes == LIMIT
        assert (spec.num_layers, spec.num_experts, spec.top_k, spec.hidden_size) == (2, 6, 3, 8)
        assert list(spec.router_addresses) == [rig.server.address]
        for size in (LIMIT - 1, LIMIT):
            answer = await rig.stub.Forward(sized(size), timeout=5)
            assert answer.output.shape[1] == HIDDEN
        error = await refused(rig, sized(LIMIT + 1))
        assert isinstance(error, ResourceExhausted)
        assert str(LIMIT) in error.message
        assert [v.field for v in error.violations] == ["hidden_states"]
        full = a_request(rows=spec.max_rows, k=3)
        await rig.stub.Forward(full, timeout=5)
        # Far above the limit gRPC itself refuses; the channel goes on.
        channel = grpc.aio.insecure_channel(
            rig.server.address, options=[("grpc.max_send_message_length", -1)]
        )
        stub = dispatch_pb2_grpc.DispatchServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Forward(a_request(rows=5000), timeout=5)
        assert isinstance(from_rpc_error(caught.value), ResourceExhausted)
        await stub.Forward(a_request(), timeout=5)
        await channel.close()


@pytest.mark.asyncio
async def test_more_than_the_default_four_mebibytes_pass() -> None:
    async with a_rig(limits=RpcLimits()) as rig:
        channel = grpc.aio.insecure_channel(rig.server.address, options=channel_options())
        stub = dispatch_pb2_grpc.DispatchServiceStub(channel)
        made = arrays(rows=120_000)
        check(made, await stub.Forward(codec.forward_request(made), timeout=30))
        too_many = codec.forward_request(arrays(rows=codec.ROWS_MAX + 1))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Forward(too_many, timeout=30)
        error = from_rpc_error(caught.value)
        assert [v.field for v in error.violations] == ["hidden_states.shape"]
        assert str(codec.ROWS_MAX) in error.message
        await channel.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("data_type", [codec.FP32, codec.BF16, codec.FP16])
async def test_every_type_comes_back_as_it_went(data_type: int) -> None:
    async with a_rig() as rig:
        made = arrays()
        kind = DType(data_type)
        fields = {f: getattr(made, f) for f in made.__dataclass_fields__}
        hidden = np.ones((4, HIDDEN), np.float32)
        raw = (hidden.view(np.uint32) >> 16).astype(np.uint16) if kind is DType.BFLOAT16 else hidden
        fields |= {"data_type": data_type, "hidden": raw.astype(kind.numpy)}
        fields["topk_weights"] = np.full((4, 2), 0.5, np.float32)
        request = codec.forward_request(codec.ForwardArrays(**fields))
        output, got = codec.output_array(await rig.stub.Forward(request, timeout=5))
        assert (got, output.dtype) == (data_type, kind.numpy)
        as_float = (
            (output.astype(np.uint32) << 16).view(np.float32)
            if kind is DType.BFLOAT16
            else output.astype(np.float32)
        )
        want = oracle(hidden, made.topk_ids, fields["topk_weights"])
        np.testing.assert_array_equal(as_float, want)


async def items_of(
    requests: list[dispatch_pb2.StreamForwardRequest],
) -> AsyncIterator[dispatch_pb2.StreamForwardRequest]:
    for request in requests:
        yield request


@pytest.mark.asyncio
async def test_a_stream_answers_each_item_and_a_bad_one_ends_only_itself() -> None:
    async with a_rig(max_stream_items=4) as rig:
        made = [arrays(seed=seed) for seed in range(30)]
        requests = []
        for number, one in enumerate(made):
            request = codec.forward_request(one)
            if number % 5 == 2:
                request.layer = 99
            requests.append(
                dispatch_pb2.StreamForwardRequest(sequence=number + 100, request=request)
            )
        requests.append(dispatch_pb2.StreamForwardRequest(sequence=500, request=sized(LIMIT + 1)))
        seen = {}
        async for answer in rig.stub.StreamForward(items_of(requests), timeout=10):
            assert answer.sequence not in seen
            seen[answer.sequence] = answer
        assert sorted(seen) == [r.sequence for r in requests]
        for number, one in enumerate(made):
            answer = seen[number + 100]
            if number % 5 == 2:
                error = from_item_error(answer.error)
                assert isinstance(error, InvalidArgument)
                assert [v.field for v in error.violations] == ["layer"]
            else:
                check(one, answer.response)
        assert isinstance(from_item_error(seen[500].error), ResourceExhausted)
        assert rig.core.open_requests == 0


@pytest.mark.asyncio
async def test_a_slow_item_does_not_hold_the_others_and_has_its_own_deadline() -> None:
    async with a_rig() as rig:
        call = rig.stub.StreamForward(timeout=10)
        for shard in rig.world.shards:
            shard.hold = asyncio.Event()
        slow = dispatch_pb2.StreamForwardRequest(sequence=1, request=a_request(), timeout_ms=300)
        await call.write(slow)
        await until(lambda: any(shard.calls for shard in rig.world.shards))
        twin = dispatch_pb2.StreamForwardRequest(sequence=1, request=a_request())
        await call.write(twin)
        answer = await call.read()
        assert [f.field for f in answer.error.fields] == ["sequence"]
        keys = {one.request_key for shard in rig.world.shards for one in shard.calls}
        for shard in rig.world.shards:
            # Its second attempt must fare no better.
            shard.never_answers = keys
            shard.hold = None
        fast = dispatch_pb2.StreamForwardRequest(sequence=2, request=a_request())
        await call.write(fast)
        answer = await call.read()
        assert (answer.sequence, answer.WhichOneof("result")) == (2, "response")
        answer = await call.read()
        assert (answer.sequence, answer.error.code) == (
            1,
            grpc.StatusCode.DEADLINE_EXCEEDED.value[0],
        )
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


@pytest.mark.asyncio
async def test_a_drained_router_ends_what_it_has_begun_and_refuses_the_rest() -> None:
    async with a_rig() as rig:
        call = rig.stub.StreamForward(timeout=10)
        for shard in rig.world.shards:
            shard.hold = asyncio.Event()
        await call.write(dispatch_pb2.StreamForwardRequest(sequence=1, request=a_request()))
        await until(lambda: rig.core.open_requests == 1)
        stopping = asyncio.create_task(rig.server.stop(8.0))
        await until(lambda: rig.server.draining)
        await call.write(dispatch_pb2.StreamForwardRequest(sequence=2, request=a_request()))
        answer = await call.read()
        assert (answer.sequence, answer.error.code) == (2, grpc.StatusCode.UNAVAILABLE.value[0])
        assert "drained; use another one" in answer.error.message
        for shard in rig.world.shards:
            held, shard.hold = shard.hold, None
            assert held is not None
            held.set()
        answer = await call.read()
        assert (answer.sequence, answer.WhichOneof("result")) == (1, "response")
        # The stream ends although the client keeps it open: nothing waits for the grace to pass.
        assert await call.read() is grpc.aio.EOF
        async with asyncio.timeout(5.0):
            await stopping


@pytest.mark.asyncio
async def test_a_client_that_goes_away_leaves_nothing_behind() -> None:
    async with a_rig() as rig:
        for shard in rig.world.shards:
            shard.hold = asyncio.Event()
        call = rig.stub.StreamForward(timeout=10)
        for number in range(5):
            item = dispatch_pb2.StreamForwardRequest(sequence=number, request=a_request())
            await call.write(item)
        unary = rig.stub.Forward(a_request(), timeout=10)
        await until(lambda: rig.core.open_requests == 6)
        call.cancel()
        unary.cancel()
        await until(lambda: not rig.core.open_requests, within_s=1.0)
        assert rig.core.role.open_sub_calls == 0


@pytest.mark.asyncio
async def test_health_says_ready_only_when_every_expert_has_a_replica() -> None:
    async with a_rig(placed=False) as rig:
        health = health_pb2_grpc.HealthStub(rig.channel)

        async def state(service: str) -> int:
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            return int(answer.status)

        serving, not_serving = (
            health_pb2.HealthCheckResponse.SERVING,
            health_pb2.HealthCheckResponse.NOT_SERVING,
        )
        assert (await state(""), await state(SERVICE_NAME)) == (serving, not_serving)
        assert isinstance(await refused(rig, a_request()), Unavailable)
        rig.core.install_table(rig.world.table())
        assert await state(SERVICE_NAME) == serving
        rig.core.install_table(rig.world.table(without=(0, 1)))
        assert await state(SERVICE_NAME) == not_serving


@pytest.mark.asyncio
async def test_reflection_lists_the_services_on_loopback() -> None:
    async with a_rig() as rig:
        stub = reflection_pb2_grpc.ServerReflectionStub(rig.channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")

        async def once() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
            yield ask

        async for answer in stub.ServerReflectionInfo(once(), timeout=5):
            names = {service.name for service in answer.list_services_response.service}
        assert SERVICE_NAME in names


DISPATCH, READER, ADMIN = "d" * 20, "r" * 20, "a" * 20


def token_file(folder: Path, text: str | None = None) -> Path:
    path = folder / "tokens"
    path.write_text(text or f"dispatch {DISPATCH}\nread {READER}\nadmin {ADMIN}\n")
    path.chmod(0o600)
    return path


@pytest.mark.asyncio
async def test_every_method_of_every_service_needs_a_token(tmp_path: Path) -> None:
    async with a_rig(token_file=token_file(tmp_path)) as rig:
        services = [
            dispatch_pb2.DESCRIPTOR.services_by_name["DispatchService"],
            health_pb2.DESCRIPTOR.services_by_name["Health"],
            reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
        ]
        methods = [
            (f"/{service.full_name}/{method.name}", method)
            for service in services
            for method in service.methods
        ]
        assert {"/grpc.health.v1.Health/Watch", f"/{SERVICE_NAME}/StreamForward"} <= {
            name for name, _ in methods
        }
        for name, method in methods:
            for metadata in (
                (),
                bearer_metadata("wrong" * 5),
                (("authorization", f"Basic {DISPATCH}"),),
            ):
                code = await code_of(rig, name, method, metadata)
                if name == "/grpc.health.v1.Health/Check":
                    assert code is grpc.StatusCode.OK
                else:
                    assert code is grpc.StatusCode.UNAUTHENTICATED, (name, metadata)
            good = await code_of(rig, name, method, bearer_metadata(DISPATCH))
            assert good is not grpc.StatusCode.UNAUTHENTICATED, name
            if name in method_roles():
                code = await code_of(rig, name, method, bearer_metadata(READER))
                assert code is grpc.StatusCode.PERMISSION_DENIED, name
        made = arrays()
        answer = await rig.stub.Forward(
            codec.forward_request(made), timeout=5, metadata=bearer_metadata(DISPATCH)
        )
        check(made, answer)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.stub.Forward(a_request(), timeout=5, metadata=bearer_metadata(ADMIN))
        assert isinstance(from_rpc_error(caught.value), PermissionDenied)


async def code_of(rig: Rig, name: str, method: object, metadata: object) -> grpc.StatusCode:
    """Call with an empty message and say how the call ended; an endless stream counts as OK."""
    asks, answers = method.client_streaming, method.server_streaming  # type: ignore[attr-defined]
    kind = {
        (False, False): rig.channel.unary_unary,
        (False, True): rig.channel.unary_stream,
        (True, True): rig.channel.stream_stream,
        (True, False): rig.channel.stream_unary,
    }[asks, answers]
    call = kind(name)
    sent = items_of([]) if asks else b""
    started = call(sent, metadata=metadata, timeout=2)
    try:
        if answers:
            async for _ in started:
                break
        else:
            await started
    except grpc.aio.AioRpcError as error:
        return error.code()
    started.cancel()
    return grpc.StatusCode.OK


@pytest.mark.asyncio
async def test_tokens_rotate_under_load_without_a_failed_call(tmp_path: Path) -> None:
    path = token_file(tmp_path)
    async with a_rig(token_file=path) as rig:
        new = "n" * 20

        async def call(token: str) -> None:
            await rig.stub.Forward(a_request(), timeout=5, metadata=bearer_metadata(token))

        await call(DISPATCH)
        token_file(tmp_path, f"dispatch {DISPATCH}\ndispatch {new}\n")
        await asyncio.gather(*(call(t) for t in (DISPATCH, new) * 20))
        token_file(tmp_path, f"dispatch {new}\n")
        await call(new)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(DISPATCH)
        assert isinstance(from_rpc_error(caught.value), Unauthenticated)


def tls_files(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate of localhost and its key."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-days", "2"),
            *("-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


@pytest.mark.asyncio
async def test_tls_is_spoken_and_plain_text_is_not(tmp_path: Path) -> None:
    certificate, key = tls_files(tmp_path)
    async with a_rig(tls_certificate=certificate, tls_key=key) as rig:
        made = arrays()
        address = rig.server.address.replace("127.0.0.1", "localhost")
        async with grpc.aio.secure_channel(
            address, channel_credentials(certificate), options=channel_options(LIMIT)
        ) as channel:
            stub = dispatch_pb2_grpc.DispatchServiceStub(channel)
            # No deadline: the router's own default holds.
            check(made, await stub.Forward(codec.forward_request(made)))
        assert isinstance(await refused(rig, a_request()), Unavailable)


@pytest.mark.asyncio
async def test_headers_above_their_limit_are_refused_and_others_go_on() -> None:
    async with a_rig() as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.stub.Forward(a_request(), timeout=5, metadata=(("x-fill", "x" * 65_536),))
        assert isinstance(from_rpc_error(caught.value), ResourceExhausted)
        await rig.stub.Forward(a_request(), timeout=5)


@pytest.mark.asyncio
async def test_an_error_that_names_many_fields_reaches_the_client_whole() -> None:
    async with a_rig() as rig:
        request = a_request()
        request.layer, request.phase, request.attempt = -5, 7, -1
        request.request_id = "\u00e9" * 2000
        request.hidden_states.shape[:] = [2**62] * 8
        request.topk_ids.shape[:] = [2**62] * 8
        request.topk_weights.shape[:] = [2**62] * 8
        error = await refused(rig, request)
        assert isinstance(error, InvalidArgument)
        assert len(error.violations) == 7


@pytest.mark.asyncio
async def test_bytes_that_are_no_message_are_refused_and_others_go_on() -> None:
    async with a_rig() as rig:
        call = rig.channel.unary_unary(f"/{SERVICE_NAME}/Forward")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"\x80\x04\x95not a message", timeout=5)
        assert caught.value.code() is not grpc.StatusCode.OK
        await rig.stub.Forward(a_request(), timeout=5)


@pytest.mark.asyncio
async def test_a_taken_port_is_refused_in_one_line() -> None:
    async with a_rig() as rig:
        port = int(rig.server.address.rpartition(":")[2])
        world = FakeWorld(marker_spec())
        core = RouterCore(router_settings(world.spec, port=port), world.open_channel)
        with pytest.raises(StartRefused, match=f"127.0.0.1:{port}"):
            await RouterServer(core).start()
        await core.stop()


@pytest.mark.asyncio
async def test_overhead_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    async with a_rig() as rig:
        lines = []
        for rows in (1, 64):
            request = a_request(rows=rows)
            times = []
            for _ in range(50):
                began_s = time.perf_counter()
                await rig.stub.Forward(request, timeout=5)
                times.append(time.perf_counter() - began_s)
            lines.append(f"unary, {rows} rows x {HIDDEN}: p50 {sorted(times)[25] * 1e3:.2f} ms")
        quantiles = rig.core.report(0).quantiles
        with capsys.disabled():
            print("\nrouter over fake shards:", "; ".join(lines), quantiles)
        assert quantiles["dispatch_p50_s"] <= quantiles["dispatch_p99_s"]


# -- bytes that are no message -------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("garbage", [b"\xff\xff\xff", b"\x0a\x02\xff\xfe", b"\x08"])
async def test_bytes_that_are_no_message_are_an_invalid_argument(garbage: bytes) -> None:
    async with a_rig() as rig:
        for name in ("Forward", "GetModelSpec"):
            method = f"/{SERVICE_NAME}/{name}"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rig.channel.unary_unary(method)(garbage, timeout=5)
            error = from_rpc_error(caught.value)
            assert type(error) is InvalidArgument
            assert error.message == (
                f"{method}: the bytes are no message of this method; use the protos of this version"
            )
        made = arrays()
        check(made, await rig.stub.Forward(codec.forward_request(made), timeout=5))


@pytest.mark.asyncio
async def test_an_item_that_is_no_message_ends_its_stream_only() -> None:
    made = arrays()
    item = dispatch_pb2.StreamForwardRequest(sequence=7, request=codec.forward_request(made))
    async with a_rig() as rig:
        raw = rig.channel.stream_stream(f"/{SERVICE_NAME}/StreamForward")(timeout=5)
        other = rig.stub.StreamForward(timeout=5)
        await raw.write(item.SerializeToString())
        await other.write(item)
        answer = dispatch_pb2.StreamForwardResponse.FromString(await raw.read())
        assert answer.sequence == 7
        check(made, answer.response)
        await raw.write(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw.read()
        assert type(from_rpc_error(caught.value)) is InvalidArgument
        check(made, (await other.read()).response)
        await other.write(item)
        check(made, (await other.read()).response)
        await other.done_writing()
        assert await other.read() is grpc.aio.EOF


@pytest.mark.asyncio
async def test_a_command_sent_to_a_router_is_told_where_it_belongs() -> None:
    async with a_rig() as rig:
        stub = placement_pb2_grpc.PlacementServiceStub(rig.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetPlacement(placement_pb2.GetPlacementRequest(), timeout=5)
    error = from_rpc_error(caught.value)
    assert isinstance(error, FailedPrecondition)
    assert "commands to the controller's admin port" in error.message
