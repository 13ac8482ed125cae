"""A router of a simulated world: the production rules and admission, driven by a virtual clock.

Responsible for doing with callbacks what the router actor does with tasks: split, send, wait,
retry, hedge, combine, report. Decides nothing: `roles.router` and `roles.admission` do. Called by
callers and by the controller, over the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from placement.messages.history import (
    RequestBegun,
    RequestEnded,
    RequestOpened,
    RouterHolds,
    RouterTold,
    TableInstalled,
    TermRefused,
)
from placement.roles.admission import Admission, Admitted, Verdict
from placement.roles.calls import Cause, Ended
from placement.roles.router import RouterRole
from placement.roles.router_records import (
    Acceptance,
    Dispatch,
    Failure,
    PlanJob,
    RouterRules,
    Step,
)
from placement.routing import RoutingTable
from placement.sim.clock import Timer
from placement.sim.compute import SubCall, SubReply
from placement.sim.demand import DemandBook, RouterReport
from placement.sim.flight import VERDICTS, WHY, Answer, Flight, Limits
from placement.sim.network import Part
from placement.sim.shard import SimShard
from placement.sim.stage import Stage
from placement.sim.traffic import Request

FETCH_TIMEOUT_S = 0.3
PAUSE_LEAST_S = 0.001
_KEYS_PER_LIFE = 1 << 40


class SimRouter(Part):
    """One life of one router."""

    def __init__(self, stage: Stage, name: str, life: int, rules: RouterRules) -> None:
        super().__init__(name, life, stage.clock)
        spec = stage.spec
        first = life * _KEYS_PER_LIFE + 1
        self.number = int(name.removeprefix("router"))
        self.role = RouterRole(self.number, spec.num_layers, spec.num_experts, rules, first)
        limits = Limits()
        self.admission = Admission(
            permits_max=limits.permits_max,
            rows_max=limits.rows_max,
            queue_max=limits.queue_max,
        )
        self.demand = DemandBook(name, life, spec)
        self.flights: dict[int, Flight] = {}
        self.stage = stage
        self.closed = False
        self.jump_s = 0.0
        """Offset of the clock that its reports are stamped with."""
        self._next_key = first
        self._fetching = False
        self._bell: Timer | None = None
        self._due_s = 0.0

    # -- tables ----------------------------------------------------------------------------------

    def install(
        self,
        table: RoutingTable,
        reply: Callable[[int], None],
        suspects: Iterable[int] | None = None,
    ) -> None:
        """Use a table; replies the epoch in use, or -(term seen) where its term is over. suspects:
        ranks to use only where nothing else is left, None = as before."""
        accepted = self.role.accept(table)
        if accepted is Acceptance.STALE_TERM:
            self.stage.coverage.refused("router.term")
            self.stage.note(TermRefused, self.who, term=table.term, seen=self.role.highest_term)
            reply(-self.role.highest_term)
            return
        if accepted is Acceptance.MISFIT:
            self.stage.coverage.refused("router.misfit")
        elif accepted is Acceptance.APPLIED:
            self.stage.note(TableInstalled, self.who, term=table.term, epoch=table.epoch)
        newest = self.role.table
        if suspects is not None and newest is not None and table.order >= newest.order:
            self.role.told_suspects(suspects)
        self._start_retries()
        reply(self.role.applied_epoch)

    def _fetch(self, shard: SimShard) -> None:
        """Get the newest table of a shard that knows a newer one."""
        if self._fetching:
            return
        self._fetching = True
        network = self.stage.network

        def over() -> None:
            self._fetching = False

        def came(table: RoutingTable | None) -> None:
            assert table is not None, "a shard that is ahead has a table"
            self.install(table, lambda _epoch: None)
            over()

        network.send(
            self, shard, lambda: network.send(shard, self, lambda: came(shard.slots.table))
        )
        self.after(FETCH_TIMEOUT_S, over)

    # -- requests --------------------------------------------------------------------------------

    def forward(self, request: Request, answer: Answer) -> None:
        """Take a request in. `answer` is called once, unless this life ends first."""
        now_s = self.clock.now_s
        flight = Flight(self._next_key, request, now_s + request.timeout_s, answer)
        self._next_key += 1
        self._note_opened(flight)
        if not request.sound:
            self.stage.coverage.refused("request.invalid")
            self._tell(flight, "invalid_argument", "no such expert")
            return
        if not request.valid.any():
            self._tell(flight, "ok", "nothing to do")
            return
        rows = int(request.ids.shape[0])
        verdict = self.admission.ask(flight.key, rows, flight.deadline_at_s, now_s)
        if verdict in VERDICTS:
            self.stage.coverage.refused(f"admission.{VERDICTS[verdict]}")
            code = "deadline_exceeded" if verdict is Verdict.TOO_LATE else "resource_exhausted"
            self._tell(flight, code, verdict.value)
            return
        self.flights[flight.key] = flight
        if request.patience_s < request.timeout_s:
            patience = self.after(request.patience_s, lambda: self._cancelled(flight))
            flight.timers.append(patience)
        flight.timers.append(self.after(request.timeout_s, lambda: self._too_late(flight)))
        if verdict is Verdict.ADMITTED:
            self._begin(flight)

    def _note_opened(self, flight: Flight) -> None:
        request, spec = flight.request, self.stage.spec
        valid = np.flatnonzero(request.valid)
        keys = request.layer * spec.num_experts + request.ids.reshape(-1)[valid]
        self.stage.note(
            RequestOpened,
            self.who,
            request=flight.key,
            deadline_at_s=flight.deadline_at_s,
            pairs=tuple(valid.tolist()),
            keys=tuple(keys.tolist()),
            top_k=spec.top_k,
            counts=request.counts,
            sound=request.sound,
        )

    def _begin(self, flight: Flight) -> None:
        request = flight.request
        job = self.role.open_request(
            flight.key,
            request.layer,
            request.ids,
            request.valid,
            at_s=self.clock.now_s,
            deadline_at_s=flight.deadline_at_s,
        )
        if isinstance(job, Failure):
            self._failed(flight, job)
            return
        self.stage.note(RequestBegun, self.who, request=flight.key)
        if request.counts:
            self.demand.count(request)
        self._launch(flight, job)

    def _launch(self, flight: Flight, job: PlanJob) -> None:
        for dispatch in self.role.commit(job, job.run(), self.clock.now_s):
            silent = partial(self._lost, flight, dispatch.sub_id, Ended.SILENT)
            timer = self.after(dispatch.timeout_s, silent)
            flight.unsettled[dispatch.sub_id] = (dispatch, timer)
            self._send(flight, dispatch)
        self._arm()

    def _send(self, flight: Flight, dispatch: Dispatch) -> None:
        stage, part, request = self.stage, dispatch.part, flight.request
        shard = stage.shards.get(part.rank)
        if shard is None or not shard.alive or shard.life != dispatch.incarnation:
            # Nobody listens at that address: the connection is refused.
            hop_s = stage.dice.around(stage.delays.network_s)
            self.after(hop_s, lambda: self._refused(flight, dispatch))
            return
        found = shard
        row = part.row_id[part.pair_row]
        call = SubCall(
            sub_id=dispatch.sub_id,
            request=flight.key,
            cause=int(dispatch.cause),
            layer=dispatch.layer,
            incarnation=dispatch.incarnation,
            timeout_s=dispatch.timeout_s,
            row_id=part.row_id,
            pair_row=part.pair_row,
            pair_k=part.pair_k,
            pair_slot=part.pair_slot,
            pair_tag=part.pair_tag,
            pair_key=dispatch.layer * stage.spec.num_experts + part.pair_expert.astype(np.int64),
            values=request.values[row, part.pair_k],
            reply=lambda reply: stage.network.send(
                found, self, lambda: self._answered(flight, dispatch.sub_id, reply, found)
            ),
        )
        stage.network.send(self, found, lambda: found.compute.submit(call))

    def _answered(
        self, flight: Flight, sub_id: int, reply: SubReply | None, shard: SimShard
    ) -> None:
        """A reply came: perhaps late, perhaps twice."""
        sent = flight.unsettled.pop(sub_id, None)
        if sent is None:
            return
        sent[1].cancel()
        at_s = self.clock.now_s
        if reply is None:
            # No memory for its batch: others may have it.
            self._apply(self.role.lost(sub_id, fault=False, at_s=at_s, why=Ended.REFUSED))
            return
        step = self.role.answered(
            sub_id,
            reply.row_status,
            reply.partial,
            backlog_s=reply.backlog_s,
            backlog_seq=reply.backlog_seq,
            compute_s=reply.compute_s,
            queue_s=reply.queue_s,
            at_s=at_s,
        )
        if self.role.behind(reply.term, reply.epoch):
            self._fetch(shard)
        self._apply(step)

    def _refused(self, flight: Flight, dispatch: Dispatch) -> None:
        self.role.connection(dispatch.part.rank, dispatch.incarnation, "connection refused")
        self._lost(flight, dispatch.sub_id, Ended.LOST)

    def _lost(self, flight: Flight, sub_id: int, why: Ended) -> None:
        """No answer in time, or the connection broke."""
        sent = flight.unsettled.pop(sub_id, None)
        if sent is not None:
            sent[1].cancel()
            step = self.role.lost(sub_id, fault=True, at_s=self.clock.now_s, why=why)
            self._apply(step)

    def disconnected(self, rank: int, incarnation: int) -> None:
        """The connection to a life of a rank broke: what is on its way there is lost."""
        self.role.connection(rank, incarnation, "disconnected")
        for flight in list(self.flights.values()):
            for sub_id, (dispatch, _) in list(flight.unsettled.items()):
                if dispatch.part.rank == rank and dispatch.incarnation == incarnation:
                    self._lost(flight, sub_id, Ended.LOST)

    def connected(self, rank: int, incarnation: int) -> None:
        """It is fine again."""
        self.role.connection(rank, incarnation, "")
        self._start_retries()

    def _apply(self, step: Step) -> None:
        flight = self.flights.get(step.request_key)
        if flight is not None:
            if step.failure is not None:
                self._failed(flight, step.failure)
            elif step.finished:
                self._end(flight, "ok", "")
        self._start_retries()

    def _start_retries(self) -> None:
        for retry in self.role.take_retries(self.clock.now_s):
            flight = self.flights.get(retry.request_key)
            assert flight is not None, "only calls of open requests are retried"
            wait_s = retry.wait_s if not self._fetching else max(retry.wait_s, 0.01)
            self.after(wait_s, partial(self._cover, flight, retry.call_id, Cause.RETRY))
        if self.role.waiting:
            self._arm()

    def _cover(self, flight: Flight, call_id: int, cause: Cause) -> None:
        if flight.key not in self.flights:
            return
        job = self.role.plan_cover(call_id, cause, self.clock.now_s)
        if isinstance(job, Failure):
            self._failed(flight, job)
        elif job is not None:
            self._launch(flight, job)

    def _arm(self) -> None:
        """Ring when the role wants to be asked again."""
        now_s = self.clock.now_s
        wake_s = self.role.wake_at_s(now_s)
        if wake_s is None or (self._bell is not None and self._due_s <= wake_s):
            return
        if self._bell is not None:
            self._bell.cancel()
        self._due_s = max(wake_s, now_s + PAUSE_LEAST_S)
        self._bell = self.after(self._due_s - now_s, self._ring)

    def _ring(self) -> None:
        self._bell = None
        now_s = self.clock.now_s
        for call_id, key in self.role.hedges_due(now_s):
            self._cover(self.flights[key], call_id, Cause.HEDGE)
        for step in self.role.overdue(now_s):
            self._apply(step)
        self._start_retries()
        self._arm()

    # -- ends ------------------------------------------------------------------------------------

    def _failed(self, flight: Flight, failure: Failure) -> None:
        self.stage.coverage.refused(f"request.{WHY[failure.kind]}")
        self._end(flight, "unavailable", failure.detail)

    def _too_late(self, flight: Flight) -> None:
        if flight.key in self.flights:
            self.stage.coverage.refused("request.deadline")
            self._end(flight, "deadline_exceeded", "not finished before its deadline")

    def _cancelled(self, flight: Flight) -> None:
        if flight.key in self.flights:
            self.stage.coverage.refused("request.cancelled")
            self._end(flight, "cancelled", "the caller gave up")

    def _end(self, flight: Flight, outcome: str, detail: str) -> None:
        """Close the request: combine or drop, tell the caller, give the permit back."""
        del self.flights[flight.key]
        added = self.role.close_request(flight.key)
        for timer in flight.timers:
            timer.cancel()
        now_s = self.clock.now_s
        for sub_id, (_, timer) in list(flight.unsettled.items()):
            timer.cancel()
            del flight.unsettled[sub_id]
            self.role.lost(sub_id, fault=False, at_s=now_s)
        request, wrong = flight.request, 0
        if outcome == "ok":
            out = np.zeros(request.ids.shape[0], np.uint64)
            for one in added:
                out[one.row_id] += one.partial[one.take, 0]
            want = request.wanted(self.stage.marks, self.stage.spec.num_experts)
            wrong = int(np.count_nonzero(out != want))
        rows = tuple((one.sub_id, tuple(one.row_id.tolist())) for one in added)
        self._tell(flight, outcome, detail, rows if outcome == "ok" else (), wrong)
        self._next(self.admission.cancel(flight.key, now_s))
        self._start_retries()

    def _tell(
        self,
        flight: Flight,
        outcome: str,
        detail: str,
        added: tuple[tuple[int, tuple[int, ...]], ...] = (),
        wrong_rows: int = 0,
    ) -> None:
        self.stage.note(
            RequestEnded,
            self.who,
            request=flight.key,
            outcome=outcome,
            detail=detail,
            added=added,
            wrong_rows=wrong_rows,
        )
        flight.answer(outcome)

    def _next(self, admitted: Admitted) -> None:
        for key in admitted.expired:
            self._too_late(self.flights[key])
        for key in admitted.started:
            self._begin(self.flights[key])

    def close(self) -> None:
        """Take nothing more in; what waits is refused, what is open goes on."""
        self.closed = True
        for key in self.admission.close():
            self.stage.coverage.refused("admission.closed")
            self._end(self.flights[key], "unavailable", "the router drains")

    # -- the controller's side -------------------------------------------------------------------

    def report(self, acked_seq: int, jump_s: float = 0.0) -> RouterReport:
        """Demand after `acked_seq`, acknowledgements, suspects."""
        applied, quiesced = self.role.applied_epoch, self.role.quiesced_epoch
        term = -1 if self.role.table is None else self.role.table.term
        self.stage.note(
            RouterTold,
            self.who,
            term=term,
            router=self.place,
            applied=applied,
            quiesced=quiesced,
        )
        return RouterReport(
            term=term,
            applied=applied,
            quiesced=quiesced,
            highest_term=self.role.highest_term,
            suspects=self.role.suspects(self.clock.now_s),
            reports=self.demand.reports(acked_seq, self.clock.now_s + jump_s),
        )

    def note_holdings(self) -> None:
        """Note what is held now."""
        self.stage.note(
            RouterHolds,
            self.who,
            permits=self.admission.at_work,
            rows=self.admission.rows_at_work,
            waiting=self.admission.waiting,
            calls=self.role.open_calls,
            sub_calls=self.role.open_sub_calls,
        )
