"""Running a plan: which step begins when, what a wave publishes, what a deadline or a cancelled
plan does.

Responsible for waves and their one table each. Chooses no step: plans come from the planner. Called
by the engine after every event, until nothing moves any more.

No shard's silence keeps the engine waiting. A step whose shard was asked to give something back and
let the first wait pass is *stuck*: its wave goes on without it. A plan that was ended while an
expert lies below the floor waits for none of its steps at all. What is open then is parked.
"""

from __future__ import annotations

from collections import Counter

from placement.engine.floor import floor_now, must_not_wait
from placement.engine.runs import did_its_work, finish_run, has_ended, open_wave
from placement.engine.source import (
    SOURCE_CODES,
    copies_out_of,
    find_source,
    price_copy,
    source_failed,
)
from placement.engine.state import (
    NEVER_S,
    STUCK_AFTER_ASKED,
    PlanRun,
    RankStatus,
    RunState,
    SlotUse,
    StepRun,
)
from placement.engine.steps import PARKABLE, fire, offer
from placement.engine.tables import (
    advance_removals,
    drop_silent_routers,
    may_publish,
    publish,
    remaining_replicas,
)
from placement.engine.turn import Turn
from placement.migration import AddState, RemoveState, StepEvent
from placement.planner.plan import StepKind


def advance_run(turn: Turn) -> bool:
    """Take the running plan as far as it goes now. Whether anything moved."""
    run = turn.state.run
    if run is None:
        return False
    moved = _cancel_planned(turn, run) if run.state is RunState.ENDING else False
    moved |= _begin_adds(turn, run)
    moved |= _publish_wave(turn, run)
    if _wave_open(turn, run):
        return moved
    later = {s.step.wave for s in run.steps.values() if s.step.wave > run.wave}
    if later:
        open_wave(run, min(later))
    else:
        finish_run(turn)
    return True


def _wave_open(turn: Turn, run: PlanRun) -> bool:
    """Whether a step of the wave (of the whole plan, once it ends) is still open and waited for;
    see the module's text. Nor is one waited for that merely waits for a table."""
    if run.waiting:
        return True
    ending = run.state is RunState.ENDING
    in_hand = turn.open_steps(_in_hand(turn, turn.state.copying | turn.state.removing))
    if in_hand:
        if not ending and not all([s.stuck for s in in_hand]):
            return True
        urgent = ending and must_not_wait(turn)
        if not all([s.stuck or (urgent and s.state in PARKABLE) for s in in_hand]):
            return True
    withheld = not may_publish(turn)
    known = {s.step.step_id for s in in_hand}
    return any(
        not has_ended(s)
        and s.step.step_id not in known
        and not (withheld and s.state == AddState.VERIFIED)
        for s in run.steps.values()
        if s.step.wave == run.wave or ending
    )


def _in_hand(turn: Turn, ids: set[int]) -> set[int]:
    """Those steps that are the running plan's own."""
    parked = turn.state.parked
    return ids - parked.keys() if parked else ids


def _begin_adds(turn: Turn, run: PlanRun) -> bool:
    """Begin what waits, as long as its rank and its source have a copy to spare."""
    if not run.waiting:
        return False
    moved = False
    copying = turn.open_steps(_in_hand(turn, turn.state.copying))
    into = Counter([s.step.slot.rank for s in copying if s.asked < STUCK_AFTER_ASKED])
    most = turn.config.wave_adds_per_rank
    open_ranks = sorted(rank for rank in run.waiting if into[rank] < most)
    busy = copies_out_of(copying) if open_ranks else {}
    for rank in open_ranks:
        spare = most - into[rank]
        still: list[int] = []
        ids = run.waiting[rank]
        for position, step_id in enumerate(ids):
            if spare <= 0:
                still.extend(ids[position:])
                break
            step = run.steps[step_id]
            verdict = _may_begin(turn, run, step)
            if verdict is False:
                fire(turn, step, StepEvent.CANCELLED, "what it waited for did not happen")
                moved = True
            elif verdict is None or not _begin(turn, step, busy):
                still.append(step_id)
            else:
                spare -= 1
                moved = True
        if still:
            run.waiting[rank] = still
        else:
            del run.waiting[rank]
    return moved


