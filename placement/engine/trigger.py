"""When the placement should follow the load: closed windows in, a started plan or a reason why not
out.

Responsible for the automatic trigger and for what becomes of computed targets. Plans nothing
itself. Called by the engine.

The rule: a layer in balance is left alone. Otherwise a target is computed, and what this window
lost against it is added to the regret. The plan starts once it pays over its expected life and the
regret has reached its cost.
"""

from __future__ import annotations

import numpy as np

from placement.engine.needs import SPOKEN_FOR, ask_target, forget_outstanding
from placement.engine.outlook import expected_balance, has_demand, realised_gain, take_window
from placement.engine.runs import back_off, start_run
from placement.engine.state import Outstanding, PlanAsk, StoredPlan, short_hash
from placement.engine.turn import Turn
from placement.layout import LayoutError
from placement.load import LoadError
from placement.messages.effects import Answer
from placement.messages.events import TargetComputed, TargetFailed, WindowClosed
from placement.planner import accumulate, plan_pays, prove, regret_reached
from placement.planner.plan import Plan

STORED_PLANS_MAX = 8
"""Computed plans kept for ApplyPlan, oldest forgotten first."""


def window_closed(turn: Turn, event: WindowClosed) -> None:
    """Take the window in, tell what the last plan really gained, and look whether a plan is due."""
    try:
        take_window(turn, event.window)
    except LoadError as error:
        turn.record("window_refused", "refused", str(error))
        return
    _tell_realised(turn, event)
    state, config = turn.state, turn.config
    why_not = _why_not(turn, event)
    if why_not is not None:
        rule, detail = why_not
        turn.record(rule, "kept", detail, numbers={"regret_s": state.regret_s})
        return
    balance = expected_balance(turn)
    worst = int(np.argmin(balance))
    numbers = {"worst_layer": float(worst), "worst_balancedness": float(balance[worst])}
    if float(balance[worst]) >= config.balance_enough:
        state.regret_s = accumulate(state.regret_s, 0.0, config.window_s, config.regret_decay)
        turn.record("in_balance", "kept", numbers=numbers | {"regret_s": state.regret_s})
        return
    ask_target(turn, "auto")
    turn.record("out_of_balance", "noted", "a target is being computed", numbers=numbers)


def _why_not(turn: Turn, event: WindowClosed) -> tuple[str, str] | None:
    state, config = turn.state, turn.config
    if state.paused:
        return "paused", "automatic plans are paused"
    if state.run is not None:
        return "plan_running", f"plan {state.run.plan_id} is running"
    if state.outstanding is not None:
        return "target_outstanding", f"the {state.outstanding.cause} target is not answered yet"
    if not state.published or turn.layout().missing():
        return "not_ready", "not every expert has a listed replica"
    if all(r.draining for r in state.ranks if r.holds):
        return "not_ready", "every rank that lives is being emptied"
    if not has_demand(event.window):
        return "no_load", "nothing was asked for in this window"
    if turn.at_s < state.last_run_ended_at_s + config.cooldown_s:
        return "cooldown", f"the last plan ended less than {config.cooldown_s} s ago"
    return None


def _tell_realised(turn: Turn, event: WindowClosed) -> None:
    realised, window = turn.state.realised, event.window
    if realised is None or window.start_s < realised.ended_at_s:
        return
    gain = realised_gain(turn, window, realised.before, realised.after)
    turn.state.realised = None
    turn.record(
        "realised_gain",
        "done",
        "measured on the first whole window after the plan, with its own demand",
        plan_id=realised.plan_id,
        expected_gain_s_per_s=realised.expected_gain_s_per_s,
        realised_gain_s_per_s=gain,
    )


def target_failed(turn: Turn, event: TargetFailed) -> None:
    """No target: back off, or tell the operator who asked."""
    outstanding = turn.state.outstanding
    if outstanding is None or outstanding.request_id != event.request_id:
        turn.record("target_stale", "kept", f"answer {event.request_id} is not the one waited for")
        return
    give_up(turn, event.reason)


def give_up(turn: Turn, reason: str) -> None:
    """The outstanding target will not come."""
    outstanding = forget_outstanding(turn)
    turn.record("target_failed", "refused", f"{outstanding.cause}: {reason}")
    if outstanding.asked_by >= 0:
        turn.commands.append(Answer(request_id=outstanding.asked_by, code="failed", message=reason))
    back_off(turn, outstanding.cause)


