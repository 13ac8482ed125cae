"""One step at a time: an event of a step's machine -> new state, journalled transition, slot use,
command.

Responsible for the only place where step states and slot uses change together. Decides nothing
about plans. Called by supervise, ranks and the engine's answers.
"""

from __future__ import annotations

from placement.engine.shown import shown_key
from placement.engine.source import find_source
from placement.engine.state import NEVER_S, RunState, SlotUse, StepRun
from placement.engine.turn import Turn
from placement.layout import EMPTY
from placement.messages.effects import (
    AbortAdd,
    CopyExpert,
    ReleaseSlot,
    ReserveSlot,
    Transition,
    VerifyExpert,
)
from placement.migration import (
    AddState,
    RemoveState,
    StepAction,
    StepEvent,
    advance,
    can_take,
    is_terminal,
)
from placement.planner.plan import StepKind

COPY_SLACK = 5.0
"""A copy may take this many times what its price says before its deadline passes."""
ASK_AGAIN_S = 1.0
"""Least time before a shard is asked again to abort, release or prove a slot."""

COPYING = frozenset({AddState.RESERVED, AddState.COPYING, AddState.ABORTING})
REMOVING = frozenset(
    {RemoveState.UNLISTED, RemoveState.ACKED, RemoveState.DRAINED, RemoveState.RECALLED}
)
ADD_USE = {
    AddState.RESERVED: SlotUse.TAKEN,
    AddState.COPYING: SlotUse.TAKEN,
    AddState.ABORTING: SlotUse.TAKEN,
    AddState.VERIFIED: SlotUse.VERIFIED,
    AddState.LISTED: SlotUse.LISTED,
    AddState.ABORTED: SlotUse.EMPTY,
}
PARKABLE = frozenset({AddState.VERIFIED, AddState.ABORTING}) | REMOVING
"""States in which an ended plan may leave a step: all that is open and does not copy."""
REMOVE_USE = {
    RemoveState.UNLISTED: SlotUse.LEAVING,
    RemoveState.ACKED: SlotUse.LEAVING,
    RemoveState.DRAINED: SlotUse.LEAVING,
    RemoveState.RECALLED: SlotUse.LEAVING,
    RemoveState.LISTED: SlotUse.LISTED,
    RemoveState.RELEASED: SlotUse.EMPTY,
}


def fire(turn: Turn, run: StepRun, event: StepEvent, why: str = "") -> None:
    """Let the event happen to the step. Raises IllegalTransition where it cannot: a bug of the
    caller."""
    step, before = run.step, run.state
    after, action = advance(step.kind, before, event)
    run.state = after
    if why:
        run.why = why
    if after != before:
        run.asked = 0
        _set_use(turn, run, before)
        _set_index(turn, run)
        _set_deadline(turn, run)
        turn.transitions.append(
            Transition(
                at_s=turn.at_s,
                plan_id=turn.plan_of(step.step_id),
                step_id=step.step_id,
                kind=step.kind,
                rank=step.slot.rank,
                slot=step.slot.index,
                layer=step.layer,
                expert=step.expert,
                event=event.value,
                before=before,
                after=after,
                slot_tag=run.tag,
                epoch=run.epoch,
            )
        )
        note_progress(turn, step.step_id)
    _act(turn, run, action)
    if turn.state.parked and is_terminal(step.kind, after):
        turn.state.parked.pop(step.step_id, None)


def offer(turn: Turn, run: StepRun, event: StepEvent, why: str = "") -> bool:
    """As `fire`, but an event the state cannot take is dropped: an answer that came too late.
    Whether it was taken."""
    if not can_take(run.step.kind, run.state, event):
        return False
    fire(turn, run, event, why)
    return True


def note_progress(turn: Turn, step_id: int) -> None:
    """Something happened to a step: where it is one of the running plan, the plan goes on."""
    run = turn.state.run
    if run is None or step_id not in run.steps:
        return
    run.longest_gap_s = max(run.longest_gap_s, turn.at_s - run.progress_at_s)
    run.progress_at_s = turn.at_s
    if run.stalled and run.state is RunState.RUNNING:
        turn.state.stall = None
    run.stalled = ""


def park(turn: Turn, run: StepRun, cause: str) -> None:
    """Leave an open step of an ended plan behind: it goes on by itself, and its slot stays taken
    until its shard has answered or is lost. cause: of its plan."""
    step, slot = run.step, turn.slot(run.step.slot.rank, run.step.slot.index)
    assert run.state in PARKABLE, f"step {step.step_id} cannot be left in {run.state}"
    assert slot is not None and slot.key == turn.spec.key(step.layer, step.expert), (  # noqa: PT018
        f"step {step.step_id}: slot {step.slot} is not its own"
    )
    run.cause = cause
    turn.state.parked[step.step_id] = run
    if slot.use in (SlotUse.TAKEN, SlotUse.LEAVING):
        slot.use = SlotUse.PARKED
        turn.changed(step.slot.rank, step.slot.index)


