"""The two step machines: how a replica is added, and how one is removed, while the service runs.

Responsible for: which state follows which event, and which action the engine then takes. Must never
know a message, a clock or a layout. Called by the engine, which turns answers into `StepEvent` and
`StepAction` into commands.

Theory. Experts are read-only, so nothing moves in place: a replica is *added* somewhere and, later,
another is *removed*.

An `add` brings a slot from empty to listed:

    PLANNED -> RESERVED -> COPYING -> VERIFIED -> LISTED        ABORTING -> ABORTED from any state
    before LISTED

- RESERVED: the slot is ours by intention; the shard is asked to reserve it. Journalled before the
  first byte is copied.
- COPYING: the shard has named the slot's tag; bytes are brought and then proved. One state for
  both, because what ends it is the same: the proof, a failure, or the deadline. "Copied" without
  "verified" is worth nothing.
- VERIFIED: resident bytes equal the canonical digest. May be listed by the next table, never
  before.
- LISTED: a published table names it. From here on it leaves only by a `remove`.
- ABORTING: the shard was told to give the slot back and has not answered. A slot counts as occupied
  until it has.

A `remove` brings a listed slot to empty:

    PLANNED -> UNLISTED -> ACKED -> DRAINED -> RELEASED         back to LISTED from any state before
    RELEASED

- UNLISTED: a published table no longer names it. Routers may still send to it, and are served: the
  tag still matches.
- ACKED: every router in the set uses that table (or the wait for them ended).
- DRAINED: none of them has older work in flight (or that wait ended). Only now is the shard asked
  to free the slot.
- RECALLED: the removal was taken back after the shard was asked to free. Whether the slot still
  holds its expert is known only to the shard, so it is asked (and forbids itself the release);
  listed again only if it answers with a proof.
- RELEASED: the shard has freed the slot, or is gone with it.

Rules of this file: transitions are data; one row a pair; a pair that is not in a table is a bug and
raises. A repeated or late answer is no bug (commands are executed at least once), so such pairs
have rows that stay where they are. A half-done thing is a state, never a flag. Waiting is for
availability; safety is the tag.
"""

from __future__ import annotations

from enum import StrEnum

from placement.planner.plan import StepKind


class AddState(StrEnum):
    """Where an `add` stands."""

    PLANNED = "planned"
    RESERVED = "reserved"
    COPYING = "copying"
    VERIFIED = "verified"
    LISTED = "listed"
    ABORTING = "aborting"
    ABORTED = "aborted"


class RemoveState(StrEnum):
    """Where a `remove` stands."""

    PLANNED = "planned"
    UNLISTED = "unlisted"
    ACKED = "acked"
    DRAINED = "drained"
    RECALLED = "recalled"
    RELEASED = "released"
    LISTED = "listed"


class StepEvent(StrEnum):
    """What can happen to a step."""

    BEGUN = "begun"
    """The engine starts it: its turn has come and nothing it waits for is open."""
    RESERVED = "slot_reserved"
    COPIED = "expert_copied"
    VERIFIED = "expert_verified"
    PUBLISHED = "published"
    """A table that lists the add, or no longer lists the removed replica, was published."""
    ACKED = "acked"
    """Every router in the set uses a table at least that new."""
    QUIESCED = "quiesced"
    """No router in the set has older work in flight."""
    RELEASED = "slot_released"
    ABORTED = "add_aborted"
    FAILED = "failed"
    """The shard refused or could not do what it was asked."""
    DEADLINE = "deadline"
    """The time given to the present state is over."""
    CANCELLED = "cancelled"
    """The step is no longer wanted: its plan was cancelled, or what it relied on is gone."""
    RANK_LOST = "rank_lost"
    """The step's own rank is gone, or no longer holds the slot."""
    RESUMED = "resumed"
    """The controller restarted and does not know whether its last command arrived."""


class StepAction(StrEnum):
    """What the engine does after a transition."""

    NONE = "none"
    RESERVE = "reserve"
    COPY = "copy"
    VERIFY = "verify"
    ABORT = "abort"
    RELEASE = "release"
    RECALL = "recall"
    """Ask the shard to prove the slot and to refuse its release."""
    RELIST = "relist"
    """List the replica in the next table."""


