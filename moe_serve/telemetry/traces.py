"""Spans: what one request did where and for how long, for whoever collects traces.

Off unless the service file names a collector: parts then hold NO_TRACES, whose `on` is False, and
look at nothing else; no library for traces is imported.

A span says figures and words of ours (layer, rows, rank, outcome ...), the request's id, and
nothing else of a request: no row, no gate weight, no list of experts, no header but those of the
trace itself.

Responsible for what a span may say and for which requests have spans. Must never fail its caller.
Made by the parts' actors; used by routers and shards.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

from moe_serve.errors import StartRefused
from moe_serve.rpc.trace_context import TraceContext

SHARE: Final = 0.01
"""Of requests without a parent that are sampled, where nothing else is said."""
TEXT_MAX: Final = 128
"""Characters of a text in a span."""
SPAN_ATTRIBUTES: Final = frozenset(
    {
        "part",
        "node",
        "incarnation",
        "request_id",
        "layer",
        "rows",
        "pairs",
        "phase",
        "term",
        "epoch",
        "outcome",
        "rank",
        "cause",
        "wait_s",
        "compute_s",
    }
)
"""Everything a span may say."""
Value = str | int | float


class SpanKind(StrEnum):
    """Whose side of a call a span tells."""

    SERVER = "server"
    CLIENT = "client"


@dataclass(frozen=True, slots=True)
class Span:
    """One that has ended. began_s, ended_s: monotonic seconds of this process. parent_span_id: ""
    where it has none. attributes: names of SPAN_ATTRIBUTES."""

    name: str
    kind: SpanKind
    context: TraceContext
    parent_span_id: str
    began_s: float
    ended_s: float
    failed: bool = False
    attributes: Mapping[str, Value] = field(default_factory=dict)


class Traces(Protocol):
    """Decides which requests have spans and takes the spans. Any thread may call it."""

    @property
    def on(self) -> bool:
        """Whether any request may have spans. Where False nothing else is asked."""
        ...

    def begin(self, parent: TraceContext | None) -> TraceContext | None:
        """The context of a new span below `parent`, or of a new trace; None where the request is
        not sampled: by the parent's flag, or by lot where there is no parent."""
        ...

    def ended(self, span: Span) -> None:
        """Take a span. Never blocks, never raises."""
        ...

    def close(self) -> None:
        """Send what waits, for a moment at most, and take no more. Idempotent."""
        ...


class NoTraces:
    """Takes nothing."""

    on = False

    def begin(self, _parent: TraceContext | None) -> TraceContext | None:
        """Nothing is sampled."""
        return None

    def ended(self, _span: Span) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is open."""


NO_TRACES: Final = NoTraces()


class Sampler:
    """Who has spans: what the parent's flag says; without a parent a share of them, by lot."""

    def __init__(
        self,
        share: float = SHARE,
        *,
        draw: Callable[[], float] | None = None,
        token_hex: Callable[[int], str] = secrets.token_hex,
    ) -> None:
        self._share = share
        self._draw = draw or random.SystemRandom().random
        self._token_hex = token_hex

    def begin(self, parent: TraceContext | None) -> TraceContext | None:
        """See Traces."""
        if parent is not None:
            return parent.child(self._id(8)) if parent.sampled else None
        if self._draw() >= self._share:
            return None
        return TraceContext(self._id(16), self._id(8), sampled=True)

    def _id(self, num_bytes: int) -> str:
        """Hex digits that are not all zero."""
        while not (found := self._token_hex(num_bytes)).strip("0"):
            pass
        return found


def sayable(attributes: Mapping[str, Value]) -> dict[str, Value]:
    """Attributes as a span may say them. An unknown name is a bug of ours."""
    assert attributes.keys() <= SPAN_ATTRIBUTES, attributes.keys() - SPAN_ATTRIBUTES
    return {
        name: value[:TEXT_MAX] if isinstance(value, str) else value
        for name, value in attributes.items()
    }


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Where spans go. endpoint: URL of an OTLP collector (gRPC), "" = nowhere. share: of requests
    without a parent."""

    endpoint: str = ""
    share: float = SHARE


def check_traces(settings: TraceSettings) -> None:
    """Raises StartRefused where a collector is named and what sends to it is not installed here."""
    if not settings.endpoint:
        return
    try:
        import moe_serve.telemetry.otel  # noqa: F401  # whether it can be imported is the question
    except ImportError as error:
        raise StartRefused(
            "telemetry.otlp_endpoint: OpenTelemetry is not installed here; "
            "run `pip install 'moe-serve[otel]'` on every node, or leave the endpoint out"
        ) from error


def open_traces(settings: TraceSettings, *, service: str, part: str, node: str) -> Traces:
    """Where a part's spans go. Raises StartRefused as `check_traces` does."""
    check_traces(settings)
    if not settings.endpoint:
        return NO_TRACES
    from moe_serve.telemetry.otel import otlp_traces

    return otlp_traces(settings, service=service, part=part, node=node)
