"""What people are shown of the past: decision records, moves, the newest closed window. Bounded.

Responsible for keeping, not for deciding: nothing here is read by the engine. Filled by the driver,
read by views.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Container
from dataclasses import dataclass, replace

import msgspec

from moe_serve.controller.befores import Befores
from moe_serve.controller.clock import wall_s
from moe_serve.controller.plans import PlanShelf
from moe_serve.controller.room import Removed, room_of, room_words
from placement.engine import EngineState
from placement.engine.runs import QUIET_CAUSES
from placement.engine.state import PlanRun
from placement.load import LoadWindow
from placement.messages.effects import Transition
from placement.messages.records import DecisionRecord

MOVE_RULES = frozenset({"replicate", "migrate", "evict"})


@dataclass(frozen=True, slots=True)
class KeptRecord:
    """A decision record with the wall-clock time at which it was made (seconds of the Unix
    epoch)."""

    record: DecisionRecord
    wall_time_s: float


@dataclass(frozen=True, slots=True)
class KeptMove:
    """A move as people see it. state: running | done | aborted. Ranks are -1 where there is
    none. cross_node, room: as the plan says; False and empty where its beginning was not seen."""

    move_id: int
    plan_id: str
    kind: str
    layer: int
    expert: int
    source_rank: int
    target_rank: int
    copy_bytes: int
    reason: str
    gain_s_per_s: float
    state: str
    started_at_s: float
    ended_at_s: float = 0.0
    cross_node: bool = False
    room: tuple[Removed, ...] = ()


class Book:
    """The past of one service, as far as it is kept."""

    def __init__(self, *, records_kept: int, moves_kept: int) -> None:
        self.records_kept = records_kept
        self._records: deque[KeptRecord] = deque(maxlen=records_kept)
        self._moves: OrderedDict[tuple[str, int], KeptMove] = OrderedDict()
        self._moves_kept = moves_kept
        self._begun: dict[tuple[str, int], KeptMove] = {}
        """Moves of the plan that began last, as they were then."""
        self._plan: object = None
        self._since: dict[int, float] = {}
        self.window: LoadWindow | None = None
        self.epochs_published = 0
        self.replicas_replaced = 0
        """Replicas that finished moves removed to make room."""
        self.befores = Befores()
        self.plans = PlanShelf()

    def add(self, records: tuple[DecisionRecord, ...], run: PlanRun | None = None) -> None:
        """Keep records in their order; those of moves also change the moves. `run`: the running
        plan after them. A record that begins a move then also says what makes room for it."""
        for record in records:
            told = record
            if record.rule in MOVE_RULES and record.move_id >= 0:
                if run is not None and record.plan_id == run.plan_id:
                    self._begin(run)
                room = self._move(record).room
                if room and record.outcome == "started":
                    detail = f"{record.detail}; in place of {room_words(room)}"
                    told = msgspec.structs.replace(record, detail=detail)
            self._records.append(KeptRecord(told, wall_s()))

    def note(self, transitions: tuple[Transition, ...], live: Container[int]) -> None:
        """Remember when the steps of the running plan (`live`) entered their state."""
        if transitions:
            self._since = {s: t for s, t in self._since.items() if s in live}
            self._since |= {t.step_id: t.at_s for t in transitions if t.step_id in live}

    def since_s(self, step_id: int) -> float | None:
        """Driver time at which a step entered its state, None where that is not known."""
        return self._since.get(step_id)

    def recall_run(self, state: EngineState) -> None:
        """After a restart: the moves of the plan that was running are shown again, and what was
        there before it is known.

        Not those of a quiet plan: no record would ever end them.
        """
        run = state.run
        self.befores.note(run)
        if run is None or run.cause in QUIET_CAUSES:
            return
        self._begin(run)
        for move in self._begun.values():
            self._keep(move)

    @property
    def moves(self) -> tuple[KeptMove, ...]:
        """Kept moves, newest last."""
        return tuple(self._moves.values())

    def records_after(self, seq: int) -> list[KeptRecord]:
        """Kept records whose number is above `seq`, oldest first."""
        found: list[KeptRecord] = []
        for kept in reversed(self._records):
            if kept.record.seq <= seq:
                break
            found.append(kept)
        return found[::-1]

    def newest(self, count: int) -> list[KeptRecord]:
        """The newest records, oldest first."""
        return list(self._records)[-count:]

    def _begin(self, run: PlanRun) -> None:
        if run.plan is self._plan:
            return
        self._plan, room = run.plan, room_of(run.plan)
        self._begun = {
            (run.plan_id, move.move_id): KeptMove(
                move_id=move.move_id,
                plan_id=run.plan_id,
                kind=move.kind.value,
                layer=move.layer,
                expert=move.expert,
                source_rank=move.source_rank,
                target_rank=move.target_rank,
                copy_bytes=move.copy_bytes,
                reason=move.reason,
                gain_s_per_s=move.gain_s_per_s,
                state="running",
                started_at_s=run.started_at_s,
                cross_node=move.cross_node,
                room=room.get(move.move_id, ()),
            )
            for move in run.plan.moves
        }

    def _move(self, record: DecisionRecord) -> KeptMove:
        key = record.plan_id, record.move_id
        known = self._moves.get(key) or self._begun.get(key)
        numbers = record.numbers
        if known is None:
            known = KeptMove(
                move_id=record.move_id,
                plan_id=record.plan_id,
                kind=record.rule,
                layer=int(numbers.get("layer", -1)),
                expert=int(numbers.get("expert", -1)),
                source_rank=int(numbers.get("source_rank", -1)),
                target_rank=int(numbers.get("target_rank", -1)),
                copy_bytes=record.copy_bytes,
                reason=record.detail.partition(": ")[2] or record.detail,
                gain_s_per_s=record.expected_gain_s_per_s,
                state="running",
                started_at_s=record.at_s,
            )
        if record.outcome in ("done", "aborted"):
            known = replace(known, state=record.outcome, ended_at_s=record.at_s)
        if record.outcome == "done":
            self.replicas_replaced += len(known.room)
        self._keep(known)
        return known

    def _keep(self, move: KeptMove) -> None:
        self._moves[move.plan_id, move.move_id] = move
        while len(self._moves) > self._moves_kept:
            self._moves.popitem(last=False)
