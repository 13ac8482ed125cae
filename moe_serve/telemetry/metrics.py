"""Metrics: a fixed registry of names with a maximum of series each, and the sink they go to.

Responsible for names, labels and bounds: the series of all metrics together stay below SERIES_MAX,
whatever a label's values are. Per-expert figures are not metrics: the page reads them from the
admin port. Only controller and routers emit; shards report to the controller. Called by them.

Naming: `moe_serve_` + what + unit (`_seconds`, `_bytes`, `_ratio`), counters end in `_total`; one
base unit; two labels never say the same thing. `imbalance` is 1 / balancedness - 1, 0 is even.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final, Protocol

SERIES_MAX = 2000
"""Series of all metrics together, with every bucket of a histogram counted."""
PREFIX = "moe_serve_"
SECONDS_BUCKETS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0)


class Kind(StrEnum):
    """COUNTER only grows; GAUGE is set; HISTOGRAM counts observations into buckets."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. `series_max`: combinations of label values at most; further ones are dropped and
    counted. `buckets`: upper bounds of a histogram."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    series_max: int = 1
    buckets: tuple[float, ...] = ()

    @property
    def cost(self) -> int:
        """Series it may make at the scraper: buckets, +Inf, sum and count of a histogram."""
        each = len(self.buckets) + 3 if self.kind is Kind.HISTOGRAM else 1
        return self.series_max * each


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


class NullSink:
    """Takes everything, keeps nothing."""

    def add(self, spec: MetricSpec, labels: tuple[str, ...], amount: float) -> None:
        """See MetricSink."""

    def set(self, spec: MetricSpec, labels: tuple[str, ...], value: float) -> None:
        """See MetricSink."""

    def observe(self, spec: MetricSpec, labels: tuple[str, ...], value: float) -> None:
        """See MetricSink."""


