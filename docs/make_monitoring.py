"""Write dashboard, alert rules and scrape configuration: `python -m docs.make_monitoring`.

They are what `moe-serve metrics dashboard`, `rules` and `scrape` print; a test fails where a file
under deploy/monitoring differs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from moe_serve.telemetry.alerts import rules
from moe_serve.telemetry.grafana import dashboard
from moe_serve.telemetry.scrape import scrape_config

FOLDER = Path(__file__).resolve().parents[1] / "deploy" / "monitoring"
TARGET = "127.0.0.1:9464"
_NOTE = "# Written by `python -m docs.make_monitoring`; a test compares this file with the code.\n"


def _yaml(tree: Any) -> str:
    return _NOTE + yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=1 << 16)


FILES: MappingProxyType[str, Callable[[], str]] = MappingProxyType(
    {
        "grafana-dashboard.json": lambda: json.dumps(dashboard(), indent=2) + "\n",
        "alert-rules.yaml": lambda: _yaml(rules()),
        "prometheus.yaml": lambda: _yaml(scrape_config(TARGET)),
    }
)
"""File under deploy/monitoring -> what writes it."""


def main() -> None:
    """Write all files."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in FILES.items():
        (FOLDER / name).write_text(text(), encoding="utf-8")
        print(f"deploy/monitoring/{name}")


if __name__ == "__main__":
    main()