def _begin(turn: Turn, step: StepRun, busy: dict[int, int]) -> bool:
    """Begin the add, unless its nearest source has no copy to spare. Counts it in `busy`."""
    source = find_source(turn, step)
    if source.rank >= 0 and busy.get(source.rank, 0) >= turn.config.wave_copies_from_rank:
        return False
    step.source_rank = source.rank
    step.copy_s = price_copy(turn, step, source)
    fire(turn, step, StepEvent.BEGUN)
    busy[source.rank] = busy.get(source.rank, 0) + 1
    return True


def _may_begin(turn: Turn, run: PlanRun, step: StepRun) -> bool | None:
    """True: now. None: not yet. False: never, for what it waited for did not happen or its slot is
    gone."""
    for before in step.step.after:
        other = run.steps[before]
        assert has_ended(other) or other.stuck, (
            f"step {before} is {other.state}, yet a later wave is open"
        )
        if not did_its_work(other):
            return False
    if _still_held(turn, step):
        return False
    rank = turn.rank(step.step.slot.rank)
    slot = turn.slot(step.step.slot.rank, step.step.slot.index)
    if rank.status is not RankStatus.LIVE or slot is None or slot.use is not SlotUse.EMPTY:
        return False
    return None if rank.suspected_at_s != NEVER_S else True


def _still_held(turn: Turn, step: StepRun) -> bool:
    """Whether its rank was asked to let go of the very expert and has not done so: were that taken
    back, the rank would hold it twice."""
    return any(
        s.step.kind is StepKind.REMOVE
        and (s.step.slot.rank, s.step.layer, s.step.expert)
        == (step.step.slot.rank, step.step.layer, step.step.expert)
        for s in turn.state.parked.values()
    )


def _publish_wave(turn: Turn, run: PlanRun) -> bool:
    """Once no add of the wave is under way: one table that lists the verified and drops what may
    go."""
    if run.waiting or not all(
        [s.stuck for s in turn.open_steps(_in_hand(turn, turn.state.copying))]
    ):
        return False
    wave = [s for s in run.steps.values() if s.step.wave == run.wave]
    fresh = [s for s in wave if s.step.kind is StepKind.ADD and s.state == AddState.VERIFIED]
    planned = [s for s in wave if s.step.kind is StepKind.REMOVE and s.state == RemoveState.PLANNED]
    if not fresh and not planned:
        return False
    if run.cause == "cleanup":
        # What is in no table needs none to leave it; it is drained like the others all the same.
        for step in planned:
            _unlist_orphan(turn, run, step)
        return True
    if not may_publish(turn):
        return _give_up_removals(turn, planned)
    unlist: list[StepRun] = []
    leaving: dict[tuple[int, int], int] = {}
    for step in planned:
        key = (step.step.layer, step.step.expert)
        relied = [run.steps[a] for a in step.step.after]
        ready = all(did_its_work(s) or s.state == AddState.VERIFIED for s in relied)
        covered = remaining_replicas(turn, step) > leaving.get(key, 0)
        if ready and covered and run.state is RunState.RUNNING:
            unlist.append(step)
            leaving[key] = leaving.get(key, 0) + 1
        else:
            fire(turn, step, StepEvent.CANCELLED, "what it relied on did not happen")
    if not unlist and not fresh:
        return True
    publish(turn, unlist)
    return True


def _give_up_removals(turn: Turn, planned: list[StepRun]) -> bool:
    """Before the first table: experts that the wave did not bring keep the table away, and a
    removal that waited for it would keep the next plan away. Whether any is given up."""
    if turn.state.published or not turn.layout().missing():
        return False
    for step in planned:
        fire(turn, step, StepEvent.CANCELLED, "no table yet: not every expert is resident")
    return bool(planned)


def _unlist_orphan(turn: Turn, run: PlanRun, step: StepRun) -> None:
    # A clean-up leaves PLANNED in the very call that starts it: nothing can have come between.
    assert run.state is RunState.RUNNING, f"clean-up {run.plan_id} has not begun and is ending"
    slot = turn.slot(step.step.slot.rank, step.step.slot.index)
    assert slot is not None and slot.use is SlotUse.ORPHAN, f"{step.step.slot} is no orphan"  # noqa: PT018
    step.epoch, step.tag = turn.state.epoch, slot.tag
    fire(turn, step, StepEvent.PUBLISHED)


