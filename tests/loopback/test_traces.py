"""A request's trace and id from the client's call to the shards' compute: over gRPC and the wire,
in one trace, whatever way the client takes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from moe_serve.client import AsyncClient
from moe_serve.client.link import RouterLink
from moe_serve.errors import InvalidArgument, MoeServeError, Unavailable
from moe_serve.router.actor import wire_channels
from moe_serve.router.dispatch import RouterCore
from moe_serve.router.service import RouterServer
from moe_serve.rpc import codec, dispatch_pb2, dispatch_pb2_grpc
from moe_serve.telemetry.traces import NO_TRACES, Traces
from placement.routing import RankAddress, RoutingTable
from placement.topology import Phase
from tests.fake_shards import HIDDEN, marker_spec, oracle, router_settings
from tests.fakes.marker_experts import add, marker_model, marker_shard
from tests.fakes.traces import PARENT, PARENT_ID, TRACE_ID, KeptSpans, ids

RANKS, EXPERTS = 2, 6
IDS = np.array([[0, 1], [2, 3], [4, 5]], np.int32)
GATES = np.full((3, 2), 0.5, np.float32)
ROWS = np.arange(3 * HIDDEN, dtype=np.float32).reshape(3, HIDDEN)


class Service:
    """One router over two shards that hold every other expert of layer 1."""

    def __init__(self, traced: bool, share: float = 0.0, **settings: Any) -> None:
        self.kept = KeptSpans(share)
        model = marker_model(layers=2, experts=EXPERTS, top_k=3, hidden=HIDDEN)

        def of(part: str) -> Traces:
            return self.kept.of(part) if traced else NO_TRACES

        self.shards = [
            marker_shard(model=model, rank=rank, num_slots=8, traces=of(f"shard-{rank}"))
            for rank in range(RANKS)
        ]
        self.addresses = [shard.start() for shard in self.shards]
        self.core = RouterCore(
            router_settings(marker_spec(), node="node-0", **settings),
            wire_channels(None),
            traces=of("r0"),
        )
        self.server = RouterServer(self.core)

    async def start(self) -> str:
        self.core.install_table(self._table(self.addresses))
        return await self.server.start()

    async def stop(self) -> None:
        await self.server.stop(0.0)
        for shard in self.shards:
            shard.stop()

    def _table(self, addresses: list[RankAddress]) -> RoutingTable:
        tags = [
            add(self.shards[e % RANKS], e // RANKS, e, layer=1, step_id=10 + e)
            for e in range(EXPERTS)
        ]
        ptr = np.concatenate([np.zeros(EXPERTS, np.int32), np.arange(EXPERTS + 1, dtype=np.int32)])
        experts = np.arange(EXPERTS, dtype=np.int32)
        return RoutingTable(
            term=3,
            epoch=5,
            model="marker",
            weights_version="v1",
            num_layers=2,
            num_experts=EXPERTS,
            replica_ptr=ptr,
            replica_rank=experts % RANKS,
            replica_slot=experts // RANKS,
            replica_tag=np.array(tags, np.int64),
            ranks=tuple(addresses),
        )


@asynccontextmanager
async def running(traced: bool = True, **more: Any) -> AsyncIterator[tuple[Service, str]]:
    service = Service(traced, **more)
    try:
        yield service, await service.start()
    finally:
        await service.stop()


async def ask(client: AsyncClient, **more: Any) -> None:
    output = await client.forward(1, ROWS, IDS, GATES, phase=Phase.DECODE, **more)
    np.testing.assert_allclose(output, oracle(ROWS, IDS, GATES), rtol=1e-4)


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "unary"])
async def test_one_trace_from_the_client_to_the_shards(stream: bool) -> None:
    async with running() as (service, address), AsyncClient([address], stream=stream) as client:
        await ask(client, request_id="order-7", traceparent=PARENT, tracestate="vendor=1")
        await ask(client)  # no parent, and no share: no span
    kept = service.kept
    (forward,) = kept.named("Forward")
    calls, shards = kept.named("sub-call"), kept.named("shard")
    assert ids(forward)[::2] == (TRACE_ID, PARENT_ID)
    assert forward.context is not None
    assert forward.context.trace_state.to_header() == "vendor=1"
    assert len(calls) == len(shards) == RANKS
    assert len(kept.all()) == 1 + 2 * RANKS
    assert {ids(call)[::2] for call in calls} == {(TRACE_ID, ids(forward)[1])}
    assert {ids(span)[2] for span in shards} == {ids(call)[1] for call in calls}
    assert {ids(span)[0] for span in shards} == {TRACE_ID}
    assert len({ids(span)[1] for span in kept.all()}) == len(kept.all())


@pytest.mark.asyncio
async def test_the_spans_say_where_the_time_went() -> None:
    async with running() as (service, address), AsyncClient([address]) as client:
        await ask(client, request_id="order-7", traceparent=PARENT)
    (forward,) = [dict(span.attributes or {}) for span in service.kept.named("Forward")]
    assert forward == {
        "part": "r0",
        "node": "node-0",
        "layer": 1,
        "rows": 3,
        "phase": "decode",
        "term": 3,
        "epoch": 5,
        "outcome": "ok",
        "request_id": "order-7",
    }
    for name, part in (("sub-call", "r0"), ("shard", "shard-{rank}")):
        spans = service.kept.named(name)
        said = [dict(span.attributes or {}) for span in spans]
        assert {one["rank"] for one in said} == {0, 1}
        assert {one["pairs"] for one in said} == {3}
        assert all(one["part"] == part.format(**one) for one in said)
        assert {(one["cause"], one["outcome"]) for one in said} == {("first", "ok")}
        for one, span in zip(said, spans, strict=True):
            wait_s, compute_s = one["wait_s"], one["compute_s"]
            assert isinstance(wait_s, float)
            assert isinstance(compute_s, float)
            assert span.start_time is not None
            assert span.end_time is not None
            # The rest is told by wire in steps of four in a hundred.
            assert 0.0 <= wait_s + compute_s <= 1.1 * (span.end_time - span.start_time) / 1e9 + 1e-3


@pytest.mark.asyncio
async def test_headers_alone_are_a_parent_too_and_an_items_own_fields_come_first() -> None:
    async with (
        running() as (service, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = dispatch_pb2_grpc.DispatchServiceStub(channel)
        made = codec.forward_request(
            codec.ForwardArrays(
                model="marker",
                layer=1,
                phase=int(dispatch_pb2.FORWARD_PHASE_DECODE),
                data_type=codec.FP32,
                hidden=ROWS,
                topk_ids=IDS,
                topk_weights=GATES,
            )
        )
        headers = (("traceparent", PARENT), ("tracestate", "vendor=1"))
        await stub.Forward(made, metadata=headers, timeout=10)
        stream = stub.StreamForward(metadata=headers)
        other = f"00-{'7' * 32}-{'8' * 16}-01"
        for sequence, parent in enumerate(("", other)):
            made.traceparent = parent
            await stream.write(dispatch_pb2.StreamForwardRequest(sequence=sequence, request=made))
            assert (await stream.read()).WhichOneof("result") == "response"
        await stream.done_writing()
    found = [ids(span)[::2] for span in service.kept.named("Forward")]
    assert found == [(TRACE_ID, PARENT_ID), (TRACE_ID, PARENT_ID), ("7" * 32, "8" * 16)]
    named = {str((span.attributes or {})["request_id"]) for span in service.kept.named("shard")}
    assert len(named) == 3, "a request without an id is given one, and the shards are told"
    assert all(name.startswith("r0.1-") for name in named)


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "unary"])
async def test_a_malformed_context_is_dropped_and_counted_and_the_request_is_served(
    stream: bool,
) -> None:
    async with running() as (service, address), AsyncClient([address], stream=stream) as client:
        await ask(client, traceparent="xyzzy")
        await ask(client, traceparent=PARENT, tracestate="=,=")
        assert client.dropped_traces == 2
        assert len(service.kept.named("Forward")) == 1
        assert service.core.pulse.counters().get("malformed_traces", 0.0) == 0.0
        async with grpc.aio.insecure_channel(address) as channel:
            stub = dispatch_pb2_grpc.DispatchServiceStub(channel)
            made = dispatch_pb2.ForwardRequest(model="other", traceparent="xyzzy")
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Forward(made, timeout=10)
        assert service.core.pulse.counters()["malformed_traces"] == 1.0


@pytest.mark.asyncio
async def test_a_share_of_the_requests_without_a_parent_begins_a_trace() -> None:
    async with running(share=1.0) as (service, address), AsyncClient([address]) as client:
        await ask(client)
        await ask(client, traceparent=PARENT[:-1] + "0")
    (forward,) = service.kept.named("Forward")
    assert ids(forward)[2] == ""
    assert {ids(span)[0] for span in service.kept.all()} == {ids(forward)[0]}


@pytest.mark.asyncio
async def test_a_request_that_fails_says_so_in_its_spans() -> None:
    async with running() as (service, address), AsyncClient([address]) as client:
        await client.spec()
        for shard in service.shards:
            shard.stop()
        with pytest.raises(MoeServeError):
            await ask(client, traceparent=PARENT, timeout_s=1.0)
    spans = service.kept.named("Forward")
    assert spans
    assert {dict(span.attributes or {})["outcome"] for span in spans} <= {
        "unavailable",
        "deadline_exceeded",
        "cancelled",
    }
    calls = service.kept.named("sub-call")
    assert "ok" not in {dict(span.attributes or {})["outcome"] for span in calls}


@pytest.mark.asyncio
async def test_off_the_context_goes_nowhere_and_the_id_still_reaches_the_slow_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with (
        running(traced=False, slow_request_s=1e-9) as (service, address),
        AsyncClient([address]) as client,
    ):
        await ask(client, request_id="order-7", traceparent=PARENT)
    assert service.kept.all() == []
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line[:1] == "{"]
    (slow,) = [line for line in lines if line["event"] == "slow request"]
    assert list(slow)[:8] == [
        "ts",
        "level",
        "event",
        "part",
        "node",
        "term",
        "epoch",
        "request_id",
    ]
    assert (slow["part"], slow["node"], slow["request_id"]) == ("r0", "node-0", "order-7")
    assert (slow["term"], slow["epoch"], slow["rows"], slow["phase"]) == (3, 5, 3, "decode")
    assert slow["seconds"] > 0


class _Listening(dispatch_pb2_grpc.DispatchServiceServicer):
    """Notes the headers of each unary call and says no."""

    def __init__(self) -> None:
        self.headers: list[dict[str, Any]] = []

    async def Forward(self, _request: Any, context: Any) -> Any:
        self.headers.append(dict(context.invocation_metadata()))
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no")


@pytest.mark.asyncio
async def test_a_unary_call_has_the_headers_for_whatever_stands_between() -> None:
    servicer, server = _Listening(), grpc.aio.server()
    dispatch_pb2_grpc.add_DispatchServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link = RouterLink(f"127.0.0.1:{port}", (("authorization", "Bearer x"),), None, lambda: False)
    try:
        for request in (
            dispatch_pb2.ForwardRequest(traceparent=PARENT, tracestate="vendor=1"),
            dispatch_pb2.ForwardRequest(),
        ):
            with pytest.raises(InvalidArgument):
                await link.forward(request, 10.0, stream=False)
    finally:
        await link.close(Unavailable("the test has ended"))
        await server.stop(0)
    traced, plain = servicer.headers
    assert (traced["traceparent"], traced["tracestate"]) == (PARENT, "vendor=1")
    assert traced["authorization"] == plain["authorization"] == "Bearer x"
    assert not {"traceparent", "tracestate"} & plain.keys()
