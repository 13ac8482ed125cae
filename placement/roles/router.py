"""The router's rules: which table it uses, what it sends where, what it adds, retries, hedges and
gives up.

A driver (the router actor, or the simulator) feeds events with the time `at_s` and does what comes
back: it runs a `PlanJob` (pure, anywhere), commits it, sends each `Dispatch`, reports the answer or
the loss, and asks `take_retries` after each event. Every number in flight is kept by table, so that
`quiesced_epoch` can be acknowledged.

Responsible for table acceptance and for joining the rules: exactly-once calls (`calls`), when to
send again (`router_retries`, `router_hedges`) and to whom (`router_covers`), avoidance and backlog
(`rank_state`). Must never wait, send or read a clock. Called by `moe_serve.router` and the
simulator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from placement.roles import router_covers as covers
from placement.roles.assignment import Bytes, Int32s, LayerReplicas, Part, TableIndex
from placement.roles.calls import (
    Call,
    CallBook,
    Cause,
    Contribution,
    Ended,
    OpenRequest,
    Settled,
    SubCallState,
)
from placement.roles.rank_state import RankBook
from placement.roles.router_records import (
    Acceptance,
    Dispatch,
    Failure,
    FailureKind,
    PlanJob,
    Retry,
    RouterRules,
    Step,
)
from placement.roles.router_second_tries import SecondTries
from placement.roles.router_waits import waits
from placement.routing import RoutingTable

_NOTICED_S = 0.1
"""A timeout noticed later than this was slept through."""


class RouterRole:
    """State of one router. Not thread-safe: one event at a time.

    `router_number` turns ties of the split apart between routers. `first_id`: first call id, so
    that two lives of a router never use the same.
    """

    def __init__(
        self,
        router_number: int,
        num_layers: int,
        num_experts: int,
        rules: RouterRules,
        first_id: int = 1,
    ) -> None:
        self.rules = rules
        self.counters: Counter[str] = Counter()
        self.highest_term = 0
        self._router_number = router_number
        self._shape = (num_layers, num_experts)
        self._index: TableIndex | None = None
        self._book = CallBook(first_id)
        self._ranks = RankBook(
            faults_to_eject=rules.faults_to_eject,
            eject_s=rules.eject_s,
            eject_max_s=rules.eject_max_s,
            eject_share=rules.eject_share,
            slowness=rules.rank_slowness,
        )
        self._in_flight: Counter[tuple[int, int]] = Counter()
        """Jobs and sub-calls by (term, epoch) of their table."""
        self._batches = 0
        self._tries = SecondTries(rules, self._book, self._ranks)
        self._pending = self._tries.queue.pending
        self._latencies = self._tries.hedges.latencies
        self._now_s = 0.0
        """Newest time seen: `take_retries` may be asked without one."""

    # ------------------------------------------------------------------------------- tables

    @property
    def table(self) -> RoutingTable | None:
        """The table that new batches are split under."""
        return None if self._index is None else self._index.table

    @property
    def applied_epoch(self) -> int:
        """Epoch of that table, 0 before the first."""
        return 0 if self._index is None else self._index.table.epoch

    @property
    def quiesced_epoch(self) -> int:
        """Greatest e such that nothing split under a table older than this term's epoch e is in
        flight: 0 while work of an earlier term is."""
        if self._index is None:
            return 0
        term, epoch = min(self._in_flight, default=self._index.table.order)
        return epoch if term == self._index.table.term else 0

    def accept(self, table: RoutingTable) -> Acceptance:
        """Use a table for new batches if it is newer. An epoch goes down only with a new term."""
        if table.term < self.highest_term:
            return Acceptance.STALE_TERM
        if (table.num_layers, table.num_experts) != self._shape:
            return Acceptance.MISFIT
        self.highest_term = table.term
        if not table.is_newer(self.table):
            return Acceptance.KNOWN
        self._index = self._tries.index = TableIndex(table)
        self._ranks.follow(self._index.incarnation)
        return Acceptance.APPLIED

    def behind(self, term: int, epoch: int) -> bool:
        """Whether a shard that names (term, epoch) knows a newer table."""
        if epoch < 0 or term < self.highest_term:
            return False  # it has no table, or one of a controller that is fenced
        return self.table is None or (term, epoch) > self.table.order

    # ------------------------------------------------------------------------------- ranks

    def connection(self, rank: int, incarnation: int, fault: str) -> None:
        """Connection of a rank broke (`fault` says how) or is fine (\"\")."""
        self._ranks.connection(rank, incarnation, fault)

    def told_suspects(self, ranks: Iterable[int]) -> None:
        """The controller suspects exactly these ranks: they are used where nothing else is left."""
        self._ranks.told(ranks)

    def suspects(self, at_s: float) -> tuple[tuple[int, int, str], ...]:
        """(rank, incarnation, why) of the ranks avoided now by this router's own judgement."""
        return self._ranks.suspects(at_s)

    @property
    def ejections(self) -> int:
        """Times a shard was ejected."""
        return self._ranks.ejections.count

    # ------------------------------------------------------------------------------- requests

    def open_request(
        self, key: int, layer: int, ids: Int32s, valid: Bytes, *, at_s: float, deadline_at_s: float
    ) -> PlanJob | Failure:
        """Take a checked request with at least one valid pair; ids int32 [T, k], valid uint8 [T,
        k].
        """
        index = self._index
        if index is None:
            return Failure(FailureKind.NO_TABLE, "no routing table yet")
        failure = covers.missing(index, layer, ids[valid != 0])
        if failure is not None:
            return failure
        version, pairs = index.table.weights_version, int(np.count_nonzero(valid))
        request = OpenRequest(key, layer, ids, valid, deadline_at_s, version, pairs)
        self._book.requests[key] = request
        # Only rows with a pair: the others are zero without anybody's help.
        rows = np.flatnonzero(valid.any(axis=1)).astype(np.int32)
        ejected = self._ranks.ejections.out(at_s, trial=True)
        replicas = index.layer(layer, ejected, self._ranks.unreachable)
        return self._job(request, None, Cause.FIRST, index, replicas, rows, valid[rows], at_s)

    def plan_cover(self, call_id: int, cause: Cause, at_s: float) -> PlanJob | Failure | None:
        """Plan a retry or hedge of an open call under the newest table.

        None: the call has closed, or a hedge finds no other node to serve it.
        """
        call = self._book.calls.get(call_id)
        if call is None:
            return None
        request = self._book.requests[call.request_key]
        index = self._index
        assert index is not None, "calls are opened under a table"
        if cause is Cause.HEDGE:
            # While its split is computed it is not due a second time, and one that finds no other
            # node is not looked at again.
            self._tries.hedged(call_id)
        failure = covers.unservable(request, call, index)
        if failure is not None:
            # A hedge ends nothing: what was sent first may still be answered.
            return None if cause is Cause.HEDGE else failure
        avoid = [
            self._ranks.ejections.out(at_s),
            covers.failed_by(call, index),
            self._ranks.unreachable,
        ]
        if cause is Cause.HEDGE:
            # A hedge is no reason to use a rank that is avoided.
            shunned = frozenset().union(*avoid, covers.same_nodes(call, index))
            experts = covers.experts_of(request, call)
            if covers.out_of_reach(index, request.layer, experts, shunned):
                return None
            self._tries.hedges.spend(at_s)
            avoid = [shunned]
        replicas = index.layer(request.layer, *avoid)
        return self._job(request, call, cause, index, replicas, call.row_id, call.pairs, at_s)

    def commit(self, job: PlanJob, parts: tuple[Part, ...], at_s: float) -> tuple[Dispatch, ...]:
        """Start what a job planned. Empty where its request or call has closed meanwhile."""
        self._now_s = at_s
        self.abandon(job)
        request = self._book.requests.get(job.request_key)
        if request is None:
            return ()
        incarnation = job.index.incarnation
        order = job.index.table.order
        sent: list[Dispatch] = []
        if job.call_id is None:
            self._tries.called(len(parts), at_s)
            num_pairs = 0
            for part in parts:
                pairs = np.zeros((part.row_id.shape[0], job.ids.shape[1]), np.uint8)
                pairs[part.pair_row, part.pair_k] = 1
                call = self._book.open_call(request, part.row_id, pairs, at_s)
                cover = self._book.open_cover(call, job.cause, (part,), incarnation, order, at_s)
                num_pairs += cover.subs[0].num_pairs
                sent.append(self._dispatch(job, request, call, cover.subs[0], part, at_s))
            assert num_pairs == request.left_pairs, "every pair of the request is in one call"
            return tuple(sent)
        found = self._book.calls.get(job.call_id)
        if found is None:
            return ()
        cover = self._book.open_cover(found, job.cause, parts, incarnation, order, at_s)
        for sub, part in zip(cover.subs, parts, strict=True):
            sent.append(self._dispatch(job, request, found, sub, part, at_s))
        return tuple(sent)

    def abandon(self, job: PlanJob) -> None:
        """Forget a job that will not be committed."""
        self._release(job.index.table.order)

    def answered(
        self,
        sub_id: int,
        row_status: Bytes,
        partial: npt.NDArray[Any],
        *,
        backlog_s: float,
        backlog_seq: int,
        compute_s: float,
        at_s: float,
        queue_s: float = 0.0,
    ) -> Step:
        """A well-formed reply came: row_status uint8 [R], partial raw [served rows, H]. queue_s:
        time the sub-call waited in the shard."""
        self._now_s = at_s
        sub = self._book.subs[sub_id]
        self._release(sub.order)
        ranks, rank, incarnation = self._ranks, sub.rank, sub.incarnation
        ranks.answered(rank, incarnation, backlog_seq, backlog_s, at_s)
        served_pairs = self._count_pairs(sub, row_status)
        if served_pairs:
            work = sub.work_pairs * served_pairs / sub.num_pairs
            ranks.computed(rank, incarnation, work, compute_s)
            took_s = at_s - sub.sent_at_s
            ranks.served(rank, incarnation, took_s - queue_s, work, at_s)
            self._latencies.add(sub.num_pairs, took_s)
        elif not np.any(row_status == Ended.STALE):
            ranks.busy(rank, incarnation, at_s)
        return self._settle(sub, self._book.answer(sub, row_status, partial, at_s), at_s)

    def lost(self, sub_id: int, *, fault: bool, at_s: float, why: Ended = Ended.LOST) -> Step:
        """No answer will come, or the shard has only said why there is none. `fault`: the shard's
        own (disconnect, silence, malformed reply, failed computing), not a cancelled request or its
        word that it is busy. Silence counts only where it lasted, and was not our own: a router
        that was paused notices its timeouts late.
        """
        self._now_s = at_s
        sub = self._book.subs[sub_id]
        self._release(sub.order)
        ranks, rank, incarnation = self._ranks, sub.rank, sub.incarnation
        self.counters["refused_pairs" if why is Ended.REFUSED else "lost_pairs"] += sub.num_pairs
        took_s = at_s - sub.sent_at_s
        asleep = took_s > sub.timeout_s + _NOTICED_S
        if fault and not (why is Ended.SILENT and (asleep or took_s < sub.patience_s)):
            ranks.fault(rank, incarnation, at_s)
        if why is Ended.REFUSED:
            ranks.busy(rank, incarnation, at_s)
        usual_s = self._latencies.of(sub.num_pairs)
        waited = why in (Ended.LOST, Ended.SILENT) and not asleep
        if waited and usual_s is not None and took_s > usual_s:
            self._latencies.add(sub.num_pairs, took_s)
            ranks.unanswered(rank, incarnation, took_s, sub.work_pairs, at_s)
        return self._settle(sub, self._book.lose(sub, at_s, why), at_s)

    def close_request(self, key: int) -> tuple[Contribution, ...]:
        """End a request (finished, failed or cancelled): what to add, in the fixed order (rank,
        sub-call).
        """
        request = self._book.close_request(key)
        if request is None:
            return ()
        for call_id in request.open_calls:
            self._tries.forget(call_id)
        return tuple(sorted(request.added, key=lambda c: (c.rank, c.sub_id)))

    # ------------------------------------------------------------------------------- second tries

    def take_retries(self, at_s: float | None = None) -> tuple[Retry, ...]:
        """Calls whose retry may start now, as far as the budget goes; ask after every event, and
        when `wake_at_s` says so. `at_s`: None = the time of the last event."""
        return self._tries.take_retries(self._now_s if at_s is None else at_s)

    def hedges_due(self, at_s: float) -> tuple[tuple[int, int], ...]:
        """(call id, request key) of calls to hedge now, oldest first.

        They are old enough, have one cover on its way, and stay within the share.
        """
        return self._tries.hedges_due(at_s)

    def overdue(self, at_s: float) -> tuple[Step, ...]:
        """Give up the calls that waited too long for the budget or for a rank to come back: each
        fails its request. Ask when `wake_at_s` says so."""
        return self._tries.overdue(at_s)

    def wake_at_s(self, at_s: float) -> float | None:
        """When to ask for hedges, overdue calls and retries next, None where nothing is open that
        time could change."""
        return self._tries.wake_at_s(at_s)

    @property
    def waiting(self) -> bool:
        """Whether a call waits for its retry, or for a rank to come back."""
        return bool(self._pending)

    @property
    def open_calls(self) -> int:
        """Calls open now."""
        return len(self._book.calls)

    @property
    def open_sub_calls(self) -> int:
        """Sub-calls on their way, late ones included."""
        return len(self._book.subs)

    @property
    def dropped_replies(self) -> int:
        """Replies that served rows of which nothing was added."""
        return self._book.dropped_replies

    # ------------------------------------------------------------------------------- inside

    def _job(
        self,
        request: OpenRequest,
        call: Call | None,
        cause: Cause,
        index: TableIndex,
        replicas: LayerReplicas,
        rows: Int32s,
        valid: Bytes,
        at_s: float,
    ) -> PlanJob:
        self._in_flight[index.table.order] += 1
        self._batches += 1
        return PlanJob(
            request_key=request.key,
            layer=request.layer,
            call_id=None if call is None else call.call_id,
            cause=cause,
            index=index,
            replicas=replicas,
            ids=request.ids[rows],
            valid=valid,
            row_id=rows,
            backlog=self._ranks.backlog_pairs(index.num_ranks, at_s),
            tie_offset=self._router_number + self._batches,
            memory_bound_pairs=self.rules.memory_bound_pairs,
        )

    def _dispatch(
        self,
        job: PlanJob,
        request: OpenRequest,
        call: Call,
        sub: SubCallState,
        part: Part,
        at_s: float,
    ) -> Dispatch:
        self._in_flight[sub.order] += 1
        self.counters["sent_pairs"] += sub.num_pairs
        if job.cause is Cause.RETRY:
            self.counters["retried_pairs"] += sub.num_pairs
        elif job.cause is Cause.HEDGE:
            self.counters["hedged_pairs"] += sub.num_pairs
        backlog_s = self._ranks.backlog_s(part.rank, at_s)
        self._ranks.sent(part.rank, part.work_pairs, at_s)
        sub.timeout_s, sub.patience_s = waits(
            self.rules,
            left_s=max(0.0, request.deadline_at_s - at_s),
            backlog_s=backlog_s,
            usual_s=self._latencies.of(sub.num_pairs),
            last=job.cause is not Cause.HEDGE and call.attempt + 1 >= self.rules.max_attempts,
            alone=job.replicas.any_alone(part.pair_expert),
        )
        return Dispatch(
            sub_id=sub.sub_id,
            call_id=call.call_id,
            request_key=request.key,
            layer=request.layer,
            cause=job.cause,
            attempt=call.attempt,
            incarnation=sub.incarnation,
            term=job.index.table.term,
            epoch=job.index.table.epoch,
            timeout_s=sub.timeout_s,
            part=part,
        )

    def _settle(self, sub: SubCallState, settled: Settled, at_s: float) -> Step:
        if settled.closed is None:
            return Step(sub.request_key)
        if self._tries.noted:
            self._tries.forget(settled.closed.call_id)
        request = self._book.requests[sub.request_key]
        call = settled.reopened
        if call is None:
            # One that was given up ends as failed, though what was still open is answered.
            finished = not (request.open_calls or request.given_up)
            assert not finished or request.left_pairs == 0, "added once: every pair of the request"
            return Step(sub.request_key, finished=finished)
        return self._tries.reopened(request, call, at_s)

    def _count_pairs(self, sub: SubCallState, row_status: Bytes) -> int:
        """Count the pairs of a reply by what became of them; returns those served."""
        if not row_status.any():
            self.counters["served_pairs"] += sub.num_pairs
            return sub.num_pairs
        by_status = np.bincount(row_status[sub.pair_row], minlength=3)
        self.counters["served_pairs"] += int(by_status[0])
        self.counters["stale_pairs"] += int(by_status[int(Ended.STALE)])
        self.counters["refused_pairs"] += int(by_status[int(Ended.REFUSED)])
        return int(by_status[0])

    def _release(self, order: tuple[int, int]) -> None:
        self._in_flight[order] -= 1
        if self._in_flight[order] == 0:
            del self._in_flight[order]
