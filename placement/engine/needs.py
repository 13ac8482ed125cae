"""What must be done when nothing is being done: repair, clean up, refill, shrink, drain, apply,
plan.

Responsible for the order of causes and for backing off after a failure. Computes no plan: it asks
for one. Called by the engine once a plan has ended and no target is outstanding.
"""

from __future__ import annotations

import numpy as np

from placement.engine.floor import below_floor, floor_now, must_not_wait, tell_floor
from placement.engine.outlook import scenarios_of, wary_scenarios
from placement.engine.restore import (
    awaits_ranks,
    end_restoring,
    refill_plan,
    rescue_plan,
    restore_plan,
)
from placement.engine.runs import cleanup_plan, start_run, terms_of
from placement.engine.state import (
    NEVER_S,
    Outstanding,
    PlanAsk,
    RankState,
    RankStatus,
    SlotState,
    SlotUse,
    StoredPlan,
)
from placement.engine.tables import JOIN_GRACE_S
from placement.engine.turn import Turn
from placement.messages.effects import ComputeTarget, SetRankSlots
from placement.planner.plan import StepKind
from placement.policy import POLICIES
from placement.policy.base import PolicyInput

SPOKEN_FOR = frozenset({"repair", "budget", "drain", "staging"})


def next_need(turn: Turn) -> bool:
    """Start what is needed most, if the engine is idle. Whether anything was started."""
    state = turn.state
    _resize_ranks(turn)
    if state.run is not None or state.outstanding is not None or not _ready(turn):
        return False
    if _restore(turn):
        return True
    if must_not_wait(turn):
        if awaits_ranks(turn):
            return False
        _repair(turn)
        return True
    plan = cleanup_plan(turn) if state.published or _short_of_room(turn) else None
    if plan is not None:
        state.retry_at_s.pop("initial", None)  # there will be more room
        start_run(turn, plan, "cleanup", rule="cleanup")
        return True
    plan = refill_plan(turn)
    if plan is not None:
        start_run(turn, plan, "refill", rule="refill")
        return True
    cause = _wanted_cause(turn)
    if cause is not None:
        ask_target(turn, cause)
        return True
    if state.published and not turn.layout().missing():
        tell_floor(turn)
    return _asked(turn)


def _short_of_room(turn: Turn) -> bool:
    """Whether the first table has to wait for slots that orphans hold: there are too few others, or
    no plan was found that did with these (a policy reckons with the slots of a rank, orphans among
    them). Else they are freed after it: an earlier controller's table may list them, and before
    there is one without them no router can say that it uses it."""
    if turn.at_s < turn.state.retry_at_s.get("initial", -NEVER_S):
        return True
    free = sum(
        s.use is SlotUse.EMPTY
        for r in turn.state.ranks
        if r.status is RankStatus.LIVE and not r.draining
        for s in r.slots
    )
    return len(turn.layout().missing()) > free


def _asked(turn: Turn) -> bool:
    """Start what an operator asked for."""
    state = turn.state
    if state.apply_next is not None:
        stored, state.apply_next = state.apply_next, None
        changed = what_changed(turn, stored)
        if changed:  # while the plan before it ended
            turn.record("asked", "refused", f"plan {stored.plan_id}: {changed}")
        else:
            start_run(turn, stored.plan, "asked", rule="asked", plan_id=stored.plan_id)
            for kept in state.stored:
                kept.begun = kept.begun or kept.plan_id == stored.plan_id
        return True
    if state.asks and not turn.layout().missing():
        ask = state.asks.pop(0)
        ask_target(
            turn,
            "asked",
            asked_by=ask.request_id,
            policy=ask.policy,
            max_moves=ask.max_moves,
            target=ask.target,
        )
        return True
    return False


def _restore(turn: Turn) -> bool:
    """After a total loss: put back what ranks that have returned held. Whether that began."""
    state = turn.state
    if turn.at_s < state.retry_at_s.get("restore", -NEVER_S):
        return False
    plan = restore_plan(turn)
    if plan is not None:
        start_run(turn, plan, "restore", rule="restore")
        return True
    if state.restoring_until_s > -NEVER_S and not awaits_ranks(turn):
        end_restoring(turn)
    return False


