"""I8, the journal: written before the effect, nothing forgotten, and the same again when replayed.

Responsible for this one.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import msgspec

from placement.engine import EngineSnapshot
from placement.messages.effects import Effects
from placement.messages.events import AnyEvent
from placement.messages.history import CommandSent, Recovered, StateWritten, TablePublished
from placement.migration import is_terminal
from placement.planner.plan import StepKind
from placement.replay import replay_events
from placement.sim.checks.base import InvariantBroken, Rules

NEEDS = {
    "ReserveSlot": ("reserved",),
    "CopyExpert": ("copying",),
    "VerifyExpert": ("copying", "recalled"),
    "AbortAdd": ("aborting",),
    "ReleaseSlot": ("drained",),
}
"""State that must be in the journal before the command may leave (one of them)."""


@dataclass(slots=True)
class _Book:
    """One journal: what is written in it of each step."""

    states: dict[int, set[str]] = field(default_factory=dict)
    last: dict[int, StateWritten] = field(default_factory=dict)
    step_of: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """(rank, slot, tag) of the adds."""


class JournalFirst:
    """I8: each state is in the journal before its command leaves or its table is published; a
    controller that begins with the journal knows every step that is neither done nor rolled back.
    One that begins without has a journal of its own from then on, whatever another still writes.

    killed: lives that may have written one last time without noting it. What their successor found
    in the journal counts then, as `unnoted` does how many steps that were."""

    def __init__(self, *, killed: Container[str] = ()) -> None:
        self._killed = killed
        self._last_life = ""
        self.unnoted = 0
        self._newest = _Book()
        self._book_of: dict[str, _Book] = {}

    def rules(self) -> Rules:
        """See `Checker`."""
        return {
            StateWritten: self._written,
            CommandSent: self._sent,
            TablePublished: self._published,
            Recovered: self._recovered,
        }

    def _book(self, who: str) -> _Book:
        return self._book_of.setdefault(who, self._newest)

    def _written(self, fact: StateWritten) -> None:
        book = self._book(fact.who)
        known = book.last.get(fact.step_id)
        if known is not None and known.after != fact.before:
            raise InvariantBroken(
                f"I8: step {fact.step_id} goes on from {fact.before}, but was left {known.after}"
            )
        book.states.setdefault(fact.step_id, set()).add(fact.after)
        book.last[fact.step_id] = fact
        if fact.kind == StepKind.ADD.value and fact.slot_tag >= 0:
            book.step_of[fact.rank, fact.slot, fact.slot_tag] = fact.step_id

    def _sent(self, fact: CommandSent) -> None:
        needs = NEEDS.get(fact.command)
        if needs is None:
            return
        written = self._book(fact.who).states.get(fact.step_id, set())
        if written.isdisjoint(needs):
            raise InvariantBroken(
                f"I8: {fact.command} of step {fact.step_id} left before {' or '.join(needs)} was "
                f"in the journal, which knows {sorted(written)}"
            )

    def _published(self, fact: TablePublished) -> None:
        book = self._book(fact.who)
        for _, rank, slot, tag in fact.listed:
            step_id = book.step_of.get((rank, slot, tag))
            if step_id is None:
                continue  # adopted from an inventory
            last = book.last.get(step_id)
            if last is not None and not is_terminal(StepKind.ADD, last.after):
                raise InvariantBroken(
                    f"I8: epoch {fact.epoch} lists rank {rank} slot {slot}, whose step {step_id} "
                    f"is {last.after} in the journal"
                )

    def _recovered(self, fact: Recovered) -> None:
        if not fact.journal:
            self._newest = _Book()
        book = self._book_of[fact.who] = self._newest
        before, self._last_life = self._last_life, fact.who
        known = dict(fact.open_steps)
        if before in self._killed:
            for step_id, state in known.items():
                book.states.setdefault(step_id, set()).add(state)
        for step_id, last in sorted(book.last.items()):
            if is_terminal(StepKind(last.kind), last.after):
                continue
            if known.get(step_id) != last.after:
                if before in self._killed:
                    self._take_over(book, last, known.get(step_id))
                    continue
                raise InvariantBroken(
                    f"I8: step {step_id} was {last.after} in the journal; {fact.who} began with "
                    f"{known.get(step_id, 'nothing of it')}"
                )

    def _take_over(self, book: _Book, last: StateWritten, found: str | None) -> None:
        """A step went on, or ended, unseen."""
        self.unnoted += 1
        if found is None:
            del book.last[last.step_id]
            return
        book.states[last.step_id].add(found)
        book.last[last.step_id] = msgspec.structs.replace(last, after=found)

    def finish(self) -> None:
        """See `Checker`."""


def check_replay(snapshot: EngineSnapshot, inputs: Sequence[tuple[AnyEvent, Effects]]) -> None:
    """I8: the inputs of a controller, given to an engine made from its snapshot, have the same
    effects, byte for byte. Raises InvariantBroken."""
    events = [event for event, _ in inputs]
    differing = replay_events(snapshot, events, [effects for _, effects in inputs])
    if differing:
        raise InvariantBroken(f"I8: {differing[0]}")
