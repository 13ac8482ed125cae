"""`up` and the demo are killed while they start: nothing that they had started is left."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli_process import ROOT, Shell
from tests.service_cluster import wait_until

EXAMPLE = "examples/tiny-moe.yaml"
PROGRESS_WAIT_S = 400.0


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    # Not below tmp_path: names of Ray's sockets must stay short.
    short = Path(tempfile.mkdtemp(prefix="k"))
    try:
        with Shell(tmp_path / "user", extra={"TMPDIR": str(short)}).cleaned() as user:
            yield user
            assert list(short.iterdir()) == []
    finally:
        shutil.rmtree(short, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("command", "once"),
    [
        (("up", "-f", EXAMPLE), "raylet"),
        (("up", "-f", EXAMPLE), "ray::ShardActor"),
        (("demo", "--seconds", "30", "--no-dashboard", "-q"), "ray::ShardActor"),
    ],
)
def test_a_start_that_is_killed_leaves_nothing(
    shell: Shell, command: tuple[str, ...], once: str
) -> None:
    program = subprocess.Popen(
        [sys.executable, "-m", "moe_serve", *command],
        env=shell.environment,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(
            f"{once} runs",
            lambda: any(once in line for line in shell.processes().values()),
            PROGRESS_WAIT_S,
        )
        assert program.poll() is None
        program.send_signal(signal.SIGKILL)
    finally:
        program.kill()
        program.wait()
    assert shell.left() == {}
    assert shell.cli("status").returncode == 3
