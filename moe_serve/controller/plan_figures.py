"""Metrics of decisions: what windows came to, what became of plans and moves, what they gained.

Responsible for reading them out of decision records. Must never be read by anything that decides.
Called by `figures`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from moe_serve.controller.book import MOVE_RULES
from moe_serve.telemetry import Metrics
from moe_serve.telemetry.registry import VERDICTS
from placement.messages.records import DecisionRecord

ENDS: Final = frozenset({"done", "aborted"})
STALL_RULE: Final = "plan_stalled"
NO_POLICY: Final = "none"
"""Of plans that no policy computed: what was lost is filled again, what is in no table freed."""
WEIGHED: Final = "threshold_s"
"""Only records about a computed plan that was weighed have this number."""
CAUSES: Final = frozenset({"repair", "budget", "drain", "staging", "initial"})
"""Rules of plans that are needed; kept means that no move was found."""
PLANS_KEPT: Final = 64
"""Plans whose policy is remembered until they end."""


class PlanFigures:
    """Samples of one term."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._began: dict[tuple[str, int], float] = {}
        """Driver time at which moves under way were started."""
        self._stalls = 0.0
        """Plans that stood still, as the newest record of one says."""
        self._solved = ""
        """Policy of the target that was computed last and is not answered for yet."""
        self._policies: OrderedDict[str, str] = OrderedDict()
        """Policy of each plan that was stored or started."""

    @property
    def moves_under_way(self) -> int:
        """Moves that were started and have not ended."""
        return len(self._began)

    def solved(self, policy: str, seconds: float) -> None:
        """A target was computed, or could not be, in so many seconds."""
        self._solved = policy
        self._metrics.observe("plan_solve_seconds", seconds)

    def record(self, record: DecisionRecord) -> None:
        """One decision."""
        self._verdict(record)
        self._plan(record)
        if record.rule == STALL_RULE:
            self._stall(record)
        if record.rule in MOVE_RULES and record.move_id >= 0:
            self._move(record)
        if record.rule == "realised_gain":
            for figure in ("expected", "realised"):
                gain = record.numbers[f"{figure}_gain_s_per_s"]
                self._metrics.set("plan_gain_ratio", gain, figure=figure)

    def _verdict(self, record: DecisionRecord) -> None:
        about_window = record.outcome == "kept" and WEIGHED not in record.numbers
        if record.rule == "out_of_balance" or (about_window and record.rule in VERDICTS):
            self._metrics.add("windows_total", verdict=record.rule)

    def _plan(self, record: DecisionRecord) -> None:
        rule, outcome, numbers = record.rule, record.outcome, record.numbers
        for moment in ("before", "after"):
            balance = numbers.get(f"balancedness_{moment}", 0.0)
            if balance > 0.0 and (outcome == "started" or WEIGHED in numbers):
                self._metrics.set("plan_imbalance_ratio", 1.0 / balance - 1.0, moment=moment)
        if rule == "plan_done":
            self._ended(self._policies.pop(record.plan_id, NO_POLICY), outcome)
        elif rule not in MOVE_RULES and record.plan_id and outcome in ("started", "noted"):
            if rule in (STALL_RULE, "parked") or record.plan_id in self._policies:
                return
            self._policies[record.plan_id] = self._take()
            while len(self._policies) > PLANS_KEPT:
                self._policies.popitem(last=False)
        elif outcome == "kept" and (WEIGHED in numbers or rule in CAUSES):
            self._ended(self._take(), "kept")
        elif rule in ("target_stale", "target_failed"):
            self._ended(self._take(), rule.removeprefix("target_"))

    def _take(self) -> str:
        policy, self._solved = self._solved or NO_POLICY, ""
        return policy

    def _ended(self, policy: str, outcome: str) -> None:
        self._metrics.add("plans_total", policy=policy, outcome=outcome)

    def _stall(self, record: DecisionRecord) -> None:
        # One plan may leave two records: that it stands still, and that it was aborted for it.
        number = record.numbers.get("plans_stalled", 0.0)
        if number != self._stalls:
            self._metrics.add("plans_stalled_total")
        self._stalls = number

    def _move(self, record: DecisionRecord) -> None:
        key = record.plan_id, record.move_id
        if record.outcome not in ENDS:
            self._began[key] = record.at_s
            return
        self._metrics.add("moves_total", kind=record.rule, outcome=record.outcome)
        began_s = self._began.pop(key, None)  # unknown where a controller before this one began it
        if record.outcome == "done":
            if record.copy_bytes:
                self._metrics.add("copy_bytes_total", record.copy_bytes, kind=record.rule)
            if began_s is not None:
                self._metrics.observe("move_seconds", record.at_s - began_s)
