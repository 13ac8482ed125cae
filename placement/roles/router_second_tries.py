"""What becomes of a call that was not served, or not yet: retried, held, hedged or given up.

Responsible for joining the two queues of `router_retries`, the hedges and what is known of ranks.
Must never plan a split or change what was added. Called by `placement.roles.router`, which tells it
of each call that opens again or closes.
"""

from __future__ import annotations

from placement.roles.assignment import TableIndex
from placement.roles.calls import Call, CallBook, Ended, OpenRequest
from placement.roles.rank_state import RankBook
from placement.roles.router_covers import (
    experts_of,
    gave_up,
    out_of_reach,
    over_budget,
    unreachable,
)
from placement.roles.router_hedges import Hedges
from placement.roles.router_records import Retry, RouterRules, Step
from placement.roles.router_retries import RetryQueue

_BUDGET_LOOK_S = 0.05
"""Time between two looks at what waits for the budget."""


class SecondTries:
    """Open calls of `book` that wait or are late. `index`: the table in use."""

    def __init__(self, rules: RouterRules, book: CallBook, ranks: RankBook) -> None:
        self.index: TableIndex | None = None
        self.hedges = Hedges(rules)
        self._rules = rules
        self._book = book
        self._ranks = ranks
        self.queue = RetryQueue(rules)
        self.noted: set[int] = set()
        """Open calls that the queue or the hedges know of: few, where little fails."""

    def called(self, count: int, at_s: float) -> None:
        """So many calls were made for the first time."""
        self.queue.budget.called(count, at_s)
        self.hedges.called(count, at_s)

    def forget(self, call_id: int) -> None:
        """The call has closed."""
        if call_id in self.noted:
            self.noted.discard(call_id)
            self.queue.forget(call_id)
            self.hedges.forget(call_id)

    def hedged(self, call_id: int) -> None:
        """A rank is looked for to hedge the call: it is not looked at again."""
        self.noted.add(call_id)
        self.hedges.tried(call_id)

    def reopened(self, request: OpenRequest, call: Call, at_s: float) -> Step:
        """These rows were served by none of the covers: they wait, or end the request."""
        self.noted.add(call.call_id)
        left_s = max(0.0, request.deadline_at_s - at_s)
        if self._out_of_reach(request, call):
            self.queue.hold(call.call_id, at_s, left_s)
            return Step(request.key, held_call=call.call_id)
        if call.attempt >= self._rules.max_attempts:
            failure = gave_up(request, call)
            self.forget(call.call_id)
            self._book.drop_call(call)
            return Step(request.key, failure=failure)
        put = self.queue.redirect if _only_stale(call) else self.queue.wait
        put(call.call_id, at_s, left_s)
        return Step(request.key)

    def take_retries(self, at_s: float) -> tuple[Retry, ...]:
        """Calls whose retry may start now."""
        if not self.queue.pending:
            return ()
        order = None if self.index is None else self.index.table.order
        for call_id in self.queue.held_unless_seen((self._ranks.version, order)):
            call = self._book.calls[call_id]
            request = self._book.requests[call.request_key]
            if not self._out_of_reach(request, call):
                self.queue.release(call_id)
        granted = []
        for call_id in self.queue.take(len(self._book.calls), at_s):
            call = self._book.calls[call_id]
            wait_s = 0.0 if _only_stale(call) else self._rules.retry_wait_s * call.attempt
            granted.append(Retry(call.request_key, call_id, wait_s))
        return tuple(granted)

    def hedges_due(self, at_s: float) -> tuple[tuple[int, int], ...]:
        """(call id, request key) of calls to hedge now."""
        if self.index is None or not self.index.many_nodes:
            return ()
        due = self.hedges.due(self._book.calls.values(), at_s)
        return tuple((call.call_id, call.request_key) for call in due)

    def overdue(self, at_s: float) -> tuple[Step, ...]:
        """Give up the calls that waited too long: each fails its request."""
        steps = []
        for one in self.queue.overdue(at_s) if self.queue.pending else ():
            call = self._book.calls[one.call_id]
            request = self._book.requests[call.request_key]
            if one.held:
                experts = self._out_of_reach(request, call)
                failure = unreachable(request.layer, experts, call)
            else:
                failure = over_budget(request, call)
            self.forget(call.call_id)
            self._book.drop_call(call)
            steps.append(Step(request.key, failure=failure))
        return tuple(steps)

    def wake_at_s(self, at_s: float) -> float | None:
        """When time alone may change something, None where nothing is open that it could."""
        wakes = []
        if self.queue.pending:
            # Also the budget has more room as time passes.
            wakes.append(min(at_s + _BUDGET_LOOK_S, self.queue.next_s()))
        may_hedge = self._book.calls and self.index is not None and self.index.many_nodes
        again_s = self.hedges.look_again_s() if may_hedge else None
        if again_s is not None:
            wakes.append(at_s + again_s)
        return min(wakes, default=None)

    def _out_of_reach(self, request: OpenRequest, call: Call) -> list[int]:
        """Experts of a call that only unreachable ranks have."""
        avoid, index = self._ranks.unreachable, self.index
        if not avoid or index is None:
            return []
        return out_of_reach(index, request.layer, experts_of(request, call), avoid)


def _only_stale(call: Call) -> bool:
    """Whether its ranks refused it for its old table and for nothing else."""
    return all(refusal.why is Ended.STALE for refusal in call.refused_by.values())
