"""A configuration for a plain Prometheus, as data.

Responsible for the two ways to scrape: the controller's metrics port, and Ray's exporters by the
file in which Ray lists them. Used by `moe-serve metrics scrape`.
"""

from __future__ import annotations

from typing import Any, Final

RAY_TARGETS: Final = "/tmp/ray/prom_metrics_service_discovery.json"  # noqa: S108 - where Ray puts it
INTERVAL: Final = "10s"


def scrape_config(target: str | None) -> dict[str, Any]:
    """Prometheus' file. target: host:port of `ports.metrics`; None = scrape Ray's exporters."""
    job: dict[str, Any] = (
        {"job_name": "moe-serve", "static_configs": [{"targets": [target]}]}
        if target is not None
        else {"job_name": "ray", "file_sd_configs": [{"files": [RAY_TARGETS]}]}
    )
    return {
        "global": {"scrape_interval": INTERVAL, "evaluation_interval": INTERVAL},
        "rule_files": ["alert-rules.yaml"],
        "scrape_configs": [job],
    }
