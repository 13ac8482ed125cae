"""moe-serve run as the pages of the documentation write it, command by command.

The interpreter is loaded once and forked for each command: loading takes a second of processor
time, and pages have dozens of commands.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.cli_process import CALL_TIMEOUT_S, Shell, said
from tests.doc_blocks import Block

FOR_EVER = frozenset({"--watch", "events -f"})
"""By what a command is known that ends when somebody ends it: once it has said something."""
TRIAL_S = "2"
"""Seconds of a load test, whatever the page says."""
POLL_S = 0.05
PLAN_ID = re.compile(r"Run: moe-serve apply (\S+)")
INTERRUPTED = 130
PRELOADED = ["moe_serve.cli.app", "moe_serve.cli.admin", "tests.page_shell"]


def _moe_serve(words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
    """In the forked process: the command line between the files of `folder`."""
    for name, mode, stream in (("in", "r", 0), ("out", "w", 1), ("err", "w", 2)):
        with (folder / f".{name}").open(mode) as file:
            os.dup2(file.fileno(), stream)
    sys.stdin = os.fdopen(0, "r")
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = ["moe-serve", *words]
    from moe_serve.cli import main

    main()


@dataclass
class PageShell:
    """Runs blocks as `shell`'s user, in `folder`. `places`: what stands for a word of a page. The
    plan that `plan` names last becomes `PLAN_ID`. `codes`: exit codes that a command may end with,
    where they are not 0 alone. `elsewhere`: lines that something else runs."""

    shell: Shell
    folder: Path
    places: dict[str, str] = field(default_factory=dict)
    codes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    elsewhere: Collection[str] = ()

    def block(self, block: Block) -> None:
        """Run each command of a block and show what it said."""
        for words in block.commands:
            if " ".join(words) not in self.elsewhere:
                self.command(words)

    def command(self, words: Sequence[str]) -> str:
        """Run a command line; what it said on stdout. Its exit code must be one of its codes."""
        line, program = " ".join(words), words[0]
        assert program == "moe-serve", line
        placed = [self.places.get(word, word) for word in words[1:]]
        if placed[0] == "bench":
            placed += ["--seconds", TRIAL_S]
        ends = not any(f" {mark}" in line for mark in FOR_EVER)
        done = self._run(placed, ends=ends)
        print(f"\n$ {line}\n{done.stdout}{done.stderr}")
        assert done.returncode in self.codes.get(line, (0 if ends else INTERRUPTED,)), said(done)
        if found := PLAN_ID.search(done.stdout):
            self.places["PLAN_ID"] = found[1]
        return done.stdout

    def _run(self, words: Sequence[str], *, ends: bool) -> subprocess.CompletedProcess[str]:
        self.folder.mkdir(exist_ok=True)
        (self.folder / ".in").write_text("y\n")  # to whatever is asked
        (self.folder / ".out").write_text("")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        process = context.Process(
            target=_moe_serve, args=(words, self.folder, self.shell.environment)
        )
        process.start()
        try:
            deadline_s = time.monotonic() + CALL_TIMEOUT_S
            while not ends and not (self.folder / ".out").stat().st_size:
                assert process.is_alive(), words
                assert time.monotonic() < deadline_s, words
                time.sleep(POLL_S)
            if not ends:
                assert process.pid is not None
                os.kill(process.pid, signal.SIGINT)
            process.join(CALL_TIMEOUT_S)
            code = process.exitcode
            assert code is not None, f"{words} does not end"
        finally:
            process.kill()
            process.join()
        out, err = ((self.folder / name).read_text() for name in (".out", ".err"))
        return subprocess.CompletedProcess(list(words), code, out, err)
