"""The demo as a person runs it, short, with one deliberate fault that it has to find.

Bars that need a quiet machine (balance, moves of each kind, samples during moves) are printed, not
asserted: the full run of a minute is `make demo`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, NamedTuple

import pytest

SECONDS = 12


class Run(NamedTuple):
    """Exit code, the figures of the file, and both streams."""

    status: int
    found: dict[str, Any]
    out: str
    err: str


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("demo")
    figures = folder / "figures.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "moe_serve", "demo", "--no-dashboard", "--quiet"),
            *("--seconds", str(SECONDS), "--json", str(figures), "--inject", "double-one"),
            *("-o", "json"),
        ],
        env={**os.environ, "XDG_STATE_HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert figures.exists(), f"no figures; exit {done.returncode}: {done.stdout}{done.stderr}"
    return Run(done.returncode, json.loads(figures.read_text()), done.stdout, done.stderr)


def test_a_program_gets_the_figures_and_nothing_else_on_stdout(run: Run) -> None:
    assert json.loads(run.out) == run.found
    assert "» starting Ray" in run.err
    assert "missed: " in run.err


def test_a_doubled_contribution_is_found_and_nothing_else(run: Run) -> None:
    found = run.found
    print(
        {name: found[name] for name in ("tokens", "moves", "imbalance_static", "imbalance_served")}
    )
    assert found["contributions_doubled"] in (1, 2)  # one a router that was used
    assert found["contributions_lost"] == 0
    assert found["contributions_unknown"] == 0
    assert "contributions_doubled" in found["failed_checks"]
    assert run.status == 1
    assert "contributions_doubled" in run.err


def test_text_is_the_local_models_and_every_pair_is_accounted_for(run: Run) -> None:
    found = run.found
    assert found["tokens"] > 0
    assert found["failed_requests"] == 0
    assert found["greedy_samples"] >= 1
    assert found["demand_pairs"] == found["front_end_pairs"] > 0
    assert found["executed_pairs"] == found["demand_pairs"] + found["retried"] + found["hedged"]
    # One row of one call was added twice; every other logit agrees with the local model.
    assert found["parity_samples"] >= 4


def test_nothing_is_left_running(run: Run) -> None:
    left = [
        line
        for line in subprocess.run(
            ["ps", "-eo", "args"], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        if "moe-demo-" in line
    ]
    assert left == []
