"""Where samples go: the interface of sinks, and those that need no library.

Responsible for taking samples. Must never check them (`Metrics` does). Ray's exporter is in `sink`,
the plain one in `prometheus`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from moe_serve.telemetry.spec import MetricSpec


class MetricSink(Protocol):
    """Where samples go. `labels`: values in order of the metric's label names."""

    def add(self, spec: MetricSpec, labels: tuple[str, ...], amount: float) -> None:
        """Grow a counter."""
        ...

    def set(self, spec: MetricSpec, labels: tuple[str, ...], value: float) -> None:
        """Set a gauge."""
        ...

    def observe(self, spec: MetricSpec, labels: tuple[str, ...], value: float) -> None:
        """Count one observation of a histogram."""
        ...

    def fold(
        self, spec: MetricSpec, labels: tuple[str, ...], counts: Sequence[int], total: float
    ) -> None:
        """Add observations that were counted already: one count a bucket, the last of those above
        all bounds. `total`: their sum."""
        ...

    def forget(self, spec: MetricSpec, labels: tuple[str, ...]) -> None:
        """A gauge tells of something that is gone."""
        ...


class NullSink:
    """Takes everything, keeps nothing."""

    def add(self, spec: MetricSpec, labels: tuple[str, ...], amount: float) -> None:
        """See MetricSink."""

    def set(self, spec: MetricSpec, labels: tuple[str, ...], value: float) -> None:
        """See MetricSink."""

    def observe(self, spec: MetricSpec, labels: tuple[str, ...], value: float) -> None:
        """See MetricSink."""

    def fold(
        self, spec: MetricSpec, labels: tuple[str, ...], counts: Sequence[int], total: float
    ) -> None:
        """See MetricSink."""

    def forget(self, spec: MetricSpec, labels: tuple[str, ...]) -> None:
        """See MetricSink."""


class TeeSink:
    """Hands every sample to several sinks."""

    def __init__(self, *sinks: MetricSink) -> None:
        self._sinks = sinks

    def add(self, spec: MetricSpec, labels: tuple[str, ...], amount: float) -> None:
        """See MetricSink."""
        for sink in self._sinks:
            sink.add(spec, labels, amount)

    def set(self, spec: MetricSpec, labels: tuple[str, ...], value: float) -> None:
        """See MetricSink."""
        for sink in self._sinks:
            sink.set(spec, labels, value)

    def observe(self, spec: MetricSpec, labels: tuple[str, ...], value: float) -> None:
        """See MetricSink."""
        for sink in self._sinks:
            sink.observe(spec, labels, value)

    def fold(
        self, spec: MetricSpec, labels: tuple[str, ...], counts: Sequence[int], total: float
    ) -> None:
        """See MetricSink."""
        for sink in self._sinks:
            sink.fold(spec, labels, counts, total)

    def forget(self, spec: MetricSpec, labels: tuple[str, ...]) -> None:
        """See MetricSink."""
        for sink in self._sinks:
            sink.forget(spec, labels)


class MemorySink:
    """Keeps samples by (name, labels), for tests: sums, last values, lists of observations, and
    (counts by bucket, sum) of what was folded in."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, tuple[str, ...]], float] = {}
        self.observations: dict[tuple[str, tuple[str, ...]], list[float]] = {}
        self.folded: dict[tuple[str, tuple[str, ...]], tuple[list[int], float]] = {}

    def add(self, spec: MetricSpec, labels: tuple[str, ...], amount: float) -> None:
        """See MetricSink."""
        key = (spec.name, labels)
        self.values[key] = self.values.get(key, 0.0) + amount

    def set(self, spec: MetricSpec, labels: tuple[str, ...], value: float) -> None:
        """See MetricSink."""
        self.values[spec.name, labels] = value

    def observe(self, spec: MetricSpec, labels: tuple[str, ...], value: float) -> None:
        """See MetricSink."""
        self.observations.setdefault((spec.name, labels), []).append(value)

    def fold(
        self, spec: MetricSpec, labels: tuple[str, ...], counts: Sequence[int], total: float
    ) -> None:
        """See MetricSink."""
        known, before = self.folded.get((spec.name, labels), ([0] * len(counts), 0.0))
        after = [a + b for a, b in zip(known, counts, strict=True)]
        self.folded[spec.name, labels] = after, before + total

    def forget(self, spec: MetricSpec, labels: tuple[str, ...]) -> None:
        """See MetricSink."""
        self.values.pop((spec.name, labels), None)
