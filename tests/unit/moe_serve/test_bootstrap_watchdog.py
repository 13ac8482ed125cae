"""A program that is killed leaves none of the processes it started for a cluster, nor its folder;
one that comes to its end leaves them as they are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moe_serve.bootstrap.local_ray import end_family

WAIT_S = 30.0
PROGRAM = """
import os, subprocess, sys
from pathlib import Path
from moe_serve.bootstrap.watchdog import watched
folder, how = Path(sys.argv[1]), sys.argv[2]
(folder / "ray").mkdir()
with watched(folder / "ray", folder):
    # As Ray does: the node leads a group of its own, and so does what it starts.
    child = "import subprocess as s; s.run(['sleep', '600'], start_new_session=True)"
    node = subprocess.Popen(
        [sys.executable, "-c", child],
        env={**os.environ, "RAY_TMPDIR": str(folder / "ray")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    print(node.pid, flush=True)
    sys.stdin.readline()
    if how == "raise":
        raise KeyboardInterrupt
"""


def alive_with(ray_dir: Path) -> list[int]:
    """Processes of a cluster, in order."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            names = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"RAY_TMPDIR={ray_dir}".encode() in names:
            found.append(int(entry.name))
    return sorted(found)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[int]:
    """A process of another cluster, which is nobody's business."""
    environment = {**os.environ, "RAY_TMPDIR": str(tmp_path / "other")}
    with subprocess.Popen(["sleep", "600"], env=environment) as process:
        yield process.pid
        assert process.poll() is None
        process.kill()


def started(scratch: Path, how: str) -> subprocess.Popen[bytes]:
    """The program, once its node and the node's child run."""
    scratch.mkdir()
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(scratch), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert program.stdout is not None
    assert int(program.stdout.readline()) > 0
    wait_until(lambda: len(alive_with(scratch / "ray")) == 2)
    return program


@pytest.mark.parametrize("how", ["process", "group"])
def test_who_is_killed_leaves_nothing(tmp_path: Path, other: int, how: str) -> None:
    scratch = tmp_path / "moe-x"
    with started(scratch, "killed") as program:
        if how == "group":
            os.killpg(program.pid, signal.SIGKILL)
        else:
            program.kill()
        program.wait()
    wait_until(lambda: not alive_with(scratch / "ray") and not scratch.exists())
    assert alive_with(tmp_path / "other") == [other]


@pytest.mark.parametrize("how", ["return", "raise"])
def test_who_comes_to_its_end_hands_over(tmp_path: Path, how: str) -> None:
    scratch = tmp_path / "moe-x"
    with started(scratch, how) as program:
        before = alive_with(scratch / "ray")
        program.communicate(b"\n")
    # The program has waited for the watchdog's end, so nothing comes any more.
    assert alive_with(scratch / "ray") == before
    assert scratch.exists()
    end_family(str(scratch / "ray"))
    assert alive_with(scratch / "ray") == []


NODE = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={})
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_process_that_does_not_tell_whose_it_is_ends_with_the_session_of_its_node(
    tmp_path: Path,
) -> None:
    """As Ray's agents, whose titles are written over it."""
    folder = tmp_path / "ray"
    with subprocess.Popen(
        [sys.executable, "-c", NODE],
        env={**os.environ, "RAY_TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as node:
        assert node.stdout is not None
        child = int(node.stdout.readline())
        end_family(str(folder))
    wait_until(lambda: not Path(f"/proc/{child}").exists())