def target_computed(turn: Turn, event: TargetComputed) -> None:
    """Check that the target still fits what is there, then let its cause decide."""
    outstanding = turn.state.outstanding
    if outstanding is None or outstanding.request_id != event.request_id:
        turn.record("target_stale", "kept", f"answer {event.request_id} is not the one waited for")
        return
    forget_outstanding(turn)
    if (outstanding.revision, event.layout_revision) != (turn.state.revision,) * 2:
        turn.record(
            "target_stale",
            "kept",
            f"the {outstanding.cause} target came from layout revision {event.layout_revision}, "
            f"now it is {turn.state.revision}",
        )
        _ask_again(turn, outstanding)
        return
    _check(turn, event.plan)
    for refused in event.plan.refused[:8]:
        turn.record("move_refused", "refused", refused)
    if outstanding.cause == "asked":
        _store(turn, outstanding, event.plan)
    elif outstanding.cause == "auto":
        _decide_auto(turn, event.plan)
    elif event.plan.moves:
        start_run(turn, event.plan, outstanding.cause, rule=outstanding.cause)
    else:
        turn.record(
            outstanding.cause, "kept", f"no move was found: {'; '.join(event.notes) or 'none fits'}"
        )
        back_off(turn, outstanding.cause)


def _check(turn: Turn, plan: Plan) -> None:
    """Play the plan against the slots as they are. A plan of the same revision that fails is a bug
    of the planner."""
    topology = turn.topology()
    limit = [r.num_slots if r.alive else 0 for r in topology.ranks]
    try:
        prove(turn.layout(), plan.steps, slot_limit=limit, staging_slots=turn.config.staging_slots)
    except (LayoutError, IndexError) as error:
        raise AssertionError(f"plan does not belong to this layout: {error}") from error


def _ask_again(turn: Turn, outstanding: Outstanding) -> None:
    if outstanding.cause in SPOKEN_FOR or outstanding.cause in ("initial", "auto"):
        return  # what is needed is found out anew; the next window looks again
    turn.state.asks.insert(
        0,
        PlanAsk(
            request_id=outstanding.asked_by,
            policy=outstanding.policy,
            max_moves=outstanding.max_moves,
        ),
    )


def _decide_auto(turn: Turn, plan: Plan) -> None:
    state, config = turn.state, turn.config
    state.regret_s = accumulate(
        state.regret_s, plan.gain_s_per_s, config.window_s, config.regret_decay
    )
    numbers = {
        "gain_s_per_s": plan.gain_s_per_s,
        "cost_s": plan.cost_s,
        "regret_s": state.regret_s,
        "moves": float(len(plan.moves)),
        "balancedness_before": plan.balancedness_before,
        "balancedness_after": plan.balancedness_after,
    }
    if not plan.moves:
        turn.record("nothing_better", "kept", "the policy keeps the layout", numbers=numbers)
    elif not plan_pays(plan, config.plan_life_s):
        turn.record(
            "gain_below_cost",
            "kept",
            f"gain over {config.plan_life_s} s does not reach the cost of the copies",
            numbers=numbers,
        )
    elif not regret_reached(state.regret_s, plan):
        turn.record("regret_below_cost", "kept", numbers=numbers)
    elif state.paused:
        turn.record("paused", "kept", "paused while the target was computed", numbers=numbers)
    else:
        start_run(turn, plan, "auto", rule="regret_reached", regret_s=state.regret_s)


def _store(turn: Turn, outstanding: Outstanding, plan: Plan) -> None:
    state, layout = turn.state, turn.layout()
    plan_id = f"{state.epoch}-{short_hash(plan)}"
    touched = sorted({s.slot for s in plan.steps})
    experts = sorted({(s.layer, s.expert) for s in plan.steps})
    state.stored = [s for s in state.stored if s.plan_id != plan_id]
    state.stored.append(
        StoredPlan(
            plan_id=plan_id,
            plan=plan,
            slots=[(s.rank, s.index, int(layout.slots[s.rank, s.index])) for s in touched],
            hosts=[(turn.spec.key(*e), list(layout.ranks_of(*e))) for e in experts],
        )
    )
    del state.stored[:-STORED_PLANS_MAX]
    turn.record(
        "asked",
        "noted",
        f"plan {plan_id} of {len(plan.moves)} moves is ready to be applied",
        plan_id=plan_id,
        expected_gain_s_per_s=plan.gain_s_per_s,
        copy_bytes=plan.copy_bytes,
    )
    turn.commands.append(
        Answer(
            request_id=outstanding.asked_by,
            code="ok",
            message=f"{len(plan.moves)} moves" if plan.moves else "nothing to move",
            plan_id=plan_id,
            plan=plan,
        )
    )
