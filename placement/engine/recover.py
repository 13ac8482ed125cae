"""After a restart: a snapshot and the transitions journalled after it become the state of a new
term.

Responsible for never forgetting a step that had begun, and for never taking a rank's replicas for
lost because nobody has spoken to it yet. Emits nothing; the first events after it do. Called by
`RebalanceEngine.restore`.
"""

from __future__ import annotations

from collections.abc import Iterable

from placement.engine.shown import shown_slots
from placement.engine.state import (
    NEVER_S,
    EngineState,
    PlanRun,
    RankState,
    RankStatus,
    RunState,
    SlotState,
    SlotUse,
    StepRun,
    first_step_id,
)
from placement.engine.steps import ADD_USE, COPYING, REMOVE_USE, REMOVING
from placement.engine.tables import JOIN_GRACE_S
from placement.layout import EMPTY, ExpertLayout, SlotId
from placement.messages.effects import Transition
from placement.migration import AddState, RemoveState, is_terminal
from placement.planner.gate import initial_gate
from placement.planner.plan import Plan, PlannedStep, StepKind
from placement.topology import MoeSpec

_NO_PLAN = Plan(
    moves=(),
    steps=(),
    copy_bytes=0,
    cross_node_bytes=0,
    cost_s=0.0,
    gain_s_per_s=0.0,
    balancedness_before=1.0,
    balancedness_after=1.0,
)


def restart(
    state: EngineState,
    spec: MoeSpec,
    transitions: Iterable[Transition],
    *,
    term: int,
    first_epoch: int,
    start_s: float,
    router_silence_s: float,
) -> None:
    """Bring the state up to the last journalled transition and open the new term."""
    for transition in transitions:
        _apply(state, spec, transition)
    assert term > state.term, f"term {term} must be above {state.term}"
    before_s = state.now_s
    state.term = term
    state.next_step_id = max(state.next_step_id, first_step_id(term))
    state.epoch = max(state.epoch, first_epoch - 1)
    state.now_s = state.started_at_s = state.published_at_s = start_s
    # Its times are of another clock, and what was lost before the restart is over.
    state.gate = initial_gate(spec.num_layers)
    state.candidate = state.failed_demand = None
    state.stall, state.stalls_in_a_row, state.source_failures = None, 0, []
    state.wake_at_s = NEVER_S
    state.outstanding = None
    state.asks, state.apply_next, state.realised = [], None, None
    state.retry_at_s = {}
    # What was proved before the first table, and was left behind since, still waits for it.
    proved = any(s.state == AddState.VERIFIED for s in state.parked.values())
    state.table_dirty = state.published or proved
    state.revision += 1
    # Until the routers have had time to register, none of them being known does not mean that none
    # is there.
    state.acks_count_from_s = start_s + router_silence_s
    state.parked = {i: s for i, s in state.parked.items() if not is_terminal(s.step.kind, s.state)}
    for rank in state.ranks:
        if rank.status is RankStatus.LIVE:
            rank.status = RankStatus.RESTORED
        rank.suspected_at_s = rank.resize_sent_at_s = NEVER_S
        if before_s > rank.lost_at_s + JOIN_GRACE_S and state.restoring_until_s == -NEVER_S:
            rank.lost_keys = []  # the newest table did without it
        rank.lost_at_s = start_s
    if state.restoring_until_s > -NEVER_S:
        state.restoring_until_s = NEVER_S
    for router in state.routers.values():
        router.joined_at_s = start_s
    if state.run is not None:
        state.run.state = RunState.ENDING
        state.run.waiting = {}
        state.run.started_at_s = state.run.progress_at_s = start_s
        state.run.stalled = ""
    for step in [*state.parked.values(), *(state.run.steps.values() if state.run else ())]:
        # Until its rank has told what it holds nothing is asked of it, so no wait of it may end.
        step.deadline_s = NEVER_S
        step.asked = 0
    for step in state.parked.values():
        # What was left behind before the restart still is.
        slot = state.ranks[step.step.slot.rank].slots[step.step.slot.index]
        if slot.use in (SlotUse.TAKEN, SlotUse.LEAVING):
            slot.use = SlotUse.PARKED


def _apply(state: EngineState, spec: MoeSpec, transition: Transition) -> None:
    """One journalled transition, exactly as the engine that wrote it left step and slot."""
    step = _step_of(state, spec, transition)
    step.state, step.tag, step.epoch = transition.after, transition.slot_tag, transition.epoch
    # Only a table has a number above all before it. A state's name does not tell: a removal that is
    # called off is "listed" as well, and a clean-up unlists before there is a table.
    state.published = state.published or transition.epoch > state.epoch
    state.epoch = max(state.epoch, transition.epoch)
    state.next_step_id = max(state.next_step_id, transition.step_id + 1)
    copying = transition.kind is StepKind.ADD and step.state in COPYING
    removing = transition.kind is StepKind.REMOVE and step.state in REMOVING
    (state.copying.add if copying else state.copying.discard)(transition.step_id)
    (state.removing.add if removing else state.removing.discard)(transition.step_id)
    if transition.rank >= len(state.ranks):
        return  # joined after the snapshot; its inventory will say what it holds
    slots = _slots_of(state.ranks[transition.rank], transition.slot)
    use = (
        ADD_USE[AddState(transition.after)]
        if transition.kind is StepKind.ADD
        else REMOVE_USE[RemoveState(transition.after)]
    )
    cancelled = transition.after in (AddState.ABORTED, RemoveState.LISTED)
    if transition.before == AddState.PLANNED and cancelled:
        return  # before it began: the slot never was its own
    empty = use is SlotUse.EMPTY
    slots[transition.slot] = SlotState(
        use=use,
        key=EMPTY if empty else spec.key(transition.layer, transition.expert),
        tag=-1 if empty else transition.slot_tag,
    )


def _slots_of(rank: RankState, index: int) -> list[SlotState]:
    """Slots of a rank that, by the journal, had joined: also where the snapshot is older than
    that."""
    if not rank.holds:
        rank.status, rank.incarnation, rank.slots = RankStatus.RESTORED, -1, []
    while len(rank.slots) < max(rank.num_slots, index + 1):
        rank.slots.append(SlotState())
    rank.num_slots = len(rank.slots)
    return rank.slots


def _step_of(state: EngineState, spec: MoeSpec, transition: Transition) -> StepRun:
    run = state.run
    if transition.step_id in state.parked:
        return state.parked[transition.step_id]
    if run is not None and transition.step_id in run.steps:
        return run.steps[transition.step_id]
    if run is None or transition.plan_id != run.plan_id:
        if run is not None:
            # A newer plan has spoken, so this one had ended; what was open had been parked.
            for number, open_step in run.steps.items():
                if not is_terminal(open_step.step.kind, open_step.state):
                    open_step.cause = run.cause
                    state.parked[number] = open_step
        state.run = run = PlanRun(
            plan_id=transition.plan_id,
            cause="recovered",
            plan=_NO_PLAN,
            steps={},
            started_at_s=transition.at_s,
            drain_wait_s=5.0,
            before=ExpertLayout(shown_slots(state), spec.num_layers, spec.num_experts),
        )
    planned = PlannedStep(
        step_id=transition.step_id,
        kind=transition.kind,
        move_id=-1,
        slot=SlotId(transition.rank, transition.slot),
        layer=transition.layer,
        expert=transition.expert,
        wave=0,
    )
    found = run.steps[transition.step_id] = StepRun(step=planned)
    return found
