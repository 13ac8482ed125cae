"""Windows and targets: when a layer is out of balance a target is asked for, and what comes of it.

Responsible for the automatic trigger and for what becomes of computed targets. Plans nothing
itself. Called by the engine.

The rule: a layer in balance is left alone before anything is computed. For the others a target is
asked that names them; `decision` says whether its moves start.
"""

from __future__ import annotations

import msgspec
import numpy as np

from placement.engine.decision import decide, layers_in_words
from placement.engine.needs import ask_again, ask_target, forget_outstanding
from placement.engine.outlook import (
    FloatArray,
    expected_balance,
    has_demand,
    lost_while_resting,
    remember_failure,
    saved_by_candidate,
    saving_by_layer,
    take_window,
)
from placement.engine.runs import back_off, left_out, start_run, terms_of
from placement.engine.shift import ShiftSeen, shift_seen
from placement.engine.state import Outstanding, StoredPlan, short_hash
from placement.engine.turn import Turn
from placement.layout import LayoutError
from placement.load import LoadError
from placement.messages.effects import Answer
from placement.messages.events import TargetComputed, TargetFailed, WindowClosed
from placement.planner import prove
from placement.planner.gate import BoolArray, charge, due, initial_gate, paid_back, watch
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
    state, terms = turn.state, terms_of(turn.config)
    if len(state.gate.regret_s) != turn.spec.num_layers:
        state.gate = initial_gate(turn.spec.num_layers)
    _tell_realised(turn, event)
    saved, lost = saved_by_candidate(turn), lost_while_resting(turn)
    state.gate = charge(state.gate, saved, lost, terms)
    why_not = _why_not(turn)
    if why_not is not None:
        rule, detail = why_not
        regret = {"regret_s": float(state.gate.regret_s.sum())}
        turn.record(rule, "kept", detail, numbers=regret, refused=[f"plan: {detail}"])
        return
    balance = expected_balance(turn)
    shift = shift_seen(turn)
    _watch(turn, balance)
    layers = due(state.gate, balance, shift.layers, turn.at_s, terms)
    _decide_window(turn, balance, shift, layers)


def _watch(turn: Turn, balance: FloatArray) -> None:
    """Watch layers, and forget the kept target once none of its layers is watched."""
    state, kept = turn.state, np.zeros(turn.spec.num_layers, np.bool_)
    if state.candidate is not None:
        kept[list(state.candidate.layers)] = True
    state.gate = watch(state.gate, balance, kept, terms_of(turn.config))
    if state.candidate is not None and not (kept & state.gate.watched).any():
        state.candidate = None
        regret_s = np.where(kept, 0.0, state.gate.regret_s)
        state.gate = msgspec.structs.replace(state.gate, regret_s=regret_s)


def _decide_window(turn: Turn, balance: FloatArray, shift: ShiftSeen, layers: BoolArray) -> None:
    gate = turn.state.gate
    worst = int(np.argmin(balance))
    numbers = {
        "worst_layer": float(worst),
        "worst_balancedness": float(balance[worst]),
        "layers_considered": float(layers.sum()),
        "layers_resting": float((gate.watched & ~layers).sum()),
        "layers_skipped": float((~gate.watched).sum()),
        "regret_s": float(gate.regret_s.sum()),
    } | shift.numbers
    if layers.any():
        found = tuple(np.flatnonzero(layers).tolist())
        ask_target(turn, "auto", layers=found)
        detail = f"a target is being computed for {layers_in_words(found)}"
        turn.record("out_of_balance", "noted", _with(detail, shift), numbers=numbers)
    elif gate.watched.any():
        resting = np.flatnonzero(gate.watched)
        wait_s = float(gate.rest_until_s[resting].min()) - turn.at_s
        vain = bool((gate.fruitless[resting] > 0).all())
        detail = (
            f"{layers_in_words(resting.tolist())} "
            + ("rest: nothing worth having was found; " if vain else "cool down; ")
            + f"looked at again in {wait_s:.1f} s or after a shift"
        )
        rule = "nothing_better" if vain else "cooldown"
        refused = [f"plan: {detail}"]
        turn.record(rule, "kept", _with(detail, shift), numbers=numbers, refused=refused)
    else:
        enough = turn.config.balance_enough
        refused = [
            f"plan: no layer is out of balance; the lowest, layer {worst}, is at "
            f"{balance[worst]:.3f} and {enough:g} is enough"
        ]
        turn.record("in_balance", "kept", _with("", shift), numbers=numbers, refused=refused)


