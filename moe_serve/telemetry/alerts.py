"""Alert rules over the registry's metrics, as data.

Responsible for what is worth waking somebody for, and for a page that says what to do then. Must
never name a metric the registry does not have: a test runs every expression. Used by `moe-serve
metrics rules` and by the tests of docs/runbooks.

`{m}` in an expression stands for what comes before a metric's own name: `moe_serve_`, or with
Ray's exporter `ray_moe_serve_`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from moe_serve.telemetry.spec import PREFIX

RUNBOOKS: Final = "docs/runbooks/"
"""Where the pages are, from the top of this repository."""
MOVING = "max(max_over_time({m}moves_under_way[5m])) > 0"


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule. `after`: how long it must hold, as Prometheus spells it. severity: critical (people
    are not served, or soon will not be) | warning (it costs something now) | info."""

    name: str
    severity: str
    after: str
    expr: str
    summary: str

    @property
    def runbook(self) -> str:
        """Name of its page."""
        return f"{self.name}.md"


ALERTS: Final = (
    Alert(
        "ControllerAway",
        "critical",
        "30s",
        "absent({m}window_closed_timestamp_seconds) or "
        "time() - max({m}window_closed_timestamp_seconds) > 30 + 3 * max({m}window_seconds)",
        "No window closes: the controller is away, or nobody scrapes it.",
    ),
    Alert(
        "ExpertMissing",
        "critical",
        "30s",
        'max({m}experts{{state="missing"}}) > 0',
        "{{ $value }} experts have no replica: requests that need one fail.",
    ),
    Alert(
        "RankLost",
        "critical",
        "1m",
        'max({m}ranks{{status="lost"}}) > 0',
        "{{ $value }} ranks have no shard.",
    ),
    Alert(
        "RequestsFail",
        "critical",
        "2m",
        'sum(rate({m}requests_total{{outcome="failed"}}[5m]))'
        " / sum(rate({m}requests_total[5m])) > 0.01",
        "{{ $value | humanizePercentage }} of requests fail.",
    ),
    Alert(
        "RequestsRefused",
        "warning",
        "2m",
        'sum(rate({m}requests_total{{outcome="rejected"}}[5m])) > 0',
        "{{ $value | humanize }} requests a second get no permit: routers are full.",
    ),
    Alert(
        "RankSilent",
        "warning",
        "30s",
        "{m}rank_report_age_seconds > on () group_left () (3 * max({m}window_seconds))",
        "Rank {{ $labels.rank }} has not been heard of for three windows.",
    ),
    Alert(
        "RankBehind",
        "warning",
        "2m",
        "{m}rank_backlog_seconds > 1",
        "Rank {{ $labels.rank }} has {{ $value | humanizeDuration }} of work queued.",
    ),
    Alert(
        "Imbalanced",
        "warning",
        "10m",
        "1 / min({m}balancedness_ratio) - 1 > 0.5 and max({m}moves_under_way) == 0",
        "The busiest rank has {{ $value | humanizePercentage }} more than the mean, and nothing "
        "moves.",
    ),
    Alert(
        "PlansThrash",
        "warning",
        "1m",
        'sum(increase({m}plans_total{{outcome=~"done|aborted",policy!="none"}}[5m])) > 4',
        "{{ $value | humanize }} plans ended in five minutes: experts are moved to and fro.",
    ),
    Alert(
        "PlanStalled",
        "warning",
        "1m",
        "max({m}rebalance_stalled) == 1",
        "A plan stands still, or was aborted for it.",
    ),
    Alert(
        "PlannerFails",
        "warning",
        "1m",
        'sum(increase({m}plans_total{{outcome="failed"}}[10m])) > 2',
        "{{ $value | humanize }} times in ten minutes no plan could be computed: placement does "
        "not follow the traffic.",
    ),
    Alert(
        "MovesFail",
        "warning",
        "1m",
        'sum(increase({m}moves_total{{outcome="aborted"}}[10m])) > 3',
        "{{ $value | humanize }} moves were aborted in ten minutes.",
    ),
    Alert(
        "SlowWhileMoving",
        "warning",
        "2m",
        'max by (router) (avg_over_time({m}request_seconds{{quantile="p99"}}[5m])) > '
        '2 * max by (router) (avg_over_time({m}request_seconds{{quantile="p99"}}[1h] offset 5m)) '
        "and on () " + MOVING,
        "Router {{ $labels.router }}: p99 is twice that of the hour before while experts move.",
    ),
    Alert(
        "SlowWire",
        "warning",
        "5m",
        "sum by (rank) (rate({m}rank_wire_seconds_total[5m]))"
        " / (sum by (rank) (rate({m}rank_sub_calls_total[5m])) > 0) > 0.01 and "
        "sum by (rank) (rate({m}rank_wire_seconds_total[5m]))"
        " / (sum by (rank) (rate({m}rank_sub_calls_total[5m])) > 0) > on () group_left () 4 * "
        "quantile(0.5, sum by (rank) (rate({m}rank_wire_seconds_total[5m]))"
        " / (sum by (rank) (rate({m}rank_sub_calls_total[5m])) > 0))",
        "Sub-calls to rank {{ $labels.rank }} are {{ $value | humanizeDuration }} on the way, four "
        "times as long as to others.",
    ),
    Alert(
        "LoopLags",
        "warning",
        "2m",
        "min_over_time({m}loop_lag_seconds[1m]) > 0.1",
        "The event loop of router {{ $labels.router }} lags by {{ $value | humanizeDuration }}.",
    ),
    Alert(
        "CopiesHeldBack",
        "info",
        "5m",
        "sum(rate({m}copy_wait_seconds_total[5m]))"
        " / (sum(rate({m}copy_seconds_total[5m])) > 0) > 0.8",
        "Copies wait {{ $value | humanizePercentage }} of their time for limits.copy_bytes_per_s.",
    ),
    Alert(
        "ForecastPoor",
        "info",
        "30m",
        "max by (phase) ({m}forecast_error_ratio) > 0.5",
        "{{ $labels.phase }}: forecasts cost {{ $value | humanizePercentage }} of the balance.",
    ),
    Alert(
        "GainNotRealised",
        "info",
        "10m",
        'max({m}plan_gain_ratio{{figure="realised"}}) < '
        '0.25 * max({m}plan_gain_ratio{{figure="expected"}})',
        "The last plan saves less than a quarter of what it promised.",
    ),
    Alert(
        "PausedForLong",
        "info",
        "1h",
        "max({m}paused) == 1",
        "Automatic plans have been off for an hour.",
    ),
    Alert(
        "SeriesDropped",
        "info",
        "5m",
        "sum(increase({m}series_dropped_total[15m])) > 0",
        "The fleet is larger than its metrics: series are left out.",
    ),
)
"""Every alert, the worst first."""


def expression(text: str, prefix: str = "") -> str:
    """An expression with the metrics' whole names; `prefix`: `ray_` with Ray's exporter."""
    return text.format(m=prefix + PREFIX)


def rules(prefix: str = "", runbooks: str = RUNBOOKS) -> dict[str, Any]:
    """The rules file, as data. runbooks: where the pages are, with or without a slash at its
    end."""
    folder = runbooks.rstrip("/")
    return {
        "groups": [
            {
                "name": "moe-serve",
                "rules": [
                    {
                        "alert": f"MoeServe{alert.name}",
                        "expr": expression(alert.expr, prefix),
                        "for": alert.after,
                        "labels": {"severity": alert.severity},
                        "annotations": {
                            "summary": alert.summary,
                            "runbook_url": f"{folder}/{alert.runbook}",
                        },
                    }
                    for alert in ALERTS
                ],
            }
        ]
    }
