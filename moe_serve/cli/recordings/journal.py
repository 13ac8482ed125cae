"""The inputs log of a journal: segments, each an engine and the events given to it since.

Responsible for reading it as it is. Must never change it. Called by the replay command.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import msgspec

from moe_serve.controller.journal_store import INPUTS_FILE
from moe_serve.errors import InvalidArgument, ResourceExhausted
from placement.engine import EngineSnapshot
from placement.messages.codec import decode_as, decode_event
from placement.messages.events import AnyEvent

EVENTS_MAX = 1_000_000
"""Events read of a journal; the service itself keeps fewer."""
BYTES_MAX = 4 << 30
"""Bytes of all events and snapshots read of a journal."""
_LENGTH_MAX = 1_000_000_000
"""Greatest limit SQLite knows for one value."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment of an inputs log: the engine as it was, and the events given to it since.

    `snapshot_bytes` are as they were written, to compare with.
    """

    number: int
    snapshot: EngineSnapshot
    snapshot_bytes: bytes
    events: tuple[AnyEvent, ...]


def read_segments(source: Path) -> list[Segment]:
    """Segments of an inputs log, oldest first; what comes before the first snapshot is left out.

    Raises InvalidArgument, ResourceExhausted.
    """
    file = source / INPUTS_FILE if source.is_dir() else source
    try:
        rows = _rows(file)
    except (sqlite3.Error, OSError, TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(
            f"{file} is not an inputs log ({error}); name a service's folder of state, or the "
            f"{INPUTS_FILE} in it"
        ) from error
    if sum(len(part) for part in rows.values()) > EVENTS_MAX:
        raise ResourceExhausted(
            f"{file} holds more than the {EVENTS_MAX} events that are read; replay a copy from "
            "which the older segments were deleted"
        )
    return [
        _segment(file, number, part)
        for number, part in sorted(rows.items())
        if part[0][0] == "snapshot"
    ]


def _rows(file: Path) -> dict[int, list[tuple[str, bytes]]]:
    """Kind and body of every row, by segment."""
    rows: dict[int, list[tuple[str, bytes]]] = {}
    num_bytes = 0
    # What is stored fits its file. A computed column makes more of nothing, so SQLite is told, too.
    most = min(BYTES_MAX, _stored_bytes(file))
    with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as db:
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, min(most, _LENGTH_MAX))
        made = db.execute("SELECT type FROM sqlite_master WHERE name = 'inputs'").fetchone()
        if made != ("table",):
            # A view would run whatever its file says, without an end.
            raise ValueError("it has no table of inputs")
        query = "SELECT segment, kind, body FROM inputs ORDER BY seq LIMIT ?"
        for segment, kind, body in db.execute(query, (EVENTS_MAX + 1,)):
            if not isinstance(body, bytes):
                raise TypeError(f"a body is {type(body).__name__}, not bytes")
            num_bytes += len(body)
            if num_bytes > most:
                raise ResourceExhausted(
                    f"{file} holds more than the {most} bytes of events that are read; replay "
                    "a copy from which the older segments were deleted"
                )
            rows.setdefault(int(segment), []).append((str(kind), body))
    return rows


def _stored_bytes(file: Path) -> int:
    """Bytes of a database and of what was written to it last."""
    log = file.with_name(f"{file.name}-wal")
    return file.stat().st_size + (log.stat().st_size if log.exists() else 0)


def _segment(file: Path, number: int, rows: list[tuple[str, bytes]]) -> Segment:
    try:
        snapshot = decode_as(rows[0][1], EngineSnapshot)
        events = tuple(decode_event(body) for kind, body in rows[1:] if kind == "event")
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidArgument(
            f"{file}, segment {number}: not of this version ({error}); replay it with the version "
            "that wrote it"
        ) from error
    return Segment(number, snapshot, rows[0][1], events)
