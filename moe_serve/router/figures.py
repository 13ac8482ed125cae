"""What a router says to metrics: its own report, as samples.

Responsible for turning totals since start into growth. Must never be called for each request: a
report a few times a second is all. Called by the actor.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from moe_serve.ports import RouterReport
from moe_serve.telemetry import Metrics

OUTCOMES: Final = MappingProxyType(
    {
        "served": "requests",
        "failed": "failed",
        "refused": "refused_requests",
        "rejected": "rejected",
    }
)
"""Outcome of a request -> its counter in the report."""
PAIRS: Final = MappingProxyType(
    {
        "demand": "demand_pairs",
        "sent": "sent_pairs",
        "served": "served_pairs",
        "retried": "retried_pairs",
        "hedged": "hedged_pairs",
        "stale": "stale_pairs",
        "refused": "refused_pairs",
        "lost": "lost_pairs",
    }
)
"""What became of pairs -> its counter."""


class RouterFigures:
    """Samples of one router life."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._told: dict[str, float] = {}

    def tell(self, report: RouterReport) -> None:
        """A report was made."""
        metrics, counters, quantiles = self._metrics, report.counters, report.quantiles
        for outcome, name in OUTCOMES.items():
            metrics.add("requests_total", self._growth(counters, name), outcome=outcome)
        for kind, name in PAIRS.items():
            metrics.add("pairs_total", self._growth(counters, name), kind=kind)
        metrics.add("rows_total", self._growth(counters, "tokens"))
        metrics.add("ejections_total", self._growth(counters, "ejections"))
        metrics.set("requests_in_flight", counters["open_requests"])
        metrics.set("requests_waiting", counters["waiting_requests"])
        metrics.set("loop_lag_seconds", quantiles["loop_lag_s"])
        for quantile in ("p50", "p99"):
            # Absent where no request was answered since the last report.
            if (seconds := quantiles.get(f"dispatch_{quantile}_s")) is not None:
                metrics.set("request_seconds", seconds, quantile=quantile)

    def _growth(self, counters: Mapping[str, float], name: str) -> float:
        total = counters[name]
        before, self._told[name] = self._told.get(name, 0.0), total
        return total - before
