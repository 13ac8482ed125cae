"""The page of metrics, docs/reference/metrics.md, from the registry.

Called by `docs.make_reference`.
"""

from __future__ import annotations

from moe_serve.telemetry.alerts import ALERTS
from moe_serve.telemetry.registry import (
    DEFAULT_SERIES_MAX,
    DEFAULT_SIZE,
    SERIES_MAX,
    TOPICS,
    series_at,
)
from moe_serve.telemetry.spec import SCALE_MAX, MetricSpec, Scale


def metrics_page(note: str) -> str:
    """The page. `note`: the line that says who writes it."""
    size = DEFAULT_SIZE
    most = ", ".join(
        f"{SCALE_MAX[scale]} {scale.value}"
        for scale in (Scale.LAYERS, Scale.RANKS, Scale.ROUTERS, Scale.NODES)
    )
    lines = [
        "# Metrics",
        "",
        note,
        "",
        "Two exporters tell the same. Ray's agent on each node, with the prefix `ray_` and labels "
        "of its own, where the packages of `ray[default]` are installed;",
        "and the controller at `/metrics` of `ports.metrics`, in Prometheus' text format or in "
        "OpenMetrics, routers included. Both may be on at once. The port asks",
        "for a `read` token where the service has tokens, and speaks TLS where it has TLS files.",
        "",
        f"A service of {size.layers} layers x {size.ranks} ranks with {size.routers} routers on "
        f"{size.nodes} nodes has {series_at(size)} series (at most {DEFAULT_SERIES_MAX});",
        f"`moe-serve metrics series` counts for other sizes. Beyond {most}",
        f"further ones are left out and counted, so that there are never more than {SERIES_MAX}.",
        "",
        "Counters of the controller begin at 0 with each of its lives; those of routers with each "
        "router's. Gauges are of the last closed window. Imbalance is 1 / balancedness - 1.",
        "Through Ray a counter is there from its first growth on, and `stage_seconds` is made of "
        "gauges with the names of a histogram's series.",
        "",
    ]
    for topic, specs in TOPICS.items():
        lines += [f"## {topic}", "", "| Metric | Kind | Labels | Series | Meaning |"]
        lines += ["|---|---|---|---|---|", *(_row(spec) for spec in specs), ""]
    lines += [
        "## Alerts",
        "",
        "`moe-serve metrics rules` prints them, `moe-serve metrics dashboard` a Grafana dashboard, "
        "`moe-serve metrics scrape` a configuration of Prometheus;",
        "all three lie in [deploy/monitoring](../../deploy/monitoring/).",
        "",
        "| Alert | Severity | Holds for | What to do |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| `MoeServe{alert.name}` | {alert.severity} | {alert.after} | "
        f"[{alert.name}](../runbooks/{alert.runbook}) |"
        for alert in ALERTS
    ]
    return "\n".join([*lines, ""])


def _row(spec: MetricSpec) -> str:
    kind = "histogram" if spec.buckets else spec.kind.value
    labels = "<br>".join(_label(label, spec) for label in spec.labels) or "none"
    text = spec.text
    if spec.when:
        text += f" First when {spec.when}." if not spec.opt_in else ""
    if spec.buckets:
        text += " Bounds: " + ", ".join(f"{bound:g}" for bound in spec.buckets) + " s."
    return f"| `{spec.name}` | {kind} | {labels} | {spec.series(DEFAULT_SIZE)} | {text} |"


def _label(label: str, spec: MetricSpec) -> str:
    values = spec.values[label]
    if isinstance(values, Scale):
        return f"`{label}`"
    return f"`{label}`: " + ", ".join(values)
