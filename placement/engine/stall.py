"""Plans that stand still: when one does, how long that is borne, and in which words it is said.

Responsible for judging, and for the patience with the next plan. Ends nothing: `timers` does.
Called by timers and runs; `stalled` is for views.

A plan stands still when for two windows none of its steps changed its state and no copy told of
more bytes. That is said at once, whatever the reason. It is aborted where copies hang, once they
took several times what they should. Where shards tell nothing of a copy before its end, a slow one
looks like one that hangs: so each plan aborted for it doubles the patience with the next, and no
device is too slow for ever.
"""

from __future__ import annotations

from placement.engine.state import (
    NEVER_S,
    EngineState,
    PlanRun,
    Stall,
    StepRun,
)
from placement.engine.steps import COPY_SLACK
from placement.engine.tables import JOIN_GRACE_S
from placement.engine.turn import Turn
from placement.migration import AddState, RemoveState

STALL_WINDOWS = 2
"""Windows without a sign of life after which a plan counts as standing still."""
STALL_LEAST_S = 2.0
"""But not sooner than this: with windows shorter than a copy or an answer takes, none would end."""
DOUBLINGS_MAX = 5
"""Times the patience doubles at most; a copy's own deadline comes before that."""
SHOWN_S = 60.0
"""How long an aborted plan is spoken of, unless another one gets something done before."""

_UNDER_WAY = (AddState.RESERVED, AddState.COPYING)


def stall_s(turn: Turn) -> float:
    """Seconds without a sign of life after which a plan stands still."""
    return max(STALL_WINDOWS * turn.config.window_s, STALL_LEAST_S)


def patience_s(turn: Turn, run: PlanRun) -> float:
    """Seconds without a sign of life after which a plan whose copies hang is aborted."""
    slowest_s = max([s.copy_s for s in _copies(turn, run)], default=0.0)
    return max(_patience_s(turn, turn.state.stalls_in_a_row), COPY_SLACK * slowest_s)


def _patience_s(turn: Turn, stalls: int) -> float:
    return stall_s(turn) * 2.0 ** min(stalls, DOUBLINGS_MAX)


def may_wait(turn: Turn) -> bool:
    """Whether a plan waits for ranks that may still come: that is no standing still."""
    grace_s = turn.state.started_at_s + JOIN_GRACE_S
    return turn.at_s < grace_s and bool(turn.waiting_for_ranks())


def hanging(turn: Turn, run: PlanRun) -> bool:
    """Whether the plan waits for copies, begun or not. Removals end by their own deadlines."""
    return bool(run.waiting or _copies(turn, run))


def plan_ended(turn: Turn, run: PlanRun, done: int) -> None:
    """A plan of which `done` moves were done is over: no patience is needed beyond what it took."""
    state = turn.state
    if not done:
        return
    state.stall = None
    while state.stalls_in_a_row and run.longest_gap_s < _patience_s(
        turn, state.stalls_in_a_row - 1
    ):
        state.stalls_in_a_row -= 1


def stands_still(turn: Turn, run: PlanRun) -> None:
    """Note that the plan does not go on, and why."""
    run.stalled = _why(turn, run)
    turn.state.plans_stalled += 1
    turn.state.stall = Stall(plan_id=run.plan_id, cause=run.cause, at_s=turn.at_s, why=run.stalled)


def stalled(state: EngineState) -> str:
    """What does not go on and why, in words; "" where everything does. Never empty while the
    running plan stands still, or while a shard does not answer what an ended plan asked of it."""
    if state.run is not None and state.run.stalled:
        return f"rebalance stalled: plan {state.run.plan_id}: {state.run.stalled}"
    stuck = [s for s in state.parked.values() if s.stuck]
    if stuck:
        return f"rebalance stalled: {_unanswered(stuck)}; nothing new is put there"
    if state.stall is not None:
        return (
            f"rebalance stalled: plan {state.stall.plan_id} was aborted and is tried again: "
            f"{state.stall.why}"
        )
    return ""


def _copies(turn: Turn, run: PlanRun) -> list[StepRun]:
    return [run.steps[i] for i in turn.state.copying if i in run.steps and _begun(run.steps[i])]


def _begun(step: StepRun) -> bool:
    return step.state in _UNDER_WAY


def _why(turn: Turn, run: PlanRun) -> str:
    """What the plan waits for."""
    state = turn.state
    found: list[str] = []
    copies = _copies(turn, run)
    if copies:
        into = sorted({s.step.slot.rank for s in copies})
        out_of = sorted({s.source_rank for s in copies if s.source_rank >= 0})
        read = any(s.source_rank < 0 for s in copies)
        sources = [f"rank {r}" for r in out_of] + (["the checkpoint"] if read else [])
        found.append(
            f"{len(copies)} copies from {', '.join(sources)} into {_ranks(into)} do not go on"
        )
    silent = sorted(r for r in run.waiting if state.ranks[r].suspected_at_s != NEVER_S)
    if silent:
        found.append(f"copies wait for {_ranks(silent)} to answer again")
    removals = [run.steps[i] for i in sorted(state.removing) if i in run.steps]
    for phase, words in (
        (RemoveState.UNLISTED, "to use epoch"),
        (RemoveState.ACKED, "to end work from before epoch"),
    ):
        epochs = [s.epoch for s in removals if s.state == phase]
        if epochs:
            found.append(f"{_routers(turn, max(epochs), phase)} {words} {max(epochs)}")
    asked = [s for s in run.steps.values() if s.asked]
    if asked:
        found.append(_unanswered(asked))
    return "; ".join(found) or "its copies wait for each other"


def _routers(turn: Turn, epoch: int, phase: RemoveState) -> str:
    late = sorted(
        r.router
        for r in turn.state.routers.values()
        if r.in_set and (r.applied if phase is RemoveState.UNLISTED else r.quiesced) < epoch
    )
    return f"waits for {', '.join(late) or 'routers to register and'}"


def _unanswered(steps: list[StepRun]) -> str:
    ranks = sorted({s.step.slot.rank for s in steps})
    return f"{_ranks(ranks)} did not say that {len(steps)} slots were given back"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
