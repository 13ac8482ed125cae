"""The journal: what was intended, on disk before it is done; and every input of the engine, for
replay.

Responsible for order, durability, the fence between two controllers on one folder, and bounds. One
writer thread does all I/O, so the loop never waits for a disk. Must never decide what is written.
Called by the driver and by the life that owns it.

One first-in-first-out queue feeds the thread: an input that was handed over before a commit is
written before it. A full disk fails commits with JournalFull and cuts the inputs log until its next
segment, as anything else that is wrong with that log does; nothing else stops.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from moe_serve.controller.journal_rows import ROUTER_PORT, JournalImage, Row, Starts, image_of
from moe_serve.controller.journal_store import (
    INPUTS_FILE,
    STARTS_KEPT,
    STATE_FILE,
    InputsStore,
    JournalFull,
    StateStore,
    damaged,
    set_aside,
)
from moe_serve.controller.settings import JournalLimits

_T = TypeVar("_T")
INPUTS_BATCH_MAX = 256
"""Inputs written in one transaction."""
CUT_PAUSE_S = 10.0
"""Wait after a cut before a segment is tried again: each begins with a whole snapshot."""


@dataclass(slots=True)
class _Stores:
    """Owned by the writer thread once open."""

    state: StateStore
    inputs: InputsStore


class Journal:
    """The open journal of one controller. Make it with `open_journal`."""

    def __init__(self, limits: JournalLimits) -> None:
        self._limits = limits
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="journal", daemon=True)
        self._stores: _Stores | None = None
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, str, float, bytes]] = []
        self._segments: list[tuple[int, int, float]] = []
        self._segment = 0
        self._segment_bytes = 0
        self._begun_at_s = float("-inf")
        self._cut = True
        self._term = 0
        self.inputs_cut = 0
        """Inputs that were not written: queue or disk was full, or no segment was open."""
        self._thread.start()

    async def commit(self, rows: Sequence[Row]) -> None:
        """Write rows in one transaction; on disk when this returns. Raises JournalFull,
        StaleTerm."""
        term = self._term
        await self._call(lambda s: s.state.append(term, rows))

    async def intend_term(self, term: int) -> None:
        """Write down the term that is about to be claimed. Raises JournalFull."""
        await self._call(lambda s: s.state.set_meta(intended_term=str(term)))

    async def open_term(self, term: int, snapshot: Row, *, owner: str, starts: Starts) -> None:
        """Own the journal under a claimed term. Raises StaleTerm, JournalFull."""
        meta = {
            "owner": owner,
            "boot": starts.boot,
            "closed": "0",
            "starts": " ".join(f"{s:.3f}" for s in starts.at_s[-STARTS_KEPT:]),
        }
        await self._call(lambda s: s.state.open_term(term, snapshot, meta))
        self._term = term

    async def note_admin_port(self, port: int) -> None:
        """Remember where the admin port is. Raises StaleTerm, JournalFull."""
        term = self._term
        await self._call(lambda s: s.state.set_meta(term, admin_port=str(port)))

    async def note_router_port(self, router: str, port: int) -> None:
        """Remember where a router listens. Raises StaleTerm, JournalFull."""
        term = self._term
        await self._call(lambda s: s.state.set_meta(term, **{f"{ROUTER_PORT}{router}": str(port)}))

    async def mark_closed(self) -> None:
        """The service is ended on purpose: the next start takes only the numbers from here."""
        await self._call(lambda s: s.state.set_meta(closed="1"))

    def wants_segment(self, at_s: float) -> bool:
        """Whether the driver should begin a new segment of inputs before its next event."""
        if self._segment_bytes >= self._limits.segment_bytes:
            return True
        return self._cut and not self._waiting and at_s >= self._begun_at_s + CUT_PAUSE_S

    def begin_segment(self, at_s: float, snapshot: bytes) -> None:
        """Begin a segment with an engine snapshot; old ones beyond the bounds go."""
        self._segment += 1
        self._cut = False
        self._begun_at_s = at_s
        self._segment_bytes = 0
        self._put(self._segment, "snapshot", at_s, snapshot)
        self._jobs.put(lambda: self._drop_old(at_s))

    def append_input(self, at_s: float, event: bytes) -> None:
        """Write an event that is about to be given to the engine. Never waits."""
        self._put(self._segment, "event", at_s, event)

    async def close(self) -> None:
        """Write what waits and end the thread."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def _put(self, segment: int, kind: str, at_s: float, body: bytes) -> None:
        with self._lock:
            if self._cut or len(self._waiting) >= self._limits.queue_max:
                self._cut = True
                self.inputs_cut += 1
                return
            self._waiting.append((segment, kind, at_s, body))
            self._segment_bytes += len(body)
            first = len(self._waiting) == 1
        if first:
            self._jobs.put(self._write_inputs)

    async def _call(self, action: Callable[[_Stores], _T]) -> _T:
        done: Future[_T] = Future()

        def job() -> None:
            if not done.set_running_or_notify_cancel():
                return  # whoever asked is gone, and will not carry anything out
            try:
                assert self._stores is not None, "the journal is not open"
                self._write_inputs()
                done.set_result(action(self._stores))
            except BaseException as error:  # handed to the caller
                done.set_exception(error)

        self._jobs.put(job)
        return await asyncio.wrap_future(done)

    async def open_stores(self, folder: Path, service_id: str) -> JournalImage:
        """Open both files in the writer thread and read the state log. Called once."""
        done: Future[JournalImage] = Future()

        def job() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(self._open(folder, service_id))
            except BaseException as error:  # handed to the caller
                done.set_exception(error)

        self._jobs.put(job)
        return await asyncio.wrap_future(done)

    def _open(self, folder: Path, service_id: str) -> JournalImage:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = StateStore(folder, service_id, self._limits.state_bytes_max)
        try:
            inputs = InputsStore(folder)
        except BaseException:
            state.close()
            raise
        self._stores = _Stores(state, inputs)
        self._segments = inputs.segments()
        self._segment = max((s for s, _, _ in self._segments), default=0)
        last_at_s = max((t for _, _, t in self._segments), default=0.0)
        try:
            return image_of(state.rows, state.meta(), last_at_s, dropped_tail=state.dropped_tail)
        except (msgspec.DecodeError, ValueError) as error:
            raise damaged(folder / STATE_FILE, str(error)) from error

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
        if self._stores is not None:
            self._write_inputs()
            self._stores.state.close()
            self._stores.inputs.close()

    def _write_inputs(self) -> None:
        with self._lock:
            rows, self._waiting = self._waiting, []
        assert self._stores is not None, "the journal is not open"
        for first in range(0, len(rows), INPUTS_BATCH_MAX):
            try:
                self._stores.inputs.append(rows[first : first + INPUTS_BATCH_MAX])
            except (JournalFull, sqlite3.Error):
                # Whatever is wrong with the inputs costs replay only. The writer must outlive it:
                # commits wait for nobody else.
                with self._lock:
                    self._cut = True
                    self.inputs_cut += len(rows) - first
                return

    def _drop_old(self, at_s: float) -> None:
        self._write_inputs()
        assert self._stores is not None, "the journal is not open"
        try:
            self._segments = self._stores.inputs.segments()
            total = sum(size for _, size, _ in self._segments)
            gone: list[int] = []
            for segment, size, last_at_s in self._segments[:-1]:
                young = last_at_s >= at_s - self._limits.inputs_age_max_s
                if total <= self._limits.inputs_bytes_max and young:
                    break
                gone.append(segment)
                total -= size
            if gone:
                self._stores.inputs.drop(gone)
        except (JournalFull, sqlite3.Error):
            self._cut = True


async def open_journal(
    folder: Path, service_id: str, limits: JournalLimits
) -> tuple[Journal, JournalImage]:
    """The journal of a folder and what it says. Raises JournalDamaged, StartRefused."""
    journal = Journal(limits)
    try:
        return journal, await journal.open_stores(folder, service_id)
    except BaseException:
        await journal.close()
        raise


def move_aside(folder: Path) -> None:
    """Put a closed journal that must not be trusted out of the way, for people to look at."""
    for name in (STATE_FILE, INPUTS_FILE):
        set_aside(folder, name)
