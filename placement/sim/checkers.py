"""Invariants as checkers over the event log. Each is small, written apart from what it checks, and
names what broke.

Responsible for I1 (table order), I2 (coverage), I6 (memory), I7 (release last) and I8 (replay).
Called by the runner.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from placement.engine import EngineSnapshot
from placement.messages.effects import ReleaseSlot
from placement.messages.events import AnyEvent
from placement.replay import replay_events
from placement.sim.log import Entry, Freed, Listed, MemoryUsed, Published, RouterTold, Stepped


class InvariantBroken(AssertionError):
    """An invariant does not hold; the text begins with its name."""


class Checker(Protocol):
    """Reads the log in order."""

    def take(self, entry: Entry) -> None:
        """Raise InvariantBroken where the entry breaks the invariant."""
        ...


class TableOrder:
    """I1: epochs strictly grow, one table a (term, epoch), no router goes back."""

    def __init__(self) -> None:
        self._newest = (-1, -1)
        self._routers: dict[str, int] = {}

    def take(self, entry: Entry) -> None:
        """See the class."""
        if isinstance(entry, Published):
            if entry.epoch <= self._newest[1] or entry.term < self._newest[0]:
                raise InvariantBroken(f"I1: table {entry.term, entry.epoch} after {self._newest}")
            self._newest = (entry.term, entry.epoch)
        elif isinstance(entry, RouterTold):
            if entry.installs < self._routers.get(entry.router, -1):
                raise InvariantBroken(f"I1: router {entry.router} went back to {entry.installs}")
            self._routers[entry.router] = entry.installs


class Coverage:
    """I2: what a table lists is resident and proved at that moment; no expert without a replica
    that had one before."""

    def __init__(self, *, losses_allowed: bool = False) -> None:
        self._losses_allowed = losses_allowed
        self._covered: frozenset[int] | None = None

    def take(self, entry: Entry) -> None:
        """See the class."""
        if not isinstance(entry, Published):
            return
        false = sorted(entry.listed - entry.verified)
        if false:
            raise InvariantBroken(
                f"I2: epoch {entry.epoch} lists {false[:4]} that are not resident"
            )
        covered = frozenset(key for key, _, _, _ in entry.listed)
        if self._covered is None and len(covered) != entry.num_keys:
            raise InvariantBroken(f"I2: the first table covers {len(covered)} of {entry.num_keys}")
        lost = sorted((self._covered or frozenset()) - covered)
        if lost and not self._losses_allowed:
            raise InvariantBroken(f"I2: epoch {entry.epoch} loses experts {lost[:4]}")
        twice = len(entry.listed) - len({(key, rank) for key, rank, _, _ in entry.listed})
        if twice:
            raise InvariantBroken(f"I2: epoch {entry.epoch} lists {twice} experts twice on a rank")
        self._covered = covered


class Memory:
    """I6: resident and reserved bytes never exceed the budget."""

    def take(self, entry: Entry) -> None:
        """See the class."""
        if isinstance(entry, MemoryUsed):
            used = entry.resident_bytes + entry.reserved_bytes
            if used > entry.budget_bytes:
                raise InvariantBroken(
                    f"I6: rank {entry.rank} uses {used} of {entry.budget_bytes} bytes"
                )


class ReleaseLast:
    """I7: a slot is freed only when unlisted, when nothing pins it, and when its release was asked
    for in time.

    Asked for in time: every router has said that it uses an epoch without it, or `wait_s` has
    passed; and the same again for having quiesced it.
    """

    def __init__(self, *, wait_s: float) -> None:
        self._wait_s = wait_s
        self._listed_until: dict[tuple[int, int, int], tuple[int, float]] = {}
        self._listed: frozenset[Listed] = frozenset()
        self._routers: dict[str, tuple[int, int]] = {}

    def take(self, entry: Entry) -> None:
        """See the class."""
        if isinstance(entry, Published):
            for _, rank, slot, tag in self._listed - entry.listed:
                self._listed_until[rank, slot, tag] = (entry.epoch, entry.at_s)
            self._listed = entry.listed
        elif isinstance(entry, RouterTold):
            self._routers[entry.router] = (entry.applied, entry.quiesced)
        elif isinstance(entry, Stepped):
            for command in entry.effects.commands:
                if isinstance(command, ReleaseSlot):
                    self._check(entry, (command.rank, command.slot, command.slot_tag))
        elif isinstance(entry, Freed):
            if entry.pins:
                raise InvariantBroken(
                    f"I7: rank {entry.rank} slot {entry.slot} freed under {entry.pins} pins"
                )
            self._check(entry, (entry.rank, entry.slot, entry.tag))

    def _check(self, entry: Entry, slot: tuple[int, int, int]) -> None:
        if any((rank, index, tag) == slot for _, rank, index, tag in self._listed):
            raise InvariantBroken(f"I7: {slot} (rank, slot, tag) is freed while it is listed")
        epoch, at_s = self._listed_until.get(slot, (-1, -1e18))
        unaware = sorted(r for r, (applied, _) in self._routers.items() if applied < epoch)
        busy = sorted(r for r, (_, quiesced) in self._routers.items() if quiesced < epoch)
        waited_s = self._wait_s * (bool(unaware) + bool(busy))
        if entry.at_s < at_s + waited_s:
            raise InvariantBroken(
                f"I7: {slot} (rank, slot, tag) freed while routers {busy} may use it"
            )


def check_replay(snapshot: EngineSnapshot, entries: Iterable[Entry]) -> None:
    """I8: the journalled events, given to an engine made from the snapshot, give the same effects
    byte for byte."""
    steps = [e for e in entries if isinstance(e, Stepped)]
    events: list[AnyEvent] = [s.event for s in steps]
    differing = replay_events(snapshot, events, [s.effects for s in steps])
    if differing:
        raise InvariantBroken(f"I8: {differing[0]}")
