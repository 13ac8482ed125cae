"""The rule of ski rental for a plan as a whole, which the engine's gate refines layer by layer.

A plan starts once it pays over its expected life and the seconds lost against it, decayed each
window, have reached its cost: that never loses more than about twice what the best plan in
hindsight would have lost.

Responsible for three comparisons in seconds. Must never plan. Called by the players of the ratio
benchmark, to tell what the rule alone is worth.
"""

from __future__ import annotations

from placement.planner import Plan
from placement.planner.gate import pays


def plan_pays(plan: Plan, plan_life_s: float) -> bool:
    """`pays` for a whole plan."""
    return pays(plan.gain_s_per_s, plan.cost_s, plan_life_s)


def accumulate(regret_s: float, gain_s_per_s: float, window_s: float, decay: float) -> float:
    """Regret after one more window: what was lost before, decayed, and what this window lost
    against the plan."""
    return regret_s * decay + max(0.0, gain_s_per_s) * window_s


def regret_reached(regret_s: float, plan: Plan) -> bool:
    """Whether the seconds lost so far have reached the cost of moving."""
    return regret_s >= plan.cost_s
