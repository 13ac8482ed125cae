"""Facts of a real process as lines of a file, for tests that check a service's promises from
outside.

A fact is in the file before whatever follows from it can leave the process: what a killed process
noted last may be missing only where nobody else has seen an effect of it. Facts of BUFFERED kinds
lead to no effect; they are written with the next other one, or after FLUSH_S.

Responsible for the file and for the order of its lines. Must never judge a fact, and never fail its
caller: where the disk takes no more, noting ends and the gap shows in the counts. Made by actors
whose settings name a folder; production settings name none.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any, Final

from placement.messages.history import (
    Fact,
    MemoryUsed,
    RequestBegun,
    RequestOpened,
    RouterHeard,
    RouterHolds,
    StallReported,
    to_line,
)

BUFFERED: Final = frozenset(
    {MemoryUsed, RequestBegun, RequestOpened, RouterHeard, RouterHolds, StallReported}
)
FLUSH_S = 0.05
"""Longest time for which a noted fact is only in memory."""


class FactLog:
    """The facts of one process. Safe to call from several threads.

    folder: made where it is not there. place: what the process is, "rank2"; the file is
    `<place>-<process id>.jsonl`.
    """

    def __init__(self, folder: str, place: str) -> None:
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self._file = os.open(
            path / f"{place}-{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )
        self._lock = threading.Lock()
        self._lines: list[bytes] = []
        self._ended = threading.Event()
        self._flusher = threading.Thread(target=self._flush_now_and_then, daemon=True)
        self._flusher.start()

    def life(self, who: str) -> LifeLog:
        """Where one life of the process notes its facts; `who` as in `Fact`."""
        return LifeLog(self, who)

    def write(self, life: LifeLog, kind: type[Fact], fields: dict[str, Any]) -> None:
        """See `LifeLog.note`."""
        with self._lock:
            # Count and time under the lock: lines of a life are in the order of both.
            fact = kind(who=life.who, seq=life.next_seq, at_s=time.monotonic(), **fields)
            life.next_seq += 1
            self._lines.append(to_line(fact))
            if kind not in BUFFERED:
                self._flush()

    def close(self) -> None:
        """Write what is noted and close the file. Idempotent."""
        self._ended.set()
        self._flusher.join()
        with self._lock:
            if self._file >= 0:
                self._flush()
                os.close(self._file)
                self._file = -1

    def _flush_now_and_then(self) -> None:
        while not self._ended.wait(FLUSH_S):
            with self._lock:
                self._flush()

    def _flush(self) -> None:
        """Under the lock."""
        if self._file < 0:
            self._lines.clear()  # noting has ended; nothing is kept for a file that is closed
        if not self._lines:
            return
        data = memoryview(b"\n".join(self._lines) + b"\n")
        self._lines.clear()
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError:
            # No room: the reader sees the counts break off, and a service goes on without notes.
            os.close(self._file)
            self._file = -1


class LifeLog:
    """The facts of one life of a part: a term of the controller, an incarnation of another."""

    def __init__(self, log: FactLog, who: str) -> None:
        self.who = who
        self.next_seq = 0
        """Guarded by the log."""
        self._log = log

    def note(self, kind: type[Fact], /, **fields: Any) -> None:
        """Note a fact of this life, now. `fields`: all but who, seq and at_s."""
        self._log.write(self, kind, fields)


def open_log(history_dir: str, place: str) -> FactLog | None:
    """A log in that folder, None where settings name no folder."""
    return FactLog(history_dir, place) if history_dir else None
