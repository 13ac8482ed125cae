"""The spans of a router: one a request, and below it one a sub-call.

Responsible for where a request's trace comes from (its own fields, else the headers of its call)
and for what the two spans say. Must never change an answer. Made where traces are on; without them
`service` and `dispatch` do not come here. Called by these two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from moe_serve.errors import MoeServeError
from moe_serve.ports import SubCall, SubReply
from moe_serve.router.checks import REQUEST_ID_CHARS_MAX, ForwardInput
from moe_serve.router.flight import ForwardOutput
from moe_serve.router.lanes import Lane
from moe_serve.router.outcome import Lost, ask
from moe_serve.router.pulse import Pulse
from moe_serve.rpc import dispatch_pb2
from moe_serve.rpc.trace_context import TraceContext, from_metadata, parse
from moe_serve.telemetry.traces import Span, SpanKind, Traces, Value
from placement.topology import Phase

Ask = Callable[[Lane, SubCall], Awaitable[SubReply | Lost]]
MALFORMED = "malformed_traces"
"""Counter of headers that were dropped."""


@dataclass(slots=True)
class RequestSpan:
    """One request that is sampled, while it is in work."""

    context: TraceContext
    said: dict[str, Value] = field(default_factory=dict)

    def of(self, request: ForwardInput) -> ForwardInput:
        """The request, marked with its span."""
        self.said["request_id"] = request.request_id
        self.said["phase"] = request.phase.name.lower()
        self.said["rows"] = int(request.hidden.shape[0])
        return replace(request, trace=self.context.header())

    def answered(self, output: ForwardOutput) -> None:
        """It was answered."""
        self.said |= {"term": output.term, "epoch": output.epoch}


class RequestSpans:
    """Spans of requests. `clock` gives monotonic seconds."""

    def __init__(self, traces: Traces, pulse: Pulse, clock: Callable[[], float]) -> None:
        self._traces = traces
        self._pulse = pulse
        self._clock = clock

    @contextmanager
    def of(
        self, request: dispatch_pb2.ForwardRequest, metadata: Any
    ) -> Iterator[RequestSpan | None]:
        """Around the work of a request: its span, None where it has none. metadata: headers of its
        call."""
        parent = self._parent(request, metadata)
        context = self._traces.begin(parent)
        if context is None:
            yield None
            return
        said: dict[str, Value] = {"layer": request.layer, "outcome": "internal"}
        said["request_id"] = request.request_id[:REQUEST_ID_CHARS_MAX]
        span = RequestSpan(context, said)
        began_s = self._clock()
        try:
            yield span
            span.said["outcome"] = "ok"
        except MoeServeError as error:
            span.said["outcome"] = error.code.lower()
            raise
        except asyncio.CancelledError:
            span.said["outcome"] = "cancelled"
            raise
        finally:
            self._traces.ended(
                Span(
                    name="Forward",
                    kind=SpanKind.SERVER,
                    context=context,
                    parent_span_id="" if parent is None else parent.span_id,
                    began_s=began_s,
                    ended_s=self._clock(),
                    failed=span.said["outcome"] not in ("ok", "cancelled"),
                    attributes=span.said,
                )
            )

    def _parent(self, request: dispatch_pb2.ForwardRequest, metadata: Any) -> TraceContext | None:
        given = (request.traceparent, request.tracestate)
        parent, malformed = parse(*(given if given[0] else from_metadata(metadata)))
        if malformed:
            self._pulse.add(MALFORMED, malformed)
        return parent


def asking(traces: Traces, clock: Callable[[], float]) -> Ask:
    """`ask`, with a span of each sub-call whose request has one."""
    if not traces.on:
        return ask

    async def ask_and_tell(lane: Lane, sub_call: SubCall) -> SubReply | Lost:
        parent = parse(sub_call.trace)[0]
        context = traces.begin(parent) if parent is not None else None
        if parent is None or context is None:
            return await ask(lane, sub_call)
        began_s = clock()
        ended: SubReply | Lost | None = None
        try:
            ended = await ask(lane, replace(sub_call, trace=context.header()))
        finally:
            traces.ended(
                Span(
                    name="sub-call",
                    kind=SpanKind.CLIENT,
                    context=context,
                    parent_span_id=parent.span_id,
                    began_s=began_s,
                    ended_s=clock(),
                    failed=isinstance(ended, Lost),
                    attributes=_said_of(sub_call, lane, ended),
                )
            )
        return ended

    return ask_and_tell


def _said_of(sub_call: SubCall, lane: Lane, ended: SubReply | Lost | None) -> dict[str, Value]:
    said: dict[str, Value] = {
        "rank": lane.address.rank,
        "incarnation": sub_call.incarnation,
        "layer": sub_call.layer,
        "phase": Phase(sub_call.phase).name.lower(),
        "cause": sub_call.cause.name.lower(),
        "term": sub_call.term,
        "epoch": sub_call.epoch,
        "rows": len(sub_call.row_id),
        "pairs": len(sub_call.pair_row),
        "request_id": sub_call.request_id,
    }
    if ended is None:
        return {**said, "outcome": "cancelled"}
    if isinstance(ended, Lost):
        return {**said, "outcome": ended.why.name.lower()}
    refused = bool(ended.row_status.any())
    return {
        **said,
        "outcome": "refused" if refused else "ok",
        "wait_s": ended.queue_s + ended.rest_s,
        "compute_s": ended.compute_s,
    }
