"""The Ray sink makes one of Ray's metric objects for each metric, with its labels."""

from typing import Any

import pytest

from moe_serve.telemetry import METRICS, Metrics
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
    metrics.set("request_seconds", 0.5, quantile="p99")
    evict = {"kind": "evict", "outcome": "done"}
    assert recording.samples == [
        ("inc", "moe_serve_moves_total", 1.0, evict),
        ("inc", "moe_serve_moves_total", 2.0, evict),
        ("set", "moe_serve_epoch", 0, {}),
        ("set", "moe_serve_request_seconds", 0.5, {"quantile": "p99"}),
    ]
    assert recording.made == [
        ("moe_serve_moves_total", ("kind", "outcome")),
        ("moe_serve_epoch", ()),
        ("moe_serve_request_seconds", ("quantile",)),
    ]


@pytest.mark.parametrize("spec", METRICS.values(), ids=lambda spec: spec.name)
def test_ray_takes_every_metric(spec: Any) -> None:
    sink = RaySink()
    labels = tuple("x" for _ in spec.labels)
    {"counter": sink.add, "gauge": sink.set, "histogram": sink.observe}[spec.kind](
        spec, labels, 1.0
    )
