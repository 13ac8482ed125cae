"""`up` and the demo are killed while they start, and a keeper is told to end: nothing that they had
started is left."""

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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_kept_service_ends_with_its_keeper(shell: Shell) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "moe_serve", "up", "--keep", "-f", EXAMPLE],
        env=shell.environment,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as keeper:
        try:
            assert keeper.stdout is not None
            said = ""
            while "Next:" not in said:  # the test's own limit ends a start that hangs
                line = keeper.stdout.readline()
                assert line, said
                said += line
            assert shell.cli("status", "--check").returncode == 0
            keeper.send_signal(signal.SIGTERM)
            assert keeper.wait(120.0) == 0
        finally:
            keeper.kill()
    assert shell.left() == {}
    assert shell.cli("status").returncode == 3