State = AddState | RemoveState
TERMINAL_ADD = frozenset({AddState.LISTED, AddState.ABORTED})
TERMINAL_REMOVE = frozenset({RemoveState.LISTED, RemoveState.RELEASED})


class IllegalTransition(AssertionError):
    """A pair of state and event that no table names: a bug of the engine."""


_A, _R, _E, _X = AddState, RemoveState, StepEvent, StepAction

ADD_TABLE: dict[tuple[AddState, StepEvent], tuple[AddState, StepAction]] = {
    (_A.PLANNED, _E.BEGUN): (_A.RESERVED, _X.RESERVE),
    (_A.PLANNED, _E.CANCELLED): (_A.ABORTED, _X.NONE),
    (_A.PLANNED, _E.RANK_LOST): (_A.ABORTED, _X.NONE),
    (_A.RESERVED, _E.RESERVED): (_A.COPYING, _X.COPY),
    (_A.RESERVED, _E.FAILED): (_A.ABORTING, _X.ABORT),
    (_A.RESERVED, _E.DEADLINE): (_A.ABORTING, _X.ABORT),
    (_A.RESERVED, _E.CANCELLED): (_A.ABORTING, _X.ABORT),
    (_A.RESERVED, _E.RANK_LOST): (_A.ABORTED, _X.NONE),
    (_A.RESERVED, _E.RESUMED): (_A.RESERVED, _X.RESERVE),
    (_A.COPYING, _E.RESERVED): (_A.COPYING, _X.NONE),
    (_A.COPYING, _E.COPIED): (_A.COPYING, _X.VERIFY),
    (_A.COPYING, _E.VERIFIED): (_A.VERIFIED, _X.NONE),
    (_A.COPYING, _E.FAILED): (_A.ABORTING, _X.ABORT),
    (_A.COPYING, _E.DEADLINE): (_A.ABORTING, _X.ABORT),
    (_A.COPYING, _E.CANCELLED): (_A.ABORTING, _X.ABORT),
    (_A.COPYING, _E.RANK_LOST): (_A.ABORTED, _X.NONE),
    (_A.COPYING, _E.RESUMED): (_A.COPYING, _X.COPY),
    (_A.VERIFIED, _E.PUBLISHED): (_A.LISTED, _X.NONE),
    (_A.VERIFIED, _E.RESERVED): (_A.VERIFIED, _X.NONE),
    (_A.VERIFIED, _E.COPIED): (_A.VERIFIED, _X.NONE),
    (_A.VERIFIED, _E.VERIFIED): (_A.VERIFIED, _X.NONE),
    (_A.VERIFIED, _E.FAILED): (_A.ABORTING, _X.ABORT),
    (_A.VERIFIED, _E.CANCELLED): (_A.ABORTING, _X.ABORT),
    (_A.VERIFIED, _E.RANK_LOST): (_A.ABORTED, _X.NONE),
    (_A.VERIFIED, _E.RESUMED): (_A.VERIFIED, _X.NONE),
    (_A.ABORTING, _E.ABORTED): (_A.ABORTED, _X.NONE),
    (_A.ABORTING, _E.RANK_LOST): (_A.ABORTED, _X.NONE),
    (_A.ABORTING, _E.DEADLINE): (_A.ABORTING, _X.ABORT),
    (_A.ABORTING, _E.RESUMED): (_A.ABORTING, _X.ABORT),
    (_A.ABORTING, _E.RESERVED): (_A.ABORTING, _X.NONE),
    (_A.ABORTING, _E.COPIED): (_A.ABORTING, _X.NONE),
    (_A.ABORTING, _E.VERIFIED): (_A.ABORTING, _X.NONE),
    (_A.ABORTING, _E.FAILED): (_A.ABORTING, _X.NONE),
    (_A.ABORTING, _E.CANCELLED): (_A.ABORTING, _X.NONE),
}