class MemorySink:
    """Keeps samples by (name, labels), for tests: sums, last values, lists of observations."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, tuple[str, ...]], float] = {}
        self.observations: dict[tuple[str, tuple[str, ...]], list[float]] = {}

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


def _metric(
    name: str,
    kind: Kind,
    text: str,
    labels: tuple[str, ...] = (),
    series_max: int = 1,
    buckets: tuple[float, ...] = (),
) -> MetricSpec:
    return MetricSpec(PREFIX + name, kind, text, labels, series_max, buckets)


_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
DROPPED: Final = _metric(
    "series_dropped_total",
    _C,
    "Samples dropped because a metric had its most series.",
    ("metric",),
    30,
)
_ALL: Final = (
    DROPPED,
    _metric("build_info", _G, "1, labelled with version and model.", ("version", "model"), 4),
    _metric("term", _G, "Number of the controller."),
    _metric("epoch", _G, "Number of the newest routing table."),
    _metric("rebalancing", _G, "1 while a plan runs."),
    _metric("paused", _G, "1 while automatic plans are off."),
    _metric("rebalance_stalled", _G, "1 while a plan stands still, or was aborted for it lately."),
    _metric("plans_stalled_total", _C, "Plans that stood still."),
    _metric("experts", _G, "Experts by whether a replica is listed.", ("state",), 2),
    _metric("balancedness_ratio", _G, "Of the newest window, over all layers, in (0, 1]."),
    _metric("layer_imbalance_ratio", _G, "1 / balancedness - 1 of a layer.", ("layer",), 128),
    _metric("layer_pairs_total", _C, "Demand: rows x k.", ("layer", "phase"), 256),
    _metric("layer_replicas", _G, "Listed replicas of a layer.", ("layer",), 128),
    _metric("rank_pairs_total", _C, "Pairs executed.", ("rank",), 128),
    _metric("rank_busy_seconds_total", _C, "Seconds of compute.", ("rank", "phase"), 256),
    _metric("rank_slots", _G, "Slots by use.", ("rank", "state"), 256),
    _metric("rank_weight_bytes", _G, "Resident and reserved bytes.", ("rank",), 128),
    _metric("rank_backlog_seconds", _G, "Seconds of queued work.", ("rank",), 128),
    _metric(
        "rank_fragmentation_ratio",
        _G,
        "Share of free slot memory outside its largest piece.",
        ("rank",),
        128,
    ),
    _metric("rank_up", _G, "1 while the shard answers.", ("rank",), 128),
    _metric("decisions_total", _C, "Decisions by rule and outcome.", ("rule", "outcome"), 96),
    _metric("moves_total", _C, "Moves that ended.", ("kind", "outcome"), 6),
    _metric("moves_under_way", _G, "Moves not ended yet."),
    _metric("copying_bytes", _G, "Still to come in the copies that run now."),
    _metric("copy_bytes_total", _C, "Bytes of experts copied.", ("kind",), 3),
    _metric("move_seconds", _H, "From its start to its end.", ("kind",), 3, SECONDS_BUCKETS),
    _metric("requests_total", _C, "Requests by how they ended.", ("outcome",), 4),
    _metric("rows_total", _C, "Rows of answered requests."),
    _metric("pairs_total", _C, "Demand, and what was sent and came of it.", ("kind",), 8),
    _metric("ejections_total", _C, "Shards left alone for failing or being far too slow."),
    _metric("request_seconds", _G, "Whole request, since the last report.", ("quantile",), 2),
    _metric("requests_in_flight", _G, "In work now."),
    _metric("requests_waiting", _G, "Waiting for a permit now."),
    _metric("loop_lag_seconds", _G, "Greatest lag of the event loop since the last report."),
)
METRICS: Final[Mapping[str, MetricSpec]] = MappingProxyType({spec.name: spec for spec in _ALL})
"""The registry: every metric there is, by name."""


class Metrics:
    """Samples of one process, checked against the registry, on their way to a sink.

    Raises KeyError for a name or a label the registry does not have: that is our bug, and a test
    finds it. A label value too many is not: it is dropped and counted.
    """

    def __init__(self, sink: MetricSink, registry: Mapping[str, MetricSpec] = METRICS) -> None:
        self._sink = sink
        self._registry = registry
        self._known: dict[str, set[tuple[str, ...]]] = {}

    def add(self, name: str, amount: float = 1.0, /, **labels: str | int) -> None:
        """Grow a counter by `amount` >= 0."""
        assert amount >= 0, f"{name} is a counter and cannot fall by {amount}"
        spec, values = self._spec(name, Kind.COUNTER, labels)
        if self._admit(spec, values):
            self._sink.add(spec, values, amount)

    def set(self, name: str, value: float, /, **labels: str | int) -> None:
        """Set a gauge."""
        spec, values = self._spec(name, Kind.GAUGE, labels)
        if self._admit(spec, values):
            self._sink.set(spec, values, value)

    def observe(self, name: str, value: float, /, **labels: str | int) -> None:
        """Count one observation of a histogram."""
        spec, values = self._spec(name, Kind.HISTOGRAM, labels)
        if self._admit(spec, values):
            self._sink.observe(spec, values, value)

    def _spec(
        self, name: str, kind: Kind, labels: Mapping[str, str | int]
    ) -> tuple[MetricSpec, tuple[str, ...]]:
        spec = self._registry[PREFIX + name]
        if spec.kind is not kind or set(labels) != set(spec.labels):
            raise KeyError(f"{name} is a {spec.kind} with labels {list(spec.labels)}")
        return spec, tuple(str(labels[label]) for label in spec.labels)

    def _admit(self, spec: MetricSpec, values: tuple[str, ...]) -> bool:
        known = self._known.setdefault(spec.name, set())
        if values in known:
            return True
        if len(known) < spec.series_max:
            known.add(values)
            return True
        if spec.name != DROPPED.name:
            self.add("series_dropped_total", 1.0, metric=spec.name)
        return False
