"""Ends a Ray cluster of ours where the program that started it dies before it handed it over.

A program that is killed (`kill -9`, out of memory) cannot clean up after itself, and the nodes it
started lead process groups of their own. So a small process of its own waits at a pipe whose other
end only that program holds: a word says that the cluster is handed over or ended, an end of file
without one that the program is dead.

Responsible for that one decision, and for leaving neither processes nor folder behind. Must never
end a process that does not name the cluster's folder, nor outlive the word. `up` is watched until
its record is written, the demo for its whole life.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moe_serve.bootstrap.local_ray import end_family

RELEASED = b"released\n"
"""The word that nothing is to be ended."""
RELEASE_WAIT_S = 10.0
"""Longest wait for the watchdog's own end after the word; it then has nothing to do any more."""


@contextmanager
def watched(ray_dir: Path, scratch: Path) -> Iterator[None]:
    """While inside, the death of this program ends every process of the cluster whose temporary
    folder is `ray_dir`, and removes `scratch`. Leaving says the word, however it is left: whoever
    is still alive cleans up by itself."""
    process = subprocess.Popen(  # noqa: S603 - every argument is ours
        [sys.executable, "-m", "moe_serve.bootstrap.watchdog", str(ray_dir), str(scratch)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C at the terminal is not meant for it
    )
    assert process.stdin is not None, "stdin is a pipe"
    try:
        yield
    finally:
        try:
            process.stdin.write(RELEASED)
            process.stdin.close()
            process.wait(RELEASE_WAIT_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            process.kill()
            process.wait()


def guard(ray_dir: str, scratch: str) -> None:
    """Wait for the word at stdin; end the cluster where it does not come."""
    if sys.stdin.buffer.read() == RELEASED:
        return
    end_family(ray_dir)
    shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    guard(sys.argv[1], sys.argv[2])
