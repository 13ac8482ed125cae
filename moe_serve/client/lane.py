"""One bidirectional stream to one router: many calls in flight, answers in any order.

Responsible for matching answers to calls and for failing all open calls when the stream ends. Must
never retry, and never let a caller that gives up disturb the others: reads and writes are done by
tasks of the lane, because gRPC ends a stream whose read or write is cancelled. Called by
RouterLink, on one event loop.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

import grpc

from moe_serve.client.lost import RouterLost, lost_or_typed
from moe_serve.errors import DeadlineExceeded, MoeServeError
from moe_serve.rpc import dispatch_pb2
from moe_serve.rpc.status import from_item_error

OPEN_ITEMS_MAX = 1024
"""Calls in flight on one stream; more wait for room, within their own deadline."""


class _Item(NamedTuple):
    sequence: int
    request: dispatch_pb2.ForwardRequest
    deadline_s: float


class StreamLane:
    """A StreamForward call (opened, nothing written yet). A lane that ended is not used again."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._open: dict[int, asyncio.Future[dispatch_pb2.ForwardResponse]] = {}
        self._outbox: asyncio.Queue[_Item] = asyncio.Queue()
        self._room = asyncio.Semaphore(OPEN_ITEMS_MAX)
        self._next = 1
        self._ended: MoeServeError | None = None
        loop = asyncio.get_running_loop()
        self._reader = loop.create_task(self._read())
        self._writer = loop.create_task(self._write())

    @property
    def ended(self) -> bool:
        """Whether the stream is over."""
        return self._ended is not None

    async def forward(
        self, request: dispatch_pb2.ForwardRequest, timeout_s: float
    ) -> dispatch_pb2.ForwardResponse:
        """Send one item and await its answer.

        `request` is encoded later: it must not be changed before this returns. Raises the item's
        typed error, Unavailable where the stream ended, or DeadlineExceeded.
        """
        deadline_s = time.monotonic() + timeout_s
        try:
            async with asyncio.timeout(timeout_s), self._room:
                return await self._ask(request, deadline_s)
        except TimeoutError as error:
            raise DeadlineExceeded(f"no answer within {timeout_s:.3f} s") from error

    async def _ask(
        self, request: dispatch_pb2.ForwardRequest, deadline_s: float
    ) -> dispatch_pb2.ForwardResponse:
        if self._ended is not None:
            raise self._ended
        sequence, self._next = self._next, self._next + 1
        answer: asyncio.Future[dispatch_pb2.ForwardResponse] = (
            asyncio.get_running_loop().create_future()
        )
        self._open[sequence] = answer
        self._outbox.put_nowait(_Item(sequence, request, deadline_s))
        try:
            return await answer
        finally:
            del self._open[sequence]
            if answer.done() and not answer.cancelled():
                answer.exception()  # seen, also where the caller was cancelled in the same moment

    async def _write(self) -> None:
        try:
            while True:
                item = await self._outbox.get()
                left_s = item.deadline_s - time.monotonic()
                if item.sequence not in self._open or left_s <= 0:
                    continue  # its caller gave up while it waited here
                await self._call.write(
                    dispatch_pb2.StreamForwardRequest(
                        sequence=item.sequence,
                        request=item.request,
                        timeout_ms=max(1, int(left_s * 1000)),
                    )
                )
        except (grpc.RpcError, asyncio.InvalidStateError):
            # The stream is over. Why is its status, which the reader gets and tells every caller.
            self._call.cancel()

    async def _read(self) -> None:
        error: MoeServeError = RouterLost("the stream to the router was closed")
        try:
            while (reply := await self._call.read()) is not grpc.aio.EOF:
                self._settle(reply)
            error = RouterLost("the router ended the stream")
        except grpc.RpcError as failure:
            error = lost_or_typed(failure)
        finally:
            self._end(error)
            self._writer.cancel()

    def _settle(self, reply: dispatch_pb2.StreamForwardResponse) -> None:
        answer = self._open.get(reply.sequence)
        if answer is None or answer.done():
            return  # its caller gave up: deadline or cancel
        if reply.WhichOneof("result") == "response":
            answer.set_result(reply.response)
        else:
            answer.set_exception(from_item_error(reply.error))

    def _end(self, error: MoeServeError) -> None:
        if self._ended is None:
            self._ended = error
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(self._ended)

    async def close(self, error: MoeServeError) -> None:
        """End the stream; open calls fail with `error`."""
        self._end(error)
        self._call.cancel()
        self._reader.cancel()
        self._writer.cancel()
        await asyncio.gather(self._reader, self._writer, return_exceptions=True)
