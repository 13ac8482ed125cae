"""The loop: one task owns the engine; event -> inputs log -> step -> commit -> commands, in order.

Responsible for the order that `Effects` demands: transitions are on disk before a command that
follows from them is carried out, a table is sent before the commands after it. Stamps events with
driver time. Must never decide. Called by the life that owns it; everything else posts events.

Operators' requests that move something are tried on a twin of the engine: what would follow is on
disk before the engine itself hears of the request. Where the disk is full the request is refused at
once, by name of the problem, and nothing of it is done, then or later.

Full disk. Effects with transitions that cannot be written are withheld, in order, and written again
each second; automatic plans are paused. While any are withheld, so is every command to a shard: it
may follow from what could not be written (a release that is asked for again, say), and for two
drain waits after it is every release, and every end of an emptied shard: routers must have heard of
the table first. Other effects without transitions (a lost rank's table, records) are carried out: a
table follows from nothing that must be remembered, and a later one includes an earlier.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec

from moe_serve.controller.book import Book
from moe_serve.controller.clock import DriverClock
from moe_serve.controller.fail_points import FailPoints
from moe_serve.controller.figures import Figures
from moe_serve.controller.journal import Journal
from moe_serve.controller.journal_rows import (
    Row,
    StateSnapshot,
    epoch_row,
    snapshot_row,
    transition_row,
)
from moe_serve.controller.journal_store import JournalFull
from moe_serve.controller.recent import Recent
from moe_serve.controller.tasks import Bell
from moe_serve.errors import FailedPrecondition, ResourceExhausted, Unavailable
from placement.engine import Durability, EngineFacts, RebalanceEngine
from placement.messages.codec import encode
from placement.messages.effects import (
    Answer,
    AnyCommand,
    Effects,
    PublishTable,
    ShardCommand,
    WakeAt,
)
from placement.messages.events import (
    AnyEvent,
    ApplyAsked,
    BudgetAsked,
    DrainAsked,
    PauseAsked,
    RankAddAsked,
    RankRemoveAsked,
    RankReplaceAsked,
    ResumeAsked,
    TimerFired,
    UndrainAsked,
    WindowClosed,
)
from placement.routing import RoutingTable

NEVER_S = float("inf")
EVENTS_MAX = 4096
"""Events that may wait. Those who post more wait themselves."""
ASKS_MAX = 256
"""Operators' requests without an answer; above it RESOURCE_EXHAUSTED."""
FULL_RETRY_S = 1.0
"""Wait before a commit that a full disk refused is tried again."""
OWN_REQUEST = 0
"""Number of requests the controller makes of its own engine; nobody waits for the answer."""

_MOVING = (
    ApplyAsked,
    BudgetAsked,
    DrainAsked,
    UndrainAsked,
    RankAddAsked,
    RankRemoveAsked,
    RankReplaceAsked,
    ResumeAsked,
)
"""Operators' requests that move something, or let something move."""


class Executor(Protocol):
    """Carries out commands. Both return at once; answers come back as events."""

    def publish(self, table: RoutingTable) -> None:
        """Send the table to every part."""
        ...

    def start(self, command: AnyCommand) -> None:
        """Begin any other command."""
        ...


