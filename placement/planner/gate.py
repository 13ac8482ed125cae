"""The gate: whether a plan pays, and whether enough has been lost to pay for it now.

Responsible for two comparisons in one unit, seconds. Called by the engine after each automatic
target.

A plan saves `gain_s_per_s` seconds of serving a second and costs `cost_s` seconds of rank time for
its copies. It *pays* where gain x expected life exceeds the cost. It is *started* only once the
seconds already lost against it (regret, decayed each window so that a passing wave is forgotten)
have reached that cost: the rule of the ski rental problem, which never loses more than about twice
what the best plan in hindsight would have lost. Worked example: gain 0.02, window 2 s, decay 0.9,
cost 0.1: regret after windows 1, 2, 3 is 0.04, 0.076, 0.108; the plan starts after the third.
"""

from __future__ import annotations

from placement.planner.plan import Plan


def plan_pays(plan: Plan, plan_life_s: float) -> bool:
    """Whether the predicted saving over the plan's expected life exceeds the cost of its copies."""
    return plan.gain_s_per_s > 0.0 and plan.gain_s_per_s * plan_life_s > plan.cost_s


def accumulate(regret_s: float, gain_s_per_s: float, window_s: float, decay: float) -> float:
    """Regret after one more window: what was lost before, decayed, and what this window lost
    against the plan."""
    return regret_s * decay + max(0.0, gain_s_per_s) * window_s


def regret_reached(regret_s: float, plan: Plan) -> bool:
    """Whether the seconds lost so far have reached the cost of moving."""
    return regret_s >= plan.cost_s