def _repair(turn: Turn) -> None:
    """Experts lie below the floor: a target, or where no layout holds every expert, what can be
    done without one."""
    if not turn.config.uniform and not floor_now(turn):
        scenarios, weights = scenarios_of(turn)
        load = np.tensordot(weights, scenarios.sum(axis=1), axes=1).reshape(-1)
        plan = rescue_plan(turn, load)
        if plan is not None:
            detail = "the ranks cannot hold every expert; staging and surplus slots are used"
            start_run(turn, plan, "repair", rule="repair", detail=detail)
            return
    ask_target(turn, "repair")


def what_changed(turn: Turn, stored: StoredPlan) -> str:
    """What the plan touches and is not as it was, in words; "" where all is."""
    layout = turn.layout()
    limit = {r.rank: r.num_slots if r.alive else 0 for r in turn.topology().ranks}
    for rank, index, key in stored.slots:
        if index >= limit[rank] or int(layout.slots[rank, index]) != key:
            return f"rank {rank} slot {index} changed since the plan was computed"
    filled = {s.slot.rank for s in stored.plan.steps if s.kind is StepKind.ADD}
    for number in sorted(filled):
        if turn.rank(number).draining:
            return f"rank {number} is being emptied since the plan was computed"
    for key, hosts in stored.hosts:
        layer, expert = divmod(key, turn.spec.num_experts)
        if list(layout.ranks_of(layer, expert)) != hosts:
            return f"layer {layer} expert {expert} changed since the plan was computed"
    return ""


def _ready(turn: Turn) -> bool:
    """Whether enough ranks are there to decide: all promised ones, or the grace is over, or few are
    missing."""
    state = turn.state
    if not any(r.status is RankStatus.LIVE for r in state.ranks):
        return False
    if turn.at_s >= state.started_at_s + JOIN_GRACE_S:
        return True
    if turn.waiting_for_ranks():
        return False
    if state.restoring_until_s > turn.at_s:
        return True
    lost = sum(r.status is RankStatus.LOST and not r.draining for r in state.ranks)
    # Most of the fleet being replaced at once is a restart of everything: filling the first rank
    # back would be worse.
    return 2 * lost <= sum(r.status is not RankStatus.REMOVED for r in state.ranks)


def _wanted_cause(turn: Turn) -> str | None:
    causes = []
    if not turn.state.published and below_floor(turn):
        causes.append("initial")  # later it is a repair, and that comes before all this
    if any(r.wanted_slots >= 0 and _to_shrink(turn, r) for r in turn.state.ranks):
        causes.append("budget")
    if any(r.draining and r.holds and _placed(r.slots) for r in turn.state.ranks):
        causes.append("drain")
    if turn.state.published and _crowded(turn):
        causes.append("staging")
    for cause in causes:
        if turn.at_s >= turn.state.retry_at_s.get(cause, -NEVER_S):
            return cause
    return None


def _placed(slots: list[SlotState]) -> int:
    """Slots whose replicas a plan can move away; the others wait for their shard."""
    return sum(s.use in (SlotUse.LISTED, SlotUse.VERIFIED) for s in slots)


def _to_shrink(turn: Turn, rank: RankState) -> bool:
    """Whether a plan is needed before the rank can give its slots up."""
    if not rank.holds:
        return False
    staging = min(turn.config.staging_slots, rank.wanted_slots)
    high = rank.slots[rank.wanted_slots :]
    return _placed(high) > 0 or _placed(rank.slots) > rank.wanted_slots - staging


def _crowded(turn: Turn) -> bool:
    """Whether a rank has given staging slots away, in need or with a plan that was ended half-way,
    and the ranks can do without."""
    topology = turn.topology()
    crowded = any(
        r.status is RankStatus.LIVE
        and not r.draining
        and topology.ranks[r.rank].fill_max < 0
        and _placed(r.slots) > max(0, r.num_slots - turn.config.staging_slots)
        for r in turn.state.ranks
    )
    return crowded and floor_now(turn) > 0


def _shrunk(turn: Turn, rank: RankState) -> bool:
    """Whether the rank's high slots are given back and enough of the others hold nothing."""
    high = rank.slots[rank.wanted_slots :]
    staging = min(turn.config.staging_slots, rank.wanted_slots)
    return all(s.use is SlotUse.EMPTY for s in high) and (
        _placed(rank.slots) <= rank.wanted_slots - staging
    )


