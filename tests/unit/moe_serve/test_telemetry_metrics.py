"""The registry of metrics keeps its promises, and samples keep to the registry."""

import re

import pytest

from moe_serve.telemetry import METRICS, Kind, MemorySink, Metrics, MetricSpec, NullSink, TeeSink
from moe_serve.telemetry.registry import (
    DEFAULT_SERIES_MAX,
    DEFAULT_SIZE,
    SERIES_MAX,
    TOPICS,
    series_at,
)
from moe_serve.telemetry.spec import PREFIX, SCALE_MAX, Scale, Size

SPEC = MetricSpec(PREFIX + "layers_total", Kind.COUNTER, "For tests.", ("layer",), 2)
DROPPED = METRICS[PREFIX + "series_dropped_total"]


def test_all_series_together_are_bounded() -> None:
    assert sum(spec.cost for spec in METRICS.values() if not spec.opt_in) <= SERIES_MAX


def test_the_default_series_of_a_large_service_are_few() -> None:
    count = series_at(DEFAULT_SIZE)
    print(f"series at 58 layers x 32 ranks, 2 routers, 4 nodes: {count}")
    assert count <= DEFAULT_SERIES_MAX
    more = series_at(DEFAULT_SIZE, per_expert=True) - count
    assert more == DEFAULT_SIZE.layers * DEFAULT_SIZE.experts


def test_a_size_beyond_the_limits_is_counted_up_to_them() -> None:
    huge = Size(layers=10**6, ranks=10**6, routers=10**6, nodes=10**6, experts=10**6)
    assert huge.of(Scale.RANKS) == SCALE_MAX[Scale.RANKS]
    assert huge.of(("a", "b")) == 2
    assert series_at(huge) <= SERIES_MAX


def test_every_metric_has_one_topic() -> None:
    assert [spec for topic in TOPICS.values() for spec in topic] == list(METRICS.values())


@pytest.mark.parametrize("spec", METRICS.values(), ids=lambda spec: spec.name)
def test_a_metric_is_named_by_the_rules(spec: MetricSpec) -> None:
    assert re.fullmatch(r"moe_serve_[a-z][a-z0-9_]*", spec.name)
    assert (spec.kind is Kind.COUNTER) == spec.name.endswith("_total")
    assert (spec.kind in (Kind.HISTOGRAM, Kind.BUCKETS)) == bool(spec.buckets)
    assert list(spec.buckets) == sorted(set(spec.buckets))
    assert spec.text.endswith(".")
    assert len(set(spec.labels)) == len(spec.labels)
    assert (spec.series_max > 1) == bool(spec.labels)
    assert set(spec.values) == set(spec.labels)
    assert not {"request_id", "address"} & set(spec.labels)
    assert spec.opt_in == ("expert" in spec.labels)


def test_samples_reach_the_sink() -> None:
    sink = MemorySink()
    metrics = Metrics(sink)
    metrics.add("moves_total", kind="evict", outcome="done")
    metrics.add("moves_total", 2.0, kind="evict", outcome="done")
    metrics.set("epoch", 7)
    metrics.set("rank_backlog_seconds", 1, rank=3)
    metrics.observe("move_seconds", 0.01)
    metrics.fold("stage_seconds", [1, 0, 0, 0, 0, 0, 2], 5.0, phase="decode", stage="wire")
    metrics.fold("stage_seconds", [1, 1, 0, 0, 0, 0, 0], 0.5, phase="decode", stage="wire")
    assert sink.values == {
        ("moe_serve_moves_total", ("evict", "done")): 3.0,
        ("moe_serve_epoch", ()): 7,
        ("moe_serve_rank_backlog_seconds", ("3",)): 1,
    }
    assert sink.observations == {("moe_serve_move_seconds", ()): [0.01]}
    folded = {("moe_serve_stage_seconds", ("decode", "wire")): ([2, 1, 0, 0, 0, 0, 2], 5.5)}
    assert sink.folded == folded


def test_counts_must_be_as_many_as_buckets() -> None:
    with pytest.raises(AssertionError, match="6 bounds"):
        Metrics(MemorySink()).fold("stage_seconds", [1], 1.0, phase="decode", stage="wire")


def test_counters_of_known_values_begin_at_zero() -> None:
    sink = MemorySink()
    Metrics(sink).begin()
    assert sink.values["moe_serve_moves_total", ("evict", "aborted")] == 0.0
    assert sink.values["moe_serve_plans_stalled_total", ()] == 0.0
    assert {METRICS[name].kind for name, _ in sink.values} == {Kind.COUNTER}
    scaled = {name for name, spec in METRICS.items() if "rank" in spec.labels}
    assert not scaled & {name for name, _ in sink.values}


def test_samples_reach_every_sink() -> None:
    one, two = MemorySink(), MemorySink()
    metrics = Metrics(TeeSink(one, two))
    metrics.add("plans_stalled_total")
    metrics.set("epoch", 7)
    metrics.observe("move_seconds", 0.01)
    metrics.fold("stage_seconds", [1] * 7, 5.0, phase="decode", stage="wire")
    assert one.values
    assert (one.values, one.observations, one.folded) == (two.values, two.observations, two.folded)


def test_what_is_gone_makes_room() -> None:
    gauge = MetricSpec(PREFIX + "size_bytes", Kind.GAUGE, "For tests.", ("rank",), 1)
    sink = MemorySink()
    metrics = Metrics(TeeSink(sink, NullSink()), {gauge.name: gauge, DROPPED.name: DROPPED})
    metrics.set("size_bytes", 1, rank=0)
    metrics.forget("size_bytes", rank=1)
    assert sink.values == {(gauge.name, ("0",)): 1}
    metrics.forget("size_bytes", rank=0)
    metrics.forget("size_bytes", rank=0)
    metrics.set("size_bytes", 2, rank=1)
    assert sink.values == {(gauge.name, ("1",)): 2}


def test_label_values_too_many_are_dropped_and_counted() -> None:
    sink = MemorySink()
    metrics = Metrics(sink, {SPEC.name: SPEC, DROPPED.name: DROPPED})
    for layer in (0, 1, 2, 3, 1):
        metrics.add("layers_total", layer=layer)
    assert sink.values == {
        (SPEC.name, ("0",)): 1.0,
        (SPEC.name, ("1",)): 2.0,
        (DROPPED.name, ()): 2.0,
    }


def test_the_count_of_drops_is_bounded_itself() -> None:
    none = MetricSpec(DROPPED.name, Kind.COUNTER, "For tests.", (), 0)
    metrics = Metrics(MemorySink(), {DROPPED.name: none})
    metrics.add("series_dropped_total")
    metrics.add("series_dropped_total")


@pytest.mark.parametrize(
    ("call", "name", "labels"),
    [
        ("add", "no_such_total", {}),
        ("add", "epoch", {}),
        ("set", "rank_backlog_seconds", {}),
        ("set", "rank_backlog_seconds", {"rank": 1, "node": "a"}),
        ("observe", "windows_total", {"verdict": "no_load"}),
        ("observe", "stage_seconds", {"phase": "decode", "stage": "wire"}),
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
    metrics.observe("move_seconds", 0.1)
    metrics.fold("stage_seconds", [1] * 7, 5.0, phase="decode", stage="wire")
