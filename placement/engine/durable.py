"""What a controller must have in its journal, and what waits while the journal takes nothing.

The driver of the controller and that of the simulator hold one each, so the rules that are
simulated are the rules that production follows.

Responsible for saying when a snapshot is due and what may leave. Writes nothing and carries nothing
out: whoever drives the engine does both.
"""

from __future__ import annotations

from collections.abc import Container

import msgspec

from placement.engine.engine import RebalanceEngine
from placement.engine.state import NEVER_S
from placement.messages.effects import (
    AnyCommand,
    Effects,
    EndRank,
    PublishTable,
    ReleaseSlot,
    ReplaceRank,
    ShardCommand,
)
from placement.migration import AddState

RELEASE_WAITS = 2
"""Drain waits after which slots are freed, and emptied shards ended, again once there is room: the
table without them left only then, and routers have to hear of it and to finish what they have in
flight."""


class Durability:
    """Of one life of a controller. snapshot_every: transitions after which a snapshot is due in any
    case. Times are those of the engine's events, seconds."""

    def __init__(self, engine: RebalanceEngine, *, snapshot_every: int) -> None:
        self._snapshot_every = snapshot_every
        self._told = _intent(engine)
        self._since_snapshot = 0
        self._withheld: list[Effects] = []
        self._releases_from_s = 0.0
        self._ends: list[AnyCommand] = []

    @property
    def withheld(self) -> tuple[Effects, ...]:
        """What could not be written, and what followed from it; oldest first."""
        return tuple(self._withheld)

    def take_snapshot(self, engine: RebalanceEngine) -> bool:
        """Whether the next commit needs a snapshot: for what no transition tells, or for the number
        of transitions since the last. It counts as taken."""
        intent = _intent(engine)
        due = intent != self._told or self._since_snapshot >= self._snapshot_every
        if due:
            self._told, self._since_snapshot = intent, 0
        return due

    def forget_told(self) -> None:
        """A commit failed: whatever was to be told is told with the next one."""
        self._told = ()

    def written(self, effects: Effects) -> None:
        """The transitions of these effects are in the journal."""
        self._since_snapshot += len(effects.transitions)

    def must_wait(self, effects: Effects) -> bool:
        """Whether these may follow from something that is not written yet. A table may leave, as
        far as `leaving` says."""
        return bool(self._withheld) and (
            bool(effects.transitions) or any(isinstance(c, ShardCommand) for c in effects.commands)
        )

    def leaving(self, effects: Effects) -> Effects:
        """These without the tables that list what is not written yet, which are withheld: the next
        controller would not know of the listing, and free the slot under its readers."""
        listed = {
            (t.rank, t.slot, t.slot_tag)
            for waiting in self._withheld
            for t in waiting.transitions
            if t.after == AddState.LISTED
        }
        held = [c for c in effects.commands if listed and _lists(c, listed)]
        if not held:
            return effects
        self.withhold(Effects(commands=tuple(held)))
        return msgspec.structs.replace(
            effects, commands=tuple(c for c in effects.commands if c not in held)
        )

    def withhold(self, effects: Effects) -> None:
        """They wait behind those that wait already."""
        self._withheld.append(effects)

    def all_written(self, engine: RebalanceEngine, at_s: float) -> tuple[Effects, ...]:
        """A snapshot and everything withheld are in the journal: what is to be carried out now, in
        this order. No slot is freed for a while: the waits of removals passed while no router could
        hear of the table that unlists them."""
        withheld, self._withheld = tuple(self._withheld), []
        self._told, self._since_snapshot = _intent(engine), 0
        self._releases_from_s = at_s + RELEASE_WAITS * engine.config.drain_wait_s
        return withheld

    def may_leave(self, command: AnyCommand, at_s: float) -> bool:
        """False for a release that comes too early, which the engine asks for again; and for the
        end of a shard that comes too early, which is kept for `due`."""
        if at_s >= self._releases_from_s:
            return True
        if _ends_a_shard(command):
            self._ends.append(command)
            return False
        return not isinstance(command, ReleaseSlot)

    @property
    def due_at_s(self) -> float:
        """When to ask for `due`; infinite where nothing is kept."""
        return self._releases_from_s if self._ends else NEVER_S

    def due(self, at_s: float) -> tuple[AnyCommand, ...]:
        """Kept commands whose time has come, in their order; they are kept no more."""
        if at_s < self.due_at_s:
            return ()
        due, self._ends = tuple(self._ends), []
        return due


def _lists(command: AnyCommand, replicas: Container[tuple[int, int, int]]) -> bool:
    """Whether it is a table that lists one of these (rank, slot, tag)."""
    if not isinstance(command, PublishTable):
        return False
    table = command.table
    columns = table.replica_rank, table.replica_slot, table.replica_tag
    return any(one in replicas for one in zip(*(c.tolist() for c in columns), strict=True))


def _ends_a_shard(command: AnyCommand) -> bool:
    """Whether it ends a shard that lives, for all anybody knows."""
    return isinstance(command, EndRank) or (isinstance(command, ReplaceRank) and command.emptied)


def _intent(engine: RebalanceEngine) -> tuple[object, ...]:
    """What no transition tells: a change of it is followed by a snapshot."""
    state = engine.state
    return (
        state.paused,
        None if state.run is None else state.run.plan_id,
        *(
            (r.status, r.incarnation, r.num_slots, r.drained_by, r.wanted_slots, r.budget_bytes)
            for r in state.ranks
        ),
    )
