"""Diff of two layouts -> moves -> steps -> waves, in an order proved feasible, and the price of it.

Responsible for plans as data and for the gate that says whether one pays. Must never decide where
an expert should lie (policies do) and never run a step (the engine does).
"""

from placement.planner.compose import ALL_AT_ONCE, PlannerError, WaveConfig, make_plan
from placement.planner.fit import fit, missing_slots, missing_uniform, reachable_floor
from placement.planner.part import choose_parts, part_of
from placement.planner.plan import LayerFigure, Move, MoveKind, Plan, PlannedStep, StepKind
from placement.planner.prove import prove

__all__ = [
    "ALL_AT_ONCE",
    "LayerFigure",
    "Move",
    "MoveKind",
    "Plan",
    "PlannedStep",
    "PlannerError",
    "StepKind",
    "WaveConfig",
    "choose_parts",
    "fit",
    "make_plan",
    "missing_slots",
    "missing_uniform",
    "part_of",
    "prove",
    "reachable_floor",
]
