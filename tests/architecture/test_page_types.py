"""The types that the page's modules name in comments, where there is a compiler to check them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "vendor-js"
NODE = shutil.which("node")
COMPILER = Path(os.environ.get("TSC", FOLDER / "node_modules" / ".bin" / "tsc"))


def missing() -> str:
    """What the check needs and this machine has not, "" where it has all."""
    if NODE is None:
        return "node is not installed: the page's types are not checked"
    if not COMPILER.exists():
        return f"{COMPILER} is not there: run `npm ci --ignore-scripts` in {FOLDER.name}"
    return ""


@pytest.mark.skipif(missing() != "", reason=missing() or "-")
@pytest.mark.timeout(120)
def test_the_types_of_the_pages_modules_hold() -> None:
    assert NODE is not None
    done = subprocess.run(
        [NODE, "check-types.mjs"],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
