"""What the journal's rows are, as data: snapshots, transitions, part names, epochs.

Responsible for their bytes. Must never open a file. Called by journal, and by whoever reads one.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from placement.engine import EngineSnapshot
from placement.messages.codec import decode_as, encode
from placement.messages.effects import Transition


class RowKind(StrEnum):
    """Kinds of rows of the state log."""

    SNAPSHOT = "snapshot"
    TRANSITION = "transition"
    PART = "part"
    """A part's name, before the part is created."""
    PART_GONE = "part_gone"
    EPOCH = "epoch"
    """Number of a table, before it is sent."""


class StateSnapshot(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Opens a term and follows whatever transitions do not tell: layout, budgets and open steps (in
    the engine's snapshot), names of parts, tables published so far."""

    term: int
    epoch: int
    at_s: float
    engine: EngineSnapshot
    parts: tuple[str, ...]
    epochs_published: int


@dataclass(frozen=True, slots=True)
class Row:
    """One row: kind, driver time, bytes."""

    kind: RowKind
    at_s: float
    body: bytes

    @property
    def checksum(self) -> int:
        """CRC-32 of kind and bytes."""
        return checksum(self.kind, self.body)


def checksum(kind: str, body: bytes) -> int:
    """CRC-32 of a row: zlib's, of the kind's text and the bytes."""
    return zlib.crc32(body, zlib.crc32(kind.encode()))


def snapshot_row(snapshot: StateSnapshot) -> Row:
    """Row of a snapshot."""
    return Row(RowKind.SNAPSHOT, snapshot.at_s, encode(snapshot))


def transition_row(transition: Transition) -> Row:
    """Row of a transition."""
    return Row(RowKind.TRANSITION, transition.at_s, encode(transition))


def part_row(name: str, at_s: float, *, gone: bool = False) -> Row:
    """Row of a part that is about to be created, or that was ended."""
    return Row(RowKind.PART_GONE if gone else RowKind.PART, at_s, name.encode())


def epoch_row(epoch: int, at_s: float) -> Row:
    """Row of a table that is about to be sent."""
    return Row(RowKind.EPOCH, at_s, str(epoch).encode())


@dataclass(frozen=True, slots=True)
class JournalImage:
    """What a journal said when it was opened.

    intended_term: greatest term its controller meant to claim. owner: machine that wrote it last.
    closed: the service was ended on purpose, so only numbers count. starts: wall-clock seconds of
    the newest starts. dropped_tail: its last record was torn and was dropped.
    """

    intended_term: int = 0
    owner: str = ""
    closed: bool = False
    starts: tuple[float, ...] = ()
    snapshot: StateSnapshot | None = None
    transitions: tuple[Transition, ...] = ()
    parts: tuple[str, ...] = ()
    epoch: int = 0
    epochs_published: int = 0
    last_at_s: float = 0.0
    dropped_tail: bool = False
    admin_port: int = 0
    """Where the admin port was last, so that clients find it there again."""

    @property
    def empty(self) -> bool:
        """Nothing was ever written."""
        return self.intended_term == 0 and self.snapshot is None


def image_of(
    rows: list[Row], meta: dict[str, str], last_at_s: float, *, dropped_tail: bool
) -> JournalImage:
    """What rows in their order, the newest snapshot first of all, say. Raises
    msgspec.ValidationError where a row is not of its kind."""
    snapshot: StateSnapshot | None = None
    transitions: list[Transition] = []
    parts: dict[str, None] = {}
    epoch = epochs = 0
    for row in rows:
        if row.kind is RowKind.SNAPSHOT:
            snapshot = decode_as(row.body, StateSnapshot)
            transitions, parts = [], dict.fromkeys(snapshot.parts)
            epoch, epochs = max(epoch, snapshot.epoch), snapshot.epochs_published
        elif row.kind is RowKind.TRANSITION:
            transitions.append(decode_as(row.body, Transition))
        elif row.kind is RowKind.PART:
            parts[row.body.decode()] = None
        elif row.kind is RowKind.PART_GONE:
            parts.pop(row.body.decode(), None)
        else:
            epoch, epochs = max(epoch, int(row.body)), epochs + 1
    starts = tuple(float(word) for word in meta.get("starts", "").split())
    return JournalImage(
        intended_term=int(meta.get("intended_term", "0")),
        owner=meta.get("owner", ""),
        closed=meta.get("closed", "0") == "1",
        starts=starts,
        snapshot=snapshot,
        transitions=tuple(transitions),
        parts=tuple(parts),
        epoch=epoch,
        epochs_published=epochs,
        last_at_s=max([last_at_s, *(row.at_s for row in rows)]),
        dropped_tail=dropped_tail,
        admin_port=int(meta.get("admin_port", "0")),
    )