def _with(detail: str, shift: ShiftSeen) -> str:
    return "; ".join(words for words in (detail, shift.words) if words)


def _why_not(turn: Turn) -> tuple[str, str] | None:
    state = turn.state
    if state.paused:
        return "paused", "automatic plans are paused"
    if state.run is not None:
        still = f"; it stands still: {state.run.stalled}" if state.run.stalled else ""
        return "plan_running", f"plan {state.run.plan_id} is running{still}"
    if state.outstanding is not None:
        return "target_outstanding", f"the {state.outstanding.cause} target is not answered yet"
    if not state.published or turn.layout().missing():
        return "not_ready", "not every expert has a listed replica"
    if all(r.draining for r in state.ranks if r.holds):
        return "not_ready", "every rank that lives is being emptied"
    if not has_demand(turn):
        return "no_load", "nothing was asked for in this window"
    return None


def _tell_realised(turn: Turn, event: WindowClosed) -> None:
    state, realised, window = turn.state, turn.state.realised, event.window
    if realised is None or window.start_s < realised.ended_at_s or not has_demand(turn):
        return  # of a window in which nothing was asked for no layout is the better one
    found = saving_by_layer(turn, realised.before, realised.after, realised.promised)
    state.realised = None
    terms = terms_of(turn.config)
    state.gate, failed = paid_back(state.gate, realised.promised, found, turn.at_s, terms)
    remember_failure(turn, failed)
    gain = sum(found.values(), 0.0)
    turn.record(
        "realised_gain",
        "done",
        "measured on the first whole window with load after the plan, by its own demand"
        + (f"; {layers_in_words(failed)} got less than promised" if failed else ""),
        plan_id=realised.plan_id,
        numbers={
            "expected_gain_s_per_s": realised.expected_gain_s_per_s,
            "realised_gain_s_per_s": gain,
            "cost_s": realised.cost_s,
            "layers": float(len(realised.promised)),
            "layers_failed": float(len(failed)),
        },
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
        ask_again(turn, outstanding)
        return
    _check(turn, event.plan)
    for refused in event.plan.refused[:8]:
        turn.record("move_refused", "refused", refused)
    if outstanding.cause == "asked":
        _store(turn, outstanding, event)
    elif outstanding.cause == "auto":
        decide(turn, event.plan, event.slots, outstanding.layers)
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


def _store(turn: Turn, outstanding: Outstanding, event: TargetComputed) -> None:
    state, layout, plan = turn.state, turn.layout(), event.plan
    given = bool(outstanding.target)
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
            given=given,
        )
    )
    del state.stored[:-STORED_PLANS_MAX]
    towards = " to the placement that was asked for" if given else ""
    turn.record(
        "asked",
        "noted",
        f"plan {plan_id} of {len(plan.moves)} moves{towards} is ready to be applied",
        plan_id=plan_id,
        expected_gain_s_per_s=plan.gain_s_per_s,
        copy_bytes=plan.copy_bytes,
        refused=left_out(plan),
    )
    turn.commands.append(
        Answer(
            request_id=outstanding.asked_by,
            code="ok",
            message=f"{len(plan.moves)} moves" if plan.moves else "nothing to move",
            plan_id=plan_id,
            plan=plan,
            notes=event.notes if given else (),
        )
    )
