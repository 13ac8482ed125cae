"""What an expression of PromQL names: metrics with their matchers and the labels it groups by."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moe_serve.telemetry.registry import METRICS
from moe_serve.telemetry.spec import PREFIX, MetricSpec

SELECTOR = re.compile(rf"({PREFIX}\w+)(\{{[^}}]*\}})?")
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
GROUPING = re.compile(r"\b(?:by|ignoring|group_left) \(([^)]*)\)")
HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")


@dataclass(frozen=True)
class Selector:
    """One metric in an expression. `text`: as it stands there."""

    text: str
    name: str
    matchers: tuple[tuple[str, str, str], ...]

    @property
    def spec(self) -> MetricSpec:
        """Its entry in the registry."""
        for part in HISTOGRAM_PARTS:
            whole = METRICS.get(self.name.removesuffix(part))
            if self.name.endswith(part) and whole is not None and whole.buckets:
                return whole
        return METRICS[self.name]

    @property
    def labels(self) -> frozenset[str]:
        """All labels that its series have."""
        more = {"le"} if self.name.endswith("_bucket") and self.spec.buckets else set()
        return frozenset({*self.spec.labels, *more})


def selectors(expr: str) -> list[Selector]:
    """Every metric that the expression names."""
    return [
        Selector(text, name, tuple(MATCHER.findall(braces or "")))
        for text, name, braces in (
            (found[0], found[1], found[2]) for found in SELECTOR.finditer(expr)
        )
    ]


def grouping(expr: str) -> set[str]:
    """Labels that the expression groups or joins by."""
    named = (label.strip() for found in GROUPING.findall(expr) for label in found.split(","))
    return {label for label in named if label}
