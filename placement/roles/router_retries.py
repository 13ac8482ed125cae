"""Calls that are to be sent again: when, and when no more.

A call waits here for one of two things. One that some rank can serve waits for room in the budget,
in order: for others to end as long as it takes, but for a budget that is used up, because much is
failing, not longer than its patience. What only named old slots is no sign that anything fails: it
waits for others to end, and not for the budget. One that has an expert whose every listed rank is
unreachable is *held*: sending it would only use up its attempts. It is released when a rank or the
table changes, and given up shortly before its request's deadline, so that the caller learns the
reason.

Responsible for these two lists. Must never judge whether a rank is reachable. Called by
`placement.roles.router`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from math import inf

from placement.roles.retry_budget import RetryBudget
from placement.roles.router_records import RouterRules


@dataclass(frozen=True, slots=True)
class Overdue:
    """A call whose wait is over. `held`: it waited for a rank, not for the budget."""

    call_id: int
    held: bool


class RetryQueue:
    """Both lists, by call id. Times in seconds of the caller's clock."""

    def __init__(self, rules: RouterRules) -> None:
        self._rules = rules
        self.budget = RetryBudget(
            share=rules.retry_share,
            least_at_once=rules.retries_least,
            least=rules.budget_least,
            window_s=rules.budget_window_s,
        )
        self.pending: set[int] = set()
        """Calls of any list. The same set for ever."""
        self._waiting: OrderedDict[int, tuple[float, float]] = OrderedDict()
        """Call -> (when it began to wait, when it is given up), oldest first."""
        self._free: OrderedDict[int, float] = OrderedDict()
        """Calls that were held before, or refused for their old table -> when they are given up.
        What kept them is known to have changed: their retries are no part of a storm."""
        self._held: dict[int, float] = {}
        """Call -> when it is given up."""
        self._dry_since_s: float | None = None
        """Since when the budget has been used up while somebody waited for it."""
        self._next_s = inf
        """No wait is over before it."""
        self._seen: object = None

    def wait(self, call_id: int, at_s: float, left_s: float) -> None:
        """The call waits for the budget; its request has so much time left."""
        self.pending.add(call_id)
        self._waiting[call_id] = (at_s, at_s + 0.9 * left_s)
        self._next_s = min(self._next_s, self._end_s(call_id))

    def redirect(self, call_id: int, at_s: float, left_s: float) -> None:
        """The call was refused for its old table alone: it waits for others to end, no more."""
        self.pending.add(call_id)
        self._free[call_id] = end_s = at_s + 0.9 * left_s
        self._next_s = min(self._next_s, end_s)

    def hold(self, call_id: int, at_s: float, left_s: float) -> None:
        """The call waits for a rank to come back."""
        self.pending.add(call_id)
        end_s = at_s + left_s - min(self._rules.hold_margin_s, 0.1 * left_s)
        self._held[call_id] = end_s
        self._next_s = min(self._next_s, end_s)

    def held_unless_seen(self, version: object) -> tuple[int, ...]:
        """Calls that are held, once for each `version` of what is known of ranks and table."""
        if not self._held or version == self._seen:
            return ()
        self._seen = version
        return tuple(self._held)

    def release(self, call_id: int) -> None:
        """A held call can be served again: it waits for the budget instead."""
        self._free[call_id] = self._held.pop(call_id)

    def take(self, open_calls: int, at_s: float) -> list[int]:
        """Calls whose retry starts now, as far as the budget goes."""
        taken: list[int] = []
        while self._free:
            call_id = next(iter(self._free))
            if not self.budget.grant(call_id, open_calls, at_s, free=True):
                break  # too many at once
            del self._free[call_id]
            taken.append(call_id)
        while self._waiting and not self._free:
            call_id = next(iter(self._waiting))
            if not self.budget.grant(call_id, open_calls, at_s):
                break
            del self._waiting[call_id]
            taken.append(call_id)
        self.pending.difference_update(taken)
        if not self._waiting or not self.budget.dry(at_s):
            self._dry_since_s = None
        elif self._dry_since_s is None:
            self._dry_since_s = at_s
            self._next_s = min(self._next_s, at_s + self._rules.retry_patience_s)
        return taken

    def overdue(self, at_s: float) -> list[Overdue]:
        """Calls whose wait is over; the caller forgets them."""
        if at_s < self._next_s:
            return []
        ends = [(self._end_s(call_id), call_id, False) for call_id in self._waiting]
        ends += [(end_s, call_id, False) for call_id, end_s in self._free.items()]
        ends += [(end_s, call_id, True) for call_id, end_s in self._held.items()]
        self._next_s = min((end_s for end_s, _, _ in ends if end_s > at_s), default=inf)
        return [Overdue(call_id, held) for end_s, call_id, held in ends if end_s <= at_s]

    def next_s(self) -> float:
        """When a wait may be over, infinite where nothing waits."""
        return self._next_s if self.pending else inf

    def forget(self, call_id: int) -> None:
        """The call has closed."""
        self.budget.ended(call_id)
        if call_id in self.pending:
            self.pending.discard(call_id)
            self._waiting.pop(call_id, None)
            self._held.pop(call_id, None)
            self._free.pop(call_id, None)

    def _end_s(self, call_id: int) -> float:
        """When a call that waits for the budget is given up, as things are now."""
        began_s, end_s = self._waiting[call_id]
        if self._dry_since_s is None:
            return end_s
        return min(end_s, max(began_s, self._dry_since_s) + self._rules.retry_patience_s)
