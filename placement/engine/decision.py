"""What becomes of an automatic target: which of its moves start now, which wait, and why.

Responsible for weighing a target layer by layer and for the record that tells it, with what was
refused. Plans nothing and runs nothing itself. Called by trigger.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import numpy as np

from placement.engine.outlook import expected_balance
from placement.engine.runs import left_out, start_run, terms_of
from placement.engine.shift import shift_seen
from placement.engine.state import Candidate
from placement.engine.turn import Turn
from placement.layout import IntArray
from placement.planner.gate import (
    LAST_WORD_WEIGHT,
    Verdict,
    Weighed,
    foresee,
    fruitless,
    waits,
    weigh,
)
from placement.planner.part import Figures, choose_parts, part_of
from placement.planner.plan import Plan
from placement.planner.prove import prove

LAYERS_NAMED_MAX = 8
"""Layers that one record names; the others are counted."""
_WHY = MappingProxyType(
    {
        Verdict.REGRET_BELOW_COST: "regret has not reached the cost, or is not beyond noise",
        Verdict.GAIN_BELOW_BAND: "the gain is within the band of noise",
        Verdict.GAIN_BELOW_COST: "gain over the expected life below the cost of the copies",
    }
)
"""Why moves wait; the first is nearest to starting."""
_STARTS = (Verdict.SHIFT, Verdict.REGRET_REACHED, Verdict.PAYS_IN_TIME)
"""Why moves start; the first that any part has names the record."""
_QUIET = MappingProxyType(
    {
        "nothing_better": "the policy keeps the layout",
        "paused": "paused while the target was computed",
    }
)


def layers_in_words(layers: Sequence[int]) -> str:
    """ "layer 3", "layers 1, 2 and 5", "layers 0, 1, ... (58)"."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    if len(layers) > LAYERS_NAMED_MAX:
        return f"layers {', '.join(map(str, layers[:LAYERS_NAMED_MAX]))} ... ({len(layers)})"
    return f"layers {', '.join(map(str, layers[:-1]))} and {layers[-1]}"


def decide(turn: Turn, plan: Plan, slots: IntArray, planned: Sequence[int]) -> None:
    """Start the parts of the plan that the gate lets through; keep the target of the others, to
    measure regret against it. planned: layers the target was asked for."""
    state, config = turn.state, turn.config
    terms, shift = terms_of(config), shift_seen(turn)
    kept = set() if state.candidate is None else set(state.candidate.layers)
    fresh = np.array([layer not in kept for layer in range(turn.spec.num_layers)])
    state.gate = foresee(state.gate, plan.layers, fresh, terms)

    def verdict(part: Figures) -> Weighed:
        return weigh(state.gate, part, shift.layers, terms)

    layout = turn.layout()
    limit = [r.num_slots if r.alive else 0 for r in turn.topology().ranks]
    go, stay = choose_parts(
        plan,
        layout,
        slot_limit=limit,
        staging_slots=config.staging_slots,
        starts=lambda part: verdict(part).verdict.starts,
    )
    started, refused = [verdict(p) for p in go], [verdict(p) for p in stay]
    _rest(turn, plan, planned, refused)
    _keep(turn, slots, refused)
    numbers = _numbers(started or refused, started, refused, planned) | shift.numbers
    waiting = _refusals(refused)
    detail = "; ".join(words for words in (*waiting.values(), shift.words) if words)
    looked_at = [f"{verdict}: {words}" for verdict, words in waiting.items()]
    if not started or state.paused:
        rule = "paused" if started else _main_reason(refused)
        if started:
            looked_at.insert(0, f"{started[0].verdict}: {_QUIET[rule]}")
        turn.record(
            rule,
            "kept",
            detail or _QUIET[rule],
            numbers=_plan_numbers(plan) | numbers,
            refused=[*looked_at, *left_out(plan)],
        )
        return
    part = part_of(plan, go)
    if part is not plan:
        prove(layout, part.steps, slot_limit=limit, staging_slots=config.staging_slots)
    said = {w.verdict for w in started}
    rule = next(v for v in _STARTS if v in said)
    start_run(
        turn, part, "auto", rule=rule.value, detail=detail, numbers=numbers, refused=looked_at
    )


