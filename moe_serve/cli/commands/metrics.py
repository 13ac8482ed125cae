"""`moe-serve metrics`: the list of metrics, and what dashboards and alerts are made of."""

from __future__ import annotations

import json
import re
import sys
from enum import StrEnum
from typing import Annotated, Any

import typer
import yaml

from moe_serve.cli.beside import refuse_beside
from moe_serve.cli.exits import EPILOG
from moe_serve.cli.options import OutputOption
from moe_serve.cli.output import Output, OutputFormat, columns
from moe_serve.errors import InvalidArgument
from moe_serve.telemetry.alerts import RUNBOOKS
from moe_serve.telemetry.alerts import rules as alert_rules
from moe_serve.telemetry.grafana import dashboard as grafana_dashboard
from moe_serve.telemetry.registry import DEFAULT_SIZE, METRICS
from moe_serve.telemetry.scrape import scrape_config
from moe_serve.telemetry.spec import MetricSpec, Scale, Size

metrics_app = typer.Typer(
    help="The list of metrics, and what dashboards and alerts are made of. Needs no service.",
    no_args_is_help=True,
)
COUNT_MAX = 100_000
TARGET = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[^\s:/@\[\]]+):([0-9]{1,5})")
"""HOST:PORT."""


class Exporter(StrEnum):
    """Where a Prometheus finds the metrics."""

    PORT = "port"
    RAY = "ray"

    @property
    def prefix(self) -> str:
        """What stands before the names there."""
        return "ray_" if self is Exporter.RAY else ""


ExporterOption = Annotated[
    Exporter,
    typer.Option(help="The controller's ports.metrics, or Ray's exporter."),
]


def _count(text: str) -> Any:
    return typer.Option(min=1, max=COUNT_MAX, help=text)


def series(
    ctx: typer.Context,
    layers: Annotated[int, _count("Layers with experts.")] = DEFAULT_SIZE.layers,
    ranks: Annotated[int, _count("Ranks.")] = DEFAULT_SIZE.ranks,
    routers: Annotated[int, _count("Routers.")] = DEFAULT_SIZE.routers,
    nodes: Annotated[int, _count("Nodes.")] = DEFAULT_SIZE.nodes,
    experts: Annotated[int, _count("Experts of a layer.")] = DEFAULT_SIZE.experts,
    per_expert: Annotated[
        bool, typer.Option("--per-expert", help="Count what metrics.per_expert adds, too.")
    ] = False,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Every metric with its labels, its meaning and the series it makes at a given size."""
    if not per_expert:
        refuse_beside(
            ctx, ("experts",), "what is on by default", "it has no series of experts; --per-expert"
        )
    size = Size(layers=layers, ranks=ranks, routers=routers, nodes=nodes, experts=experts)
    out = Output(output)
    told = [spec for spec in METRICS.values() if per_expert or not spec.opt_in]
    total = sum(spec.series(size) for spec in told)
    table = columns(["METRIC", "KIND", "LABELS", "SERIES", "MEANING"], right=["SERIES"])
    for spec in told:
        labels = ",".join(spec.labels) or "-"
        table.add_row(spec.name, _kind(spec), labels, str(spec.series(size)), spec.text)
    words = f"{total} series at {layers} layers x {ranks} ranks, {routers} routers, {nodes} nodes"
    plain = [
        {
            "name": spec.name,
            "kind": _kind(spec),
            "labels": {
                label: values.value if isinstance(values, Scale) else list(values)
                for label, values in spec.values.items()
            },
            "series": spec.series(size),
            "text": spec.text,
            "when": spec.when,
        }
        for spec in told
    ]
    out.data({"series": total, "metrics": plain}, [table, "", words])


def dashboard() -> None:
    """Print a Grafana dashboard, to be imported: JSON.

    It asks for a data source, and whether that one scrapes Ray's exporter or `ports.metrics`.
    """
    sys.stdout.write(json.dumps(grafana_dashboard(), indent=2) + "\n")


def rules(
    exporter: ExporterOption = Exporter.PORT,
    runbooks: Annotated[
        str, typer.Option(metavar="URL", help="Where the pages of docs/runbooks are for you.")
    ] = RUNBOOKS,
) -> None:
    """Print alert rules for Prometheus: YAML.

    Each names its page in docs/runbooks.
    """
    if not _is_plain(runbooks):
        raise InvalidArgument(
            f"--runbooks {runbooks!r} is no address and no folder: it must be printable, "
            "without blanks; leave it out for the pages of the repository"
        )
    sys.stdout.write(_yaml(alert_rules(exporter.prefix, runbooks)))


def scrape(
    ctx: typer.Context,
    target: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where ports.metrics is served.")
    ] = "127.0.0.1:9464",
    exporter: ExporterOption = Exporter.PORT,
) -> None:
    """Print a configuration for Prometheus that scrapes the service and loads the rules: YAML."""
    if exporter is Exporter.RAY:
        refuse_beside(ctx, ("target",), "--exporter ray", "Ray lists its exporters in a file")
    elif not _is_target(target):
        raise InvalidArgument(
            f"--target {target!r} is not host:port; it is where ports.metrics is served"
        )
    sys.stdout.write(_yaml(scrape_config(None if exporter is Exporter.RAY else target)))


def _is_plain(text: str) -> bool:
    """Whether it stands in a file as it was given: something, printable, without blanks."""
    return bool(text) and text.isprintable() and " " not in text


def _is_target(text: str) -> bool:
    """Whether Prometheus takes it as a place: a name or an address, IPv6 in brackets, and a
    port."""
    found = TARGET.fullmatch(text)
    return _is_plain(text) and found is not None and 0 < int(found[1]) < 65_536


def _kind(spec: MetricSpec) -> str:
    return "histogram" if spec.buckets else spec.kind.value


def _yaml(tree: Any) -> str:
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=1 << 16)


for _command in (series, dashboard, rules, scrape):
    metrics_app.command(epilog=EPILOG)(_command)
