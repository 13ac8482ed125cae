"""The plain exporter writes what it was given, in both formats."""

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_plain

from moe_serve.telemetry import METRICS, Kind, Metrics
from moe_serve.telemetry.prometheus import PrometheusSink
from moe_serve.telemetry.spec import PREFIX

OPEN = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def values(families: list[Metric]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name.removeprefix(PREFIX), tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def filled() -> PrometheusSink:
    sink = PrometheusSink()
    metrics = Metrics(sink)
    for amount in (1.0, 2.0, 0.0):
        metrics.add("moves_total", amount, kind="evict", outcome="done")
    metrics.set("epoch", 3)
    metrics.set("epoch", 7)
    metrics.set("build_info", 1.0, version='a"b\\c\n', model="m")
    for seconds in (0.1, 0.2, 1000.0):
        metrics.observe("move_seconds", seconds)
    metrics.fold("stage_seconds", [2, 0, 0, 0, 0, 0, 1], 5.0, phase="decode", stage="wire")
    metrics.fold("stage_seconds", [0, 1, 0, 0, 0, 0, 0], 1.0, phase="decode", stage="wire")
    return sink


@pytest.mark.parametrize("accept", ["", OPEN])
def test_what_was_told_is_on_the_page(accept: str) -> None:
    page, kind = filled().snapshot().text(accept)
    assert kind.startswith("application/openmetrics-text" if accept else "text/plain")
    parse = parse_open if accept else parse_plain
    found = values(list(parse(page.decode())))
    evicted = (("kind", "evict"), ("outcome", "done"))
    assert found["moves_total", evicted] == 3.0
    assert found["epoch", ()] == 7.0
    assert found["build_info", (("model", "m"), ("version", 'a"b\\c\n'))] == 1.0
    wire = (("phase", "decode"), ("stage", "wire"))
    bounds = METRICS[PREFIX + "stage_seconds"].buckets
    so_far = [2.0, *[3.0] * (len(bounds) - 1)]
    for bound, count in zip(bounds, so_far, strict=True):
        assert found["stage_seconds_bucket", (("le", f"{bound:.10g}"), *wire)] == count
    assert found["stage_seconds_bucket", (("le", "+Inf"), *wire)] == 4.0
    assert found["stage_seconds_count", wire] == 4.0
    assert found["stage_seconds_sum", wire] == 6.0
    assert found["move_seconds_bucket", (("le", "0.1"),)] == 1.0  # a bound is in its bucket
    assert found["move_seconds_bucket", (("le", "300"),)] == 2.0
    assert found["move_seconds_count", ()] == 3.0


def test_a_snapshot_stays_as_it_was() -> None:
    sink = filled()
    snapshot = sink.snapshot()
    before = snapshot.text()
    metrics = Metrics(sink)
    metrics.set("epoch", 8)
    metrics.add("moves_total", kind="evict", outcome="done")
    metrics.observe("move_seconds", 0.1)
    assert snapshot.text() == before
    assert sink.snapshot().text() != before


@pytest.mark.parametrize("accept", ["", OPEN])
@pytest.mark.parametrize("spec", METRICS.values(), ids=lambda spec: spec.name)
def test_every_metric_can_be_written(spec: object, accept: str) -> None:
    assert isinstance(spec, type(METRICS[PREFIX + "epoch"]))
    sink = PrometheusSink()
    labels = tuple("x" for _ in spec.labels)
    if spec.kind is Kind.BUCKETS:
        sink.fold(spec, labels, [1] * (len(spec.buckets) + 1), 1.0)
    else:
        {"counter": sink.add, "gauge": sink.set, "histogram": sink.observe}[spec.kind](
            spec, labels, 1.0
        )
    parse = parse_open if accept else parse_plain
    (family,) = parse(sink.snapshot().text(accept)[0].decode())
    assert len(family.samples) == spec.each
    assert all(set(sample.labels) - {"le"} == set(spec.labels) for sample in family.samples)


def test_what_is_gone_is_not_on_the_page() -> None:
    sink = PrometheusSink()
    metrics = Metrics(sink)
    metrics.set("host_cache_bytes", 1, node="a")
    metrics.set("host_cache_bytes", 1, node="b")
    metrics.forget("host_cache_bytes", node="a")
    page = sink.snapshot().text()[0].decode()
    assert 'node="b"' in page
    assert 'node="a"' not in page


def test_nothing_told_is_an_empty_page() -> None:
    assert PrometheusSink().snapshot().text()[0] == b""
