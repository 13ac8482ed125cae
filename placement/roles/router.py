"""The router's rules: which table it uses, what it sends where, what it adds, retries, hedges and
gives up.

A driver (the router actor, or the simulator) feeds events with the time `at_s` and does what comes
back: it runs a `PlanJob` (pure, anywhere), commits it, sends each `Dispatch`, reports the answer or
the loss, and asks `take_retries` after each event. Every number in flight is kept by table, so that
`quiesced_epoch` can be acknowledged.

Responsible for table acceptance, exactly-once calls (`calls`), retry budget, hedging, avoidance
(`rank_state`) and backlog. Must never wait, send or read a clock. Called by `moe_serve.router` and
the simulator.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import numpy as np
import numpy.typing as npt

from placement.roles.assignment import (
    Bytes,
    Int32s,
    LayerReplicas,
    Part,
    TableIndex,
)
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
from placement.routing import RoutingTable


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
        )
        self._in_flight: Counter[tuple[int, int]] = Counter()
        """Jobs and sub-calls by (term, epoch) of their table."""
        self._batches = 0
        self._waiting: deque[int] = deque()
        self._retrying: set[int] = set()
        self._hedged: set[int] = set()

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
        self._index = TableIndex(table)
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

    def suspects(self, at_s: float) -> tuple[tuple[int, int, str], ...]:
        """(rank, incarnation, why) of the ranks avoided now."""
        return self._ranks.suspects(at_s)

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
        failure = self._missing(index, layer, ids[valid != 0])
        if failure is not None:
            return failure
        version = index.table.weights_version
        request = OpenRequest(key, layer, ids, valid, deadline_at_s, version)
        self._book.requests[key] = request
        # Only rows with a pair: the others are zero without anybody's help.
        rows = np.flatnonzero(valid.any(axis=1)).astype(np.int32)
        replicas = index.layer(layer, self._ranks.avoided(at_s))
        return self._job(request, None, Cause.FIRST, index, replicas, rows, valid[rows], at_s)

    def plan_cover(self, call_id: int, cause: Cause, at_s: float) -> PlanJob | Failure | None:
        """Plan a retry or hedge of an open call under the newest table.

        None: the call has closed, or a hedge finds no other node.
        """
        call = self._book.calls.get(call_id)
        if call is None:
            return None
        request = self._book.requests[call.request_key]
        index = self._index
        assert index is not None, "calls are opened under a table"
        if index.table.weights_version != request.weights_version:
            return Failure(FailureKind.WEIGHTS_CHANGED, "the model's weights changed meanwhile")
        avoid = self._ranks.avoided(at_s) | _avoided_by(call, index)
        ids = request.ids[call.row_id]
        failure = self._missing(index, request.layer, ids[call.pairs != 0])
        if failure is not None:
            return failure
        if cause is Cause.HEDGE:
            # Counted from here on: while its split is computed it is not due a second time, and one
            # that finds no other node is not looked at again.
            self._hedged.add(call_id)
            avoid |= _same_nodes(call, index)
            if not _reachable(index, request.layer, ids[call.pairs != 0], avoid):
                return None
        replicas = index.layer(request.layer, avoid)
        return self._job(request, call, cause, index, replicas, call.row_id, call.pairs, at_s)

    def commit(self, job: PlanJob, parts: tuple[Part, ...], at_s: float) -> tuple[Dispatch, ...]:
        """Start what a job planned. Empty where its request or call has closed meanwhile."""
        self.abandon(job)
        request = self._book.requests.get(job.request_key)
        if request is None:
            return ()
        incarnation = job.index.incarnation
        order = job.index.table.order
        sent: list[Dispatch] = []
        if job.call_id is None:
            for part in parts:
                pairs = np.zeros((part.row_id.shape[0], job.ids.shape[1]), np.uint8)
                pairs[part.pair_row, part.pair_k] = 1
                call = self._book.open_call(request, part.row_id, pairs, at_s)
                cover = self._book.open_cover(call, job.cause, (part,), incarnation, order, at_s)
                sent.append(self._dispatch(job, request, call, cover.subs[0], part, at_s))
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
    ) -> Step:
        """A well-formed reply came: row_status uint8 [R], partial raw [served rows, H]."""
        sub = self._book.subs[sub_id]
        self._release(sub.order)
        self._ranks.answered(sub.rank, sub.incarnation, backlog_seq, backlog_s, at_s)
        served_pairs = self._count_pairs(sub, row_status)
        served_work = sub.work_pairs * served_pairs / sub.num_pairs
        self._ranks.computed(sub.rank, sub.incarnation, served_work, compute_s)
        return self._settle(sub, self._book.answer(sub, row_status, partial, at_s))

    def lost(self, sub_id: int, *, fault: bool, at_s: float) -> Step:
        """No answer will come. `fault`: the shard's own (disconnect, silence, malformed reply), not
        a cancelled request.
        """
        sub = self._book.subs[sub_id]
        self._release(sub.order)
        self.counters["lost_pairs"] += sub.num_pairs
        if fault:
            self._ranks.fault(sub.rank, sub.incarnation, at_s)
        return self._settle(sub, self._book.lose(sub, at_s))

    def close_request(self, key: int) -> tuple[Contribution, ...]:
        """End a request (finished, failed or cancelled): what to add, in the fixed order (rank,
        sub-call).
        """
        request = self._book.close_request(key)
        if request is None:
            return ()
        for call_id in request.open_calls:
            self._forget(call_id)
        self._waiting = deque(c for c in self._waiting if c in self._book.calls)
        return tuple(sorted(request.added, key=lambda c: (c.rank, c.sub_id)))

    # ------------------------------------------------------------------------------- retries,
    # hedges

    def take_retries(self) -> tuple[Retry, ...]:
        """Calls whose retry may start now, as far as the budget goes; ask after every event."""
        granted = []
        most = max(self.rules.retries_least, int(self.rules.retry_share * len(self._book.calls)))
        while self._waiting and len(self._retrying) < most:
            call = self._book.calls[self._waiting.popleft()]
            self._retrying.add(call.call_id)
            stale = all(refusal.why is Ended.STALE for refusal in call.refused_by.values())
            wait_s = 0.0 if stale else self.rules.retry_wait_s * call.attempt
            granted.append(Retry(call.request_key, call.call_id, wait_s))
        return tuple(granted)

    def hedges_due(self, at_s: float) -> tuple[tuple[int, int], ...]:
        """(call id, request key) of calls to hedge now, oldest first.

        They are old enough, have one cover on its way, and stay within the share.
        """
        after_s = self.rules.hedge_after_s
        if after_s is None:
            return ()
        room = max(1, int(self.rules.hedge_share * len(self._book.calls))) - len(self._hedged)
        due = [
            (call.call_id, call.request_key)
            for call in self._book.calls.values()
            if call.running
            and len(call.covers) == 1
            and call.call_id not in self._hedged
            and at_s - call.opened_at_s >= after_s
        ]
        return tuple(due[: max(0, room)])

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
        self.counters["sent_pairs"] += part.num_pairs
        if job.cause is Cause.RETRY:
            self.counters["retried_pairs"] += part.num_pairs
        elif job.cause is Cause.HEDGE:
            self.counters["hedged_pairs"] += part.num_pairs
        backlog_s = self._ranks.backlog_s(part.rank, at_s)
        self._ranks.sent(part.rank, part.work_pairs, at_s)
        left_s = max(0.0, request.deadline_at_s - at_s)
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
            timeout_s=min(left_s, self.rules.attempt_timeout_s + backlog_s),
            part=part,
        )

    def _settle(self, sub: SubCallState, settled: Settled) -> Step:
        if settled.closed is None:
            return Step(sub.request_key)
        self._forget(settled.closed.call_id)
        reopened = settled.reopened
        if reopened is None:
            request = self._book.requests[sub.request_key]
            return Step(sub.request_key, finished=not request.open_calls)
        if reopened.attempt >= self.rules.max_attempts:
            self._book.requests[sub.request_key].open_calls.discard(reopened.call_id)
            del self._book.calls[reopened.call_id]
            return Step(sub.request_key, failure=_gave_up(reopened))
        self._waiting.append(reopened.call_id)
        return Step(sub.request_key)

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

    def _missing(self, index: TableIndex, layer: int, ids: Int32s) -> Failure | None:
        if index.complete(layer):
            return None
        missing = index.missing(layer, np.unique(ids).astype(np.int64))
        if not missing:
            return None
        named = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        return Failure(
            FailureKind.NO_REPLICA, f"layer {layer} has no ready replica of expert {named}"
        )

    def _release(self, order: tuple[int, int]) -> None:
        self._in_flight[order] -= 1
        if self._in_flight[order] == 0:
            del self._in_flight[order]

    def _forget(self, call_id: int) -> None:
        self._retrying.discard(call_id)
        self._hedged.discard(call_id)


def _avoided_by(call: Call, index: TableIndex) -> frozenset[int]:
    """Ranks that failed this call, unless what made them fail has changed: a newer table, or a new
    life of the shard.
    """
    return frozenset(
        rank
        for rank, refusal in call.refused_by.items()
        if index.incarnation.get(rank) == refusal.incarnation
        and not (refusal.why is Ended.STALE and index.table.order > refusal.order)
    )


def _same_nodes(call: Call, index: TableIndex) -> frozenset[int]:
    asked = {sub.rank for cover in call.covers.values() for sub in cover.subs}
    nodes = {index.node.get(rank) for rank in asked}
    return frozenset(rank for rank, node in index.node.items() if rank in asked or node in nodes)


def _reachable(index: TableIndex, layer: int, ids: Int32s, avoid: frozenset[int]) -> bool:
    """Whether every expert has a replica off the avoided ranks."""
    return all(
        any(rank not in avoid for rank, _, _ in index.table.replicas(layer, int(expert)))
        for expert in np.unique(ids)
    )


def _gave_up(call: Call) -> Failure:
    named = ", ".join(
        f"rank {rank} {refusal.why.name.lower()}"
        for rank, refusal in sorted(call.refused_by.items())
    )
    rows = call.row_id.shape[0]
    return Failure(FailureKind.ATTEMPTS, f"{rows} rows failed {call.attempt} times ({named})")
