"""A controller of a simulated world: the production engine, driven as the controller actor drives
it.

Responsible for the order that `Effects` demands: transitions are in the journal before a command
that follows from them leaves, a table leaves before the commands after it. Dies where it is told
to, between any two of these. Decides nothing. Talks to parts through `liaison`. Made by the fleet.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import partial

import msgspec

from placement.engine import (
    Durability,
    EngineFacts,
    EngineSnapshot,
    RebalanceEngine,
    compute_target,
)
from placement.load import LoadFolder
from placement.messages import events as ev
from placement.messages.effects import (
    Answer,
    AnyCommand,
    ComputeTarget,
    Effects,
    EndRank,
    PublishTable,
    ReplaceRank,
    ReplaceRouter,
    WakeAt,
)
from placement.routing import RoutingTable
from placement.sim.journal import JournalFull, JournalOwned, Record, SimJournal
from placement.sim.liaison import Liaison
from placement.sim.network import Part
from placement.sim.stage import Stage

FULL_RETRY_S = 0.5
LEAST_S = 1e-9
"""A shorter wait may be none: it does not change the sum it is added to."""
SNAPSHOT_EVERY = 200
"""Transitions after which a snapshot follows."""
OWN_REQUEST = 0


class DiesAt(StrEnum):
    """Where the next transition kills the controller."""

    NOWHERE = ""
    BEFORE_WRITE = "before_write"
    IN_WRITE = "in_write"
    AFTER_WRITE = "after_write"
    AFTER_FIRST_COMMAND = "after_first_command"


class SimController(Part):
    """One life of the controller, one term."""

    def __init__(
        self,
        stage: Stage,
        engine: RebalanceEngine,
        journal: SimJournal,
        *,
        replace_rank: Callable[[SimController, ReplaceRank], None],
        end_rank: Callable[[SimController, int], None],
        replace_router: Callable[[SimController, str], None],
        on_end: Callable[[SimController, str], None],
        on_step: Callable[[SimController, Effects], None],
    ) -> None:
        super().__init__("controller", engine.state.term, stage.clock)
        self.stage = stage
        self.engine = engine
        self.journal = journal
        self.term = engine.state.term
        self.dies_at = DiesAt.NOWHERE
        self.step_back_s = 0.0
        """How far its clock has jumped back: events carry older times."""
        self.table: RoutingTable | None = None
        self.started_from: EngineSnapshot = engine.snapshot()
        self.inputs: list[tuple[ev.AnyEvent, Effects]] = []
        self.answers: dict[int, Answer] = {}
        self.folder = LoadFolder(
            num_layers=stage.spec.num_layers,
            num_experts=stage.spec.num_experts,
            num_ranks=len(stage.topology.ranks),
            window_s=stage.config.window_s,
            sub_windows=stage.config.sub_windows,
            start_s=stage.clock.now_s,
        )
        self.facts = EngineFacts(engine, stage.spec, partial(stage.note_of, self.who))
        self.liaison = Liaison(self)
        self._replace_rank = replace_rank
        self._end_rank = end_rank
        self._replace_router = replace_router
        self._on_end = on_end
        self._on_step = on_step
        self._stepping = False
        self._wake_at_s = -1.0
        self._durable = Durability(engine, snapshot_every=SNAPSHOT_EVERY)
        self._paused_here = False
        history = engine.state.history.windows
        self._first_window = history[-1].index + 1 if history else 0
        self._next_window_s = stage.clock.now_s + stage.config.window_s
        self.after(stage.config.window_s, self._close_window)

    # -- events and their effects ------------------------------------------------------------------

    def feed(self, event: ev.AnyEvent) -> None:
        """Give the engine an event and carry out what it asks for."""
        if not self.alive:
            return
        assert not self._stepping, "one event at a time"
        self._stepping = True
        event = msgspec.structs.replace(event, at_s=self.clock.now_s - self.step_back_s)
        effects = self.engine.step(event)
        self.inputs.append((event, effects))
        self.facts.stepped(event, effects)
        for record in effects.records:
            self._count(record.rule, record.outcome)
        self._on_step(self, effects)
        if self.alive:
            self._write_and_execute(effects)
        self._stepping = False

    def _count(self, rule: str, outcome: str) -> None:
        coverage = self.stage.coverage
        if rule == "rank_refused":
            coverage.refused("join.refused")
        elif rule == "target_stale":
            coverage.refused("target.stale")
        elif (rule, outcome) == ("target_failed", "refused"):
            coverage.refused("target.failed")

    def _write_and_execute(self, effects: Effects) -> None:
        for command in effects.commands:
            if isinstance(command, WakeAt):
                self._wake(command.at_s)
        if self._durable.must_wait(effects):
            self._durable.withhold(effects)
            return
        effects = self._durable.leaving(effects)
        dies_at = self.dies_at if effects.transitions else DiesAt.NOWHERE
        if dies_at is DiesAt.BEFORE_WRITE:
            self.end("fault")
            return
        try:
            self._write(effects, torn=dies_at is DiesAt.IN_WRITE)
        except JournalOwned:
            self.stage.coverage.refused("journal.owner")
            self.end("fenced")
            return
        except JournalFull:
            self.stage.coverage.refused("journal.full")
            self._disk_full(effects)
            if effects.transitions:
                return
        if dies_at in (DiesAt.IN_WRITE, DiesAt.AFTER_WRITE):
            self.end("fault")
            return
        self._execute(effects, only_first=dies_at is DiesAt.AFTER_FIRST_COMMAND)
        if dies_at is DiesAt.AFTER_FIRST_COMMAND:
            self.end("fault")

    def _write(self, effects: Effects, *, torn: bool) -> None:
        """Commit what must be remembered: transitions, epochs, and a snapshot where an intention
        changed."""
        changed = self._durable.take_snapshot(self.engine)
        publishes = any(isinstance(c, PublishTable) for c in effects.commands)
        if not (effects.transitions or changed or publishes):
            return
        snapshot = self.engine.snapshot() if changed else None
        record = Record(effects.transitions, snapshot)
        self.journal.write(self.term, record, self.engine.state.epoch, torn=torn)
        self._durable.written(effects)
        if not torn:
            self.facts.written(effects)

    def _execute(self, effects: Effects, *, only_first: bool = False) -> None:
        now_s = self.clock.now_s
        commands = [
            c
            for c in effects.commands
            if not isinstance(c, WakeAt) and self._durable.may_leave(c, now_s)
        ]
        for command in commands[: 1 if only_first else None]:
            self._carry_out(command)

    def _carry_out(self, command: AnyCommand) -> None:
        match command:
            case ComputeTarget():
                plan_s = self.stage.dice.around(self.stage.delays.plan_s)
                self.after(plan_s, lambda: self._compute(command))
            case PublishTable():
                self._publish(command.table)
            case Answer():
                self.answers[command.request_id] = command
                if command.code != "ok":
                    self.stage.coverage.refused(f"admin.{command.code}")
            case ReplaceRank():
                self._replace_rank(self, command)
            case EndRank():
                self._end_rank(self, command.rank)
            case ReplaceRouter():
                self._replace_router(self, command.router)
            case WakeAt():
                raise AssertionError("it was taken before")
            case _:
                self.facts.sent(command)
                self.liaison.submit(command)

    def _compute(self, command: ComputeTarget) -> None:
        answer = compute_target(command, self.stage.config)
        if command.target and isinstance(answer, ev.TargetFailed):
            self.stage.coverage.refused("target.unfit")
        self.feed(answer)

    def _publish(self, table: RoutingTable) -> None:
        if not table.is_newer(self.table):
            return  # a full disk held it back, and a newer one says all that it said
        self.table = table
        self.facts.published(table)
        self.liaison.publish(table)

    # -- a disk without room -----------------------------------------------------------------------

    def _disk_full(self, effects: Effects) -> None:
        """New moves stop; what must be remembered waits until it is."""
        self._durable.forget_told()
        if not self._durable.withheld and not self._paused_here:
            if not self.engine.state.paused:
                self._paused_here = True
                pause = ev.PauseAsked(at_s=0.0, request_id=OWN_REQUEST, reason="the disk is full")
                self.after(0.0, lambda: self.feed(pause))
            self.after(FULL_RETRY_S, self._write_withheld)
        if effects.transitions:
            self._durable.withhold(effects)

    def _write_withheld(self) -> None:
        withheld = self._durable.withheld
        waiting = tuple(t for effects in withheld for t in effects.transitions)
        try:
            record = Record(waiting, self.engine.snapshot())
            self.journal.write(self.term, record, self.engine.state.epoch)
        except JournalOwned:
            self.stage.coverage.refused("journal.owner")
            self.end("fenced")
            return
        except JournalFull:
            self.after(FULL_RETRY_S, self._write_withheld)
            return
        for effects in self._durable.all_written(self.engine, self.clock.now_s):
            self.facts.written(effects)
            self._execute(effects)
        if self._durable.due_at_s < float("inf"):
            self.after(self._durable.due_at_s - self.clock.now_s, self._carry_out_kept)
        if self._paused_here:
            self._paused_here = False
            self.feed(ev.ResumeAsked(at_s=0.0, request_id=OWN_REQUEST))

    def _carry_out_kept(self) -> None:
        for command in self._durable.due(self.clock.now_s):
            self._carry_out(command)

    # -- time and load -----------------------------------------------------------------------------

    def _wake(self, at_s: float) -> None:
        self._wake_at_s = at_s
        delay_s = max(0.0, at_s + self.step_back_s - self.clock.now_s)
        self.after(delay_s, lambda: self._woken(at_s))

    def _woken(self, at_s: float) -> None:
        if at_s != self._wake_at_s:
            return
        early_s = at_s - (self.clock.now_s - self.step_back_s)
        if early_s > 0:  # the clock was set back meanwhile
            self.after(max(early_s, LEAST_S), lambda: self._woken(at_s))
            return
        self.feed(ev.TimerFired(at_s=at_s))

    def _close_window(self) -> None:
        window = self.folder.close(self.clock.now_s)
        window = msgspec.structs.replace(window, index=self._first_window + window.index)
        self.facts.folded(window)
        self.feed(ev.WindowClosed(at_s=0.0, window=window))
        window_s = self.stage.config.window_s
        self._next_window_s = max(self._next_window_s + window_s, self.clock.now_s)
        self.after(self._next_window_s - self.clock.now_s, self._close_window)

    # -- ends --------------------------------------------------------------------------------------

    def fenced(self) -> None:
        """A part has seen a higher term: another controller took over."""
        self.end("fenced")

    def end(self, cause: str) -> None:
        """This life is over. cause: fault | fenced."""
        if self.alive:
            self.die()
            self._on_end(self, cause)
