"""Spans: who has them, what they say, and that nothing of them is there while they are off."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime

import pytest
from opentelemetry.trace import SpanKind as Kind
from opentelemetry.trace import StatusCode

from moe_serve.errors import StartRefused
from moe_serve.rpc.trace_context import TraceContext, parse
from moe_serve.telemetry import traces
from moe_serve.telemetry.traces import (
    NO_TRACES,
    Sampler,
    Span,
    SpanKind,
    TraceSettings,
    open_traces,
    sayable,
)
from tests.fakes.traces import PARENT, PARENT_ID, TRACE_ID, KeptSpans, ids


def _sampler(share: float, lots: list[float], hexes: list[str] | None = None) -> Sampler:
    given = iter(hexes or [f"{n:x}" for n in range(1, 100)])
    return Sampler(
        share, draw=iter(lots).__next__, token_hex=lambda n: next(given).rjust(2 * n, "0")
    )


def test_with_a_parent_its_flag_decides_and_the_trace_goes_on() -> None:
    sampled, silent = parse(PARENT)[0], parse(PARENT[:-1] + "0")[0]
    never, always = _sampler(0.0, []), _sampler(1.0, [])
    own = never.begin(sampled)
    assert own is not None
    assert (own.trace_id, own.sampled) == (TRACE_ID, True)
    assert own.span_id != PARENT_ID
    assert always.begin(silent) is None


def test_without_a_parent_a_share_of_requests_begins_a_trace() -> None:
    sampler = _sampler(0.25, [0.9, 0.25, 0.2, 0.0])
    began = [sampler.begin(None) for _ in range(4)]
    assert [context is not None for context in began] == [False, False, True, True]
    found = [context for context in began if context is not None]
    assert found[0].trace_id != found[1].trace_id


def test_an_id_is_never_all_zero() -> None:
    own = _sampler(1.0, [0.0], ["0", "0", "7", "0", "8"]).begin(None)
    assert own == TraceContext("7".rjust(32, "0"), "8".rjust(16, "0"), sampled=True)


def test_a_span_says_no_word_that_is_not_listed_and_no_long_text() -> None:
    assert sayable({"rank": 3, "request_id": "r" * 500}) == {"rank": 3, "request_id": "r" * 128}
    with pytest.raises(AssertionError, match="gates"):
        sayable({"gates": 1.0})
    secret = {
        "token",
        "authorization",
        "gate",
        "gates",
        "topk_ids",
        "hidden",
        "experts",
        "metadata",
    }
    assert not secret & traces.SPAN_ATTRIBUTES


def test_a_span_arrives_as_it_was_measured() -> None:
    kept = KeptSpans()
    part = kept.of("router-0", "node-7")
    parent = parse(PARENT, "vendor=1")[0]
    own = part.begin(parent)
    assert own is not None
    now_s = time.monotonic()
    said = {"layer": 1, "outcome": "unavailable"}
    part.ended(Span("Forward", SpanKind.SERVER, own, PARENT_ID, now_s - 2.5, now_s, True, said))
    (span,) = kept.all()
    assert ids(span) == (TRACE_ID, own.span_id, PARENT_ID)
    assert span.context is not None
    assert span.context.trace_state.to_header() == "vendor=1"
    assert (span.name, span.kind) == ("Forward", Kind.SERVER)
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes == {**said, "part": "router-0", "node": "node-7"}
    assert span.start_time is not None
    assert span.end_time is not None
    assert abs((span.end_time - span.start_time) / 1e9 - 2.5) < 1e-6
    assert abs(span.end_time / 1e9 - datetime.now(UTC).timestamp()) < 60.0
    assert span.resource.attributes["service.instance.id"] == "router-0"


def test_after_the_end_nothing_is_taken() -> None:
    kept = KeptSpans(share=1.0)
    part = kept.of("router-0")
    own = part.begin(None)
    assert own is not None
    part.close()
    part.close()
    part.ended(Span("Forward", SpanKind.SERVER, own, "", 0.0, 1.0))
    assert kept.all() == []


def test_off_means_nothing_is_asked_or_kept() -> None:
    off = open_traces(TraceSettings(share=1.0), service="s", part="p", node="n")
    assert off is NO_TRACES
    assert not off.on
    assert off.begin(None) is None
    off.close()


def test_a_collector_without_the_libraries_refuses_the_start_with_a_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [n for n in sys.modules if n.startswith("opentelemetry")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "moe_serve.telemetry.otel", raising=False)
    with pytest.raises(StartRefused, match=r"pip install 'moe-serve\[otel\]'"):
        open_traces(TraceSettings("http://127.0.0.1:1"), service="s", part="p", node="n")
