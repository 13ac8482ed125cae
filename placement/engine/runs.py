"""A plan's life as a whole: numbered, started, told, finished; and the plan that cleans up orphan
slots.

Responsible for ids, records and what a finished plan leaves behind. Begins no step. Called by
supervise and by whatever decides that a plan shall run (needs, target, admin).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from placement.config import RebalanceConfig
from placement.engine.restore import restored
from placement.engine.stall import plan_ended
from placement.engine.state import (
    PlanRun,
    RankStatus,
    Realised,
    RunState,
    SlotUse,
    StepRun,
    short_hash,
)
from placement.engine.steps import park
from placement.engine.turn import Turn
from placement.layout import SlotId
from placement.migration import AddState, RemoveState, is_terminal
from placement.planner.gate import Terms, moved
from placement.planner.plan import Move, MoveKind, Plan, PlannedStep, StepKind

FILLS = frozenset({"initial", "restore", "refill"})
"""Causes that fill empty ranks: nothing moves by them."""
QUIET_CAUSES = FILLS | {"cleanup"}
"""Causes whose moves are too many and too plain for a record each."""

_UNSAID = "cancelled"
_UNANSWERED = "its shard has not given the slot back yet"

CHOSEN_CAUSES = frozenset({"auto", "asked"})
"""Causes after whose plans the automatic trigger cools down; what had to be done is no reason to
wait."""


def renumbered(turn: Turn, plan: Plan) -> Plan:
    """The plan with step and move ids that were never used before."""
    first_step, first_move = turn.state.next_step_id, turn.state.next_move_id
    low_step = min((s.step_id for s in plan.steps), default=0)
    low_move = min((m.move_id for m in plan.moves), default=0)
    steps = tuple(
        msgspec.structs.replace(
            s,
            step_id=s.step_id - low_step + first_step,
            move_id=s.move_id - low_move + first_move,
            after=tuple(a - low_step + first_step for a in s.after),
        )
        for s in plan.steps
    )
    moves = tuple(
        msgspec.structs.replace(m, move_id=m.move_id - low_move + first_move) for m in plan.moves
    )
    turn.state.next_step_id = max((s.step_id for s in steps), default=first_step - 1) + 1
    turn.state.next_move_id = max((m.move_id for m in moves), default=first_move - 1) + 1
    return msgspec.structs.replace(plan, steps=steps, moves=moves)


def start_run(
    turn: Turn,
    plan: Plan,
    cause: str,
    *,
    rule: str,
    detail: str = "",
    numbers: dict[str, float] | None = None,
    plan_id: str = "",
    refused: Sequence[str] = (),
) -> PlanRun:
    """Make the plan the running one. Nothing else may run. `plan_id`: the id it is already known
    by. detail, numbers: what the rule saw, beside the plan's own figures. refused: what else was
    looked at, as in a record; what the plan itself leaves out is added to it."""
    assert turn.state.run is None, "a plan is already running"
    plan = renumbered(turn, plan)
    plan_id = plan_id or f"{turn.state.epoch}-{short_hash(plan)}"
    config = turn.config
    run = PlanRun(
        plan_id=plan_id,
        cause=cause,
        plan=plan,
        steps={s.step_id: StepRun(step=s) for s in plan.steps},
        started_at_s=turn.at_s,
        drain_wait_s=config.budget_drain_wait_s if cause == "budget" else config.drain_wait_s,
        before=turn.layout(),
        progress_at_s=turn.at_s,
    )
    open_wave(run, 0)
    turn.state.run = run
    turn.state.retry_at_s.pop(cause, None)
    turn.record(
        rule,
        "started",
        f"{cause} plan of {len(plan.moves)} moves in {len(plan.steps)} steps"
        + (f"; {detail}" if detail else ""),
        plan_id=plan_id,
        numbers={
            "moves": float(len(plan.moves)),
            "cost_s": plan.cost_s,
            "gain_s_per_s": plan.gain_s_per_s,
            "balancedness_before": plan.balancedness_before,
            "balancedness_after": plan.balancedness_after,
            "cross_node_bytes": float(plan.cross_node_bytes),
        }
        | (numbers or {}),
        expected_gain_s_per_s=plan.gain_s_per_s,
        copy_bytes=plan.copy_bytes,
        refused=[*refused, *left_out(plan)],
    )
    if cause not in QUIET_CAUSES:
        for move in plan.moves:
            _record_move(turn, run, move, "started", move.reason)
    return run


def left_out(plan: Plan) -> list[str]:
    """What its target wanted and the plan cannot do, as a record names it."""
    return [f"move_refused: {why}" for why in plan.refused]


def _record_move(turn: Turn, run: PlanRun, move: Move, outcome: str, detail: str) -> None:
    turn.record(
        move.kind.value,
        outcome,
        f"layer {move.layer} expert {move.expert}: {detail}",
        plan_id=run.plan_id,
        move_id=move.move_id,
        numbers={
            "source_rank": float(move.source_rank),
            "target_rank": float(move.target_rank),
            "layer": float(move.layer),
            "expert": float(move.expert),
        },
        expected_gain_s_per_s=move.gain_s_per_s,
        copy_bytes=move.copy_bytes,
    )


def cleanup_plan(turn: Turn) -> Plan | None:
    """Removals of every orphan slot; None where there is none. Slots are looked at once a
    revision: orphans come with a rank that joins, and that makes a new one."""
    if turn.cache.clean_at_revision == turn.state.revision:
        return None
    steps = []
    for rank in turn.state.ranks:
        if rank.status is not RankStatus.LIVE:
            continue
        for index, slot in enumerate(rank.slots):
            if slot.use is SlotUse.ORPHAN:
                layer, expert = divmod(slot.key, turn.spec.num_experts)
                steps.append((rank.rank, index, layer, expert))
    if not steps:
        turn.cache.clean_at_revision = turn.state.revision
        return None
    return Plan(
        moves=tuple(
            Move(
                move_id=n,
                kind=MoveKind.EVICT,
                layer=layer,
                expert=expert,
                source_rank=rank,
                target_rank=-1,
                copy_bytes=0,
                cross_node=False,
                reason="resident but in no table",
                gain_s_per_s=0.0,
            )
            for n, (rank, _, layer, expert) in enumerate(steps)
        ),
        steps=tuple(
            PlannedStep(
                step_id=n,
                kind=StepKind.REMOVE,
                move_id=n,
                slot=SlotId(rank, index),
                layer=layer,
                expert=expert,
                wave=0,
            )
            for n, (rank, index, layer, expert) in enumerate(steps)
        ),
        copy_bytes=0,
        cross_node_bytes=0,
        cost_s=0.0,
        gain_s_per_s=0.0,
        balancedness_before=1.0,
        balancedness_after=1.0,
    )


def open_wave(run: PlanRun, wave: int) -> None:
    """Let the wave's adds wait for their turn."""
    run.wave = wave
    run.waiting = {}
    for s in run.steps.values():
        if s.step.wave == wave and s.step.kind is StepKind.ADD and s.state == AddState.PLANNED:
            run.waiting.setdefault(s.step.slot.rank, []).append(s.step.step_id)


