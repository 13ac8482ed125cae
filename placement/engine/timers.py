"""Time: what its passing does, and when the engine wants to be woken next.

Responsible for deadlines of every kind and for WakeAt. Called by the engine at the end of every
step.
"""

from __future__ import annotations

from placement.engine.ranks import drop_silent_ranks
from placement.engine.source import source_failed
from placement.engine.stall import (
    SHOWN_S,
    hanging,
    may_wait,
    patience_s,
    stall_s,
    stands_still,
)
from placement.engine.state import (
    NEVER_S,
    STUCK_AFTER_ASKED,
    PlanRun,
    RankStatus,
    RunState,
    StepRun,
)
from placement.engine.supervise import cancel_run, pass_deadlines
from placement.engine.tables import JOIN_GRACE_S, silence_ends_at
from placement.engine.trigger import give_up
from placement.engine.turn import Turn
from placement.messages.effects import WakeAt
from placement.migration import AddState


def pass_time(turn: Turn) -> None:
    """Let everything whose time is over happen."""
    outstanding = turn.state.outstanding
    if outstanding is not None and turn.at_s >= outstanding.deadline_s:
        give_up(turn, f"no answer in {turn.config.target_timeout_s} s")
    pass_deadlines(turn)
    drop_silent_ranks(turn, JOIN_GRACE_S)
    _look_for_stall(turn)


def _look_for_stall(turn: Turn) -> None:
    """Say that the running plan stands still, and abort it where copies hang: it is tried again
    like any plan that failed, the sources of these copies last."""
    stall, run = turn.state.stall, turn.state.run
    if stall is not None and turn.at_s >= stall.at_s + SHOWN_S:
        turn.state.stall = None
    if run is None or turn.at_s < run.progress_at_s + stall_s(turn) or may_wait(turn):
        return
    aborts = (
        run.state is RunState.RUNNING
        and turn.at_s >= run.progress_at_s + patience_s(turn, run)
        and hanging(turn, run)
    )
    if run.stalled and not aborts:
        return
    if not run.stalled:
        stands_still(turn, run)
    turn.record(
        "plan_stalled",
        "aborted" if aborts else "noted",
        f"the {run.cause} plan has not gone on for {turn.at_s - run.progress_at_s:.3f} s: "
        f"{run.stalled}",
        plan_id=run.plan_id,
        numbers={
            "still_s": turn.at_s - run.progress_at_s,
            "patience_s": patience_s(turn, run),
            "plans_stalled": float(turn.state.plans_stalled),
        },
    )
    if aborts:
        _abort(turn, run)


def _abort(turn: Turn, run: PlanRun) -> None:
    turn.state.stalls_in_a_row += 1
    suspects: list[StepRun] = []
    for step in turn.open_steps(turn.state.copying):
        if step.state == AddState.COPYING:
            source_failed(turn, step)
            suspects.append(step)
    cancel_run(turn, f"the plan stood still: {run.stalled}")
    for step in suspects:
        # Its shard has been silent long enough: nothing waits for this answer.
        step.asked = STUCK_AFTER_ASKED


def ask_to_be_woken(turn: Turn) -> None:
    """WakeAt for the earliest time at which something may be over, unless an earlier or equal one
    was asked for."""
    state = turn.state
    if state.wake_at_s <= turn.at_s:
        state.wake_at_s = NEVER_S
    soonest = min(_times(turn))
    if soonest < state.wake_at_s:
        state.wake_at_s = soonest
        turn.commands.append(WakeAt(at_s=soonest))


def _times(turn: Turn) -> list[float]:
    state = turn.state
    times = [turn.soonest_deadline_s()]
    if turn.at_s < state.restoring_until_s:
        times.append(state.restoring_until_s)
    if state.run is not None:
        wait_s = patience_s(turn, state.run) if state.run.stalled else stall_s(turn)
        if state.run.progress_at_s + wait_s > turn.at_s:
            times.append(state.run.progress_at_s + wait_s)
    if state.removing and state.acks_count_from_s > turn.at_s:
        times.append(state.acks_count_from_s)
    if state.outstanding is not None:
        times.append(state.outstanding.deadline_s)
    times.extend(at for at in state.retry_at_s.values() if at > turn.at_s)
    for rank in state.ranks:
        if rank.suspected_at_s != NEVER_S:
            times.append(rank.suspected_at_s + turn.config.rank_silence_s)
        # A time that is over waits for the running plan to end: it is no time to be woken at.
        again_s = rank.resize_sent_at_s + turn.config.retry_s
        if rank.wanted_slots >= 0 and again_s > turn.at_s:
            times.append(again_s)
    times.extend(silence_ends_at(turn, r) for r in state.routers.values())
    grace = state.started_at_s + JOIN_GRACE_S
    if grace > turn.at_s and not all([r.status is RankStatus.LIVE for r in state.ranks]):
        times.append(grace)
    return times
