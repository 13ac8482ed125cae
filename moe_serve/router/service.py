"""The public gRPC edge of a router: DispatchService, health, and reflection on loopback.

Responsible for turning messages into checked arrays and errors into status. Must never plan or
combine (`dispatch` does), and never let a bad item touch another. Called by the router actor, and
by tests directly.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import (  # type: ignore[import-untyped]
    health,
    health_pb2,
    health_pb2_grpc,
)
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]

from moe_serve.errors import (
    FieldViolation,
    InvalidArgument,
    MoeServeError,
    StartRefused,
    Unavailable,
)
from moe_serve.ports import DType
from moe_serve.router.checks import REQUEST_ID_CHARS_MAX, check_forward, check_model
from moe_serve.router.dispatch import RouterCore
from moe_serve.router.flight import ForwardOutput
from moe_serve.router.settings import RouterSettings
from moe_serve.router.spans import RequestSpan, RequestSpans
from moe_serve.rpc import API_VERSION, codec, dispatch_pb2, dispatch_pb2_grpc
from moe_serve.rpc.auth import AuthInterceptor, TokenChecker, TokenFile
from moe_serve.rpc.options import server_credentials, server_options
from moe_serve.rpc.status import abort, to_item_error
from moe_serve.rpc.undecodable import DecodeInterceptor
from moe_serve.telemetry import AuditLog

SERVICE_NAME = dispatch_pb2.DESCRIPTOR.services_by_name["DispatchService"].full_name


class DispatchServicer(dispatch_pb2_grpc.DispatchServiceServicer):
    """GetModelSpec, Forward and StreamForward over one RouterCore."""

    def __init__(self, core: RouterCore, own_address: str) -> None:
        self._core = core
        self._settings = core.settings
        self._own_address = own_address
        self._spans = (
            RequestSpans(core.traces, core.pulse, time.monotonic) if core.traces.on else None
        )
        self._unnamed = itertools.count(1)
        self._draining = asyncio.Event()

    def drain(self) -> None:
        """Take nothing new, in open streams neither; these end once what they brought is answered.
        Without that a front end that keeps a stream open would be cut off in the middle."""
        self._draining.set()

    @property
    def draining(self) -> bool:
        """Whether `drain` was called."""
        return self._draining.is_set()

    async def GetModelSpec(
        self, request: dispatch_pb2.GetModelSpecRequest, context: Any
    ) -> dispatch_pb2.GetModelSpecResponse:
        """Shape, limits and addresses of the service."""
        settings, spec = self._settings, self._settings.spec
        try:
            check_model(request.model, spec)
        except MoeServeError as error:
            await abort(context, error)
        layers = settings.checkpoint_layers or tuple(range(spec.num_layers))
        table = self._core.role.table
        limit = settings.limits.max_message_bytes
        peers = self._core.peers
        return dispatch_pb2.GetModelSpecResponse(
            model=spec.model,
            weights_version=spec.weights_version if table is None else table.weights_version,
            num_layers=spec.num_layers,
            checkpoint_layers=layers,
            num_experts=spec.num_experts,
            top_k=spec.top_k,
            hidden_size=spec.hidden_size,
            data_types=[dispatch_pb2.DataType.ValueType(t) for t in codec.HIDDEN_TYPES],
            max_message_bytes=limit,
            max_rows=codec.max_rows(
                top_k=spec.top_k, hidden_size=spec.hidden_size, max_message_bytes=limit
            ),
            router_addresses=peers if self._own_address in peers else (self._own_address, *peers),
            api_version=API_VERSION,
            simulated=settings.simulated,
        )

    async def Forward(
        self, request: dispatch_pb2.ForwardRequest, context: Any
    ) -> dispatch_pb2.ForwardResponse:
        """One layer of one batch."""
        left_s = context.time_remaining()
        default_s = self._settings.default_timeout_s
        try:
            headers = context.invocation_metadata() if self._spans is not None else None
            return await self._answer(request, default_s if left_s is None else left_s, headers)
        except MoeServeError as error:
            self._note(error, request)
            await abort(context, error)
            raise AssertionError("abort always raises") from error

    async def StreamForward(
        self, request_iterator: AsyncIterator[dispatch_pb2.StreamForwardRequest], context: Any
    ) -> AsyncIterator[dispatch_pb2.StreamForwardResponse]:
        """Many items, answered in the order they finish; a bad one gets an error of its own."""
        headers = context.invocation_metadata() if self._spans is not None else None
        stream = _Stream(self, self._settings.max_stream_items, context.time_remaining(), headers)
        reader = asyncio.create_task(stream.read(request_iterator))
        closer = asyncio.create_task(stream.close_after(self._draining))
        try:
            while (answer := await stream.answers.get()) is not None:
                yield answer
                stream.room.release()
            if not self._draining.is_set():
                await reader
        finally:
            reader.cancel()
            closer.cancel()
            await asyncio.gather(reader, closer, return_exceptions=True)
            await stream.end()

    async def answer_item(
        self, item: dispatch_pb2.StreamForwardRequest, left_s: float | None, headers: Any = None
    ) -> dispatch_pb2.StreamForwardResponse:
        """Answer or error of one item of a stream, never an exception. headers: of the stream."""
        timeout_s = item.timeout_ms / 1000 if item.timeout_ms else self._settings.default_timeout_s
        if left_s is not None:
            timeout_s = min(timeout_s, left_s)
        try:
            response = await self._answer(item.request, timeout_s, headers)
        except MoeServeError as error:
            self._note(error, item.request)
            return dispatch_pb2.StreamForwardResponse(
                sequence=item.sequence, error=to_item_error(error)
            )
        return dispatch_pb2.StreamForwardResponse(sequence=item.sequence, response=response)

    async def _answer(
        self, request: dispatch_pb2.ForwardRequest, timeout_s: float, headers: Any
    ) -> dispatch_pb2.ForwardResponse:
        if not request.request_id:
            # Of ours then, so that lines and errors of router and shard can be told together.
            name = f"{self._settings.router}.{self._settings.incarnation}-{next(self._unnamed)}"
            request.request_id = name
        if self._spans is None:
            return await self._answered(request, timeout_s, None)
        with self._spans.of(request, headers) as span:
            return await self._answered(request, timeout_s, span)

    async def _answered(
        self, request: dispatch_pb2.ForwardRequest, timeout_s: float, span: RequestSpan | None
    ) -> dispatch_pb2.ForwardResponse:
        settings = self._settings
        if self._draining.is_set():
            raise Unavailable("the router is being drained; use another one")
        try:
            checked = check_forward(request, settings.spec, settings.limits.max_message_bytes)
        except MoeServeError:
            self._core.pulse.add("refused_requests")
            raise
        if span is not None:
            checked = span.of(checked)
        output = await self._core.forward(checked, timeout_s)
        if span is not None:
            span.answered(output)
        return _response(output, checked.dtype)

    def _note(self, error: MoeServeError, request: dispatch_pb2.ForwardRequest) -> None:
        request_id = request.request_id[:REQUEST_ID_CHARS_MAX]
        self._core.lines.failed(error, request_id, request.layer)


class _Stream:
    """State of one StreamForward call. `room`: items that may be read before one is answered."""

    def __init__(
        self, servicer: DispatchServicer, max_items: int, left_s: float | None, headers: Any
    ) -> None:
        self.answers: asyncio.Queue[dispatch_pb2.StreamForwardResponse | None] = asyncio.Queue()
        self.room = asyncio.Semaphore(max_items)
        self._servicer = servicer
        self._headers = headers
        loop = asyncio.get_running_loop()
        self._clock = loop.time
        self._ends_at_s = None if left_s is None else loop.time() + left_s
        self._open: dict[int, asyncio.Task[None]] = {}

    async def read(self, items: AsyncIterator[dispatch_pb2.StreamForwardRequest]) -> None:
        """Start every item; after the last, wait for all of them and mark the end."""
        try:
            await self.room.acquire()
            async for item in items:
                self._start(item)
                await self.room.acquire()
            while self._open:
                await asyncio.wait(self._open.values())
        finally:
            self.answers.put_nowait(None)

    async def close_after(self, draining: asyncio.Event) -> None:
        """Once the router is drained: mark the end as soon as every item that was begun has its
        answer. The front end goes to another router with what it sends from then on."""
        await draining.wait()
        while self._open:
            await asyncio.wait(self._open.values())
        self.answers.put_nowait(None)

    async def end(self) -> None:
        """Cancel what still runs."""
        tasks = list(self._open.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, item: dispatch_pb2.StreamForwardRequest) -> None:
        sequence = item.sequence
        if sequence in self._open:
            text = f"{sequence} is open already; use a number that no open item has"
            fault = InvalidArgument(text, violations=(FieldViolation("sequence", text),))
            self.answers.put_nowait(
                dispatch_pb2.StreamForwardResponse(sequence=sequence, error=to_item_error(fault))
            )
            return
        task = asyncio.create_task(self._run(item))
        self._open[sequence] = task
        task.add_done_callback(partial(self._closed, sequence))

    async def _run(self, item: dispatch_pb2.StreamForwardRequest) -> None:
        left_s = None if self._ends_at_s is None else max(0.0, self._ends_at_s - self._clock())
        answer = await self._servicer.answer_item(item, left_s, self._headers)
        # Free for reuse from the moment the answer can be seen.
        self._open.pop(item.sequence, None)
        self.answers.put_nowait(answer)

    def _closed(self, sequence: int, task: asyncio.Task[None]) -> None:
        if self._open.get(sequence) is task:
            del self._open[sequence]


class RouterServer:
    """A gRPC server around a RouterCore: bind, serve, report ready, stop."""

    def __init__(self, core: RouterCore, checker: TokenChecker | None = None) -> None:
        settings = core.settings
        if checker is None and settings.token_file is not None:
            checker = TokenFile(settings.token_file)
        audit = AuditLog(part=settings.router, node=settings.node)
        tokens = [] if checker is None else [AuthInterceptor(checker, audit=audit)]
        self._core = core
        self._server = grpc.aio.server(
            interceptors=[*tokens, DecodeInterceptor()],
            options=server_options(settings.limits),
            maximum_concurrent_rpcs=settings.limits.max_concurrent_rpcs,
        )
        self._servicer: DispatchServicer | None = None
        self._telling: asyncio.Future[None] | None = None
        self._health = health.aio.HealthServicer()
        self.address = ""
        """host:port that others reach, once started."""

    async def start(self) -> str:
        """Bind and serve; returns the address. Raises StartRefused where the port is taken or TLS
        files are bad.
        """
        settings = self._core.settings
        port = _bind(self._server, settings)
        host = settings.advertise_host or settings.host
        self.address = f"{host}:{port}"
        self._servicer = DispatchServicer(self._core, self.address)
        dispatch_pb2_grpc.add_DispatchServiceServicer_to_server(self._servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if settings.loopback:
            names = (SERVICE_NAME, "grpc.health.v1.Health", reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        await self._core.start()
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self.tell_health()
        self._core.on_table = self._table_changed
        await self._server.start()
        return self.address

    @property
    def draining(self) -> bool:
        """Whether it takes nothing new any more."""
        return self._servicer is not None and self._servicer.draining

    async def tell_health(self) -> None:
        """Report DispatchService as serving exactly when every expert has a listed replica."""
        state = health_pb2.HealthCheckResponse
        ready = self._core.ready
        await self._health.set(SERVICE_NAME, state.SERVING if ready else state.NOT_SERVING)

    async def stop(self, grace_s: float = 5.0) -> None:
        """Take no new calls, let open ones finish for `grace_s`, then end everything."""
        self._core.on_table = None
        await self._health.enter_graceful_shutdown()
        if self._servicer is not None:
            self._servicer.drain()
        await self._server.stop(grace_s)
        await self._core.stop()

    def _table_changed(self) -> None:
        self._telling = asyncio.ensure_future(self.tell_health())


def _bind(server: grpc.aio.Server, settings: RouterSettings) -> int:
    address = f"{settings.host}:{settings.port}"
    try:
        if settings.tls_certificate is None or settings.tls_key is None:
            port = server.add_insecure_port(address)
        else:
            credentials = server_credentials(settings.tls_certificate, settings.tls_key)
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise StartRefused(
            f"router {settings.router} cannot listen on {address}; is the port taken?"
        ) from error
    if port == 0 or (settings.port not in (0, port)):
        raise StartRefused(f"router {settings.router} cannot listen on {address}; got port {port}")
    return port


def _response(output: ForwardOutput, dtype: DType) -> dispatch_pb2.ForwardResponse:
    return dispatch_pb2.ForwardResponse(
        output=codec.tensor(output.output, int(dtype)),
        term=output.term,
        epoch=output.epoch,
        weights_version=output.weights_version,
    )