def _resize_ranks(turn: Turn) -> None:
    """Tell ranks whose slots are ready to be given up to give them up; again if they do not
    answer."""
    for rank in turn.state.ranks:
        if rank.wanted_slots < 0 or rank.status is not RankStatus.LIVE:
            continue
        if turn.state.run is not None or not _shrunk(turn, rank):
            continue
        again_s = rank.resize_sent_at_s + turn.config.retry_s
        if rank.resize_sent_at_s == NEVER_S or turn.at_s >= again_s:
            rank.resize_sent_at_s = turn.at_s
            turn.commands.append(
                SetRankSlots(
                    rank=rank.rank,
                    incarnation=rank.incarnation,
                    num_slots=rank.wanted_slots,
                    budget_bytes=rank.wanted_bytes,
                )
            )


def ask_target(
    turn: Turn,
    cause: str,
    *,
    asked_by: int = -1,
    policy: str = "",
    max_moves: int = -1,
    layers: tuple[int, ...] | None = None,
    target: tuple[tuple[int, ...], ...] = (),
) -> None:
    """Ask for a target. Automatic and asked plans have a budget of moves; what must be done has
    none beyond itself. layers: those out of balance, None = all. target: what an operator wants."""
    state, config = turn.state, turn.config
    assert state.outstanding is None, "a target is already outstanding"
    request_id = state.next_request_id
    state.next_request_id += 1
    deadline_s = turn.at_s + config.target_timeout_s
    state.outstanding = Outstanding(
        request_id=request_id,
        revision=state.revision,
        cause=cause,
        deadline_s=deadline_s,
        asked_by=asked_by,
        policy=policy,
        max_moves=max_moves,
        layers=layers or (),
        target=target,
    )
    limits: dict[str, int | None] = {
        "max_moves": config.max_moves,
        "max_bytes": config.max_bytes,
        "max_cross_node_bytes": config.max_cross_node_bytes,
    }
    if cause == "initial" or cause in SPOKEN_FOR:
        limits = dict.fromkeys(limits)
        if cause in SPOKEN_FOR:
            limits["max_moves"] = 0
    elif max_moves >= 0:
        limits["max_moves"] = max_moves
    scenarios, weights = wary_scenarios(turn) if cause == "auto" else scenarios_of(turn)
    topology, layout = turn.topology(), turn.layout()
    request = PolicyInput(
        spec=turn.spec,
        topology=topology,
        layout=layout,
        scenarios=scenarios,
        weights=weights,
        floor=max(1, floor_now(turn)),
        staging_slots=config.staging_slots,
        max_moves=limits["max_moves"],
        max_bytes=limits["max_bytes"],
        max_cross_node_bytes=limits["max_cross_node_bytes"],
        uniform=config.uniform,
        batch_tokens=state.call_tokens,
        byte_price=config.byte_price,
        # Below the band a layer is planned until it is above it: else it would soon be back.
        balance_enough=terms_of(config).stop if layers is not None else config.balance_enough,
        layers=layers,
    )
    turn.commands.append(
        ComputeTarget(
            request_id=request_id,
            layout_revision=state.revision,
            cause=cause,
            policy=policy or _configured_policy(turn, request),
            input=request,
            deadline_s=deadline_s,
            target=target,
        )
    )


def _configured_policy(turn: Turn, request: PolicyInput) -> str:
    """The first layout's policy where nothing is resident and no load is known, else the usual one.

    A usual one that does not exist is asked all the same: refused at the first fill, it is noticed.
    """
    config = turn.config
    blank = not request.scenarios.any() and not request.layout.replica_counts.any()
    return config.first_policy if blank and config.policy in POLICIES else config.policy


def forget_outstanding(turn: Turn) -> Outstanding:
    """The outstanding request, answered or given up."""
    outstanding = turn.state.outstanding
    assert outstanding is not None, "no target is outstanding"
    turn.state.outstanding = None
    return outstanding


def drop_outstanding(turn: Turn, why: str) -> None:
    """The answer would come too late to mean anything: what is needed is found out anew, and what
    an operator asked for is asked for again."""
    if turn.state.outstanding is None:
        return
    outstanding = forget_outstanding(turn)
    turn.record("target_stale", "kept", f"the {outstanding.cause} target is dropped: {why}")
    ask_again(turn, outstanding)


def ask_again(turn: Turn, outstanding: Outstanding) -> None:
    """What an operator asked for waits for its turn again; the rest is found out anew."""
    if outstanding.asked_by >= 0:
        ask = PlanAsk(
            request_id=outstanding.asked_by,
            policy=outstanding.policy,
            max_moves=outstanding.max_moves,
            target=outstanding.target,
        )
        turn.state.asks.insert(0, ask)
