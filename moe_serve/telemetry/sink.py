"""Metrics through Ray's own exporter: every Ray user scrapes it already; and the log of a process
that is an actor's own.

Ray adds the prefix `ray_` and its own labels. Responsible for making each of Ray's metric objects
once. The only module of telemetry that imports Ray. Called where a part is composed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray.util import metrics as ray_metrics

from moe_serve.telemetry.library_logs import write_as_json
from moe_serve.telemetry.logs import NODE_LABEL
from moe_serve.telemetry.prometheus import cumulative
from moe_serve.telemetry.spec import Kind, MetricSpec

REPEAT_S: Final = 5.0
"""After this long a gauge is told again."""


@dataclass(frozen=True, slots=True)
class _Gauge:
    """Value of a gauge, and when it was set."""

    spec: MetricSpec
    value: float
    at_s: float


@dataclass(frozen=True, slots=True)
class _Folded:
    """A histogram that others count: counts by bucket, their sum, and when it grew."""

    spec: MetricSpec
    counts: list[int]
    total: float
    at_s: float


class RaySink:
    """`MetricSink` over `ray.util.metrics`. One a process; a sample costs about 13 microseconds.

    Ray's histograms take observations one by one. One that was counted by somebody else is told as
    gauges with the names and the label of a histogram's series, so that the same query reads both.

    A gauge that is set once is exported for a while only (twice Ray's `metrics_report_interval_ms`
    of 10 s). What was not set again is therefore told again with whatever comes next.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._set: dict[tuple[str, tuple[str, ...]], _Gauge] = {}
        self._repeated_s = clock()
        self._made: dict[str, Any] = {}
        self._folded: dict[tuple[str, tuple[str, ...]], _Folded] = {}

    def add(self, spec: MetricSpec, labels: tuple[str, ...], amount: float) -> None:
        """See MetricSink."""
        if amount > 0:  # Ray refuses to add nothing
            self._of(spec).inc(amount, tags=_tags(spec, labels))
        self._repeat()

    def set(self, spec: MetricSpec, labels: tuple[str, ...], value: float) -> None:
        """See MetricSink."""
        self._set[spec.name, labels] = _Gauge(spec, value, self._clock())
        self._of(spec).set(value, tags=_tags(spec, labels))
        self._repeat()

    def observe(self, spec: MetricSpec, labels: tuple[str, ...], value: float) -> None:
        """See MetricSink."""
        self._of(spec).observe(value, tags=_tags(spec, labels))

    def fold(
        self, spec: MetricSpec, labels: tuple[str, ...], counts: Sequence[int], total: float
    ) -> None:
        """See MetricSink."""
        known = self._folded.get((spec.name, labels))
        before = [0] * len(counts) if known is None else known.counts
        total += 0.0 if known is None else known.total
        after = [a + b for a, b in zip(before, counts, strict=True)]
        self._folded[spec.name, labels] = _Folded(spec, after, total, self._clock())
        self._tell_folded(spec, labels, after, total)

    def _tell_folded(
        self, spec: MetricSpec, labels: tuple[str, ...], after: Sequence[int], total: float
    ) -> None:
        tags = _tags(spec, labels)
        for bound, so_far in cumulative(spec, after):
            self._part(spec, "_bucket", ("le",)).set(so_far, tags=tags | {"le": bound})
        self._part(spec, "_sum").set(total, tags=tags)
        self._part(spec, "_count").set(float(sum(after)), tags=tags)

    def forget(self, spec: MetricSpec, labels: tuple[str, ...]) -> None:
        """See MetricSink."""
        self._set.pop((spec.name, labels), None)

    def _repeat(self) -> None:
        """Tell gauges again that were not set for a while."""
        now_s = self._clock()
        if now_s - self._repeated_s < REPEAT_S:
            return
        self._repeated_s = now_s
        for (_, labels), gauge in self._set.items():
            if now_s - gauge.at_s >= REPEAT_S:
                self._of(gauge.spec).set(gauge.value, tags=_tags(gauge.spec, labels))
        for (_, labels), one in self._folded.items():
            if now_s - one.at_s >= REPEAT_S:
                self._tell_folded(one.spec, labels, one.counts, one.total)

    def _of(self, spec: MetricSpec) -> Any:
        made = self._made.get(spec.name)
        if made is None:
            made = self._made[spec.name] = _make(spec)
        return made

    def _part(self, spec: MetricSpec, suffix: str, more: tuple[str, ...] = ()) -> Any:
        name = spec.name + suffix
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = ray_metrics.Gauge(
                name, description=spec.text, tag_keys=(*spec.labels, *more)
            )
        return made


def _tags(spec: MetricSpec, labels: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(spec.labels, labels, strict=True))


def _make(spec: MetricSpec) -> Any:
    if spec.kind is Kind.COUNTER:
        return ray_metrics.Counter(spec.name, description=spec.text, tag_keys=spec.labels)
    if spec.kind is Kind.GAUGE:
        return ray_metrics.Gauge(spec.name, description=spec.text, tag_keys=spec.labels)
    return ray_metrics.Histogram(
        spec.name, description=spec.text, boundaries=list(spec.buckets), tag_keys=spec.labels
    )


def this_node() -> str:
    """Name of the node that this process runs on, as tables and lines say it; "" where the process
    has joined no cluster."""
    if not ray.is_initialized():
        return ""
    context = ray.get_runtime_context()
    labels: Any = context.get_node_labels() or {}
    return str(labels.get(NODE_LABEL) or context.get_node_id()[:12])


def actor_lines(*, part: str, **fields: Any) -> None:
    """Have what modules of ours log in this process written as JSON lines with these fields. Only
    in an actor's own process: another one's log is not ours to change."""
    if ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None:
        write_as_json(part=part, node=this_node(), **fields)
