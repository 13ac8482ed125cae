"""Spans reach a collector over OTLP, and one that is away costs nothing but its spans."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from moe_serve.rpc.trace_context import parse
from moe_serve.telemetry.traces import Span, SpanKind, Traces, TraceSettings, open_traces
from tests.fakes.traces import PARENT, PARENT_ID, TRACE_ID


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.came = threading.Event()
        self.requests: list[Any] = []

    def Export(self, request: Any, _context: Any) -> Any:
        self.requests.append(request)
        self.came.set()
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def a_collector() -> Iterator[tuple[Collector, str]]:
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def end_one(traces: Traces) -> str:
    own = traces.begin(parse(PARENT)[0])
    assert own is not None
    said = {"layer": 1, "outcome": "ok", "wait_s": 0.5}
    traces.ended(Span("Forward", SpanKind.SERVER, own, PARENT_ID, 1.0, 3.0, attributes=said))
    return own.span_id


def test_a_span_reaches_the_collector() -> None:
    with a_collector() as (collector, endpoint):
        traces = open_traces(TraceSettings(endpoint), service="tiny", part="router-0", node="n1")
        span_id = end_one(traces)
        traces.close()  # sends what waits
        assert collector.came.wait(30)
    (resource,) = collector.requests[0].resource_spans
    of = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert (of["service.namespace"], of["service.instance.id"]) == ("tiny", "router-0")
    (span,) = resource.scope_spans[0].spans
    assert (span.name, span.trace_id.hex(), span.span_id.hex()) == ("Forward", TRACE_ID, span_id)
    assert span.parent_span_id.hex() == PARENT_ID
    assert span.end_time_unix_nano - span.start_time_unix_nano == pytest.approx(2e9, rel=1e-6)
    assert {one.key for one in span.attributes} == {"layer", "outcome", "wait_s", "part", "node"}


def test_a_collector_that_is_away_ends_nobody() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: whoever connects is refused
        port = taken.getsockname()[1]
        endpoint = f"http://127.0.0.1:{port}"
        traces = open_traces(TraceSettings(endpoint), service="tiny", part="router-0", node="n1")
        for _ in range(5000):
            end_one(traces)
        traces.close()
        end_one(traces)
