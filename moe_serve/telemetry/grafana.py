"""A Grafana dashboard over the registry's metrics, as data.

Responsible for the form that Grafana imports. Must never choose what is shown (`panels` does). Used
by `moe-serve metrics dashboard`.

Two variables make it fit: `DS_PROMETHEUS` is the data source, `prefix` is `ray_` for Ray's exporter
and nothing for the metrics port.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from moe_serve.telemetry.panels import ROWS, Panel
from moe_serve.telemetry.spec import PREFIX

COLUMNS: Final = 24
"""Of Grafana's grid."""
PANEL_HEIGHT: Final = 8
SOURCE: Final = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}


def dashboard() -> dict[str, Any]:
    """The dashboard, as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": top},
                "panels": [],
            }
        )
        top += 1
        for at, panel in enumerate(row):
            across = _across(row)
            place = {
                "h": PANEL_HEIGHT,
                "w": COLUMNS // across,
                "x": at % across * (COLUMNS // across),
                "y": top + at // across * PANEL_HEIGHT,
            }
            panels.append(_drawn(panel, len(panels) + 1, place))
        top += -(-len(row) // _across(row)) * PANEL_HEIGHT
    return {
        "uid": "moe-serve",
        "title": "moe-serve",
        "description": "Experts of a Mixture-of-Experts model: balance, load, dispatch, moves.",
        "tags": ["moe-serve"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables()},
        "panels": panels,
    }


def queries() -> list[str]:
    """Every query of the dashboard, with `{m}` for what comes before a metric's own name."""
    return [text for _, row in ROWS for panel in row for text, _ in panel.queries]


def _across(row: Sequence[Panel]) -> int:
    return 2 if len(row) in (2, 4) else 3


def _variables() -> list[dict[str, Any]]:
    return [
        {
            "name": "DS_PROMETHEUS",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
            "current": {},
        },
        {
            "name": "prefix",
            "label": "Exporter",
            "description": "Ray's own exporter, or the controller's metrics port.",
            "type": "custom",
            "query": "Ray : ray_, metrics port : ",
            "current": {"text": "Ray", "value": "ray_"},
            "options": [
                {"text": "Ray", "value": "ray_", "selected": True},
                {"text": "metrics port", "value": "", "selected": False},
            ],
        },
    ]


def _drawn(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    drawn: dict[str, Any] = {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": SOURCE,
                "expr": text.format(m="${prefix}" + PREFIX),
                "legendFormat": legend.format(),
            }
            for at, (text, legend) in enumerate(panel.queries)
        ],
    }
    if panel.kind == "heatmap":
        # Viridis is read by people who are colour-blind, too.
        drawn["options"] = {
            "calculate": False,
            "color": {"mode": "scheme", "scheme": "Viridis", "steps": 64},
            "rowsFrame": {"layout": "auto"},
        }
    if panel.stacked:
        drawn["fieldConfig"]["defaults"]["custom"] = {
            "stacking": {"mode": "normal"},
            "fillOpacity": 40,
        }
    return drawn
