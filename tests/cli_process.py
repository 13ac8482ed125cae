"""moe-serve and other programs of ours as processes of their own, in an environment of their own,
and what is left of them.

Everything they start inherits the environment, so whatever is alive of it, on however many levels,
is found by the folder that it names.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CALL_TIMEOUT_S = 200.0
END_WAIT_S = 40.0

Done = subprocess.CompletedProcess[str]


@dataclass
class Shell:
    """A user of this machine with an own home and state folder under `folder`. `inside` is what
    every command line begins with. `extra` goes to the environment."""

    folder: Path
    inside: tuple[str, ...] = ()
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        ours = ("RAY_", "MOE_SERVE_", "PYTEST_")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        home = self.folder / "home"
        home.mkdir(parents=True, exist_ok=True)
        state = {"HOME": str(home), "XDG_STATE_HOME": str(self.folder / "state")}
        return {**kept, **state, "NO_COLOR": "1", "COLUMNS": "200", **self.extra}

    def run(self, *arguments: str, timeout_s: float = CALL_TIMEOUT_S, **extra: str) -> Done:
        """`python -m` of a module with arguments, to its end."""
        return subprocess.run(
            [*self.inside, sys.executable, "-m", *arguments],
            env={**self.environment, **extra},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def cli(self, *arguments: str, timeout_s: float = CALL_TIMEOUT_S, **extra: str) -> Done:
        """moe-serve with arguments; further keywords go to its environment."""
        return self.run("moe_serve", *arguments, timeout_s=timeout_s, **extra)

    def data(self, *arguments: str, **extra: str) -> Any:
        """What moe-serve prints as JSON; it must succeed."""
        done = self.cli(*arguments, "-o", "json", **extra)
        assert done.returncode == 0, said(done)
        return json.loads(done.stdout)

    def front_end(self, what: str, **arguments: Any) -> Any:
        """What `tests.front_end_process` found out, run as a process of its own."""
        done = self.run("tests.front_end_process", what, json.dumps(arguments))
        assert done.returncode == 0, said(done)
        return json.loads(done.stdout)

    def processes(self) -> dict[int, str]:
        """Everything alive that this user started, by process id."""
        mark = f"XDG_STATE_HOME={self.folder / 'state'}".encode()
        found = {}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(folder.name)] = command.decode(errors="replace").strip()[:120]
        return found

    def actors(self) -> set[int]:
        """Those that are parts of some service."""
        ours = (
            "ray::ShardActor",
            "ray::RouterActor",
            "ray::ControllerActor",
            "ray::DashboardActor",
        )
        return {pid for pid, command in self.processes().items() if command.startswith(ours)}

    def left(self, expected: Sequence[int] = ()) -> dict[int, str]:
        """What is alive beyond `expected` once everything had time to end."""
        deadline_s = time.monotonic() + END_WAIT_S
        while True:
            found = {p: c for p, c in self.processes().items() if c and p not in expected}
            if not found or time.monotonic() > deadline_s:
                return found
            time.sleep(0.2)

    @contextlib.contextmanager
    def cleaned(self) -> Iterator[Shell]:
        """Whatever a failed test left is ended, by process id."""
        try:
            yield self
        finally:
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def said(done: Done) -> str:
    """A process's words, for an assertion."""
    return f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"


def the_refusal(done: Done) -> str:
    """The one clear line a refused command printed, without its `error: `. Only the fields it
    names may follow, indented."""
    # Ray's own remarks to its drivers come whenever they come.
    lines = [line for line in done.stderr.splitlines() if "(raylet)" not in line]
    errors = [line for line in lines if line.startswith("error: ")]
    assert done.returncode == 1, said(done)
    assert done.stdout == "", said(done)
    assert len(errors) == 1, said(done)
    after = lines[lines.index(errors[0]) + 1 :]
    assert all(line.startswith("  ") for line in after), said(done)
    assert "Traceback" not in done.stderr, said(done)
    return errors[0].removeprefix("error: ")
