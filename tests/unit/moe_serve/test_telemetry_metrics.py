"""The registry of metrics keeps its promises, and samples keep to the registry."""

import re

import pytest

from moe_serve.telemetry import METRICS, Kind, MemorySink, Metrics, MetricSpec, NullSink
from moe_serve.telemetry.metrics import PREFIX, SECONDS_BUCKETS, SERIES_MAX

SPEC = MetricSpec(PREFIX + "layers_total", Kind.COUNTER, "For tests.", ("layer",), 2)
DROPPED = METRICS[PREFIX + "series_dropped_total"]


def test_all_series_together_are_bounded() -> None:
    assert sum(spec.cost for spec in METRICS.values()) <= SERIES_MAX


@pytest.mark.parametrize("spec", METRICS.values(), ids=lambda spec: spec.name)
def test_a_metric_is_named_by_the_rules(spec: MetricSpec) -> None:
    assert re.fullmatch(r"moe_serve_[a-z][a-z0-9_]*", spec.name)
    assert (spec.kind is Kind.COUNTER) == spec.name.endswith("_total")
    assert (spec.kind is Kind.HISTOGRAM) == bool(spec.buckets)
    assert spec.text.endswith(".")
    assert len(set(spec.labels)) == len(spec.labels)
    assert (spec.series_max > 1) == bool(spec.labels)
    assert not {"expert", "request_id", "address"} & set(spec.labels)


def test_buckets_grow() -> None:
    assert list(SECONDS_BUCKETS) == sorted(set(SECONDS_BUCKETS))


def test_samples_reach_the_sink() -> None:
    sink = MemorySink()
    metrics = Metrics(sink)
    metrics.add("moves_total", kind="evict", outcome="done")
    metrics.add("moves_total", 2.0, kind="evict", outcome="done")
    metrics.set("epoch", 7)
    metrics.set("rank_up", 1, rank=3)
    metrics.observe("move_seconds", 0.01, kind="evict")
    assert sink.values == {
        ("moe_serve_moves_total", ("evict", "done")): 3.0,
        ("moe_serve_epoch", ()): 7,
        ("moe_serve_rank_up", ("3",)): 1,
    }
    assert sink.observations == {("moe_serve_move_seconds", ("evict",)): [0.01]}


def test_label_values_too_many_are_dropped_and_counted() -> None:
    sink = MemorySink()
    metrics = Metrics(sink, {SPEC.name: SPEC, DROPPED.name: DROPPED})
    for layer in (0, 1, 2, 3, 1):
        metrics.add("layers_total", layer=layer)
    assert sink.values == {
        (SPEC.name, ("0",)): 1.0,
        (SPEC.name, ("1",)): 2.0,
        (DROPPED.name, (SPEC.name,)): 2.0,
    }


def test_the_count_of_drops_is_bounded_itself() -> None:
    one = MetricSpec(DROPPED.name, Kind.COUNTER, "For tests.", ("metric",), 1)
    metrics = Metrics(MemorySink(), {DROPPED.name: one})
    metrics.add("series_dropped_total", metric="a")
    metrics.add("series_dropped_total", metric="b")


@pytest.mark.parametrize(
    ("call", "name", "labels"),
    [
        ("add", "no_such_total", {}),
        ("add", "epoch", {}),
        ("set", "rank_up", {}),
        ("set", "rank_up", {"rank": 1, "node": "a"}),
        ("observe", "decisions_total", {"rule": "a", "outcome": "b"}),
    ],
)
def test_what_the_registry_does_not_have_is_our_bug(
    call: str, name: str, labels: dict[str, str | int]
) -> None:
    with pytest.raises(KeyError):
        getattr(Metrics(MemorySink()), call)(name, 1.0, **labels)


def test_a_counter_never_falls() -> None:
    with pytest.raises(AssertionError, match="cannot fall"):
        Metrics(MemorySink()).add("moves_total", -1.0, kind="evict", outcome="done")


def test_a_sink_may_take_nothing() -> None:
    metrics = Metrics(NullSink())
    metrics.add("moves_total", kind="evict", outcome="done")
    metrics.set("epoch", 1)
    metrics.observe("move_seconds", 0.1, kind="evict")
