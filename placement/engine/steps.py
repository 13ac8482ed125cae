"""One step at a time: an event of a step's machine -> new state, journalled transition, slot use,
command.

Responsible for the only place where step states and slot uses change together. Decides nothing
about plans. Called by supervise, ranks and the engine's answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from placement.cost import copy_seconds
from placement.engine.state import NEVER_S, RankStatus, SlotUse, StepRun, shown_key
from placement.engine.turn import Turn
from placement.layout import EMPTY, SlotId
from placement.messages.effects import (
    AbortAdd,
    CopyExpert,
    CopySource,
    ReleaseSlot,
    ReserveSlot,
    Transition,
    VerifyExpert,
)
from placement.migration import AddState, RemoveState, StepAction, StepEvent, advance, can_take
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
    _act(turn, run, action)


def offer(turn: Turn, run: StepRun, event: StepEvent, why: str = "") -> bool:
    """As `fire`, but an event the state cannot take is dropped: an answer that came too late.
    Whether it was taken."""
    if not can_take(run.step.kind, run.state, event):
        return False
    fire(turn, run, event, why)
    return True


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
    shown = shown_key(slot)
    slot.use = use
    slot.key = EMPTY if use is SlotUse.EMPTY else key
    slot.tag = -1 if use is SlotUse.EMPTY else run.tag
    if shown_key(slot) != shown:
        turn.changed(step.slot.rank, step.slot.index)


def _set_index(turn: Turn, run: StepRun) -> None:
    step_id, state = run.step.step_id, turn.state
    copying = run.step.kind is StepKind.ADD and run.state in COPYING
    removing = run.step.kind is StepKind.REMOVE and run.state in REMOVING
    (state.copying.add if copying else state.copying.discard)(step_id)
    (state.removing.add if removing else state.removing.discard)(step_id)


def _set_deadline(turn: Turn, run: StepRun) -> None:
    config, state = turn.config, run.state
    wait_s = config.drain_wait_s
    if turn.state.run is not None and run.step.step_id in turn.state.run.steps:
        wait_s = turn.state.run.drain_wait_s
    if run.step.kind is StepKind.ADD:
        copying = max(config.copy_timeout_s, COPY_SLACK * run.copy_s)
        if state == AddState.RESERVED:
            run.deadline_s = turn.at_s + copying
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
        run.deadline_s = turn.at_s + max(ASK_AGAIN_S, turn.config.drain_wait_s)


def find_source(turn: Turn, run: StepRun) -> CopySource:
    """Nearest proved replica (own rank, own node, another node), least busy first; the checkpoint
    where none lives."""
    target = turn.rank(run.step.slot.rank)
    hosts = turn.layout().slots_of(run.step.layer, run.step.expert)
    busy = copies_out_of(turn.open_steps(turn.state.copying)) if hosts else {}
    best: tuple[tuple[bool, bool, int, int], SlotId] | None = None
    for slot_id in hosts:
        rank = turn.rank(slot_id.rank)
        if rank.status is not RankStatus.LIVE or rank.suspected_at_s != NEVER_S:
            continue
        order = (
            rank.rank != target.rank,
            rank.node != target.node,
            busy.get(rank.rank, 0),
            rank.rank,
        )
        if best is None or order < best[0]:
            best = (order, slot_id)
    if best is None:
        return CopySource(rank=-1)
    rank = turn.rank(best[1].rank)
    tag = rank.slots[best[1].index].tag
    return CopySource(rank=rank.rank, slot=best[1].index, slot_tag=tag, address=rank.address)


def copies_out_of(copying: Sequence[StepRun]) -> dict[int, int]:
    """Copies running out of each rank (checkpoint reads are -1), of the adds under way."""
    return Counter([s.source_rank for s in copying if s.state != AddState.ABORTING])


def price_copy(turn: Turn, run: StepRun, source: CopySource) -> float:
    """Seconds the copy should take by the declared rates."""
    return copy_seconds(turn.spec.expert_bytes, source.rank, run.step.slot.rank, turn.topology())
