"""I12, progress: a controller that lives moves on, or says why it does not.

Responsible for this one. That a service comes back to balance is measured by the runner.
"""

from __future__ import annotations

from placement.messages.history import (
    Began,
    Died,
    FaultBegan,
    FaultEnded,
    Paused,
    PlanEnded,
    PlanStarted,
    Recovered,
    Resumed,
    StallReported,
    StateWritten,
    WindowFolded,
)
from placement.sim.checks.base import InvariantBroken, Rules


class Progress:
    """I12: while no fault lasts, a running plan changes the state of a step, or the controller
    tells what holds it up, within two windows; and windows close in time. slack_s: for what a
    machine takes beyond that."""

    def __init__(self, *, window_s: float, slack_s: float = 0.0) -> None:
        self._limit_s = 2 * window_s + slack_s
        self._faults = 0
        self._quiet_since_s = 0.0
        self._boss = ""
        self._plan = ""
        self._moved_s = 0.0
        self._window_s = 0.0

    def rules(self) -> Rules:
        """See `Checker`."""
        return {
            Began: self._began,
            Died: self._disturbed,
            Paused: self._disturbed,
            Resumed: self._disturbed,
            Recovered: self._disturbed,
            FaultBegan: self._fault_began,
            FaultEnded: self._fault_ended,
            PlanStarted: self._plan_started,
            PlanEnded: self._plan_ended,
            StateWritten: self._moved,
            StallReported: self._moved,
            WindowFolded: self._window,
        }

    def _began(self, fact: Began) -> None:
        if fact.place == "controller":
            self._boss, self._plan = fact.who, ""
            self._window_s = fact.at_s
        self._disturbed(fact)

    def _disturbed(self, fact: Began | Died | Paused | Resumed | Recovered | FaultEnded) -> None:
        self._quiet_since_s = fact.at_s

    def _fault_began(self, fact: FaultBegan) -> None:
        del fact
        self._faults += 1

    def _fault_ended(self, fact: FaultEnded) -> None:
        self._faults -= 1
        self._disturbed(fact)

    def _plan_started(self, fact: PlanStarted) -> None:
        if fact.who == self._boss:
            self._plan, self._moved_s = fact.plan_id, fact.at_s

    def _plan_ended(self, fact: PlanEnded) -> None:
        if fact.who == self._boss:
            self._plan = ""

    def _moved(self, fact: StateWritten | StallReported) -> None:
        if fact.who == self._boss:
            self._moved_s = fact.at_s

    def _window(self, fact: WindowFolded) -> None:
        if fact.who != self._boss:
            return
        since_s = max(self._window_s, self._quiet_since_s)
        self._window_s = fact.at_s
        if self._faults:
            return
        if fact.at_s - since_s > self._limit_s:
            raise InvariantBroken(f"I12: {fact.who} closed no window for {fact.at_s - since_s} s")
        still_s = fact.at_s - max(self._moved_s, self._quiet_since_s)
        if self._plan and still_s > self._limit_s:
            raise InvariantBroken(
                f"I12: plan {self._plan} of {fact.who} has not moved for {still_s:.3f} s, and "
                "nobody says why"
            )

    def finish(self) -> None:
        """See `Checker`."""
