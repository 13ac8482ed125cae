"""Panels of the dashboard: what is shown of the registry's metrics, in which words and order.

Responsible for queries. Must never name a metric the registry does not have: a test runs every one.
Drawn by `grafana`.

`{m}` in a query stands for `${prefix}moe_serve_`; braces of its own are doubled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

RATE: Final = "[$__rate_interval]"


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture. `queries`: (expression, legend). `unit`: as Grafana names it. `about`: what it
    shows and how to read it. kind: timeseries | stat | heatmap."""

    title: str
    about: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    stacked: bool = False


def _rate(metric: str, by: str = "") -> str:
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({{m}}{metric}{RATE}))"


def _stage_quantile(share: str) -> tuple[tuple[str, str], ...]:
    found = _rate("stage_seconds_bucket", "le, stage")
    return ((f"histogram_quantile({share}, {found})", "{{{{stage}}}}"),)


ROWS: Final[tuple[tuple[str, tuple[Panel, ...]], ...]] = (
    (
        "Balance",
        (
            Panel(
                "Imbalance",
                "Busiest rank over the mean, less 1, over all layers: 0 is even. Dashed: what the "
                "last plan that was weighed predicted.",
                "percentunit",
                (
                    ("1 / min({m}balancedness_ratio) - 1", "served"),
                    ("max by (moment) ({m}plan_imbalance_ratio)", "plan: {{{{moment}}}}"),
                ),
            ),
            Panel(
                "Worst layers",
                "The five layers that are least even.",
                "percentunit",
                (("topk(5, max by (layer) ({m}layer_imbalance_ratio))", "layer {{{{layer}}}}"),),
            ),
            Panel(
                "Hottest experts",
                "Share of its layer's demand that one expert has, in the five layers where that is "
                "most.",
                "percentunit",
                (
                    (
                        "topk(5, max by (layer) ({m}layer_hottest_expert_share_ratio))",
                        "layer {{{{layer}}}}",
                    ),
                ),
            ),
            Panel(
                "Replicas",
                "Listed replicas of all layers, and experts that have none.",
                "short",
                (
                    ("sum(max by (layer) ({m}layer_replicas))", "replicas"),
                    ('max({m}experts{{state="missing"}})', "experts missing"),
                ),
            ),
        ),
    ),
    (
        "Load",
        (
            Panel(
                "Demand",
                "Pairs a second, rows x k, counted once by a router.",
                "short",
                ((_rate("layer_pairs_total", "phase"), "{{{{phase}}}}"),),
            ),
            Panel(
                "Pairs by rank",
                "What each rank computed in a second.",
                "short",
                ((_rate("rank_pairs_total", "rank"), "rank {{{{rank}}}}"),),
            ),
            Panel(
                "Busy",
                "Share of its time that each rank computed.",
                "percentunit",
                ((_rate("rank_busy_seconds_total", "rank"), "rank {{{{rank}}}}"),),
            ),
            Panel(
                "Backlog",
                "Seconds of work queued at each rank.",
                "s",
                (("max by (rank) ({m}rank_backlog_seconds)", "rank {{{{rank}}}}"),),
            ),
            Panel(
                "Layers over time",
                "Pairs a second of each layer.",
                "short",
                ((_rate("layer_pairs_total", "layer"), "{{{{layer}}}}"),),
                "heatmap",
            ),
        ),
    ),
    (
        "Dispatch",
        (
            Panel(
                "Requests",
                "A second, by how they ended.",
                "reqps",
                ((_rate("requests_total", "outcome"), "{{{{outcome}}}}"),),
            ),
            Panel(
                "Rows",
                "Rows of answered requests, a second.",
                "short",
                ((_rate("rows_total", "router"), "{{{{router}}}}"),),
            ),
            Panel(
                "Whole request",
                "p50 and p99 of the requests between two reports of a router.",
                "s",
                (
                    (
                        "max by (router, quantile) ({m}request_seconds)",
                        "{{{{router}}}} {{{{quantile}}}}",
                    ),
                ),
            ),
            Panel(
                "Where time goes",
                "Mean seconds of a request in each stage, stacked.",
                "s",
                (
                    (
                        f"{_rate('stage_seconds_sum', 'stage')} / "
                        f"{_rate('stage_seconds_count', 'stage')}",
                        "{{{{stage}}}}",
                    ),
                ),
                stacked=True,
            ),
            Panel(
                "p99 of each stage",
                "By interpolation between few bounds: for comparing, not for adding up.",
                "s",
                _stage_quantile("0.99"),
            ),
            Panel(
                "Wire by rank",
                "Mean seconds of a sub-call on the way there and back.",
                "s",
                (
                    (
                        f"{_rate('rank_wire_seconds_total', 'rank')} / "
                        f"{_rate('rank_sub_calls_total', 'rank')}",
                        "rank {{{{rank}}}}",
                    ),
                ),
            ),
            Panel(
                "Second tries and losses",
                "Pairs a second that were not served at once.",
                "short",
                (
                    (
                        'sum by (fate) (rate({m}pairs_total{{fate!~"sent|served"}}' + RATE + "))",
                        "{{{{fate}}}}",
                    ),
                    (_rate("ejections_total"), "ejections"),
                ),
            ),
            Panel(
                "In work and waiting",
                "Requests in routers now.",
                "short",
                (
                    ("sum({m}requests_in_flight)", "in work"),
                    ("sum({m}requests_waiting)", "waiting for a permit"),
                ),
            ),
            Panel(
                "Loop lag",
                "How late a router's event loop wakes.",
                "s",
                (("max by (router) ({m}loop_lag_seconds)", "{{{{router}}}}"),),
            ),
        ),
    ),
    (
        "Plans and moves",
        (
            Panel(
                "Plans",
                "By what became of them; kept: not worth their cost.",
                "short",
                (
                    (
                        f"sum by (policy, outcome) (increase({{m}}plans_total{RATE}))",
                        "{{{{policy}}}} {{{{outcome}}}}",
                    ),
                ),
            ),
            Panel(
                "Moves",
                "That ended, and those under way.",
                "short",
                (
                    (
                        f"sum by (kind, outcome) (increase({{m}}moves_total{RATE}))",
                        "{{{{kind}}}} {{{{outcome}}}}",
                    ),
                    ("max({m}moves_under_way)", "under way"),
                ),
            ),
            Panel(
                "How long moves take",
                "Mean, from start to end.",
                "s",
                ((f"{_rate('move_seconds_sum')} / {_rate('move_seconds_count')}", "mean"),),
            ),
            Panel(
                "How long plans take to compute",
                "p90.",
                "s",
                (
                    (
                        f"histogram_quantile(0.9, {_rate('plan_solve_seconds_bucket', 'le')})",
                        "p90",
                    ),
                ),
            ),
            Panel(
                "Gain of the last plan",
                "Seconds of waiting saved in each second: promised, and measured on the window "
                "after it.",
                "percentunit",
                (("max by (figure) ({m}plan_gain_ratio)", "{{{{figure}}}}"),),
            ),
            Panel(
                "Bytes moved",
                "By moves, a second.",
                "Bps",
                ((_rate("copy_bytes_total", "kind"), "{{{{kind}}}}"),),
            ),
            Panel(
                "Copies",
                "Bytes a second of copies while they run, and what is still to come.",
                "bytes",
                (
                    (
                        f"{_rate('copied_bytes_total')} / {_rate('copy_seconds_total')}",
                        "bytes a second of copying",
                    ),
                    ("max({m}copying_bytes)", "to come"),
                ),
            ),
            Panel(
                "Where copies come from",
                "Bytes a second.",
                "Bps",
                ((_rate("copied_bytes_total", "source"), "{{{{source}}}}"),),
            ),
            Panel(
                "Copies held back",
                "Share of their time that copies wait for limits.copy_bytes_per_s.",
                "percentunit",
                (
                    (
                        f"{_rate('copy_wait_seconds_total')} / {_rate('copy_seconds_total')}",
                        "held back",
                    ),
                ),
            ),
        ),
    ),
    (
        "Memory",
        (
            Panel(
                "Slot memory",
                "Of all ranks: used by experts, reserved for copies, free.",
                "bytes",
                (("sum by (use) (max by (rank, use) ({m}rank_memory_bytes))", "{{{{use}}}}"),),
            ),
            Panel(
                "Free by rank",
                "Bytes of slots that nothing holds.",
                "bytes",
                (('max by (rank) ({m}rank_memory_bytes{{use="free"}})', "rank {{{{rank}}}}"),),
            ),
            Panel(
                "Slots",
                "Of all ranks by use.",
                "short",
                (("max by (state) ({m}slots)", "{{{{state}}}}"),),
            ),
            Panel(
                "Fragmentation",
                "Share of free slot memory outside its largest piece.",
                "percentunit",
                (("max by (rank) ({m}rank_fragmentation_ratio)", "rank {{{{rank}}}}"),),
            ),
            Panel(
                "Host cache",
                "Bytes of experts that each node keeps ready.",
                "bytes",
                (("max by (node) ({m}host_cache_bytes)", "{{{{node}}}}"),),
            ),
        ),
    ),
    (
        "Forecast",
        (
            Panel(
                "Forecast error",
                "Balance lost because the next window is not known: 1 - the score of the "
                "forecasters that layers follow.",
                "percentunit",
                (("max by (phase) ({m}forecast_error_ratio)", "{{{{phase}}}}"),),
            ),
            Panel(
                "What windows came to",
                "Verdicts, as shares.",
                "percentunit",
                (
                    (
                        f"sum by (verdict) (increase({{m}}windows_total{RATE})) / ignoring "
                        f"(verdict) group_left () sum(increase({{m}}windows_total{RATE}))",
                        "{{{{verdict}}}}",
                    ),
                ),
            ),
        ),
    ),
    (
        "Controller",
        (
            Panel(
                "State",
                "1 where it is so.",
                "short",
                (
                    ("max({m}rebalancing)", "a plan runs"),
                    ("max({m}paused)", "paused"),
                    ("max({m}rebalance_stalled)", "stands still"),
                ),
            ),
            Panel(
                "Ranks",
                "By status.",
                "short",
                (("max by (status) ({m}ranks)", "{{{{status}}}}"),),
            ),
            Panel(
                "Age of the last word",
                "Seconds since each rank answered, when the last window closed.",
                "s",
                (("max by (rank) ({m}rank_report_age_seconds)", "rank {{{{rank}}}}"),),
            ),
            Panel(
                "Age of the last window",
                "Beyond a few windows the controller is away.",
                "s",
                (
                    ("time() - max({m}window_closed_timestamp_seconds)", "age"),
                    ("max({m}window_seconds)", "length of a window"),
                ),
            ),
            Panel(
                "Term and epoch",
                "A new term is a new controller, a new epoch a new routing table.",
                "short",
                (("max({m}term)", "term"), ("max({m}epoch)", "epoch")),
            ),
            Panel(
                "Version",
                "Of the controller, and the model it serves.",
                "short",
                (("max by (version, model) ({m}build_info)", "{{{{version}}}} {{{{model}}}}"),),
                "stat",
            ),
            Panel(
                "Wrong with the metrics themselves",
                "Plans that stood still, and samples that were left out.",
                "short",
                (
                    ("max({m}plans_stalled_total)", "plans that stood still"),
                    ("sum({m}series_dropped_total)", "samples left out"),
                ),
            ),
        ),
    ),
)
"""Rows of panels, top down."""
