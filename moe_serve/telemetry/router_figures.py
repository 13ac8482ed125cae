"""What a router says to metrics: its own report, as samples.

Responsible for turning totals since start into growth. Must never be called for each request: a
report a few times a second is all. Called by the router's actor, for Ray's exporter, and by the
controller, for a plain one: it is the one place to scrape there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
FATES: Final = MappingProxyType(
    {
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
GAUGES: Final = ("requests_in_flight", "requests_waiting", "loop_lag_seconds")
"""What a router tells of this moment."""
QUANTILES: Final = ("p50", "p99")


class RouterFigures:
    """Samples of one router life. `told`: totals that count as told already."""

    def __init__(
        self, metrics: Metrics, router: str, told: Mapping[str, float] | None = None
    ) -> None:
        self._metrics = metrics
        self._router = router
        self._told: dict[str, float] = dict(told or {})

    def tell(self, report: RouterReport) -> None:
        """A report was made."""
        metrics, counters, quantiles = self._metrics, report.counters, report.quantiles
        router = self._router
        for outcome, name in OUTCOMES.items():
            grown = self._growth(counters, name)
            metrics.add("requests_total", grown, router=router, outcome=outcome)
        for fate, name in FATES.items():
            metrics.add("pairs_total", self._growth(counters, name), router=router, fate=fate)
        metrics.add("rows_total", self._growth(counters, "tokens"), router=router)
        metrics.add("ejections_total", self._growth(counters, "ejections"), router=router)
        metrics.set("requests_in_flight", counters.get("open_requests", 0.0), router=router)
        metrics.set("requests_waiting", counters.get("waiting_requests", 0.0), router=router)
        metrics.set("loop_lag_seconds", quantiles.get("loop_lag_s", 0.0), router=router)
        for quantile in QUANTILES:
            # Absent where no request was answered since the last report.
            if (seconds := quantiles.get(f"dispatch_{quantile}_s")) is not None:
                metrics.set("request_seconds", seconds, router=router, quantile=quantile)

    def forget(self) -> None:
        """The router is gone: nothing is in work there any more."""
        for name in GAUGES:
            self._metrics.forget(name, router=self._router)
        for quantile in QUANTILES:
            self._metrics.forget("request_seconds", router=self._router, quantile=quantile)

    def _growth(self, counters: Mapping[str, float], name: str) -> float:
        total = counters.get(name, 0.0)
        before, self._told[name] = self._told.get(name, 0.0), total
        return max(0.0, total - before)


class RoutersFigures:
    """Samples of every router that reports to one controller.

    The first report of a router not met before is where its counting begins: it may have run for
    hours. A later life of one that is known begins at zero.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._of: dict[str, tuple[int, RouterFigures]] = {}
        self._shown: set[str] = set()
        """Routers that gauges tell of."""

    def tell(self, report: RouterReport) -> None:
        """A router reported."""
        known = self._of.get(report.router)
        if known is None or known[0] < report.incarnation:
            told = report.counters if known is None else {}
            figures = RouterFigures(self._metrics, report.router, told)
            known = self._of[report.router] = report.incarnation, figures
        if known[0] == report.incarnation:
            known[1].tell(report)
            self._shown.add(report.router)

    def keep(self, routers: Collection[str]) -> None:
        """These are there now; what gauges tell of others is forgotten."""
        for router in self._shown.difference(routers):
            self._of[router][1].forget()
        self._shown.intersection_update(routers)
