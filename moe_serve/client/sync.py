"""The blocking client: the asyncio client on an event loop thread of its own.

Responsible for crossing between threads. Must never hold a rule of its own. Called by front ends
and scripts, from any number of threads.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import uvloop

from moe_serve.client.aio import TIMEOUT_S, AsyncClient
from moe_serve.client.checks import Array
from moe_serve.client.model_spec import ModelSpec
from moe_serve.errors import FailedPrecondition, Unavailable
from placement.topology import Phase

CLOSE_WAIT_S = 5.0
"""Seconds that calls in flight have to fail when the client is closed; then they are cancelled."""

_T = TypeVar("_T")


class Client:
    """Blocking client; arguments and errors as AsyncClient. Safe to use from several threads.

    Not usable after a fork: the child has no loop thread, so calls there raise FailedPrecondition
    at once; make a client in the child. (gRPC itself must not be used on both sides of a fork.)
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
        self._client = AsyncClient(
            addresses,
            model=model,
            token=token,
            tls_ca=tls_ca,
            timeout_s=timeout_s,
            stream=stream,
        )
        self._process = os.getpid()
        self._closed = False
        self._lock = threading.Lock()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="moe-serve-client", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Routers known to this client, preferred first."""
        return self._client.addresses

    @property
    def dropped_traces(self) -> int:
        """As AsyncClient.dropped_traces."""
        return self._client.dropped_traces

    def spec(self, *, refresh: bool = False, timeout_s: float | None = None) -> ModelSpec:
        """As AsyncClient.spec."""
        return self._run(self._client.spec(refresh=refresh, timeout_s=timeout_s))

    def forward(  # noqa: PLR0913 - the fields of one call, by name
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
        """As AsyncClient.forward."""
        return self._run(
            self._client.forward(
                layer,
                hidden,
                topk_ids,
                topk_weights,
                phase=phase,
                request_id=request_id,
                row_valid=row_valid,
                pair_valid=pair_valid,
                timeout_s=timeout_s,
                traceparent=traceparent,
                tracestate=tracestate,
            )
        )

    def close(self) -> None:
        """End connections and the loop thread; calls of other threads fail with Unavailable.
        Idempotent."""
        if self._forked():
            return  # the parent's connections and thread are the parent's to end
        with self._lock:
            if self._closed:
                return
            self._closed = True
            done = asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop)
        try:
            done.result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run on the loop thread and wait for it."""
        if self._forked():
            work.close()
            raise FailedPrecondition(
                "this client was made before a fork; make a new one in the child"
            )
        # With the lock no work is handed to a loop that has been told to stop.
        with self._lock:
            if self._closed:
                work.close()
                raise FailedPrecondition("this client is closed; make a new one")
            done = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return done.result()
        except concurrent.futures.CancelledError:
            raise Unavailable("the client was closed during the call") from None
        except BaseException:
            done.cancel()  # Ctrl-C while waiting: nobody wants the answer any more
            raise

    async def _shut_down(self) -> None:
        """Close the client and see all calls in flight end, so that no thread waits for ever."""
        await self._client.close()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        if not rest:
            return
        _, late = await asyncio.wait(rest, timeout=CLOSE_WAIT_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def _forked(self) -> bool:
        return os.getpid() != self._process