def _rest(turn: Turn, plan: Plan, planned: Sequence[int], refused: Sequence[Weighed]) -> None:
    """Let layers rest for which nothing worth having was found. A plan that used all its budget
    says nothing of layers it does not touch."""
    config = turn.config
    writes = sum(f.writes for f in plan.layers)
    left = min(
        config.max_bytes - plan.copy_bytes, config.max_cross_node_bytes - plan.cross_node_bytes
    )
    room = left >= turn.spec.expert_bytes
    touched = {f.layer for f in plan.layers}
    vain = [layer for layer in planned if layer not in touched]
    if writes >= config.max_moves or not room:
        vain = []
    for part in refused:
        if part.verdict is not Verdict.REGRET_BELOW_COST:
            vain.extend(layer for layer in part.layers if layer in planned)
    gate, too_long = waits(turn.state.gate, _waiting(refused))
    if vain or too_long:
        terms, balance, at_s = terms_of(config), expected_balance(turn), turn.at_s
        gate = fruitless(gate, sorted(vain), balance, at_s, terms)
        gate = fruitless(gate, too_long, balance, at_s, terms, times=LAST_WORD_WEIGHT)
    turn.state.gate = gate


def _waiting(refused: Sequence[Weighed]) -> list[int]:
    late = Verdict.REGRET_BELOW_COST
    return sorted(layer for part in refused if part.verdict is late for layer in part.layers)


def _keep(turn: Turn, slots: IntArray, refused: Sequence[Weighed]) -> None:
    waited = turn.state.gate.waited
    waiting = tuple(layer for layer in _waiting(refused) if waited[layer])
    turn.state.candidate = Candidate(layers=waiting, slots=slots) if waiting else None


def _numbers(
    told: Sequence[Weighed],
    started: Sequence[Weighed],
    refused: Sequence[Weighed],
    planned: Sequence[int],
) -> dict[str, float]:
    """Regret and threshold of the parts that started, or of the refused where none did."""
    return {
        "regret_s": sum((w.regret_s for w in told), 0.0),
        "threshold_s": sum((w.threshold_s for w in told), 0.0),
        "layers_considered": float(len(planned)),
        "layers_started": float(sum(len(w.layers) for w in started)),
        "layers_refused": float(sum(len(w.layers) for w in refused)),
        "refused_gain_s_per_s": sum((w.gain_s_per_s for w in refused), 0.0),
        "refused_cost_s": sum((w.cost_s for w in refused), 0.0),
    }


def _plan_numbers(plan: Plan) -> dict[str, float]:
    return {
        "gain_s_per_s": plan.gain_s_per_s,
        "cost_s": plan.cost_s,
        "moves": float(len(plan.moves)),
        "balancedness_before": plan.balancedness_before,
        "balancedness_after": plan.balancedness_after,
    }


def _main_reason(refused: Sequence[Weighed]) -> str:
    """Rule of the part that came nearest to starting."""
    said = {w.verdict for w in refused}
    return next((v.value for v in _WHY if v in said), "nothing_better")


def _refusals(refused: Sequence[Weighed]) -> dict[str, str]:
    """What was weighed and not started, in words, by the verdict that refused it."""
    found = {}
    for verdict, why in _WHY.items():
        parts = [w for w in refused if w.verdict is verdict]
        if not parts:
            continue
        layers = sorted(layer for w in parts for layer in w.layers)
        gain, cost = sum(w.gain_s_per_s for w in parts), sum(w.cost_s for w in parts)
        regret, threshold = sum(w.regret_s for w in parts), sum(w.threshold_s for w in parts)
        found[verdict.value] = (
            f"{layers_in_words(layers)} not moved: {why} (gain {gain:.3g} s/s, cost {cost:.3g} s, "
            f"regret {regret:.3g} of {threshold:.3g} s)"
        )
    return found
