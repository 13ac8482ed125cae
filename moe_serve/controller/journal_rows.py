"""What the journal's rows are, as data: snapshots, transitions, part names, epochs.

Responsible for their bytes. Must never open a file. Called by journal, and by whoever reads one.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from moe_serve.controller.befores import Before
from placement.engine import EngineSnapshot
from placement.messages.codec import decode_as, encode
from placement.messages.effects import Transition

NUMBER_BYTES_MAX = 19
"""Digits of an epoch or term."""
NUMBER_MAX = (1 << 63) - 1
"""Greatest epoch or term: messages hold them in 64 bits."""
COUNT_MAX = 1 << 53
"""Most that is counted: more is damage, and would not be exact in every JSON reader."""
PORT_MAX = 65_535
ROUTER_PORT = "router_port:"
"""What the key of a router's port begins with; its name follows."""
TIME_S_MAX = 1e12
"""Thirty thousand years."""
SECONDS_CHARS_MAX = 40
"""Characters of a time; the error for what is none quotes it."""


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
    befores: tuple[Before, ...] = ()
    """Placements from before the newest plans; older journals tell none."""
    replicas_replaced: int = 0
    """Replicas that finished moves removed to make room; older journals tell none."""


@dataclass(frozen=True, slots=True)
class Starts:
    """Newest starts of the controller, each in seconds since the machine was booted: no clock that
    people set tells how many there were lately. `boot`: names that boot; starts before another one
    do not count."""

    boot: str = ""
    at_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """One row: kind, driver time, bytes."""

    kind: RowKind
    at_s: float
    body: bytes

    @property
    def checksum(self) -> int:
        """CRC-32 of all three."""
        return checksum(self.kind, self.at_s, self.body)


def checksum(kind: str, at_s: float, body: bytes) -> int:
    """CRC-32 of a row: zlib's, of the kind's text, the time's eight bytes (IEEE 754, little-endian)
    and the bytes."""
    time = struct.pack("<d", at_s + 0.0)  # SQLite keeps no sign of zero
    return zlib.crc32(body, zlib.crc32(time, zlib.crc32(kind.encode())))


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
    closed: the service was ended on purpose, so only numbers count. dropped_tail: its last record
    was torn and was dropped.
    """

    intended_term: int = 0
    owner: str = ""
    closed: bool = False
    starts: Starts = Starts()
    snapshot: StateSnapshot | None = None
    transitions: tuple[Transition, ...] = ()
    parts: tuple[str, ...] = ()
    epoch: int = 0
    epochs_published: int = 0
    last_at_s: float = 0.0
    dropped_tail: bool = False
    admin_port: int = 0
    """Where the admin port was last, so that clients find it there again."""
    router_ports: dict[str, int] = field(default_factory=dict)
    """Where each router was last, by its name."""

    @property
    def empty(self) -> bool:
        """Nothing was ever written."""
        return self.intended_term == 0 and self.snapshot is None


def _number(text: bytes) -> int:
    number = int(text) if text.isdigit() and len(text) <= NUMBER_BYTES_MAX else -1
    if not 0 <= number <= NUMBER_MAX:
        raise ValueError(f"{text[:40]!r} is no epoch, term or port")
    return number


def _port(text: str) -> int:
    port = _number(text.encode())
    if port > PORT_MAX:
        raise ValueError(f"{port} is no port")
    return port


def is_time(at_s: float) -> bool:
    """Whether a number is a driver time or a wall-clock time: clocks start from it, and beyond
    TIME_S_MAX a float64 does not tell milliseconds apart."""
    return -TIME_S_MAX <= at_s <= TIME_S_MAX


def _seconds(word: str) -> float:
    if len(word) > SECONDS_CHARS_MAX:
        raise ValueError(f"{word[:40]!r} is no time of a start")
    return float(word)


def image_of(
    rows: list[Row], meta: dict[str, str], last_at_s: float, *, dropped_tail: bool
) -> JournalImage:
    """What rows in their order, the newest snapshot first of all, say. Raises
    msgspec.ValidationError or ValueError where a row or setting is not of its kind."""
    snapshot: StateSnapshot | None = None
    transitions: list[Transition] = []
    parts: dict[str, None] = {}
    epoch = epochs = 0
    for row in rows:
        if row.kind is RowKind.SNAPSHOT:
            snapshot = decode_as(row.body, StateSnapshot)
            transitions, parts = [], dict.fromkeys(snapshot.parts)
            epoch, epochs = max(epoch, snapshot.epoch), snapshot.epochs_published
            if not 0 <= snapshot.replicas_replaced <= COUNT_MAX:
                raise ValueError(f"{snapshot.replicas_replaced} replaced replicas is no count")
        elif row.kind is RowKind.TRANSITION:
            transitions.append(decode_as(row.body, Transition))
        elif row.kind is RowKind.PART:
            parts[row.body.decode()] = None
        elif row.kind is RowKind.PART_GONE:
            parts.pop(row.body.decode(), None)
        else:
            epoch, epochs = max(epoch, _number(row.body)), epochs + 1
    if not (0 <= epoch <= NUMBER_MAX and 0 <= epochs <= NUMBER_MAX):
        raise ValueError(f"epoch {epoch} of {epochs} is none")
    starts = tuple(_seconds(word) for word in meta.get("starts", "").split())
    times = [last_at_s, *(row.at_s for row in rows)]
    if not all(map(is_time, (*starts, *times))):
        raise ValueError(f"a time does not lie within {TIME_S_MAX:g} s")
    return JournalImage(
        intended_term=_number(meta.get("intended_term", "0").encode()),
        owner=meta.get("owner", ""),
        closed=meta.get("closed", "0") == "1",
        starts=Starts(meta.get("boot", ""), starts),
        snapshot=snapshot,
        transitions=tuple(transitions),
        parts=tuple(parts),
        epoch=epoch,
        epochs_published=epochs,
        last_at_s=max(times),
        dropped_tail=dropped_tail,
        admin_port=_port(meta.get("admin_port", "0")),
        router_ports={
            key.removeprefix(ROUTER_PORT): _port(value)
            for key, value in meta.items()
            if key.startswith(ROUTER_PORT)
        },
    )