def _set_use(turn: Turn, run: StepRun, before: str) -> None:
    step = run.step
    slot = turn.slot(step.slot.rank, step.slot.index)
    if slot is None:
        return
    key = turn.spec.key(step.layer, step.expert)
    if step.kind is StepKind.ADD:
        use = ADD_USE[AddState(run.state)]
        if before == AddState.PLANNED:
            if run.state == AddState.ABORTED:
                return
            # Memory is never overcommitted: an add claims a slot only while it is empty.
            assert slot.use is SlotUse.EMPTY, (
                f"step {step.step_id}: slot {step.slot} is {slot.use.name}"
            )
        else:
            assert slot.key == key, (
                f"step {step.step_id}: slot {step.slot} is claimed for {slot.key}"
            )
    else:
        if before == RemoveState.PLANNED and run.state == RemoveState.LISTED:
            return
        use = REMOVE_USE[RemoveState(run.state)]
        assert slot.key == key, f"step {step.step_id}: slot {step.slot} holds {slot.key}"
    if step.step_id in turn.state.parked and use in (SlotUse.TAKEN, SlotUse.LEAVING):
        use = SlotUse.PARKED
    shown, freed = shown_key(slot), slot.use is SlotUse.PARKED and use is SlotUse.EMPTY
    slot.use = use
    slot.key = EMPTY if use is SlotUse.EMPTY else key
    slot.tag = -1 if use is SlotUse.EMPTY else run.tag
    if shown_key(slot) != shown:
        turn.changed(step.slot.rank, step.slot.index, stale=not freed)


def _set_index(turn: Turn, run: StepRun) -> None:
    step_id, state = run.step.step_id, turn.state
    copying = run.step.kind is StepKind.ADD and run.state in COPYING
    removing = run.step.kind is StepKind.REMOVE and run.state in REMOVING
    (state.copying.add if copying else state.copying.discard)(step_id)
    (state.removing.add if removing else state.removing.discard)(step_id)


def copy_deadline_s(turn: Turn, run: StepRun) -> float:
    """When a copy that is asked for now has taken too long."""
    return turn.at_s + max(turn.config.copy_timeout_s, COPY_SLACK * run.copy_s)


def _set_deadline(turn: Turn, run: StepRun) -> None:
    config, state = turn.config, run.state
    wait_s = config.drain_wait_s
    if turn.state.run is not None and run.step.step_id in turn.state.run.steps:
        wait_s = turn.state.run.drain_wait_s
    if run.step.kind is StepKind.ADD:
        if state == AddState.RESERVED:
            run.deadline_s = copy_deadline_s(turn, run)
        elif state != AddState.COPYING:
            run.deadline_s = NEVER_S
    elif state in (RemoveState.UNLISTED, RemoveState.ACKED):
        run.deadline_s = turn.at_s + wait_s
    else:
        run.deadline_s = NEVER_S


def _act(turn: Turn, run: StepRun, action: StepAction) -> None:
    step = run.step
    rank = turn.rank(step.slot.rank)
    who = {"step_id": step.step_id, "rank": rank.rank, "incarnation": rank.incarnation}
    slot = step.slot.index
    if action is StepAction.RESERVE:
        turn.commands.append(
            ReserveSlot(
                **who,
                slot=slot,
                layer=step.layer,
                expert=step.expert,
                weights_version=turn.spec.weights_version,
            )
        )
    elif action is StepAction.COPY:
        source = find_source(turn, run)
        run.source_rank, run.source_slot, run.source_tag = source.rank, source.slot, source.slot_tag
        turn.commands.append(
            CopyExpert(
                **who,
                slot=slot,
                slot_tag=run.tag,
                layer=step.layer,
                expert=step.expert,
                source=source,
                timeout_s=max(0.0, run.deadline_s - turn.at_s),
            )
        )
    elif action in (StepAction.VERIFY, StepAction.RECALL):
        turn.commands.append(VerifyExpert(**who, slot=slot, slot_tag=run.tag))
    elif action is StepAction.ABORT:
        turn.commands.append(AbortAdd(**who, slot=slot, slot_tag=run.tag))
    elif action is StepAction.RELEASE:
        # Release comes last: never before the machine has seen the replica acknowledged and
        # drained.
        assert run.state == RemoveState.DRAINED, f"step {step.step_id} releases in {run.state}"
        turn.commands.append(
            ReleaseSlot(**who, slot=slot, slot_tag=run.tag, layer=step.layer, expert=step.expert)
        )
    elif action is StepAction.RELIST:
        turn.state.table_dirty = True
    if action in (StepAction.ABORT, StepAction.RECALL, StepAction.RELEASE):
        # Asked again until the shard answers or is lost.
        run.asked += 1
        run.deadline_s = turn.at_s + max(ASK_AGAIN_S, turn.config.drain_wait_s)