def _cancel_planned(turn: Turn, run: PlanRun) -> bool:
    """Cancel every step that has not begun, and adds that have not been verified yet."""
    moved = False
    run.waiting = {}
    for step in run.steps.values():
        if step.state == AddState.PLANNED:  # the same text for both machines
            fire(turn, step, StepEvent.CANCELLED, step.why or "the plan was cancelled")
            moved = True
        elif step.step.kind is StepKind.ADD and step.state == AddState.VERIFIED:
            turn.state.table_dirty = True
    return moved


def cancel_run(turn: Turn, why: str, *, drain_wait_s: float = NEVER_S) -> None:
    """End the running plan: what has not begun is cancelled, copies are aborted, begun removals go
    on. drain_wait_s: the longest that removals, parked ones too, wait from now on; by default as
    long as they would have."""
    _shorten_waits(turn, drain_wait_s)
    run = turn.state.run
    if run is None or run.state is RunState.ENDING:
        return
    run.state = RunState.ENDING
    for step in run.steps.values():
        if step.step.kind is StepKind.ADD and step.state in (AddState.RESERVED, AddState.COPYING):
            fire(turn, step, StepEvent.CANCELLED, why)
        elif step.state == AddState.PLANNED:
            step.why = why


def _shorten_waits(turn: Turn, drain_wait_s: float) -> None:
    if turn.state.run is not None:
        turn.state.run.drain_wait_s = min(turn.state.run.drain_wait_s, drain_wait_s)
    for step in turn.open_steps(turn.state.removing):
        if step.state in (RemoveState.UNLISTED, RemoveState.ACKED):
            step.deadline_s = min(step.deadline_s, turn.at_s + drain_wait_s)


def recall_needed(turn: Turn, lost_slots: frozenset[tuple[int, int]]) -> None:
    """Take back removals whose expert has fewer other replicas than the floor, or that relied on an
    add in a lost slot: no replica is nearer than one that has not gone yet."""
    if not turn.state.removing:
        return
    run, floor = turn.state.run, max(1, floor_now(turn))
    for step_id in sorted(turn.state.removing):
        step, relied = turn.known_step(step_id), False
        cause = step.cause
        if step_id not in turn.state.parked:
            assert run is not None, f"removal {step_id} belongs to no plan"
            cause = run.cause
            relied = any(tuple(run.steps[a].step.slot) in lost_slots for a in step.step.after)
        if cause != "cleanup" and (relied or remaining_replicas(turn, step) < floor):
            offer(turn, step, StepEvent.CANCELLED, "a replica it relied on was lost")


def copy_failed(turn: Turn, step: StepRun, code: str, why: str) -> bool:
    """A command of the step failed. Whether its state could take that."""
    if step.state == AddState.COPYING and code in SOURCE_CODES:
        source_failed(turn, step)
    return offer(turn, step, StepEvent.FAILED, why)


def pass_deadlines(turn: Turn) -> None:
    """Let the time that is over happen to steps and routers."""
    due: list[StepRun] = []
    if turn.at_s >= turn.soonest_deadline_s():  # looked at after every event, over hardly ever
        open_now = turn.open_steps(turn.state.copying | turn.state.removing)
        due = [s for s in open_now if turn.at_s >= s.deadline_s]
    for step in due:
        step_id, before = step.step.step_id, step.state
        if step.step.kind is StepKind.REMOVE and before in (
            RemoveState.UNLISTED,
            RemoveState.ACKED,
        ):
            turn.record(
                "drain_wait_over",
                "noted",
                f"step {step_id} waited in {before}; late work gets STALE and is retried",
                plan_id=turn.plan_of(step_id),
                move_id=step.step.move_id,
            )
        elif before in (AddState.RESERVED, AddState.COPYING):
            if before == AddState.COPYING:
                source_failed(turn, step)
            turn.record(
                "step_aborted",
                "aborted",
                f"step {step_id} was still {before} at its deadline",
                plan_id=turn.plan_of(step_id),
                move_id=step.step.move_id,
            )
        fire(turn, step, StepEvent.DEADLINE, "deadline")
    drop_silent_routers(turn)


def settle_steps(turn: Turn) -> bool:
    """One round over plan, table and removals. Whether anything moved."""
    moved = advance_run(turn)
    if turn.state.table_dirty and may_publish(turn):
        publish(turn, [])
        moved = True
    moved |= advance_removals(turn)
    return moved
