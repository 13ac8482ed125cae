"""Spans kept in memory, through the production translation."""

from __future__ import annotations

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from moe_serve.telemetry.otel import OtelTraces
from moe_serve.telemetry.traces import Sampler

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
"""A sampled span of somebody else, as the standard's own example."""
TRACE_ID = PARENT[3:35]
PARENT_ID = PARENT[36:52]


class _Shared(InMemorySpanExporter):
    """Of several parts: the end of one of them ends nothing."""

    def shutdown(self) -> None:
        return


class KeptSpans:
    """Spans of several parts of one test. `of` makes a part's traces."""

    def __init__(self, share: float = 0.0) -> None:
        self._exporter = _Shared()
        self._share = share

    def of(self, part: str, node: str = "node-0") -> OtelTraces:
        """What a part is given."""
        processor = SimpleSpanProcessor(self._exporter)
        return OtelTraces(processor, Sampler(self._share), service="s", part=part, node=node)

    def named(self, name: str) -> list[ReadableSpan]:
        """Spans of that name, in order of their end."""
        return [span for span in self.all() if span.name == name]

    def all(self) -> list[ReadableSpan]:
        """Every span so far."""
        return list(self._exporter.get_finished_spans())


def ids(span: ReadableSpan) -> tuple[str, str, str]:
    """(trace, span, parent span) of a span, in hex; "" without a parent."""
    assert span.context is not None
    parent = "" if span.parent is None else f"{span.parent.span_id:016x}"
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}", parent
