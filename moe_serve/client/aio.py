"""The asyncio client: one deadline over all tries, failover between routers, batches cut at the
message limit.

Responsible for what one call of the caller becomes. Must never return a partial result. Called by
callers with an event loop of their own, and by the blocking Client.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import numpy as np

from moe_serve.client.batching import (
    join_outputs,
    like_input,
    raw_rows,
    rows_per_message,
    split_rows,
)
from moe_serve.client.checks import (
    Array,
    check_model_fit,
    check_request_id,
    check_shapes,
    check_timeout,
    narrow_ids,
    narrow_weights,
)
from moe_serve.client.endpoints import Endpoints
from moe_serve.client.link import RouterLink
from moe_serve.client.lost import elsewhere, of_all
from moe_serve.client.model_spec import ModelSpec
from moe_serve.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    MoeServeError,
    Unavailable,
)
from moe_serve.rpc import dispatch_pb2
from moe_serve.rpc.auth import bearer_metadata
from moe_serve.rpc.codec import ForwardArrays, forward_request, output_array
from moe_serve.rpc.options import is_loopback
from moe_serve.rpc.trace_context import parse
from placement.topology import Phase

ATTEMPTS_MAX = 3
"""Tries of one request; one deadline covers them all."""
RETRY_WAIT_S = 0.25
"""Wait before a router is tried again in the same request, times the number of tries so far."""
TIMEOUT_S = 30.0
"""Deadline where the caller gives none."""
STREAM_BYTES_MAX = 1 << 20
"""Requests up to this size use the stream, larger ones a unary call of their own so that they hold
nobody up."""
PARTS_OPEN_MAX = 4
"""Messages of one cut request in flight at once."""

_T = TypeVar("_T")
_PHASES = {
    Phase.PREFILL: int(dispatch_pb2.FORWARD_PHASE_PREFILL),
    Phase.DECODE: int(dispatch_pb2.FORWARD_PHASE_DECODE),
}
_log = logging.getLogger(__name__)


class AsyncClient:
    """Client for one event loop. Not to be shared between loops or threads, nor used after a fork.

    Args:
        addresses: routers as host:port; one is enough, the service names the others.
        model: name of the model; "" = the one that is served.
        token: bearer token, sent on every call; needs TLS or loopback addresses.
        tls_ca: PEM file of the authority that signed the routers' certificates; None = plain text.
        timeout_s: deadline of a call that gives none.
        stream: use StreamForward for requests up to STREAM_BYTES_MAX (about half the latency of
            unary calls).

    Raises InvalidArgument for bad addresses or timeout, or a token that would travel in the open.
    """

    def __init__(
        self,
        addresses: Iterable[str],
        *,
        model: str = "",
        token: str | None = None,
        tls_ca: str | Path | None = None,
        timeout_s: float = TIMEOUT_S,
        stream: bool = True,
    ) -> None:
        # Clients of one process and of several start at different routers.
        self._endpoints = Endpoints(addresses, first=secrets.randbelow(1 << 30))
        self._model = model
        self._metadata = bearer_metadata(token) if token else ()
        self._tls_ca = Path(tls_ca) if tls_ca is not None else None
        self._timeout_s = check_timeout(timeout_s)
        self._stream = stream
        self._links: dict[str, RouterLink] = {}
        self._spec: ModelSpec | None = None
        self._refresh: asyncio.Task[None] | None = None
        self._requests = itertools.count()
        self._name = secrets.token_hex(6)
        self.dropped_traces = 0
        """Headers of trace contexts that callers gave and that were malformed."""
        self._closed = False
        for address in self._endpoints.addresses:
            if not self._may_use(address):
                raise InvalidArgument(
                    f"addresses: a token would travel to {address} in the open; give tls_ca"
                )

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Routers known to this client, preferred first."""
        return self._endpoints.addresses

    async def spec(self, *, refresh: bool = False, timeout_s: float | None = None) -> ModelSpec:
        """Shape, limits and addresses of the service; asked once, again with `refresh` (and by
        itself after a failover). Raises typed errors."""
        if self._spec is not None and not refresh:
            return self._spec
        deadline_s = time.monotonic() + self._timeout(timeout_s)
        request = dispatch_pb2.GetModelSpecRequest(model=self._model)

        async def ask(link: RouterLink, _attempt: int, left_s: float) -> ModelSpec:
            return ModelSpec.from_response(await link.get_spec(request, left_s))

        spec = await self._try_routers(ask, deadline_s)
        self._spec = spec
        self._endpoints.learn(a for a in spec.router_addresses if self._may_use(a))
        await self._drop_unknown_links()
        return spec

    async def forward(  # noqa: PLR0913 - the fields of one call, by name
        self,
        layer: int,
        hidden: Array,
        topk_ids: Array,
        topk_weights: Array,
        *,
        phase: Phase,
        request_id: str = "",
        row_valid: Array | None = None,
        pair_valid: Array | None = None,
        timeout_s: float | None = None,
        traceparent: str = "",
        tracestate: str = "",
    ) -> Array:
        """Combined expert output [T, H] of one MoE layer, in the dtype of `hidden`, read-only.

        Args:
            layer: MoE layer, 0..num_layers-1.
            hidden: [T, H] float32, float16, ml_dtypes.bfloat16 or uint16 bit patterns of bfloat16.
            topk_ids: [T, k] integers, logical expert ids, distinct in a row, 1 <= k <= top_k.
            topk_weights: [T, k], finite; travels as float32.
            phase: PREFILL or DECODE.
            request_id: shown in errors and logs; made up where empty.
            row_valid: bool [T]; invalid rows come back as zeros and count nowhere.
            pair_valid: bool [T, k]; invalid pairs add nothing and are not checked.
            timeout_s: deadline over all tries, seconds.
            traceparent, tracestate: W3C trace context of the caller's span; what is malformed is
                dropped and counted in `dropped_traces`.

        Arrays must not change before this returns.

        Raises:
            InvalidArgument, ResourceExhausted, Unavailable, DeadlineExceeded, Unauthenticated ...:
            typed, with the fields named. Nothing partial is returned.
            FailedPrecondition: the client is closed.
        """
        check_shapes(hidden, topk_ids, topk_weights, row_valid, pair_valid)
        check_request_id(request_id)
        raw, data_type = raw_rows(hidden)
        timeout_s = self._timeout(timeout_s)
        deadline_s = time.monotonic() + timeout_s
        trace, dropped = parse(traceparent, tracestate)
        self.dropped_traces += dropped
        spec = await self.spec(timeout_s=timeout_s)
        check_model_fit(spec, layer, hidden)
        arrays = ForwardArrays(
            model=self._model,
            layer=layer,
            phase=_PHASES[Phase(phase)],
            data_type=data_type,
            hidden=raw,
            topk_ids=narrow_ids(topk_ids),
            topk_weights=narrow_weights(topk_weights),
            request_id=request_id or f"{self._name}-{next(self._requests)}",
            row_valid=None if row_valid is None else np.ascontiguousarray(row_valid),
            pair_valid=None if pair_valid is None else np.ascontiguousarray(pair_valid),
            traceparent="" if trace is None else trace.header(),
            tracestate="" if trace is None else trace.state,
        )
        limit = rows_per_message(spec, data_type, topk_ids.shape[1])
        outputs = await self._forward_parts(list(split_rows(arrays, limit)), deadline_s)
        return like_input(join_outputs(outputs), hidden)

    async def close(self) -> None:
        """End streams and connections; calls in flight fail with Unavailable. Idempotent."""
        self._closed = True
        if self._refresh is not None:
            self._refresh.cancel()
            await asyncio.gather(self._refresh, return_exceptions=True)
        links, self._links = list(self._links.values()), {}
        for link in links:
            await link.close(Unavailable("the client was closed during the call"))

    async def _forward_parts(self, parts: list[ForwardArrays], deadline_s: float) -> list[Array]:
        """Outputs of all parts, or the first failure, in which case the others are cancelled."""
        if len(parts) == 1:
            return [await self._forward_part(parts[0], deadline_s)]
        room = asyncio.Semaphore(PARTS_OPEN_MAX)

        async def one(part: ForwardArrays) -> Array:
            async with room:
                return await self._forward_part(part, deadline_s)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(part)) for part in parts]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _forward_part(self, arrays: ForwardArrays, deadline_s: float) -> Array:
        message = forward_request(arrays)
        stream = self._stream and arrays.hidden.nbytes <= STREAM_BYTES_MAX

        async def ask(
            link: RouterLink, attempt: int, left_s: float
        ) -> dispatch_pb2.ForwardResponse:
            message.attempt = attempt
            return await link.forward(message, left_s, stream=stream)

        response = await self._try_routers(ask, deadline_s, arrays.request_id)
        output, data_type = output_array(response)
        if output.shape != arrays.hidden.shape or data_type != arrays.data_type:
            raise MoeServeError(
                f"the router answered {output.shape} of type {data_type}, asked "
                f"{arrays.hidden.shape} of type {arrays.data_type}"
            )
        return output

    async def _try_routers(
        self,
        ask: Callable[[RouterLink, int, float], Awaitable[_T]],
        deadline_s: float,
        request_id: str = "",
    ) -> _T:
        """Ask one router, then others while the answer is UNAVAILABLE and time is left. Raises what
        `lost.of_all` makes of the tries. request_id: for the log."""
        tried: set[str] = set()
        tries: list[tuple[str, MoeServeError]] = []
        for attempt in range(ATTEMPTS_MAX):
            address = self._endpoints.pick(time.monotonic(), frozenset(tried))
            if address in tried:
                await asyncio.sleep(RETRY_WAIT_S * attempt)
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                break
            try:
                answer = await ask(self._link(address), attempt, left_s)
            except MoeServeError as error:
                if self._closed or not elsewhere(error):
                    raise
                tries.append((address, error))
                _log.info(
                    "router %s did not serve request %s: %s: %s",
                    address,
                    request_id or "for the model's shape",
                    error.code,
                    error,
                    extra={"request_id": request_id},
                )
            else:
                self._endpoints.worked(address)
                if attempt:
                    self._refresh_soon()
                return answer
            self._endpoints.failed(address, time.monotonic())
            tried.add(address)
        if not tries:
            raise DeadlineExceeded("the deadline was over before the first try")
        raise of_all(tries)

    def _link(self, address: str) -> RouterLink:
        if self._closed:
            raise FailedPrecondition("this client is closed; make a new one")
        link = self._links.get(address)
        if link is None or link.lost:
            link = self._links[address] = RouterLink(
                address, self._metadata, self._tls_ca, lambda: len(self._endpoints.addresses) > 1
            )
        return link

    def _refresh_soon(self) -> None:
        """After a failover the list of routers is probably another one: ask, behind the caller's
        back and once at a time."""
        if self._refresh is None or self._refresh.done():
            self._refresh = asyncio.get_running_loop().create_task(self._read_spec_again())

    async def _read_spec_again(self) -> None:
        try:
            await self.spec(refresh=True)
        except MoeServeError as error:
            # The old list stays in use; the next failover asks again.
            _log.warning("the list of routers was not read again: %s: %s", error.code, error)

    async def _drop_unknown_links(self) -> None:
        known = self._endpoints.addresses
        for address in [a for a in self._links if a not in known]:
            await self._links.pop(address).close(Unavailable(f"router {address} has left"))

    def _may_use(self, address: str) -> bool:
        """Whether our token, where we have one, is safe on the way to this address."""
        host = address.rpartition(":")[0]
        return not self._metadata or self._tls_ca is not None or is_loopback(host)

    def _timeout(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else check_timeout(timeout_s)
