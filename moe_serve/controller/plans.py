"""The newest plans that were asked for or ran, with what was measured before and after them.

Responsible for keeping them, bounded. Must never be read by anything that decides. Filled by the
driver, read by `explaining`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from placement.engine.state import EngineState, PlanRun
from placement.load import LoadWindow
from placement.messages.effects import Answer, Effects
from placement.scoring import balancedness

PLANS_KEPT: Final = 64
NOT_YET_S: Final = float("inf")
UNKNOWN: Final = 0.0
"""Balancedness that was not measured: a real one is above 0."""


@dataclass(slots=True)
class KeptPlan:
    """A plan (placement.planner's, as the engine made it) and what became of it, driver times.
    before, after: measured balancedness of the last window before it began, and of the first whole
    one with load after it ended."""

    plan_id: str
    plan: Any
    cause: str = "asked"
    began_s: float = NOT_YET_S
    ended_s: float = NOT_YET_S
    before: float = UNKNOWN
    after: float = UNKNOWN


class PlanShelf:
    """See the module's text."""

    def __init__(self) -> None:
        self._plans: OrderedDict[str, KeptPlan] = OrderedDict()
        self._running = ""
        self._newest = UNKNOWN

    def note(self, effects: Effects, run: PlanRun | None, at_s: float) -> None:
        """The engine took a step; `run` is the running plan after it."""
        for command in effects.commands:
            if isinstance(command, Answer) and command.plan is not None and command.plan_id:
                known = self._plans.get(command.plan_id)
                if known is None or known.began_s == NOT_YET_S:
                    self._keep(KeptPlan(command.plan_id, command.plan))
        if run is not None and run.plan_id == self._running:
            return
        ended = self._plans.get(self._running)
        if ended is not None:
            ended.ended_s = at_s
        self._running = ""
        if run is not None:
            self._running = run.plan_id
            self._keep(
                KeptPlan(
                    run.plan_id,
                    run.plan,
                    cause=run.cause,
                    began_s=run.started_at_s,
                    before=self._newest,
                )
            )

    def window_closed(self, window: LoadWindow, state: EngineState) -> None:
        """A window closed; `state` is the engine's after it."""
        measured = measured_balance(window, state)
        for kept in self._plans.values():
            if kept.after == UNKNOWN and window.start_s >= kept.ended_s:
                kept.after = measured
        self._newest = measured

    def find(self, plan_id: str) -> KeptPlan | None:
        """A plan by its id, "" = the newest; None where it is not kept."""
        if plan_id:
            return self._plans.get(plan_id)
        return next(reversed(self._plans.values()), None)

    def _keep(self, plan: KeptPlan) -> None:
        self._plans[plan.plan_id] = plan
        self._plans.move_to_end(plan.plan_id)
        while len(self._plans) > PLANS_KEPT:
            self._plans.popitem(last=False)


def measured_balance(window: LoadWindow, state: EngineState) -> float:
    """Balancedness of what ranks computed in a window; UNKNOWN where nothing was."""
    holding = [r.rank for r in state.ranks if r.holds and r.rank < len(window.rank_pairs)]
    loads = window.rank_pairs[holding]
    return balancedness(loads) if np.any(loads) else UNKNOWN
