"""Spans to an OpenTelemetry collector.

Spans arrive here finished, with ids of ours, so the library's own tracer and its ambient context
are not used: a span is handed to a processor that sends batches from a thread of its own and drops
what it has no room for.

Responsible for the translation. Must never say more than a span holds. The only module that imports
`opentelemetry`; imported by `traces.open_traces` alone, where a collector is named.
"""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.span import TraceState

from moe_serve.rpc.trace_context import TraceContext
from moe_serve.telemetry.traces import Sampler, Span, TraceSettings, sayable
from moe_serve.telemetry.traces import SpanKind as Side

SPANS_WAITING_MAX = 2048
"""Spans that wait to be sent; further ones are dropped."""
SEND_EVERY_MS = 1000
SEND_TIMEOUT_S = 5.0
"""Of one batch; a collector that is away costs its spans, nothing else."""
CLOSE_TIMEOUT_S = 2.0
"""Longest wait for what was not sent yet where a part ends."""
_SCOPE = InstrumentationScope("moe_serve")
_KINDS = {Side.SERVER: SpanKind.SERVER, Side.CLIENT: SpanKind.CLIENT}
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class OtelTraces:
    """`Traces` over a span processor. Its clock is tied to the wall clock once, so the spans of a
    process lie beside each other as they were measured."""

    on = True

    def __init__(
        self, processor: SpanProcessor, sampler: Sampler, *, service: str, part: str, node: str
    ) -> None:
        self._processor = processor
        self._sampler = sampler
        self._resource = Resource(
            {
                "service.name": "moe_serve",
                "service.namespace": service,
                "service.instance.id": part,
                "moe_serve.node": node,
            }
        )
        self._part = part
        self._node = node
        self._offset_s = datetime.now(UTC).timestamp() - time.monotonic()
        self._closed = False

    def begin(self, parent: TraceContext | None) -> TraceContext | None:
        """See Traces."""
        return self._sampler.begin(parent)

    def ended(self, span: Span) -> None:
        """See Traces."""
        if self._closed:
            return
        own = span.context
        parent = own.child(span.parent_span_id) if span.parent_span_id else None
        said = sayable({"part": self._part, "node": self._node, **span.attributes})
        self._processor.on_end(
            ReadableSpan(
                name=span.name,
                context=_context(own, remote=False),
                parent=None if parent is None else _context(parent, remote=True),
                resource=self._resource,
                attributes=said,
                kind=_KINDS[span.kind],
                status=Status(StatusCode.ERROR if span.failed else StatusCode.UNSET),
                start_time=self._wall_ns(span.began_s),
                end_time=self._wall_ns(span.ended_s),
                instrumentation_scope=_SCOPE,
            )
        )

    def close(self) -> None:
        """See Traces."""
        if self._closed:
            return
        self._closed = True
        # The library sends batch after batch, each within its own limit: together too long.
        ending = threading.Thread(target=self._processor.shutdown, daemon=True)
        ending.start()
        ending.join(CLOSE_TIMEOUT_S)

    def _wall_ns(self, at_s: float) -> int:
        return int((at_s + self._offset_s) * 1e9)


def _context(context: TraceContext, *, remote: bool) -> SpanContext:
    state = TraceState.from_header([context.state]) if context.state else None
    return SpanContext(int(context.trace_id, 16), int(context.span_id, 16), remote, _SAMPLED, state)


def otlp_traces(settings: TraceSettings, *, service: str, part: str, node: str) -> OtelTraces:
    """Spans to the collector that `settings` names: `http://HOST:PORT` in the open, `https://` with
    TLS."""
    exporter = OTLPSpanExporter(
        endpoint=settings.endpoint,
        insecure=settings.endpoint.startswith("http://"),
        timeout=SEND_TIMEOUT_S,
    )
    processor = BatchSpanProcessor(
        exporter,
        max_queue_size=SPANS_WAITING_MAX,
        schedule_delay_millis=SEND_EVERY_MS,
        export_timeout_millis=SEND_TIMEOUT_S * 1000,
    )
    sampler = Sampler(settings.share)
    return OtelTraces(processor, sampler, service=service, part=part, node=node)
