"""Bytes that are no message of the method end with INVALID_ARGUMENT, as any other bad input does.

Left alone, grpc.aio answers them with UNKNOWN and the text of an exception of protobuf's. A stream
ends there: an item that cannot be read has no sequence number to be answered under.

Responsible for this one fault. Must never look into a message. Called by every gRPC server of the
service, behind the check of tokens.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from moe_serve.errors import InvalidArgument
from moe_serve.rpc.status import abort

_OURS = "/moe_serve.rpc."
_UNDECODABLE = object()
"""Stands for a message that could not be read."""


class DecodeInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc,unused-ignore]
    """Refuses what is no message of its method. Methods of other packages stay as they are."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's own handler, behind the check."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or handler.request_deserializer is None or not method.startswith(_OURS):
            return handler
        return _guarded(handler, method)


class _NotAMessage(InvalidArgument):
    def __init__(self, method: str) -> None:
        super().__init__(
            f"{method}: the bytes are no message of this method; use the protos of this version"
        )


def _guarded(handler: Any, method: str) -> Any:
    decode = handler.request_deserializer

    def read(raw: bytes) -> Any:
        try:
            return decode(raw)
        except DecodeError:
            return _UNDECODABLE

    if handler.request_streaming:
        assert handler.response_streaming, f"{method} streams requests only"
        make, behave = grpc.stream_stream_rpc_method_handler, _streams(handler, method)
    elif handler.response_streaming:
        make, behave = grpc.unary_stream_rpc_method_handler, _answers(handler, method)
    else:
        make, behave = grpc.unary_unary_rpc_method_handler, _answer(handler, method)
    return make(behave, request_deserializer=read, response_serializer=handler.response_serializer)


def _answer(handler: Any, method: str) -> Callable[[Any, Any], Any]:
    async def answer(request: Any, context: Any) -> Any:
        if request is _UNDECODABLE:
            await abort(context, _NotAMessage(method))
        return await handler.unary_unary(request, context)

    return answer


def _answers(handler: Any, method: str) -> Callable[[Any, Any], Any]:
    async def answers(request: Any, context: Any) -> AsyncIterator[Any]:
        if request is _UNDECODABLE:
            await abort(context, _NotAMessage(method))
        async with aclosing(handler.unary_stream(request, context)) as given:
            async for answer in given:
                yield answer

    return answers


def _streams(handler: Any, method: str) -> Callable[[Any, Any], Any]:
    async def readable(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for request in requests:
            if request is _UNDECODABLE:
                raise _NotAMessage(method)
            yield request

    async def streams(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        try:
            async with aclosing(handler.stream_stream(readable(requests), context)) as given:
                async for answer in given:
                    yield answer
        except _NotAMessage as error:
            await abort(context, error)

    return streams
