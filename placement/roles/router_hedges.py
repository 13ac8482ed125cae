"""Which calls are sent a second time while the first is still on its way.

A call is hedged once it is older than 95% of recent calls of its size took, at most once, and only
to a node other than the one that has it: what makes a call slow is often its node. Hedges are at
most a share of the calls, so a fault that slows everything down does not double the load. A call
is nothing but the computing of experts, the same wherever and however often it is done; nothing
else is hedged.

Responsible for choosing calls. Must never choose a rank. Called by `placement.roles.router`.
"""

from __future__ import annotations

from collections.abc import Iterable

from placement.roles.calls import Call
from placement.roles.latency import CallLatencies
from placement.roles.retry_budget import ShareBudget
from placement.roles.router_records import RouterRules

_LOOK_S = (0.005, 0.1)
"""Least and longest time until open calls are looked at again: half of the youngest age counts."""


class Hedges:
    """Hedged calls, their budget, and how long calls take."""

    def __init__(self, rules: RouterRules) -> None:
        self._rules = rules
        self._budget = ShareBudget(share=rules.hedge_share, least=0, window_s=rules.budget_window_s)
        self._hedged: set[int] = set()
        self.latencies = CallLatencies(0.95)
        """Of sub-calls of any cause: a call of one sub-call is the usual one."""

    def called(self, count: int, at_s: float) -> None:
        """So many calls were made for the first time."""
        self._budget.called(count, at_s)

    def due(self, calls: Iterable[Call], at_s: float) -> list[Call]:
        """Calls to hedge now, of `calls` in the order they were opened."""
        room = self._budget.room(at_s)
        least_s = self._least_s()
        found: list[Call] = []
        if least_s is None:
            return found
        for call in calls:
            if len(found) >= room or at_s - call.opened_at_s < least_s:
                break
            if call.call_id not in self._hedged and self._old_enough(call, at_s):
                found.append(call)
        return found

    def look_again_s(self) -> float | None:
        """Seconds until open calls are worth a look, None where none is ever hedged."""
        least_s = self._least_s()
        if least_s is None or self._rules.hedge_share == 0.0:
            return None
        return min(max(least_s / 2, _LOOK_S[0]), _LOOK_S[1])

    def tried(self, call_id: int) -> None:
        """The call is not looked at again, whether a rank is found for it or not."""
        self._hedged.add(call_id)

    def spend(self, at_s: float) -> None:
        """A rank was found: a hedge is sent."""
        self._budget.spend(at_s)

    def forget(self, call_id: int) -> None:
        """The call has closed."""
        self._hedged.discard(call_id)

    def _least_s(self) -> float | None:
        """Age below which no call is due."""
        if self._rules.hedge_after_s is not None:
            return self._rules.hedge_after_s
        known = self.latencies.least_s
        return None if known is None else max(known, self._rules.hedge_least_s)

    def _old_enough(self, call: Call, at_s: float) -> bool:
        if len(call.covers) != 1:
            return False
        (cover,) = call.covers.values()  # on its way: with its only cover over a call would close
        after_s = self._rules.hedge_after_s
        if after_s is None:
            known = self.latencies.of(sum(sub.num_pairs for sub in cover.subs))
            if known is None:
                return False
            after_s = max(known, self._rules.hedge_least_s)
        return at_s - cover.subs[0].sent_at_s >= after_s
