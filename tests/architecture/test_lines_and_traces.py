"""Every part's log says which part on which node; without a collector a part imports nothing of
OpenTelemetry."""

import ast
import json
import subprocess
import sys

import pytest

from tests.architecture.tree import ROOT, name_of, parsed, sources

PARTS = ("moe_serve.client", "moe_serve.router.service", "moe_serve.shard.assembly")
TEXT = """
import json, sys
import {parts}
from moe_serve.telemetry.traces import TraceSettings, open_traces
open_traces(TraceSettings({endpoint!r}), service="s", part="p", node="n").close()
print(json.dumps([name for name in sys.modules if name.startswith("opentelemetry")]))
"""


def _imported(endpoint: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", TEXT.format(parts=", ".join(PARTS), endpoint=endpoint)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[str] = json.loads(done.stdout)
    return found


@pytest.mark.timeout(180)  # each imports numba's kernels
def test_without_a_collector_nothing_of_it_is_imported() -> None:
    assert _imported("") == []
    assert "opentelemetry.sdk.trace" in _imported("http://127.0.0.1:1"), "what is looked for"


def test_every_logger_of_a_part_names_part_and_node() -> None:
    found = {}
    for path in sources("moe_serve"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "make_logger":
                found[f"{name_of(path)}:{node.lineno}"] = {word.arg for word in node.keywords}
    assert len(found) >= 5
    handed_on = {None}  # whatever the caller was given
    assert {k: v for k, v in found.items() if not ({"part", "node"} <= v or handed_on <= v)} == {}
