"""A real gRPC DispatchService on loopback over plain numpy experts, which misbehaves on request."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import ml_dtypes
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from moe_serve.errors import DeadlineExceeded, MoeServeError
from moe_serve.rpc import API_VERSION, codec, dispatch_pb2, dispatch_pb2_grpc
from moe_serve.rpc.options import RpcLimits, server_options
from moe_serve.rpc.status import abort, to_item_error

Experts = Callable[[int, int, np.ndarray], np.ndarray]
"""(layer, expert, float64 rows) -> float64 rows."""


def marker_experts(_layer: int, expert: int, rows: np.ndarray) -> np.ndarray:
    """Expert e multiplies by e + 1."""
    return rows * (expert + 1)


@dataclass
class Behaviour:
    """What a fake router does instead of answering at once."""

    fail: Callable[[dispatch_pb2.ForwardRequest], MoeServeError | None] = lambda _request: None
    delay_s: Callable[[dispatch_pb2.ForwardRequest], float] = lambda _request: 0.0
    stuck: bool = False
    """Accepts everything and answers nothing, not even health."""
    end_stream: bool = False
    """Ends the stream, with OK, when the next item arrives."""
    change: Callable[[dispatch_pb2.ForwardResponse], None] = lambda _response: None
    fail_spec: MoeServeError | None = None


@dataclass
class FakeRouter(dispatch_pb2_grpc.DispatchServiceServicer):
    """One router. `requests` are the Forward requests that arrived, `by_stream` how many of them as
    items."""

    experts: Experts = marker_experts
    num_layers: int = 2
    num_experts: int = 6
    top_k: int = 3
    hidden_size: int = 8
    checkpoint_layers: tuple[int, ...] = ()
    max_message_bytes: int = 1 << 20
    peers: tuple[str, ...] = ()
    behaviour: Behaviour = field(default_factory=Behaviour)
    requests: list[dispatch_pb2.ForwardRequest] = field(default_factory=list)
    by_stream: int = 0
    spec_calls: int = 0
    health_calls: int = 0
    streams: int = 0
    open_now: int = 0
    open_most: int = 0
    tokens: list[str] = field(default_factory=list)
    address: str = ""

    async def start(self, port: int = 0) -> str:
        """Serve on loopback; returns the address."""
        options = server_options(RpcLimits(max_message_bytes=self.max_message_bytes))
        self._server = grpc.aio.server(options=options)
        dispatch_pb2_grpc.add_DispatchServiceServicer_to_server(self, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(_Health(self), self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        await self._server.start()
        return self.address

    async def stop(self) -> None:
        """Cut every connection."""
        await self._server.stop(None)

    async def GetModelSpec(self, request: Any, context: Any) -> dispatch_pb2.GetModelSpecResponse:
        self.spec_calls += 1
        self.tokens += [v for k, v in context.invocation_metadata() if k == "authorization"]
        await self._stuck()
        if self.behaviour.fail_spec is not None:
            await abort(context, self.behaviour.fail_spec)
        return dispatch_pb2.GetModelSpecResponse(
            model="marker",
            weights_version="v1",
            num_layers=self.num_layers,
            checkpoint_layers=self.checkpoint_layers or range(self.num_layers),
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden_size=self.hidden_size,
            data_types=[dispatch_pb2.DataType.ValueType(t) for t in codec.HIDDEN_TYPES],
            max_message_bytes=self.max_message_bytes,
            router_addresses=self.peers or (self.address,),
            api_version=API_VERSION,
        )

    async def Forward(
        self, request: dispatch_pb2.ForwardRequest, context: Any
    ) -> dispatch_pb2.ForwardResponse:
        try:
            return await self._answer(request)
        except MoeServeError as error:
            await abort(context, error)
            raise AssertionError("abort raises") from error

    async def StreamForward(
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[dispatch_pb2.StreamForwardResponse]:
        self.streams += 1
        answers: asyncio.Queue[dispatch_pb2.StreamForwardResponse | None] = asyncio.Queue()
        open_items: set[asyncio.Task[None]] = set()

        async def one(item: dispatch_pb2.StreamForwardRequest) -> None:
            reply = dispatch_pb2.StreamForwardResponse(sequence=item.sequence)
            try:
                async with asyncio.timeout(item.timeout_ms / 1000):
                    reply.response.CopyFrom(await self._answer(item.request))
            except TimeoutError:
                reply.error.CopyFrom(to_item_error(DeadlineExceeded("late")))
            except MoeServeError as error:
                reply.error.CopyFrom(to_item_error(error))
            answers.put_nowait(reply)

        async def read() -> None:
            async for item in request_iterator:
                self.by_stream += 1
                if self.behaviour.end_stream:
                    break
                task = asyncio.create_task(one(item))
                open_items.add(task)
                task.add_done_callback(open_items.discard)
            answers.put_nowait(None)

        reader = asyncio.create_task(read())
        try:
            while (answer := await answers.get()) is not None:
                yield answer
        finally:
            for task in (reader, *open_items):
                task.cancel()

    async def _stuck(self) -> None:
        while self.behaviour.stuck:  # noqa: ASYNC110 - set from other threads too
            await asyncio.sleep(0.02)

    async def _answer(self, request: dispatch_pb2.ForwardRequest) -> dispatch_pb2.ForwardResponse:
        self.requests.append(request)
        self.open_now += 1
        self.open_most = max(self.open_most, self.open_now)
        try:
            await self._stuck()
            await asyncio.sleep(self.behaviour.delay_s(request))
            error = self.behaviour.fail(request)
            if error is not None:
                raise error
            response = self._compute(request)
            self.behaviour.change(response)
            return response
        finally:
            self.open_now -= 1

    def _compute(self, request: dispatch_pb2.ForwardRequest) -> dispatch_pb2.ForwardResponse:
        kind = int(request.hidden_states.data_type)
        raw = codec.tensor_array("hidden", request.hidden_states, codec.HIDDEN_TYPES)
        ids = codec.tensor_array("ids", request.topk_ids, (codec.INT32,))
        gates = codec.tensor_array("gates", request.topk_weights, (codec.FP32,))
        valid = np.ones(ids.shape, np.bool_)
        if request.row_valid:
            valid &= codec.unpack_bits(request.row_valid, (ids.shape[0], 1))
        if request.pair_valid:
            valid &= codec.unpack_bits(request.pair_valid, ids.shape)
        rows = raw.view(ml_dtypes.bfloat16) if kind == codec.BF16 else raw
        output = combined(self.experts, request.layer, rows, ids, gates, valid)
        narrow = (
            output.astype(ml_dtypes.bfloat16).view(np.uint16)
            if kind == codec.BF16
            else output.astype(raw.dtype)
        )
        return dispatch_pb2.ForwardResponse(
            output=codec.tensor(narrow, kind), term=1, epoch=1, weights_version="v1"
        )


class _Health(health_pb2_grpc.HealthServicer):
    def __init__(self, router: FakeRouter) -> None:
        self._router = router

    async def Check(self, request: Any, context: Any) -> health_pb2.HealthCheckResponse:
        self._router.health_calls += 1
        await self._router._stuck()
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


def combined(
    experts: Experts,
    layer: int,
    rows: np.ndarray,
    ids: np.ndarray,
    gates: np.ndarray,
    valid: np.ndarray,
) -> np.ndarray:
    """Float64 output of one layer, pair by pair."""
    output = np.zeros(rows.shape)
    for expert in np.unique(ids[valid]):
        row, k = np.nonzero(valid & (ids == expert))
        made = experts(layer, int(expert), rows[row].astype(np.float64))
        np.add.at(output, row, made * gates[row, k, None].astype(np.float64))
    return output


@asynccontextmanager
async def fake_routers(count: int, **settings: Any) -> AsyncIterator[list[FakeRouter]]:
    """Routers that name each other, on this loop."""
    routers = [FakeRouter(**settings) for _ in range(count)]
    addresses = tuple([await router.start() for router in routers])
    for router in routers:
        router.peers = addresses
    try:
        yield routers
    finally:
        for router in routers:
            router.behaviour.stuck = False
            await router.stop()


@contextmanager
def threaded_router(**settings: Any) -> Iterator[FakeRouter]:
    """One router on a loop and thread of its own, for tests of blocking code."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    router = FakeRouter(**settings)
    try:
        asyncio.run_coroutine_threadsafe(router.start(), loop).result(10)
        yield router
        router.behaviour.stuck = False
        asyncio.run_coroutine_threadsafe(router.stop(), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
