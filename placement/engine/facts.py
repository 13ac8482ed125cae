"""What a controller notes of its engine: plans, transitions, commands, tables, windows, as facts.

Responsible for turning events and effects into facts, the same for the driver of a real controller
and for that of a simulated one, so that one set of checkers judges both. Decides nothing and writes
nothing: `note` does. Called by whoever drives an engine, at the moment a fact is true.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from placement.engine.engine import RebalanceEngine
from placement.load import LoadWindow
from placement.messages.effects import Answer, AnyCommand, Effects
from placement.messages.events import AnyEvent, BudgetAsked
from placement.messages.history import (
    CommandSent,
    Fact,
    PlanEnded,
    PlanStarted,
    RankGivenUp,
    Recovered,
    StallReported,
    StateWritten,
    TablePublished,
    WaitsShortened,
    WindowFolded,
)
from placement.migration import is_terminal
from placement.routing import RoutingTable
from placement.topology import MoeSpec

STALL_RULES: Final = frozenset(
    {
        "target_failed",
        "target_stale",
        "plan_running",
        "target_outstanding",
        "not_ready",
        "paused",
        "no_load",
        "nothing_better",
        "cooldown",
        "step_aborted",
        "drain_wait_over",
        "repair",
        "drain",
        "budget",
        "initial",
    }
)
"""Rules of decision records that say why something did not go on."""


class Note(Protocol):
    """Notes a fact of one life, now."""

    def __call__(self, kind: type[Fact], /, **fields: Any) -> None:
        """`fields`: all but who, seq and at_s."""
        ...


class EngineFacts:
    """Of one life of a controller, which serves `spec`."""

    def __init__(self, engine: RebalanceEngine, spec: MoeSpec, note: Note) -> None:
        self._engine = engine
        self._spec = spec
        self._note = note
        self._term = engine.state.term
        self._plan: tuple[str, str] | None = None
        self._lives = self._known_lives()

    def _known_lives(self) -> dict[int, int]:
        return {rank.rank: rank.incarnation for rank in self._engine.state.ranks}

    def recovered(self, *, journal: bool, torn: bool) -> None:
        """The life began, with what a journal held or without."""
        state = self._engine.state
        steps = dict(state.parked)
        if state.run is not None:
            steps |= state.run.steps
        self._note(
            Recovered,
            term=self._term,
            epoch=state.epoch,
            journal=journal,
            open_steps=tuple(
                (i, s.state)
                for i, s in sorted(steps.items())
                if not is_terminal(s.step.kind, s.state)
            ),
            torn=torn,
        )

    def stepped(self, event: AnyEvent, effects: Effects) -> None:
        """The engine has taken an event; nothing of the effects is written or carried out."""
        self._note_plan()
        before, self._lives = self._lives, self._known_lives()
        for record in effects.records:
            if record.rule == "rank_lost":
                # The life of before: the event that ended it may be another life's that has come.
                rank = int(record.numbers["rank"])
                life = before.get(rank, -1)
                given_up = life if life >= 0 else self._lives[rank]
                self._note(RankGivenUp, rank=rank, incarnation=given_up)
            if record.rule in STALL_RULES:
                self._note(StallReported, term=self._term, why=record.rule)
        if isinstance(event, BudgetAsked) and _granted(effects):
            wait_s = self._engine.config.budget_drain_wait_s
            self._note(WaitsShortened, term=self._term, wait_s=wait_s)

    def _note_plan(self) -> None:
        run = self._engine.state.run
        now = None if run is None else (run.plan_id, run.cause)
        if now == self._plan:
            return
        if self._plan is not None:
            self._note(PlanEnded, plan_id=self._plan[0], outcome="ended", why="")
        self._plan = now
        if run is not None:
            self._note(
                PlanStarted,
                term=self._term,
                plan_id=run.plan_id,
                cause=run.cause,
                drain_wait_s=run.drain_wait_s,
            )

    def written(self, effects: Effects) -> None:
        """The transitions of these effects are in the journal."""
        for t in effects.transitions:
            self._note(
                StateWritten,
                term=self._term,
                epoch=t.epoch,
                plan_id=t.plan_id,
                step_id=t.step_id,
                kind=t.kind.value,
                rank=t.rank,
                slot=t.slot,
                slot_tag=t.slot_tag,
                key=self._spec.key(t.layer, t.expert),
                before=t.before,
                after=t.after,
            )

    def sent(self, command: AnyCommand) -> None:
        """A command to a shard leaves now."""
        self._note(
            CommandSent,
            term=self._term,
            command=type(command).__name__,
            step_id=getattr(command, "step_id", -1),
            rank=getattr(command, "rank", -1),
            incarnation=getattr(command, "incarnation", -1),
            slot=getattr(command, "slot", -1),
            slot_tag=getattr(command, "slot_tag", -1),
        )

    def published(self, table: RoutingTable) -> None:
        """A table leaves now."""
        num_keys = len(table.replica_ptr) - 1
        keys = [
            key
            for key in range(num_keys)
            for _ in range(int(table.replica_ptr[key + 1]) - int(table.replica_ptr[key]))
        ]
        listed = zip(
            keys,
            table.replica_rank.tolist(),
            table.replica_slot.tolist(),
            table.replica_tag.tolist(),
            strict=True,
        )
        self._note(
            TablePublished,
            term=table.term,
            epoch=table.epoch,
            num_keys=num_keys,
            listed=tuple(listed),
            lives=tuple((r.rank, r.incarnation) for r in table.ranks),
        )

    def folded(self, window: LoadWindow) -> None:
        """A load window closed; its number is the service's."""
        demand = window.demand.sum(axis=(0, 1)).reshape(-1)
        keys = demand.nonzero()[0].tolist()
        self._note(
            WindowFolded,
            term=self._term,
            index=window.index,
            demand=tuple((key, int(demand[key])) for key in keys),
            executed=int(window.executed_pairs.sum()),
        )


def _granted(effects: Effects) -> bool:
    return any(isinstance(c, Answer) and c.code == "ok" for c in effects.commands)
