"""The Ray sink makes one of Ray's metric objects for each metric, with its labels."""

from typing import Any

import pytest

from moe_serve.telemetry import METRICS, Kind, Metrics
from moe_serve.telemetry import sink as sink_module
from moe_serve.telemetry.sink import RaySink


class _Recording:
    """Stands in for one of Ray's classes: its real ones say nothing without a cluster."""

    made: list[tuple[str, tuple[str, ...]]]
    samples: list[tuple[str, str, float, dict[str, str]]]

    def __init__(self, name: str, *, description: str, tag_keys: Any, boundaries: Any = None):
        assert description
        self.name = name
        type(self).made.append((name, tag_keys))

    def inc(self, value: float, tags: dict[str, str]) -> None:
        type(self).samples.append(("inc", self.name, value, tags))

    def set(self, value: float, tags: dict[str, str]) -> None:
        type(self).samples.append(("set", self.name, value, tags))

    def observe(self, value: float, tags: dict[str, str]) -> None:
        type(self).samples.append(("observe", self.name, value, tags))


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> type[_Recording]:
    fresh = type("Recording", (_Recording,), {"made": [], "samples": []})
    for name in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(sink_module.ray_metrics, name, fresh)
    return fresh


def test_samples_become_calls_of_ray(recording: type[_Recording]) -> None:
    metrics = Metrics(RaySink())
    metrics.add("moves_total", kind="evict", outcome="done")
    metrics.add("moves_total", 2.0, kind="evict", outcome="done")
    metrics.add("moves_total", 0.0, kind="evict", outcome="done")  # Ray refuses to add nothing
    metrics.set("epoch", 0)
    metrics.set("request_seconds", 0.5, router="r", quantile="p99")
    evict = {"kind": "evict", "outcome": "done"}
    assert recording.samples == [
        ("inc", "moe_serve_moves_total", 1.0, evict),
        ("inc", "moe_serve_moves_total", 2.0, evict),
        ("set", "moe_serve_epoch", 0, {}),
        ("set", "moe_serve_request_seconds", 0.5, {"router": "r", "quantile": "p99"}),
    ]
    assert recording.made == [
        ("moe_serve_moves_total", ("kind", "outcome")),
        ("moe_serve_epoch", ()),
        ("moe_serve_request_seconds", ("router", "quantile")),
    ]


def test_what_nobody_tells_again_is_told_again(recording: type[_Recording]) -> None:
    now = [0.0]
    metrics = Metrics(RaySink(clock=lambda: now[0]))
    metrics.set("epoch", 7)
    metrics.set("term", 2)
    metrics.fold("stage_seconds", [1] * 7, 5.0, phase="decode", stage="wire")
    metrics.set("host_cache_bytes", 1, node="a")
    metrics.forget("host_cache_bytes", node="a")
    now[0] = 4.0
    metrics.set("term", 2)
    told = len(recording.samples)
    now[0] = 6.0
    metrics.add("moves_total", kind="evict", outcome="done")
    again = {name for _, name, _, _ in recording.samples[told + 1 :]}
    stage = "moe_serve_stage_seconds"
    assert again == {"moe_serve_epoch", stage + "_bucket", stage + "_sum", stage + "_count"}
    assert ("set", stage + "_count", 7.0, {"phase": "decode", "stage": "wire"}) in (
        recording.samples[told:]
    )


def test_what_others_counted_has_the_series_of_a_histogram(recording: type[_Recording]) -> None:
    metrics = Metrics(RaySink())
    for _ in range(2):
        metrics.fold("stage_seconds", [2, 1, 0, 0, 0, 0, 3], 5.0, phase="decode", stage="wire")
    tags = {"phase": "decode", "stage": "wire"}
    last = recording.samples[len(recording.samples) // 2 :]
    found = {(name, given.get("le")): value for _, name, value, given in last}
    assert all(kind == "set" for kind, *_ in last)
    assert all(given.items() >= tags.items() for *_, given in last)
    name = "moe_serve_stage_seconds"
    bounds = [f"{bound:.10g}" for bound in METRICS[name].buckets]
    assert found == {
        (name + "_bucket", bounds[0]): 4.0,
        **{(name + "_bucket", bound): 6.0 for bound in bounds[1:]},
        (name + "_bucket", "+Inf"): 12.0,
        (name + "_sum", None): 10.0,
        (name + "_count", None): 12.0,
    }
    assert [made for made in recording.made if made[0] == name + "_bucket"] == [
        (name + "_bucket", ("phase", "stage", "le"))
    ]


@pytest.mark.parametrize("spec", METRICS.values(), ids=lambda spec: spec.name)
def test_ray_takes_every_metric(spec: Any) -> None:
    sink = RaySink()
    labels = tuple("x" for _ in spec.labels)
    if spec.kind is Kind.BUCKETS:
        sink.fold(spec, labels, [1] * (len(spec.buckets) + 1), 1.0)
        return
    {"counter": sink.add, "gauge": sink.set, "histogram": sink.observe}[spec.kind](
        spec, labels, 1.0
    )
