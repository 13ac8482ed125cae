"""The connection to one router: its channel, its stream, and whether it is still there.

Responsible for telling slow from gone. A router that is computing answers a health check at once;
one that is stopped, unplugged or stuck does not, and without a check its callers would wait for
their whole deadline. Must never choose another router: it fails its calls with Unavailable and is
not used again. Called by AsyncClient, on one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from moe_serve.client.lane import StreamLane
from moe_serve.client.lost import RouterLost, lost_or_typed
from moe_serve.errors import DeadlineExceeded, MoeServeError
from moe_serve.rpc import dispatch_pb2, dispatch_pb2_grpc
from moe_serve.rpc.options import channel_credentials, channel_options
from moe_serve.rpc.trace_context import to_metadata

SILENCE_S = 2.0
"""Seconds with open calls and no answer after which a router is asked whether it is there."""
CHECK_TIMEOUT_S = 2.0
"""Seconds it may take to say so."""

_GONE = (
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
)
_OPTIONS = (
    # A connection of its own: closing the channel then really gives it up.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Also the limit of one attempt to connect, which is 20 s otherwise.
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.keepalive_timeout_ms", 5000),
)


class RouterLink:
    """Calls to one router.

    Args:
        address: host:port. metadata: sent with each call. tls_ca: PEM file, None = plain text.
        others: whether the client knows another router; without one a silent router is waited for.
    """

    def __init__(
        self, address: str, metadata: Any, tls_ca: Path | None, others: Callable[[], bool]
    ) -> None:
        options = [*channel_options(), *_OPTIONS]
        if tls_ca is None:
            self._channel = grpc.aio.insecure_channel(address, options=options)
        else:
            credentials = channel_credentials(tls_ca)
            self._channel = grpc.aio.secure_channel(address, credentials, options=options)
        self._address = address
        self._metadata = metadata
        self._others = others
        # The asyncio stubs exist in the type stubs only.
        self._stub: dispatch_pb2_grpc.DispatchServiceAsyncStub = (
            dispatch_pb2_grpc.DispatchServiceStub(self._channel)
        )
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._lane: StreamLane | None = None
        self._unary: set[Any] = set()
        self._waiting = 0
        self._heard_s = time.monotonic()
        self._watcher: asyncio.Task[None] | None = None
        self._lost: MoeServeError | None = None

    @property
    def lost(self) -> bool:
        """Whether the link is over; a new one may work."""
        return self._lost is not None

    async def get_spec(
        self, request: dispatch_pb2.GetModelSpecRequest, timeout_s: float
    ) -> dispatch_pb2.GetModelSpecResponse:
        """GetModelSpec. Raises typed errors."""
        answer: dispatch_pb2.GetModelSpecResponse = await self._call(
            self._stub.GetModelSpec, request, timeout_s
        )
        return answer

    async def forward(
        self, request: dispatch_pb2.ForwardRequest, timeout_s: float, *, stream: bool
    ) -> dispatch_pb2.ForwardResponse:
        """Forward, as an item of the stream or as a call of its own. Raises typed errors."""
        if not stream:
            # As headers too, for whatever stands between and reads no messages.
            trace = to_metadata(request.traceparent, request.tracestate)
            answer: dispatch_pb2.ForwardResponse = await self._call(
                self._stub.Forward, request, timeout_s, trace
            )
            return answer
        with self._waits():
            if self._lane is None or self._lane.ended:
                self._lane = StreamLane(self._stub.StreamForward(metadata=self._metadata))
            return await self._lane.forward(request, timeout_s)

    async def close(self, error: MoeServeError) -> None:
        """Give the connection up; open calls fail with `error`. Idempotent."""
        if self._lost is not None:
            return
        self._lost = error
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await self._abandon(error)

    async def _abandon(self, error: MoeServeError) -> None:
        for call in list(self._unary):
            call.cancel()
        if self._lane is not None:
            await self._lane.close(error)
        await self._channel.close()

    async def _call(
        self, method: Any, request: Any, timeout_s: float, trace: tuple[tuple[str, str], ...] = ()
    ) -> Any:
        with self._waits():
            call = method(request, timeout=timeout_s, metadata=(*self._metadata, *trace))
            self._unary.add(call)
            try:
                return await call
            except grpc.RpcError as error:
                raise lost_or_typed(error) from error
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self._lost is None or (task is not None and task.cancelling()):
                    raise
                # Not the caller but this link cancelled the call.
                raise self._lost from None
            finally:
                self._unary.discard(call)

    @contextmanager
    def _waits(self) -> Iterator[None]:
        """Around a call: keeps the watch, and notes when the router was last heard."""
        if self._lost is not None:
            raise self._lost
        if self._waiting == 0:
            self._heard_s = time.monotonic()
        self._waiting += 1
        if self._watcher is None:
            self._watcher = asyncio.get_running_loop().create_task(self._watch())
        try:
            yield
        except DeadlineExceeded:
            raise
        except MoeServeError:
            self._heard_s = time.monotonic()
            raise
        else:
            self._heard_s = time.monotonic()
        finally:
            self._waiting -= 1

    async def _watch(self) -> None:
        """While calls are open: ask a router that is silent, and give it up where it does not
        answer."""
        while self._waiting:
            silent_s = time.monotonic() - self._heard_s
            if silent_s < SILENCE_S or not self._others():
                await asyncio.sleep(max(SILENCE_S - silent_s, SILENCE_S / 2))
            elif await self._alive():
                self._heard_s = time.monotonic()
            elif self._waiting and self._lost is None:
                self._lost = RouterLost(
                    f"router {self._address} has not answered for {SILENCE_S + CHECK_TIMEOUT_S} s"
                )
                await self._abandon(self._lost)
                return
        self._watcher = None

    async def _alive(self) -> bool:
        """Whether the router answers a health check, whatever it says."""
        began_s = time.monotonic()
        try:
            await self._health.Check(
                health_pb2.HealthCheckRequest(), timeout=CHECK_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.RpcError as error:
            code: Any = getattr(error, "code", None)
            return code() not in _GONE or self._heard_s > began_s
        return True
