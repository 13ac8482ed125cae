"""A real Prometheus as a process of its own, on a port of its choice, for tests."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.service_cluster import wait_until

START_WAIT_S = 60.0
CALL_TIMEOUT_S = 30.0
LISTENS = re.compile(r'msg="Listening on" address=(127\.0\.0\.1:\d+)')
WHY = "needs `prometheus` and `promtool` (Debian: apt-get install prometheus)"

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")), reason=WHY
)


class BadExpression(Exception):
    """Prometheus refused an expression."""


@dataclass(frozen=True)
class Prometheus:
    """One that runs. `url`: of its API."""

    url: str

    def query(self, expr: str) -> list[Any]:
        """The samples of an expression, now. Raises BadExpression."""
        answer = self._get("query", {"query": expr})
        found: list[Any] = answer["data"]["result"]
        if answer["data"]["resultType"] == "scalar":
            found = [found]
        return found

    def ready(self) -> bool:
        """Whether it has begun to answer: it listens before it can."""
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=CALL_TIMEOUT_S):  # noqa: S310
                return True
        except urllib.error.HTTPError as error:
            error.close()
            return False

    def targets_up(self) -> list[bool]:
        """Whether each target answered its last scrape."""
        targets = self._get("targets", {})["data"]["activeTargets"]
        return [target["health"] == "up" for target in targets]

    def rules(self) -> list[dict[str, Any]]:
        """Its rules, with their health and state."""
        groups = self._get("rules", {})["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def _get(self, what: str, fields: Mapping[str, str]) -> Any:
        url = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(fields)}"
        try:
            with urllib.request.urlopen(url, timeout=CALL_TIMEOUT_S) as answer:  # noqa: S310
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                raise BadExpression(f"{fields}: {error.read().decode()}") from None


@contextlib.contextmanager
def prometheus(config: Mapping[str, Any], folder: Path) -> Iterator[Prometheus]:
    """Runs with this configuration, whose relative paths begin at `folder`; ended afterwards."""
    file, log = folder / "prometheus.yaml", folder / "prometheus.log"
    file.write_text(yaml.safe_dump(dict(config)), encoding="utf-8")
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={file}",
                f"--storage.tsdb.path={folder / 'tsdb'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
    try:

        def listening() -> str:
            assert process.poll() is None, log.read_text(encoding="utf-8")
            found = LISTENS.search(log.read_text(encoding="utf-8"))
            return "" if found is None else found[1]

        address = wait_until("prometheus listens", listening, START_WAIT_S)
        running = Prometheus(f"http://{address}")
        wait_until("prometheus answers", running.ready, START_WAIT_S)
        yield running
    finally:
        process.terminate()
        process.wait(START_WAIT_S)
