"""Metrics for a plain Prometheus: kept in this process, written out when somebody asks.

Responsible for the two text formats (Prometheus', and OpenMetrics for who accepts it). Must never
open a port: `controller.metrics_port` does. One a process; not safe to call from several threads,
but what `snapshot` returns may be written out on another one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry

from moe_serve.telemetry.spec import Kind, MetricSpec

TOTAL = "_total"


@dataclass(slots=True)
class _Buckets:
    """A histogram of one combination of labels: counts by bucket, and the sum."""

    counts: list[int]
    total: float = 0.0


@dataclass(slots=True)
class _Kept:
    """All samples of one metric."""

    spec: MetricSpec
    values: dict[tuple[str, ...], float] = field(default_factory=dict)
    buckets: dict[tuple[str, ...], _Buckets] = field(default_factory=dict)


class PrometheusSink:
    """`MetricSink` that keeps the newest samples of everything."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def add(self, spec: MetricSpec, labels: tuple[str, ...], amount: float) -> None:
        """See MetricSink."""
        values = self._of(spec).values
        values[labels] = values.get(labels, 0.0) + amount

    def set(self, spec: MetricSpec, labels: tuple[str, ...], value: float) -> None:
        """See MetricSink."""
        self._of(spec).values[labels] = float(value)

    def observe(self, spec: MetricSpec, labels: tuple[str, ...], value: float) -> None:
        """See MetricSink."""
        kept = self._buckets(spec, labels)
        kept.counts[bisect_left(spec.buckets, value)] += 1
        kept.total += value

    def fold(
        self, spec: MetricSpec, labels: tuple[str, ...], counts: Sequence[int], total: float
    ) -> None:
        """See MetricSink."""
        kept = self._buckets(spec, labels)
        for at, count in enumerate(counts):
            kept.counts[at] += count
        kept.total += total

    def forget(self, spec: MetricSpec, labels: tuple[str, ...]) -> None:
        """See MetricSink."""
        self._of(spec).values.pop(labels, None)

    def snapshot(self) -> Snapshot:
        """All samples as they are now. Cheap: what costs time is done when it is written out."""
        return Snapshot(
            [
                _Kept(
                    kept.spec,
                    dict(kept.values),
                    {at: _Buckets(list(b.counts), b.total) for at, b in kept.buckets.items()},
                )
                for kept in self._kept.values()
            ]
        )

    def _of(self, spec: MetricSpec) -> _Kept:
        kept = self._kept.get(spec.name)
        if kept is None:
            kept = self._kept[spec.name] = _Kept(spec)
        return kept

    def _buckets(self, spec: MetricSpec, labels: tuple[str, ...]) -> _Buckets:
        found = self._of(spec).buckets
        if labels not in found:
            found[labels] = _Buckets([0] * (len(spec.buckets) + 1))
        return found[labels]


class Snapshot(Collector):
    """Samples of one moment."""

    def __init__(self, kept: Sequence[_Kept]) -> None:
        self._kept = kept

    def collect(self) -> Iterable[Metric]:
        """See prometheus_client."""
        return (_family(kept) for kept in self._kept)

    def text(self, accept: str = "") -> tuple[bytes, str]:
        """(page, its content type): OpenMetrics where `accept`, the request's header, prefers it,
        else Prometheus' own format."""
        encode, content_type = choose_encoder(accept)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return encode(registry), content_type


def _family(kept: _Kept) -> Metric:
    spec = kept.spec
    if spec.kind is Kind.COUNTER:
        counter = CounterMetricFamily(spec.name.removesuffix(TOTAL), spec.text, labels=spec.labels)
        for labels, value in kept.values.items():
            counter.add_metric(labels, value)
        return counter
    if spec.kind is Kind.GAUGE:
        gauge = GaugeMetricFamily(spec.name, spec.text, labels=spec.labels)
        for labels, value in kept.values.items():
            gauge.add_metric(labels, value)
        return gauge
    histogram = HistogramMetricFamily(spec.name, spec.text, labels=spec.labels)
    for labels, found in kept.buckets.items():
        histogram.add_metric(labels, cumulative(spec, found.counts), found.total)
    return histogram


def cumulative(spec: MetricSpec, counts: Sequence[int]) -> list[tuple[str, float]]:
    """(upper bound as text, observations up to it) of each bucket, as scrapers want them."""
    bounds = [*(f"{bound:.10g}" for bound in spec.buckets), "+Inf"]
    sums: list[tuple[str, float]] = []
    so_far = 0
    for bound, count in zip(bounds, counts, strict=True):
        so_far += count
        sums.append((bound, float(so_far)))
    return sums
