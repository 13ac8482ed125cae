"""Dashboard, alerts and runbooks speak of metrics that there are, and the files that are shipped
are what the code makes."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from docs.make_monitoring import FILES, FOLDER, TARGET
from moe_serve.cli.app import app
from moe_serve.errors import ResourceExhausted
from moe_serve.ports import RouterReport
from moe_serve.router.permits import Permits
from moe_serve.router.pulse import Pulse
from moe_serve.telemetry import MemorySink, Metrics
from moe_serve.telemetry.alerts import ALERTS, RUNBOOKS, expression, rules
from moe_serve.telemetry.grafana import COLUMNS, dashboard, queries
from moe_serve.telemetry.registry import METRICS
from moe_serve.telemetry.router_figures import RouterFigures
from moe_serve.telemetry.spec import Scale
from placement.roles.admission import Admission
from tests.promql import grouping, selectors

ROOT = Path(__file__).resolve().parents[3]
EXPRESSIONS = [*queries(), *(alert.expr for alert in ALERTS)]
HEADS = [
    "## What it means",
    "## How to see it",
    "## Likely causes",
    "## What to do",
    "## When it can wait",
]


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_an_expression_names_metrics_and_labels_that_there_are(text: str) -> None:
    found = selectors(expression(text))
    assert found
    known = frozenset[str]().union(*(selector.labels for selector in found))
    assert grouping(text) <= known
    for selector in found:
        for label, operator, wanted in selector.matchers:
            assert label in selector.labels
            values = selector.spec.values[label]
            if operator in ("=", "!=") and not isinstance(values, Scale):
                assert wanted in values, selector.text


def test_every_metric_is_looked_at_by_a_panel_or_is_to_be_asked_for() -> None:
    seen = {selector.spec.name for text in queries() for selector in selectors(expression(text))}
    assert {name for name, spec in METRICS.items() if not spec.opt_in} - seen == set()


def test_every_alert_has_a_page_and_every_page_an_alert() -> None:
    folder = ROOT / RUNBOOKS
    assert {path.name for path in folder.iterdir()} == {alert.runbook for alert in ALERTS}
    for alert in ALERTS:
        text = (folder / alert.runbook).read_text(encoding="utf-8")
        lines = text.splitlines()
        assert lines[0] == f"# {alert.name}"
        assert f"`MoeServe{alert.name}`" in lines[2]
        assert f"it must hold for {alert.after}" in lines[2]
        assert [line for line in lines if line.startswith("## ")] == HEADS
        assert "`moe-serve " in text


@pytest.mark.asyncio
async def test_requests_are_refused_for_want_of_permits_and_not_for_their_form() -> None:
    """What a router counts, what is told of it, and the series that the alert adds up."""
    admission = Admission(permits_max=1, rows_max=8, queue_max=0)
    permits, pulse, sink = Permits(admission, lambda: 0.0), Pulse(lambda: 0.0), MemorySink()
    figures = RouterFigures(Metrics(sink), "router-0")
    (alert,) = (alert for alert in ALERTS if alert.name == "RequestsRefused")
    (selector,) = selectors(expression(alert.expr))
    ((label, _, outcome),) = selector.matchers
    assert label == "outcome"

    def seen() -> float:
        report = RouterReport("router-0", 1, 0, 0, (), (), pulse.counters() | permits.counters())
        figures.tell(report)
        return sink.values[selector.spec.name, ("router-0", outcome)]

    pulse.add("refused_requests")  # malformed: a caller's fault
    await permits.take(1, 10.0)
    assert seen() == 0.0
    with pytest.raises(ResourceExhausted):
        await permits.take(1, 10.0)
    assert seen() == 1.0


def test_alerts_are_complete() -> None:
    assert len({alert.name for alert in ALERTS}) == len(ALERTS)
    for rule in rules("ray_")["groups"][0]["rules"]:
        assert rule["for"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["summary"].endswith(".")
        assert "ray_moe_serve_" in rule["expr"]
        assert " moe_serve_" not in rule["expr"]


@pytest.mark.parametrize("name", sorted(FILES))
def test_the_shipped_file_is_what_the_code_makes(name: str) -> None:
    written = (FOLDER / name).read_text(encoding="utf-8")
    assert written == FILES[name](), "run: python -m docs.make_monitoring"


def test_every_shipped_file_has_a_writer() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(FILES)


# ------------------------------------------------------------------------------------- dashboard


def panels() -> Iterator[dict[str, Any]]:
    yield from dashboard()["panels"]


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= COLUMNS
        assert not cells & taken, panel["title"]
        taken |= cells
    numbers = [panel["id"] for panel in panels()]
    assert len(set(numbers)) == len(numbers)


def test_panels_ask_the_chosen_source_in_its_own_names() -> None:
    named = {variable["name"] for variable in dashboard()["templating"]["list"]}
    assert named == {"DS_PROMETHEUS", "prefix"}
    for panel in panels():
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == "${DS_PROMETHEUS}"
            assert "${prefix}moe_serve_" in target["expr"]
            assert "{m}" not in target["expr"]
            assert "{{{" not in target["legendFormat"]
        assert panel["type"] == "row" or panel["description"].endswith(".")


def test_rows_come_in_the_order_of_questions() -> None:
    rows = [panel["title"] for panel in panels() if panel["type"] == "row"]
    assert rows == [
        "Balance",
        "Load",
        "Dispatch",
        "Plans and moves",
        "Memory",
        "Forecast",
        "Controller",
    ]


# ---------------------------------------------------------------------------------- command line


def said(*args: str) -> str:
    result = CliRunner().invoke(app, ["metrics", *args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_series_are_counted_for_a_given_size() -> None:
    size = ["--layers", "58", "--ranks", "32", "--routers", "2", "--nodes", "4"]
    shown = said("series", *size)
    assert "894 series at 58 layers x 32 ranks, 2 routers, 4 nodes" in shown
    found = json.loads(said("series", *size, "-o", "json"))
    assert found["series"] == sum(metric["series"] for metric in found["metrics"]) == 894
    (moves,) = (m for m in found["metrics"] if m["name"] == "moe_serve_moves_total")
    assert moves["labels"]["outcome"] == ["done", "aborted"]
    assert moves["kind"] == "counter"
    more = json.loads(said("series", *size, "--experts", "8", "--per-expert", "-o", "json"))
    assert more["series"] == 894 + 58 * 8


def test_dashboard_rules_and_configuration_are_printed() -> None:
    assert json.loads(said("dashboard")) == dashboard()
    assert yaml.safe_load(said("rules")) == rules()
    assert yaml.safe_load(said("rules", "--exporter", "ray")) == rules("ray_")
    (job,) = yaml.safe_load(said("scrape", "--target", "h:1"))["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["h:1"]}]
    (job,) = yaml.safe_load(said("scrape", "--exporter", "ray"))["scrape_configs"]
    assert "file_sd_configs" in job
    assert TARGET in said("scrape")


@pytest.mark.parametrize("url", ["https://wiki.example/run", "https://wiki.example/run/"])
def test_runbooks_may_be_elsewhere(url: str) -> None:
    """Annotations of an alert are read where nobody has this repository."""
    usual, moved = said("rules"), said("rules", "--runbooks", url)
    pages = [rule["annotations"]["runbook_url"] for rule in _alerts_of(moved)]
    assert pages == [f"https://wiki.example/run/{alert.runbook}" for alert in ALERTS]
    assert moved.replace("https://wiki.example/run/", RUNBOOKS) == usual


@pytest.mark.parametrize("url", ["", " ", "https://a b", "a\nb", "a\tb", "a\u2028b", "a\udcffb"])
def test_runbooks_are_somewhere(url: str) -> None:
    result = CliRunner().invoke(app, ["metrics", "rules", "--runbooks", url])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: --runbooks {url!r} is no address and no folder")


@pytest.mark.parametrize(
    "target",
    [
        *("", "h", "h:", ":1", "h:0", "h:65536", "h:1\n", "a\nb:1", "h b:1", "http://h:1"),
        *("h:\u0661", "u@h:1", "::1:9", "[::1]", "a\udcff:1"),
    ],
)
def test_a_target_that_is_no_place_is_refused(target: str) -> None:
    result = CliRunner().invoke(app, ["metrics", "scrape", "--target", target])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: --target {target!r} is not host:port")


@pytest.mark.parametrize("target", ["moe-serve.ns.svc:9464", "10.0.0.7:1", "[fd00::7]:65535"])
def test_a_target_is_a_name_or_an_address_with_a_port(target: str) -> None:
    (job,) = yaml.safe_load(said("scrape", "--target", target))["scrape_configs"]
    assert job["static_configs"] == [{"targets": [target]}]


def _alerts_of(text: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load(text)["groups"][0]["rules"]
    return found


# ------------------------------------------------------------------------------ promtool's tests
#
# Each alert with samples on which it must fire, and quiet ones on which it must not. Series are in
# promtool's notation: first value, then what is added, how often, one sample a minute.

FLAT = "x90"
FIRING: dict[str, dict[str, str]] = {
    "ControllerAway": {"window_seconds": "2+0" + FLAT, "window_closed_timestamp_seconds": "9+0x90"},
    "ExpertMissing": {'experts{state="missing"}': "2+0x90"},
    "RankLost": {'ranks{status="lost"}': "1+0x90"},
    "RequestsFail": {
        'requests_total{router="r",outcome="served"}': "0+60x90",
        'requests_total{router="r",outcome="failed"}': "0+2x90",
    },
    "RequestsRefused": {'requests_total{router="r",outcome="rejected"}': "0+2x90"},
    "RankSilent": {'rank_report_age_seconds{rank="3"}': "7+0x90", "window_seconds": "2+0x90"},
    "RankBehind": {'rank_backlog_seconds{rank="3"}': "1.5+0x90"},
    "Imbalanced": {"balancedness_ratio": "0.5+0x90", "moves_under_way": "0+0x90"},
    "PlansThrash": {'plans_total{policy="incremental",outcome="done"}': "0+2x90"},
    "PlanStalled": {"rebalance_stalled": "1+0x90"},
    "PlannerFails": {'plans_total{policy="incremental",outcome="failed"}': "0+1x90"},
    "MovesFail": {'moves_total{kind="migrate",outcome="aborted"}': "0+1x90"},
    "SlowWhileMoving": {
        'request_seconds{router="r",quantile="p99"}': "0.01+0x70 0.5+0x20",
        "moves_under_way": "3+0x90",
    },
    "SlowWire": {
        **{f'rank_sub_calls_total{{rank="{n}"}}': "0+600x90" for n in range(4)},
        **{f'rank_wire_seconds_total{{rank="{n}"}}': "0+0.6x90" for n in range(3)},
        'rank_wire_seconds_total{rank="3"}': "0+60x90",
    },
    "LoopLags": {'loop_lag_seconds{router="r"}': "0.2+0x90"},
    "CopiesHeldBack": {"copy_seconds_total": "0+10x90", "copy_wait_seconds_total": "0+9x90"},
    "ForecastPoor": {'forecast_error_ratio{phase="decode"}': "0.6+0x90"},
    "GainNotRealised": {
        'plan_gain_ratio{figure="expected"}': "0.4+0x90",
        'plan_gain_ratio{figure="realised"}': "0.05+0x90",
    },
    "PausedForLong": {"paused": "1+0x90"},
    "SeriesDropped": {"series_dropped_total": "0+5x90"},
}
QUIET: dict[str, dict[str, str]] = {
    "ControllerAway": {"window_seconds": "2+0x90", "window_closed_timestamp_seconds": "0+60x90"},
    "ExpertMissing": {'experts{state="missing"}': "0+0x90", 'experts{state="listed"}': "9+0x90"},
    "RankLost": {'ranks{status="lost"}': "0+0x90", 'ranks{status="live"}': "4+0x90"},
    "RequestsFail": {
        'requests_total{router="r",outcome="served"}': "0+600x90",
        'requests_total{router="r",outcome="failed"}': "0+2x90",
    },
    "RequestsRefused": {
        'requests_total{router="r",outcome="rejected"}': "7+0x90",
        'requests_total{router="r",outcome="refused"}': "0+2x90",
    },
    "RankSilent": {'rank_report_age_seconds{rank="3"}': "5+0x90", "window_seconds": "2+0x90"},
    "RankBehind": {'rank_backlog_seconds{rank="3"}': "0.5+0x90"},
    "Imbalanced": {"balancedness_ratio": "0.5+0x90", "moves_under_way": "3+0x90"},
    "PlansThrash": {'plans_total{policy="none",outcome="done"}': "0+2x90"},
    "PlanStalled": {"rebalance_stalled": "0+0x90"},
    "PlannerFails": {'plans_total{policy="incremental",outcome="kept"}': "0+1x90"},
    "MovesFail": {'moves_total{kind="migrate",outcome="done"}': "0+9x90"},
    "SlowWhileMoving": {
        'request_seconds{router="r",quantile="p99"}': "0.01+0x70 0.5+0x20",
        "moves_under_way": "0+0x90",
    },
    "SlowWire": {
        **{f'rank_sub_calls_total{{rank="{n}"}}': "0+600x90" for n in range(4)},
        **{f'rank_wire_seconds_total{{rank="{n}"}}': "0+60x90" for n in range(4)},
    },
    "LoopLags": {'loop_lag_seconds{router="r"}': "0.2 0 0.2 0 0.2 0 0.2 0.01+0x80"},
    "CopiesHeldBack": {"copy_seconds_total": "0+0x90", "copy_wait_seconds_total": "0+0x90"},
    "ForecastPoor": {'forecast_error_ratio{phase="decode"}': "0.2+0x90"},
    "GainNotRealised": {
        'plan_gain_ratio{figure="expected"}': "0.4+0x90",
        'plan_gain_ratio{figure="realised"}': "0.3+0x90",
    },
    "PausedForLong": {"paused": "1+0x20 0+0x70"},
    "SeriesDropped": {"series_dropped_total": "5+0x90"},
}
LOOKED_AT = "80m"


def test_every_alert_is_shown_to_fire_and_to_keep_quiet() -> None:
    assert set(FIRING) == set(QUIET) == {alert.name for alert in ALERTS}


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool (Debian: apt-get install prometheus)"
)
@pytest.mark.parametrize("prefix", ["", "ray_"])
def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path, prefix: str) -> None:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules(prefix)), encoding="utf-8")
    cases = []
    for name, series, fires in (
        *((name, series, True) for name, series in FIRING.items()),
        *((name, series, False) for name, series in QUIET.items()),
    ):
        metric = f"{prefix}moe_serve_"
        wanted = {"exp_alerts": []} if not fires else {}
        cases.append(
            {
                "interval": "1m",
                "input_series": [
                    {"series": metric + one, "values": values} for one, values in series.items()
                ],
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="MoeServe{name}",alertstate="firing"}})',
                        "eval_time": LOOKED_AT,
                        "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
                    }
                ],
                **(
                    {}
                    if fires
                    else {
                        "alert_rule_test": [
                            {"eval_time": LOOKED_AT, "alertname": f"MoeServe{name}", **wanted}
                        ]
                    }
                ),
            }
        )
    test = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": cases}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(test), encoding="utf-8")
    done = subprocess.run(
        ["promtool", "test", "rules", "test.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