def has_ended(step: StepRun) -> bool:
    """Whether the step is in a last state of its machine."""
    return is_terminal(step.step.kind, step.state)


def did_its_work(step: StepRun) -> bool:
    """Whether an ended step did what it was planned for: added and listed, or removed and
    released."""
    return step.state == (
        AddState.LISTED if step.step.kind is StepKind.ADD else RemoveState.RELEASED
    )


def back_off(turn: Turn, cause: str) -> None:
    """Do not ask again for this cause for a while."""
    turn.state.retry_at_s[cause] = turn.at_s + turn.config.retry_s


def finish_run(turn: Turn) -> None:
    """Close the running plan. Steps that are open, for they wait for the first table or for a shard
    that does not answer, are parked."""
    state, run = turn.state, turn.state.run
    assert run is not None, "no plan to finish"
    steps_of: dict[int, list[StepRun]] = {}
    for step in run.steps.values():
        steps_of.setdefault(step.step.move_id, []).append(step)
    _park_open(turn, run)
    if run.cause == "restore":
        for step in run.steps.values():
            if did_its_work(step):
                restored(turn, step.step.slot)
    done = 0
    for move in run.plan.moves:
        steps = steps_of.get(move.move_id, [])
        whole = bool(steps) and all(did_its_work(s) or s.state == AddState.VERIFIED for s in steps)
        done += whole
        if whole and run.cause not in FILLS:
            state.moves_done[move.kind.value] = state.moves_done.get(move.kind.value, 0) + 1
        elif not whole:
            state.moves_aborted += 1
        if run.cause not in QUIET_CAUSES:
            why = next((s.why for s in steps if s.why), _UNSAID)
            took = f"done in {turn.at_s - run.started_at_s:.3f} s" if whole else why
            _record_move(turn, run, move, "done" if whole else "aborted", took)
    whole_plan = done == len(run.plan.moves) and run.state is RunState.RUNNING
    if not done and run.plan.moves and not _may_try_elsewhere(turn, run):
        back_off(turn, run.cause)  # what failed whole would fail whole again at once
    turn.record(
        "plan_done",
        "done" if whole_plan else "aborted",
        f"{done} of {len(run.plan.moves)} moves of the {run.cause} plan done",
        plan_id=run.plan_id,
        numbers={
            "moves": float(len(run.plan.moves)),
            "moves_done": float(done),
            "seconds": turn.at_s - run.started_at_s,
        },
        expected_gain_s_per_s=run.plan.gain_s_per_s,
        copy_bytes=run.copied_bytes,
    )
    state.copy_bytes_done += run.copied_bytes
    plan_ended(turn, run, done)
    state.run = None
    layers = [f.layer for f in run.plan.layers]
    if run.cause in CHOSEN_CAUSES:
        costs = {f.layer: f.cost_s for f in run.plan.layers}
        state.gate = moved(state.gate, costs, turn.at_s, terms_of(turn.config))
    forget_candidate(turn, layers)
    if done and run.plan.gain_s_per_s > 0.0:
        state.realised = Realised(
            plan_id=run.plan_id,
            ended_at_s=turn.at_s,
            expected_gain_s_per_s=run.plan.gain_s_per_s,
            before=run.before,
            after=turn.layout(),
            cost_s=run.plan.cost_s,
            promised={f.layer: f.gain_s_per_s for f in run.plan.layers},
        )


