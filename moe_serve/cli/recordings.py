"""Recordings on disk as data: the inputs log of a journal, and traces of expert ids.

Responsible for opening them read-only, for their limits and for saying what is wrong with a file.
Must never change a recording, nor judge one. Called by the replay command.
"""

from __future__ import annotations

import sqlite3
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from moe_serve.controller.journal_store import INPUTS_FILE
from moe_serve.errors import InvalidArgument, ResourceExhausted
from placement.engine import EngineSnapshot
from placement.messages.codec import decode_as, decode_event
from placement.messages.events import AnyEvent

SQLITE_MAGIC = b"SQLite format 3\0"
ZIP_MAGIC = b"PK"
EVENTS_MAX = 1_000_000
"""Events read of a journal; the service itself keeps fewer."""
TRACE_BYTES_MAX = 4 << 30
"""Expert ids of a trace, unpacked."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment of an inputs log: the engine as it was, and the events given to it since.

    `snapshot_bytes` are as they were written, to compare with.
    """

    number: int
    snapshot: EngineSnapshot
    snapshot_bytes: bytes
    events: tuple[AnyEvent, ...]


def is_journal(source: Path) -> bool:
    """Whether a path is a journal (a folder of state, or its inputs file) rather than a trace.

    Raises InvalidArgument where it is neither.
    """
    file = source / INPUTS_FILE if source.is_dir() else source
    try:
        with file.open("rb") as handle:
            magic = handle.read(len(SQLITE_MAGIC))
    except OSError as error:
        raise InvalidArgument(f"{file} cannot be read: {error.strerror}") from error
    if magic == SQLITE_MAGIC:
        return True
    if magic.startswith(ZIP_MAGIC):
        return False
    raise InvalidArgument(
        f"{file} is neither a journal (the folder that holds {INPUTS_FILE}, or that file) nor a "
        "trace (.npz with topk_ids)"
    )


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


def read_trace(file: Path) -> npt.NDArray[np.integer[Any]]:
    """Expert ids [tokens, layers, top_k] of a trace, tokens in request order.

    Raises InvalidArgument, ResourceExhausted.
    """
    try:
        with np.load(file, allow_pickle=False) as arrays:
            if "topk_ids" not in arrays.files:
                named = ", ".join(arrays.files) or "nothing"
                raise InvalidArgument(f"{file} has no array topk_ids (it has {named})")
            ids: npt.NDArray[np.integer[Any]] = arrays["topk_ids"]
    except (OSError, ValueError, zipfile.BadZipFile, MemoryError) as error:
        raise InvalidArgument(f"{file} is not a trace: {error}") from error
    if ids.ndim != 3 or ids.dtype.kind not in "iu" or ids.size == 0:
        raise InvalidArgument(
            f"{file}: topk_ids must be integers [tokens, layers, top_k], got {ids.dtype} "
            f"{ids.shape}"
        )
    if ids.nbytes > TRACE_BYTES_MAX:
        raise ResourceExhausted(f"{file}: {ids.nbytes} bytes of ids, at most {TRACE_BYTES_MAX}")
    return ids