class Driver:
    """Owner of one engine.

    parts: names of parts in the journal now, for snapshots. snapshot_every: transitions after
    which a snapshot follows.
    """

    def __init__(  # noqa: PLR0913  # the loop is where everything meets
        self,
        engine: RebalanceEngine,
        *,
        journal: Journal,
        clock: DriverClock,
        executor: Executor,
        book: Book,
        figures: Figures,
        recent: Recent,
        bell: Bell,
        parts: Callable[[], tuple[str, ...]],
        fail_points: FailPoints,
        snapshot_every: int,
        facts: EngineFacts | None = None,
    ) -> None:
        self.engine = engine
        self._facts = facts
        self._journal = journal
        self._clock = clock
        self._executor = executor
        self._book = book
        self._figures = figures
        self._recent = recent
        self._bell = bell
        self._parts = parts
        self._fail_points = fail_points
        self._durable = Durability(engine, snapshot_every=snapshot_every)
        self._events: asyncio.Queue[AnyEvent] = asyncio.Queue(EVENTS_MAX)
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._moving: set[int] = set()
        """Numbers of requests without an answer that move something."""
        self._refused: set[int] = set()
        """Numbers of those that were refused before their turn came."""
        self._next_request = OWN_REQUEST + 1
        self._wake_at_s = clock.now_s()
        self._retry_at_s = NEVER_S
        self._paused_here = False
        self.problem = ""
        """Why moves stand still, "" where they do not."""

    async def post(self, event: AnyEvent) -> None:
        """Let the event happen; its `at_s` is stamped when its turn comes."""
        await self._events.put(event)

    async def ask(self, make: Callable[[int], AnyEvent]) -> Answer:
        """Post an operator's request made with the number given, and wait for its answer. Raises
        ResourceExhausted, FailedPrecondition where it needs a disk with room."""
        if len(self._answers) >= ASKS_MAX:
            raise ResourceExhausted(f"{ASKS_MAX} requests wait for an answer; try later")
        number = self._next_request
        event = make(number)
        moves = isinstance(event, _MOVING)
        if moves:
            self.check_moves()
        if isinstance(event, PauseAsked):
            self._paused_here = False  # somebody wants it so, whatever the disk does
        self._next_request += 1
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        if moves:
            self._moving.add(number)
        try:
            await self.post(event)
            return await answer
        finally:
            self._answers.pop(number, None)
            self._moving.discard(number)

    def check_moves(self) -> None:
        """Raises FailedPrecondition while nothing may be moved, naming the problem."""
        if self.problem:
            raise self._refusal()

    async def run(self) -> None:
        """Take events for ever. Raises StaleTerm where another controller owns the journal."""
        try:
            while True:
                await self._take(await self._next())
        finally:
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(Unavailable("the controller restarts; ask again"))

    async def _next(self) -> AnyEvent:
        while True:
            now_s = self._clock.now_s()
            if now_s >= self._retry_at_s:
                await self._carry_out_withheld()
            for command in self._durable.due(now_s):
                self._executor.start(command)
            if now_s >= self._wake_at_s and self._events.empty():
                return TimerFired(at_s=now_s)
            until_s = min(self._wake_at_s, self._retry_at_s, self._durable.due_at_s)
            try:
                async with asyncio.timeout(None if until_s == NEVER_S else until_s - now_s):
                    return await self._events.get()
            except TimeoutError:
                continue

    async def _take(self, event: AnyEvent) -> None:
        at_s = self._clock.now_s()
        event = msgspec.structs.replace(event, at_s=at_s)
        if self._journal.wants_segment(at_s):
            self._journal.begin_segment(at_s, encode(self.engine.snapshot()))
        number = event.request_id if isinstance(event, _MOVING) else OWN_REQUEST
        ahead: Effects | None = None
        if number != OWN_REQUEST:
            ahead = await self._written_ahead(event, number, at_s)
            self._refused.discard(number)
            if ahead is None:
                return
        self._journal.append_input(at_s, encode(event))
        if at_s >= self._wake_at_s:
            self._wake_at_s = NEVER_S
        if isinstance(event, WindowClosed):
            self._book.window = event.window
            if self._facts is not None:
                self._facts.folded(event.window)
        effects = self.engine.step(event)
        if self._facts is not None:
            self._facts.stepped(event, effects)
        run = self.engine.state.run
        self._book.add(effects.records, run)
        self._figures.decided(effects.records)
        if isinstance(event, WindowClosed):
            self._figures.window_closed(self.engine.state, event.window)
            self._book.plans.window_closed(event.window, self.engine.state)
            self._recent.window_closed(event.window, self.engine.state)
        self._book.note(effects.transitions, () if run is None else run.steps)
        self._book.befores.note(run)
        self._book.plans.note(effects, run, at_s)
        self._recent.note(effects.transitions, run)
        self._recent.targets.decided(effects.records, self.engine.config)
        if ahead is None:
            await self._write_and_execute(effects, at_s)
        else:
            same = encode(effects.transitions) == encode(ahead.transitions)
            assert same, f"request {number} does something else than what is on disk"
            self._carry_out(effects)
        if effects.records or effects.transitions or effects.commands:
            self._bell.ring()

    async def _written_ahead(self, event: AnyEvent, number: int, at_s: float) -> Effects | None:
        """What an operator's request will do, on disk and not yet done. None where it could not be
        written, or was refused before: its answer says why not."""
        if self.problem:
            self._refuse_moving()
        if self.problem or number in self._refused:
            return None
        twin = RebalanceEngine.replayed(self.engine.snapshot())
        effects = twin.step(event)
        published = self._book.epochs_published
        rows = self._rows(twin, effects, at_s)
        self._fail_points.at_commit("before", effects.transitions)
        try:
            await self._journal.commit(rows)
        except JournalFull as error:
            self._book.epochs_published = published
            self._disk_full(error)
            return None
        self._written(effects)
        return effects

    async def _write_and_execute(self, effects: Effects, at_s: float) -> None:
        rows = self._rows(self.engine, effects, at_s)
        if self._durable.must_wait(effects):
            self._withhold(effects)
            return
        effects = self._durable.leaving(effects)
        self._fail_points.at_commit("before", effects.transitions)
        if rows:
            try:
                await self._journal.commit(rows)
            except JournalFull as error:
                if effects.transitions:
                    self._withhold(effects)
                self._disk_full(error)
                if effects.transitions:
                    return
            else:
                self._written(effects)
        self._carry_out(effects)

    def _written(self, effects: Effects) -> None:
        self._durable.written(effects)
        if self._facts is not None:
            self._facts.written(effects)

    def _carry_out(self, effects: Effects) -> None:
        """Do what is on disk."""
        self._fail_points.at_commit("after", effects.transitions)
        self._note_wake(effects)
        self._execute(effects)

    def _note_wake(self, effects: Effects) -> None:
        for command in effects.commands:
            if isinstance(command, WakeAt):  # of no consequence, and only the latest counts
                self._wake_at_s = command.at_s

    def _withhold(self, effects: Effects) -> None:
        self._note_wake(effects)
        self._durable.withhold(effects)

    def _rows(self, engine: RebalanceEngine, effects: Effects, at_s: float) -> list[Row]:
        rows = [transition_row(t) for t in effects.transitions]
        for command in effects.commands:
            if isinstance(command, PublishTable):
                self._book.epochs_published += 1
                rows.append(epoch_row(command.table.epoch, at_s))
        if self._durable.take_snapshot(engine):
            rows.append(snapshot_row(self._snapshot_of(engine, at_s)))
        return rows

    def snapshot(self, at_s: float) -> StateSnapshot:
        """Everything that must be remembered, now."""
        return self._snapshot_of(self.engine, at_s)

    def _snapshot_of(self, engine: RebalanceEngine, at_s: float) -> StateSnapshot:
        return StateSnapshot(
            term=engine.state.term,
            epoch=engine.state.epoch,
            at_s=at_s,
            engine=engine.snapshot(),
            parts=self._parts(),
            epochs_published=self._book.epochs_published,
            befores=self._book.befores.kept,
            replicas_replaced=self._book.replicas_replaced,
        )

    def _execute(self, effects: Effects) -> None:
        now_s = self._clock.now_s()
        for command in effects.commands:
            if isinstance(command, WakeAt) or not self._durable.may_leave(command, now_s):
                continue
            if isinstance(command, Answer):
                waiting = self._answers.get(command.request_id)
                if waiting is not None and not waiting.done():
                    waiting.set_result(command)
            elif isinstance(command, PublishTable):
                followed = bool(effects.transitions)
                if followed:
                    self._fail_points.at_publish("before")
                self._executor.publish(command.table)
                if followed:
                    self._fail_points.at_publish("after")
            else:
                if self._facts is not None and isinstance(command, ShardCommand):
                    self._facts.sent(command)
                self._executor.start(command)

    def _disk_full(self, error: JournalFull) -> None:
        self._durable.forget_told()
        if not self.problem:
            self.problem = f"no new moves: {error.message}"
            self._paused_here = not self.engine.state.paused
            if self._paused_here:
                self._post_soon(PauseAsked(at_s=0.0, request_id=OWN_REQUEST, reason=self.problem))
        self._refuse_moving()
        self._retry_at_s = self._clock.now_s() + FULL_RETRY_S

    def _refuse_moving(self) -> None:
        """Answer every request that moves something; what the engine took before goes on once there
        is room."""
        for number in self._moving:
            waiting = self._answers[number]
            if not waiting.done():
                waiting.set_exception(self._refusal())
                self._refused.add(number)

    def _refusal(self) -> FailedPrecondition:
        return FailedPrecondition(f"{self.problem}; then ask again")

    def _post_soon(self, event: AnyEvent) -> None:
        # From within the loop a full queue cannot be waited for: only the loop empties it.
        if not self._events.full():
            self._events.put_nowait(event)

    async def _carry_out_withheld(self) -> None:
        """Write what a full disk refused and carry it out, oldest first; where there is still no
        room, wait again."""
        try:
            # One transaction with a snapshot: it holds all that the withheld transitions did.
            at_s = self._clock.now_s()
            withheld = self._durable.withheld
            rows = [transition_row(t) for effects in withheld for t in effects.transitions]
            await self._journal.commit([*rows, snapshot_row(self.snapshot(at_s))])
        except JournalFull:
            self._retry_at_s = self._clock.now_s() + FULL_RETRY_S
            return
        self._retry_at_s, self.problem = NEVER_S, ""
        for effects in self._durable.all_written(self.engine, at_s):
            if self._facts is not None:
                self._facts.written(effects)
            self._execute(effects)
        if self._paused_here:
            self._post_soon(ResumeAsked(at_s=0.0, request_id=OWN_REQUEST))
        self._bell.ring()
