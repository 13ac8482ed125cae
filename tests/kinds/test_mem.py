"""Memory that is not given back: whatever moves a thousand times leaves bytes, descriptors,
threads, tasks and pins as they were."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.cli_process import ROOT
from tests.fakes.marker_experts import marker_model
from tests.kinds.moved_often import PARTS, TIMES, Seen

pytestmark = [pytest.mark.loopback, pytest.mark.timeout(180)]

ALLOWED = 2
"""Descriptors, threads and tasks more than before."""


def seen_of(what: str) -> Seen:
    """Figures of `moved_often`; their least-squares slopes are printed."""
    command = [sys.executable, "-m", "tests.kinds.moved_often", what]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen: Seen = json.loads(done.stdout.splitlines()[-1])
    for name, values in seen.items():
        slope = np.polyfit(np.arange(len(values)), values, 1)[0] / (TIMES / PARTS) * 100
        print(f"{what}: {name} {values[0]:.0f} -> {values[-1]:.0f}, {slope:+.2f} per 100")
    return seen


def test_an_expert_that_moves_back_and_forth_leaves_nothing_behind() -> None:
    seen = seen_of("migration")
    for name in ("held_bytes", "slab_bytes", "loaded_bytes"):
        assert seen[name][-1] == seen[name][0], name
    assert seen["held_bytes"][0] == marker_model().expert.held_bytes
    assert seen["pinned_slots"][-1] == 0
    for name in ("descriptors", "threads", "open_copies", "threads_of_none"):
        assert seen[name][-1] <= seen[name][0] + ALLOWED, (name, seen[name])


def test_a_router_that_connects_anew_a_thousand_times_leaves_nothing_behind() -> None:
    seen = seen_of("reconnects")
    for name in ("descriptors", "threads", "tasks"):
        assert seen[name][-1] <= seen[name][0] + ALLOWED, (name, seen[name])
