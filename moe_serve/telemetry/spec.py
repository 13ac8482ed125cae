"""What one metric is: its name, its kind, its labels with the values they may have, its cost.

Responsible for counting series before there are any. Must never hold a sample. Used by the
registry, by the sinks, and by what is generated from the registry.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

PREFIX: Final = "moe_serve_"


class Kind(StrEnum):
    """COUNTER only grows; GAUGE is set; HISTOGRAM counts observations into buckets; BUCKETS is a
    histogram whose observations somebody else has counted already."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    BUCKETS = "buckets"


class Scale(StrEnum):
    """Labels with one value for each of something of which a service may have many."""

    LAYERS = "layers"
    RANKS = "ranks"
    ROUTERS = "routers"
    NODES = "nodes"
    EXPERTS = "experts"
    POLICIES = "policies"
    BUILDS = "builds"


SCALE_MAX: Final[Mapping[Scale, int]] = MappingProxyType(
    {
        Scale.LAYERS: 96,
        Scale.RANKS: 80,
        Scale.ROUTERS: 16,
        Scale.NODES: 16,
        Scale.EXPERTS: 512,
        Scale.POLICIES: 5,
        Scale.BUILDS: 2,
    }
)
"""Values at most; samples of further ones are dropped and counted."""

LabelValues = Scale | tuple[str, ...]
"""All values of a label, or of what there is one for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much of everything a service has, for counting its series."""

    layers: int
    ranks: int
    routers: int
    nodes: int
    experts: int
    policies: int = 3
    """The one that balances, that of the first layout, and none (what was lost is filled again)."""
    builds: int = 1

    def of(self, values: LabelValues) -> int:
        """Values that the label has at this size."""
        if isinstance(values, Scale):
            return min(int(getattr(self, values.value)), SCALE_MAX[values])
        return len(values)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. `series_max`: combinations of label values at most; further ones are dropped and
    counted. `buckets`: upper bounds of a histogram. `values`: of each label, where they are known.
    `when`: what must happen before there is a sample, "" = nothing but a closed window."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    series_max: int = 1
    buckets: tuple[float, ...] = ()
    values: Mapping[str, LabelValues] = field(default_factory=dict)
    when: str = ""
    opt_in: bool = False
    """Only emitted where the service file asks for it."""

    @property
    def each(self) -> int:
        """Series of one combination of labels: buckets, +Inf, sum and count of a histogram."""
        return len(self.buckets) + 3 if self.buckets else 1

    @property
    def cost(self) -> int:
        """Series it may make at the scraper."""
        return self.series_max * self.each

    def series(self, size: Size) -> int:
        """Series it makes at this size."""
        return self.each * math.prod(size.of(self.values[label]) for label in self.labels)

    def all_values(self) -> Iterator[tuple[str, ...]]:
        """Every combination of label values; none where a label has one for each of something."""
        given = [self.values.get(label, Scale.EXPERTS) for label in self.labels]
        listed = [values for values in given if not isinstance(values, Scale)]
        if len(listed) == len(given):
            yield from itertools.product(*listed)


def metric(
    name: str,
    kind: Kind,
    text: str,
    /,
    *,
    buckets: tuple[float, ...] = (),
    when: str = "",
    opt_in: bool = False,
    **values: LabelValues,
) -> MetricSpec:
    """A metric of ours, with `values` of its labels in their order."""
    most = [SCALE_MAX[v] if isinstance(v, Scale) else len(v) for v in values.values()]
    return MetricSpec(
        PREFIX + name,
        kind,
        text,
        tuple(values),
        math.prod(most),
        buckets,
        MappingProxyType(values),
        when,
        opt_in,
    )
