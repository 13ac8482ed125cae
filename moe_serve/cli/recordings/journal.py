"""The inputs log of a journal: segments, each an engine and the events given to it since.

Responsible for reading it as it is. Must never change it. Called by the replay command.
"""

from __future__ import annotations

import sqlite3
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
    rows: dict[int, list[tuple[str, bytes]]] = {}
    try:
        with sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True) as db:
            query = "SELECT segment, kind, body FROM inputs ORDER BY seq LIMIT ?"
            for segment, kind, body in db.execute(query, (EVENTS_MAX + 1,)):
                rows.setdefault(int(segment), []).append((str(kind), bytes(body)))
        db.close()
    except sqlite3.Error as error:
        raise InvalidArgument(f"{file} is not an inputs log: {error}") from error
    if sum(len(part) for part in rows.values()) > EVENTS_MAX:
        raise ResourceExhausted(f"{file} holds more than {EVENTS_MAX} events")
    return [
        _segment(file, number, part)
        for number, part in sorted(rows.items())
        if part[0][0] == "snapshot"
    ]


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