REMOVE_TABLE: dict[tuple[RemoveState, StepEvent], tuple[RemoveState, StepAction]] = {
    (_R.PLANNED, _E.PUBLISHED): (_R.UNLISTED, _X.NONE),
    (_R.PLANNED, _E.CANCELLED): (_R.LISTED, _X.NONE),
    (_R.PLANNED, _E.RANK_LOST): (_R.RELEASED, _X.NONE),
    (_R.UNLISTED, _E.ACKED): (_R.ACKED, _X.NONE),
    (_R.UNLISTED, _E.DEADLINE): (_R.ACKED, _X.NONE),
    (_R.UNLISTED, _E.CANCELLED): (_R.LISTED, _X.RELIST),
    (_R.UNLISTED, _E.RANK_LOST): (_R.RELEASED, _X.NONE),
    (_R.UNLISTED, _E.RESUMED): (_R.UNLISTED, _X.NONE),
    (_R.ACKED, _E.QUIESCED): (_R.DRAINED, _X.RELEASE),
    (_R.ACKED, _E.DEADLINE): (_R.DRAINED, _X.RELEASE),
    (_R.ACKED, _E.CANCELLED): (_R.LISTED, _X.RELIST),
    (_R.ACKED, _E.RANK_LOST): (_R.RELEASED, _X.NONE),
    (_R.ACKED, _E.RESUMED): (_R.ACKED, _X.NONE),
    (_R.DRAINED, _E.RELEASED): (_R.RELEASED, _X.NONE),
    (_R.DRAINED, _E.RANK_LOST): (_R.RELEASED, _X.NONE),
    (_R.DRAINED, _E.FAILED): (_R.DRAINED, _X.NONE),
    (_R.DRAINED, _E.DEADLINE): (_R.DRAINED, _X.RELEASE),
    (_R.DRAINED, _E.RESUMED): (_R.DRAINED, _X.RELEASE),
    (_R.DRAINED, _E.CANCELLED): (_R.RECALLED, _X.RECALL),
    (_R.RECALLED, _E.VERIFIED): (_R.LISTED, _X.RELIST),
    (_R.RECALLED, _E.RELEASED): (_R.RELEASED, _X.NONE),
    (_R.RECALLED, _E.RANK_LOST): (_R.RELEASED, _X.NONE),
    (_R.RECALLED, _E.FAILED): (_R.RECALLED, _X.NONE),
    (_R.RECALLED, _E.CANCELLED): (_R.RECALLED, _X.NONE),
    (_R.RECALLED, _E.DEADLINE): (_R.RECALLED, _X.RECALL),
    (_R.RECALLED, _E.RESUMED): (_R.RECALLED, _X.RECALL),
}


def advance_add(state: AddState, event: StepEvent) -> tuple[AddState, StepAction]:
    """Next state and action of an `add`. Raises IllegalTransition for a pair the table does not
    name."""
    found = ADD_TABLE.get((state, event))
    if found is None:
        raise IllegalTransition(f"add in state {state} cannot take event {event}")
    return found


def advance_remove(state: RemoveState, event: StepEvent) -> tuple[RemoveState, StepAction]:
    """Next state and action of a `remove`. Raises IllegalTransition for a pair the table does not
    name."""
    found = REMOVE_TABLE.get((state, event))
    if found is None:
        raise IllegalTransition(f"remove in state {state} cannot take event {event}")
    return found


def advance(kind: StepKind, state: str, event: StepEvent) -> tuple[str, StepAction]:
    """The same by step kind, with the state as its text. Raises IllegalTransition, and ValueError
    on unknown text."""
    if kind is StepKind.ADD:
        return advance_add(AddState(state), event)
    return advance_remove(RemoveState(state), event)


def is_terminal(kind: StepKind, state: str) -> bool:
    """Whether a step in this state has ended."""
    if kind is StepKind.ADD:
        return AddState(state) in TERMINAL_ADD
    return RemoveState(state) in TERMINAL_REMOVE


def can_take(kind: StepKind, state: str, event: StepEvent) -> bool:
    """Whether the table names the pair; used to drop answers that come too late to mean
    anything."""
    if kind is StepKind.ADD:
        return (AddState(state), event) in ADD_TABLE
    return (RemoveState(state), event) in REMOVE_TABLE