def _may_try_elsewhere(turn: Turn, run: PlanRun) -> bool:
    """Whether a failed repair need not wait: a source or a rank that let it hang is avoided now."""
    stall = turn.state.stall
    hung = stall is not None and stall.plan_id == run.plan_id
    return run.cause == "repair" and (hung or any(s.stuck for s in run.steps.values()))


def _park_open(turn: Turn, run: PlanRun) -> None:
    """Leave the plan's open steps behind. Their slots stay taken; nothing else waits for them."""
    for step in run.steps.values():
        if not has_ended(step):
            park(turn, step, run.cause)
            step.why = step.why or _UNANSWERED
    left = [s for s in turn.state.parked.values() if s.step.step_id in run.steps]
    waiting = [s for s in left if s.state != AddState.VERIFIED]
    if not waiting:
        return
    ranks = sorted({s.step.slot.rank for s in waiting})
    turn.record(
        "parked",
        "noted",
        f"{len(waiting)} steps of plan {run.plan_id} wait for ranks "
        f"{', '.join(map(str, ranks))}: their slots stay taken, nothing else waits for them",
        plan_id=run.plan_id,
        numbers={"steps": float(len(waiting)), "ranks": float(len(ranks))},
    )


def terms_of(config: RebalanceConfig) -> Terms:
    """Settings of the gate."""
    return Terms(
        start=config.balance_enough,
        band=config.balance_band,
        window_s=config.window_s,
        decay=config.regret_decay,
        plan_life_s=config.plan_life_s,
        cooldown_s=config.cooldown_s,
        parts=config.sub_windows,
    )


def forget_candidate(turn: Turn, layers: Collection[int]) -> None:
    """Layers that changed: the target kept for them is none any more."""
    kept = turn.state.candidate
    if kept is not None:
        left = tuple(layer for layer in kept.layers if layer not in layers)
        turn.state.candidate = msgspec.structs.replace(kept, layers=left) if left else None
