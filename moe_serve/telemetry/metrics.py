"""Samples of one process, checked against the registry, on their way to a sink.

Responsible for bounds: no metric has more series than the registry allows, whatever values its
labels take. Must never decide where samples go. Only controller and routers emit; shards report to
the controller. Called by their figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from moe_serve.telemetry.registry import DROPPED, EXPERT_PAIRS, METRICS
from moe_serve.telemetry.sinks import MetricSink
from moe_serve.telemetry.spec import PREFIX, Kind, MetricSpec


class Metrics:
    """Samples of one process.

    Raises KeyError for a name or a label the registry does not have: that is our bug, and a test
    finds it. A label value too many is not: it is dropped and counted.

    per_expert: where figures of single experts go, None = they are not wanted. Not every sink takes
    thousands of samples at once without holding the loop up.
    """

    def __init__(
        self,
        sink: MetricSink,
        registry: Mapping[str, MetricSpec] = METRICS,
        *,
        per_expert: MetricSink | None = None,
    ) -> None:
        self._sink = sink
        self._registry = registry
        self._per_expert = per_expert
        self._known: dict[str, set[tuple[str, ...]]] = {}

    def begin(self) -> None:
        """Make every counter whose label values are known start from 0: an increase from nothing to
        1 is none to a scraper."""
        for spec in self._registry.values():
            if spec.kind is Kind.COUNTER and not spec.opt_in:
                for values in spec.all_values():
                    if self._admit(spec, values):
                        self._sink.add(spec, values, 0.0)

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

    def forget(self, name: str, /, **labels: str | int) -> None:
        """What a gauge told of is gone: so is its series."""
        spec, values = self._spec(name, Kind.GAUGE, labels)
        known = self._known.get(spec.name, set())
        if values in known:
            known.remove(values)
            self._sink.forget(spec, values)

    def observe(self, name: str, value: float, /, **labels: str | int) -> None:
        """Count one observation of a histogram."""
        spec, values = self._spec(name, Kind.HISTOGRAM, labels)
        if self._admit(spec, values):
            self._sink.observe(spec, values, value)

    def fold(
        self, name: str, counts: Sequence[int], seconds: float, /, **labels: str | int
    ) -> None:
        """Add observations that somebody else counted: one count for each bound of the metric, then
        those above the last. `seconds`: their sum."""
        spec, values = self._spec(name, Kind.BUCKETS, labels)
        assert len(counts) == len(spec.buckets) + 1, f"{name} has {len(spec.buckets)} bounds"
        if self._admit(spec, values):
            self._sink.fold(spec, values, counts, seconds)

    def add_experts(self, pairs: npt.NDArray[np.int64]) -> None:
        """Grow the demand of each expert that has any in `pairs`, int64 [layers, experts], where
        such figures are wanted."""
        sink = self._per_expert
        if sink is None:
            return
        at = np.nonzero(pairs)
        for layer, expert, grown in zip(*(i.tolist() for i in at), pairs[at].tolist(), strict=True):
            values = (str(layer), str(expert))
            if self._admit(EXPERT_PAIRS, values):
                sink.add(EXPERT_PAIRS, values, grown)

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
            self.add("series_dropped_total", 1.0)
        return False
