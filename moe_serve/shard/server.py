"""What a shard answers on the wire: sub-calls, tables, copies.

Responsible for handing each message to the part it concerns and its answer back, and for the span
of a sub-call that comes with a trace. It runs on the
wire thread and must never block; that thread only computes as little as `ShardCore.serve_waiting`
allows. Made by `assembly`; called by `WireServer`.
"""

from __future__ import annotations

from collections.abc import Callable

from moe_serve.errors import InvalidArgument, MoeServeError
from moe_serve.ports import SubCall, SubReply
from moe_serve.shard.copy_server import CopyServer
from moe_serve.shard.core import ShardCore
from moe_serve.shard.spans import SubCallSpans
from moe_serve.shard.work_queue import ReplyTo
from moe_serve.telemetry.traces import NO_TRACES, Traces
from moe_serve.wire.frame import Kind
from moe_serve.wire.server import Reply
from moe_serve.wire.wire_messages import (
    CopyChunk,
    CopyClose,
    CopyOpen,
    CopyOpened,
    CopyRead,
    ErrorReply,
    FetchTable,
    Table,
    WireMessage,
)

_PAIR_BYTES = 28
"""Bytes a pair holds in memory while it waits."""


def _or_error(
    reply: Reply, call_id: int, asked: Kind
) -> Callable[[CopyOpened | CopyChunk | MoeServeError], None]:
    def answer(result: CopyOpened | CopyChunk | MoeServeError) -> None:
        if isinstance(result, MoeServeError):
            reply(ErrorReply(call_id, 0, int(asked), result))
        else:
            reply(result)

    return answer


class ShardServer:
    """The handler of a shard's WireServer."""

    def __init__(self, core: ShardCore, copies: CopyServer, traces: Traces = NO_TRACES) -> None:
        self._core = core
        self._copies = copies
        self._spans = SubCallSpans(traces, core.slots, core.clock) if traces.on else None

    def __call__(self, message: WireMessage, reply: Reply) -> None:
        """Answer `message` through `reply`, now or later."""
        match message:
            case SubCall():
                self._forward(message, reply)
            case FetchTable():
                reply(Table(message.call_id, self._core.slots.table))
            case CopyOpen():
                self._copies.open(message, _or_error(reply, message.call_id, Kind.COPY_OPEN))
            case CopyRead():
                self._copies.read(message, _or_error(reply, message.call_id, Kind.COPY_READ))
            case CopyClose():
                self._copies.close(message)
            case _:
                # Answers come from shards; whoever sends one to a shard confuses its roles.
                reply(
                    ErrorReply(
                        message.call_id, 0, 0, InvalidArgument("kind: a shard takes no answers")
                    )
                )

    def burst_ended(self) -> None:
        """All that had come was handed over: have it computed, as one batch where it is one
        layer's."""
        self._core.serve_waiting()

    def _forward(self, call: SubCall, reply: Reply) -> None:
        def answer(result: SubReply | MoeServeError) -> None:
            if isinstance(result, MoeServeError):
                reply(ErrorReply(call.call_id, call.sub_id, int(Kind.FORWARD), result))
            else:
                reply(result)

        told: ReplyTo = answer
        if self._spans is not None and call.trace:
            told = self._spans.of(call, answer)
        self._core.enqueue(call, call.rows.nbytes + _PAIR_BYTES * len(call.pair_row), told)
