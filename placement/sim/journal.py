"""The journal of a simulated controller: records in order, the last of which may be torn.

Responsible for what survives a death: all whole records, and the fact that the last one was torn.
Knows which controller owns it: another one's writes are refused. Called by the controller.
"""

from __future__ import annotations

from dataclasses import dataclass

from placement.engine import EngineSnapshot
from placement.messages.effects import Transition


class JournalFull(Exception):
    """No room for a record; nothing was written."""


class JournalOwned(Exception):
    """Another controller has opened the journal since."""


class JournalDamaged(Exception):
    """A record that is not the last one cannot be read: a person must look."""


@dataclass(slots=True)
class Record:
    """Transitions that were committed together, or a snapshot that replaces all before it."""

    transitions: tuple[Transition, ...] = ()
    snapshot: EngineSnapshot | None = None
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Image:
    """What a journal holds: the newest snapshot, what followed it, the greatest epoch and term."""

    snapshot: EngineSnapshot | None
    transitions: tuple[Transition, ...]
    epoch: int
    term: int
    torn: bool


class SimJournal:
    """Survives its writers."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.full = False
        self.owner = 0
        self.epoch = 0

    def open(self, term: int) -> None:
        """This term's controller writes from now on, and no other."""
        assert term > self.owner, "terms only grow"
        self.owner = term

    def write(self, term: int, record: Record, epoch: int, *, torn: bool = False) -> None:
        """Commit a record whole, or (torn) a part of it. Raises JournalOwned, JournalFull."""
        if term != self.owner:
            raise JournalOwned(f"term {self.owner} owns the journal")
        if self.full:
            raise JournalFull("no space left on the disk")
        if torn:
            record.whole = False
        elif record.snapshot is not None:
            self.records.clear()
        self.records.append(record)
        if not torn:
            self.epoch = max(self.epoch, epoch)

    def read(self) -> Image:
        """What can be gone on with; a torn tail is dropped. Raises JournalDamaged."""
        torn = bool(self.records) and not self.records[-1].whole
        if torn:
            self.records.pop()
        if not all(record.whole for record in self.records):
            raise JournalDamaged("a record in the middle cannot be read; restore the journal")
        newest = max((i for i, r in enumerate(self.records) if r.snapshot is not None), default=-1)
        snapshot = self.records[newest].snapshot if newest >= 0 else None
        since = [t for r in self.records[max(newest, 0) :] for t in r.transitions]
        return Image(snapshot, tuple(since), self.epoch, self.owner, torn)
