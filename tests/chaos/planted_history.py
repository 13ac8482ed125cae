"""Faults planted into a sound history, to see that whoever reads it would find them.

Each takes facts by time and returns a copy with one thing wrong, and the promise that this breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from placement.messages import history as h
from placement.messages.history import Fact

_F = TypeVar("_F", bound=Fact)
Planter = Callable[[Sequence[Fact]], list[Fact]]
EARLY_S = 1e-6


def _of(facts: Sequence[Fact], kind: type[_F], which: Callable[[_F], bool]) -> _F:
    """The last one like that."""
    return next(f for f in reversed(facts) if isinstance(f, kind) and which(f))


def _instead(facts: Sequence[Fact], old: Fact, *new: Fact) -> list[Fact]:
    """With others in its place."""
    made = [one for fact in facts for one in (new if fact is old else (fact,))]
    return counted(sorted(made, key=lambda fact: fact.at_s))


def counted(facts: Sequence[Fact]) -> list[Fact]:
    """With counts of lives made anew."""
    seqs: dict[str, int] = {}
    made = []
    for fact in facts:
        seqs[fact.who] = seqs.get(fact.who, -1) + 1
        made.append(msgspec.structs.replace(fact, seq=seqs[fact.who]))
    return made


def double_contribution(facts: Sequence[Fact]) -> list[Fact]:
    """A sum has one sub-call in it twice."""
    ended = _of(facts, h.RequestEnded, lambda f: bool(f.added))
    twice = msgspec.structs.replace(ended, added=(*ended.added, ended.added[0]))
    return _instead(facts, ended, twice)


def lost_contribution(facts: Sequence[Fact]) -> list[Fact]:
    """A sum lacks one sub-call, and the request is called well all the same."""
    ended = _of(facts, h.RequestEnded, lambda f: bool(f.added))
    return _instead(facts, ended, msgspec.structs.replace(ended, added=ended.added[1:]))


def released_before_drained(facts: Sequence[Fact]) -> list[Fact]:
    """A slot is given back while a batch reads it."""
    freed = _of(facts, h.SlotFreed, lambda _: True)
    return _instead(facts, freed, msgspec.structs.replace(freed, readers=1))


def release_asked_at_once(facts: Sequence[Fact]) -> list[Fact]:
    """A release is asked for as soon as the table without the slot has left: no router has heard of
    it."""
    sent = _of(facts, h.CommandSent, lambda f: f.command == "ReleaseSlot")
    place = (sent.rank, sent.slot, sent.slot_tag)
    last = max(
        f.at_s
        for f in facts
        if isinstance(f, h.TablePublished) and place in {one[1:] for one in f.listed}
    )
    without = next(f for f in facts if isinstance(f, h.TablePublished) and f.at_s > last)
    return _instead(facts, sent, msgspec.structs.replace(sent, at_s=without.at_s + EARLY_S))


def unverified_replica_listed(facts: Sequence[Fact]) -> list[Fact]:
    """A table lists a replica whose proof came only later."""
    table = _of(facts, h.TablePublished, lambda f: bool(f.listed))
    key, rank, slot, tag = table.listed[-1]
    who = f"rank{rank}/{dict(table.lives)[rank]}"
    proof = _of(facts, h.SlotProved, lambda f: (f.who, f.slot, f.slot_tag) == (who, slot, tag))
    late = msgspec.structs.replace(proof, at_s=table.at_s + EARLY_S)
    assert proof.key == key
    return _instead(facts, proof, late)


def two_terms_publish(facts: Sequence[Fact]) -> list[Fact]:
    """A controller of a term that is over goes on: its table comes to a part that has a newer
    one, and is kept."""
    kept = _of(facts, h.TableInstalled, lambda _: True)
    first = next(f for f in facts if isinstance(f, h.TableInstalled) and f.who == kept.who)
    again = msgspec.structs.replace(first, at_s=kept.at_s + EARLY_S)
    return _instead(facts, kept, kept, again)


def command_of_an_old_term(facts: Sequence[Fact]) -> list[Fact]:
    """A shard obeys a term that is over."""
    taken = _of(facts, h.CommandTaken, lambda _: True)
    old = msgspec.structs.replace(taken, term=taken.term - 1, at_s=taken.at_s + EARLY_S)
    return _instead(facts, taken, taken, old)


def command_before_the_journal(facts: Sequence[Fact]) -> list[Fact]:
    """A command leaves, and what it follows from is in the journal only later."""
    sent = _of(facts, h.CommandSent, lambda f: f.command == "CopyExpert")
    written = next(
        f
        for f in facts
        if isinstance(f, h.StateWritten) and f.step_id == sent.step_id and f.after == "copying"
    )
    return _instead(facts, sent, msgspec.structs.replace(sent, at_s=written.at_s - EARLY_S))


def wrong_expert_computed(facts: Sequence[Fact]) -> list[Fact]:
    """A slot was filled again under a batch."""
    served = _of(facts, h.RowsServed, lambda f: bool(f.k))
    other = (served.held_key[0] + 1, *served.held_key[1:])
    return _instead(facts, served, msgspec.structs.replace(served, held_key=other))


def demand_counted_twice(facts: Sequence[Fact]) -> list[Fact]:
    """A load window says more than was asked for."""
    window = _of(facts, h.WindowFolded, lambda f: bool(f.demand))
    (key, pairs), *rest = window.demand
    more = ((key, pairs + 1_000_000), *rest)
    return _instead(facts, window, msgspec.structs.replace(window, demand=more))


def books_that_lie(facts: Sequence[Fact]) -> list[Fact]:
    """A shard holds more than its books say."""
    used = _of(facts, h.MemoryUsed, lambda _: True)
    return _instead(facts, used, msgspec.structs.replace(used, held_bytes=used.budget_bytes + 1))


def never_answered(facts: Sequence[Fact]) -> list[Fact]:
    """A request has no end."""
    ended = next(f for f in facts if isinstance(f, h.RequestEnded))
    return _instead(facts, ended)


def fact_missing(facts: Sequence[Fact]) -> list[Fact]:
    """A line is not there."""
    gone = next(f for f in facts if isinstance(f, h.MemoryUsed))
    return [fact for fact in facts if fact is not gone]


PLANTED: tuple[tuple[Planter, str], ...] = (
    (double_contribution, "I4"),
    (lost_contribution, "I4"),
    (released_before_drained, "I7"),
    (release_asked_at_once, "I7"),
    (unverified_replica_listed, "I2"),
    (two_terms_publish, "I1"),
    (command_of_an_old_term, "I3"),
    (command_before_the_journal, "I8"),
    (wrong_expert_computed, "I3"),
    (demand_counted_twice, "I9"),
    (books_that_lie, "I6"),
    (never_answered, "I10"),
    (fact_missing, "history"),
)
"""What is planted, and the promise that is then broken."""
