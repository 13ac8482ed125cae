"""One request from checked arrays to combined output: plan, send, await, retry, combine.

Responsible for driving `placement.roles.router` with real time, channels and threads. Must never
decide what the role decides. Called by `service`; plain asyncio, so a test builds it in one line
with fake channels. Only one loop may use it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from moe_serve.errors import (
    DeadlineExceeded,
    MoeServeError,
    Unavailable,
)
from moe_serve.ports import RouterInfo, RouterReport, SubCall, SubReply
from moe_serve.router.checks import ForwardInput
from moe_serve.router.combine import combine_rows, gather_rows
from moe_serve.router.counters import counters
from moe_serve.router.demand import DemandLog
from moe_serve.router.facts import RouterFacts, router_facts
from moe_serve.router.faults import FaultInjector
from moe_serve.router.flight import (
    Flight,
    ForwardOutput,
    Stamps,
    error_of,
    internal,
    ledger_entries,
    named,
    nothing_to_do,
    sub_call_of,
)
from moe_serve.router.lanes import ChannelFactory, Lanes
from moe_serve.router.ledger import CombinedLedger
from moe_serve.router.lines import RouterLines
from moe_serve.router.offload import SPLIT_BYTES_PER_PAIR, Offload
from moe_serve.router.outcome import CANCELLED, Lost
from moe_serve.router.permits import Permits
from moe_serve.router.pulse import Pulse
from moe_serve.router.second_tries import SecondTries
from moe_serve.router.settings import RouterSettings
from moe_serve.router.spans import asking
from moe_serve.router.stages import Stages
from moe_serve.router.table_fetch import TableFetch, check_accepted
from moe_serve.telemetry.traces import NO_TRACES, Traces
from placement.roles.admission import Admission
from placement.roles.calls import Contribution
from placement.roles.router import RouterRole
from placement.roles.router_records import (
    Acceptance,
    Dispatch,
    Failure,
    PlanJob,
    Step,
)
from placement.routing import RoutingTable
from placement.split import count_ids
from placement.topology import NUM_PHASES

_TICK_S = 0.1
_KEYS_PER_LIFE = 1 << 40


class RouterCore:
    """Forwards requests under the newest table. Implements what `ports.RouterPort` says.

    `clock` gives monotonic seconds. `on_table` is called after each new table.
    """

    def __init__(
        self,
        settings: RouterSettings,
        channel_factory: ChannelFactory,
        *,
        clock: Callable[[], float] = time.monotonic,
        traces: Traces = NO_TRACES,
    ) -> None:
        spec = settings.spec
        first_key = (settings.incarnation & 0xFFFFF) * _KEYS_PER_LIFE + 1
        self.settings = settings
        self.peers: tuple[str, ...] = ()
        self.on_table: Callable[[], None] | None = None
        self.role = RouterRole(
            settings.router_number,
            spec.num_layers,
            spec.num_experts,
            settings.rules,
            first_id=first_key,
        )
        self.demand = DemandLog(
            settings.router,
            settings.incarnation,
            num_phases=NUM_PHASES,
            num_layers=spec.num_layers,
            num_experts=spec.num_experts,
            sub_window_s=settings.demand_sub_window_s,
        )
        self.ledger = CombinedLedger(settings.router, settings.incarnation, settings.ledger_entries)
        self.pulse = Pulse(clock)
        self.traces = traces
        self.lines = RouterLines(settings, clock, self.role)
        self._ask = asking(traces, clock)
        self.stages = Stages()
        self._clock = clock
        self._facts: RouterFacts | None = None
        self._lanes = Lanes(channel_factory, self._disconnected)
        self._injector = None if settings.fault is None else FaultInjector(settings.fault)
        self._flights: dict[int, Flight] = {}
        self._next_key = first_key
        self._permits = Permits(
            Admission(
                permits_max=settings.max_open_requests,
                rows_max=settings.max_open_rows,
                queue_max=settings.max_waiting_requests,
            ),
            clock,
        )
        self._fetch = TableFetch(self._fetched)
        self._tries = SecondTries(
            self.role,
            self._flights,
            clock,
            launch=self._launch,
            settled=self._fetch.settled,
            refresh=self._refresh_connections,
            lines=self.lines,
        )
        self._ticker: asyncio.Task[None] | None = None
        self._stopped = False
        self._offload = Offload(settings.offload_bytes)

    # ------------------------------------------------------------------------------- life

    async def start(self) -> None:
        """Begin measuring loop lag and looking after connections."""
        self._facts = router_facts(self.settings)
        self._ticker = asyncio.create_task(self._tick())

    async def stop(self) -> None:
        """Fail what is open or waits, and close every channel."""
        self._stopped = True
        self._permits.close()
        for flight in list(self._flights.values()):
            flight.fail(Unavailable("the router is shutting down; use another one"))
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        self._tries.stop()
        await self._fetch.stop()
        await self._lanes.close()
        self._offload.stop()
        await asyncio.to_thread(self.traces.close)
        if self._facts is not None:
            self._facts.died()

    @property
    def open_requests(self) -> int:
        """Requests in work."""
        return self._permits.requests

    @property
    def ready(self) -> bool:
        """Whether every expert has a listed replica."""
        table = self.role.table
        return table is not None and not table.missing()

    # ------------------------------------------------------------------------- controller's side

    def install_table(
        self,
        table: RoutingTable,
        peers: Sequence[str] | None = None,
        suspects: Iterable[int] | None = None,
    ) -> int:
        """Use a table for new batches if it is newer. Returns the applied epoch. suspects: ranks to
        use only where nothing else is left, told with the newest table; None = as before.

        Raises StaleTerm for a term below one seen, InvalidArgument for a table of another model
        shape.
        """
        accepted = self.role.accept(table)
        if self._facts is not None:
            self._facts.accepted(accepted, table, self.role.highest_term)
        check_accepted(accepted, table, self.role.highest_term, self.settings.spec)
        if peers is not None:
            self.peers = tuple(peers)
        newest = self.role.table
        # Told with an older table they are older news.
        if suspects is not None and newest is not None and table.order >= newest.order:
            self.role.told_suspects(suspects)
        if accepted is Acceptance.APPLIED:
            self._lanes.follow(table.ranks)
            if self.on_table is not None:
                self.on_table()
        if self._flights:
            self._tries.start_retries()  # what was held may be served now
        return self.role.applied_epoch

    def describe(self, grpc_address: str, pid: int) -> RouterInfo:
        """Identity, port and newest table seen."""
        return RouterInfo(
            router=self.settings.router,
            incarnation=self.settings.incarnation,
            grpc_address=grpc_address,
            node=self.settings.node,
            pid=pid,
            highest_term=self.role.highest_term,
            highest_epoch=self.role.applied_epoch,
        )

    def report(self, acked_seq: int) -> RouterReport:
        """Demand after `acked_seq`, acknowledgements, suspects, counters since start, quantiles
        since the last report.
        """
        at_s = self._clock()
        if self._facts is not None:
            self._facts.told(self.role, self._permits)
        queued_key, queued_pairs = self.demand.queued()
        return RouterReport(
            router=self.settings.router,
            incarnation=self.settings.incarnation,
            applied_term=0 if self.role.table is None else self.role.table.term,
            applied_epoch=self.role.applied_epoch,
            quiesced_epoch=self.role.quiesced_epoch,
            reports=self.demand.reports(acked_seq, at_s),
            suspects=self.role.suspects(at_s),
            counters=counters(self.role, self.pulse, self.demand, self._permits),
            quantiles=self.pulse.take_quantiles(),
            queued_key=queued_key,
            queued_pairs=queued_pairs,
            stopped=self._stopped,
            stages=self.stages.counts(),
        )

    # ------------------------------------------------------------------------------- a request

    async def forward(self, request: ForwardInput, timeout_s: float) -> ForwardOutput:
        """Combined output of one checked request.

        Raises Unavailable, DeadlineExceeded, ResourceExhausted (its own, or a shard's word),
        InvalidArgument (a shard's word), or MoeServeError where we have a bug; nothing partial is
        returned, and no task or permit outlives the call, also when it is cancelled.
        """
        key, began_s = self._next_key, self._clock()
        self._next_key += 1
        work = self._admitted(key, request, began_s, timeout_s)
        if self._facts is None:
            return await work
        return await self._facts.follow(key, request, began_s + timeout_s, work)

    async def _admitted(
        self, key: int, request: ForwardInput, began_s: float, timeout_s: float
    ) -> ForwardOutput:
        rows, stamps = int(request.hidden.shape[0]), Stamps(began_s)
        with self.demand.waits(request):
            permit = await self._permits.take(rows, began_s + timeout_s)
        try:
            output = await self._forward(key, request, began_s + timeout_s, stamps)
        except MoeServeError as error:
            self.pulse.add("failed")
            raise named(error, request.request_id) from error.__cause__
        except Exception as error:
            self.pulse.add("failed")
            raise named(internal(error), request.request_id) from error
        finally:
            self._permits.give_back(permit)
        ended_s = self._clock()
        self.pulse.served(rows, ended_s - began_s)
        self.stages.answered(request.phase, stamps, ended_s)
        if 0.0 < self.settings.slow_request_s < ended_s - began_s:
            self.lines.slow(request, output, stamps, ended_s)
        return output

    async def _forward(
        self, key: int, request: ForwardInput, deadline_at_s: float, stamps: Stamps
    ) -> ForwardOutput:
        stamps.permit_s = now_s = self._clock()
        if not request.valid.any():
            return nothing_to_do(request, self.role.table, self.settings.spec.weights_version)
        flight = Flight(
            key=key,
            request=request,
            deadline_at_s=deadline_at_s,
            stamps=stamps,
            done=asyncio.get_running_loop().create_future(),
        )
        self._flights[flight.key] = flight
        added: tuple[Contribution, ...] = ()
        try:
            async with asyncio.timeout(deadline_at_s - now_s):
                await self._begin(flight)
                await flight.done
        except TimeoutError:
            raise DeadlineExceeded(
                f"layer {request.layer} was not finished before its deadline; nothing is returned"
            ) from None
        finally:
            added = await self._end(flight)
        return await self._combine(flight, added)

    async def _begin(self, flight: Flight) -> None:
        self._refresh_connections()
        request = flight.request
        job = self.role.open_request(
            flight.key,
            request.layer,
            request.topk_ids,
            request.valid,
            at_s=self._clock(),
            deadline_at_s=flight.deadline_at_s,
        )
        if isinstance(job, Failure):
            raise error_of(job)
        if self._facts is not None:
            self._facts.begun(flight.key)
        if request.attempt == 0:
            counts = count_ids(request.topk_ids, request.valid, self.settings.spec.num_experts)
            self.demand.count(request.phase, request.layer, counts, self._clock())
        await self._launch(flight, job)

    async def _launch(self, flight: Flight, job: PlanJob) -> None:
        """Split, then send every sub-call."""
        began_s = self._clock()
        try:
            parts = await self._offload.run(job.ids.size * SPLIT_BYTES_PER_PAIR, job.run)
        except BaseException:
            self.role.abandon(job)
            raise
        table = job.index.table
        flight.order = max(flight.order, table.order)
        flight.weights_version = table.weights_version
        now_s = self._clock()
        split_s = now_s - began_s
        if job.call_id is None:
            flight.stamps.split_s, split_s = split_s, 0.0
        for dispatch in self.role.commit(job, parts, now_s):
            flight.unsettled[dispatch.sub_id] = dispatch
            flight.spawn(partial(self._deliver, flight, dispatch, split_s))
        self._tries.arm()

    async def _deliver(self, flight: Flight, dispatch: Dispatch, split_s: float) -> None:
        """Send one sub-call and tell the role how it ended, whatever happens."""
        rank, incarnation = dispatch.part.rank, dispatch.incarnation
        # What has no time left is not sent: a shard would take it for malformed.
        lane = self._lanes.use(rank, incarnation) if dispatch.timeout_s > 0.0 else None
        ended: SubReply | Lost = CANCELLED
        try:
            if lane is not None:
                sub_call = await self._sub_call(flight, dispatch)
                sent_s = self._clock()
                ended = await self._ask(lane, sub_call)
                if isinstance(ended, SubReply):
                    flight.answered(dispatch, ended, split_s, sent_s, self._clock())
        finally:
            if lane is not None:
                self._lanes.leave(lane)
                if lane.broken and not lane.channel.connected:
                    # Also a connection that was never made: its calls wait until it is.
                    self.role.connection(rank, incarnation, lane.why_broken)
            step = self._settle(flight, dispatch, ended)
        if isinstance(ended, Lost):
            if ended.malformed:
                self.pulse.add("malformed_replies")
            if ended.error is not None:
                flight.fail(ended.error)
        elif lane is not None and self.role.behind(ended.term, ended.epoch):
            self._fetch.begin(lane.channel)
        self._tries.apply(step)

    def _settle(self, flight: Flight, dispatch: Dispatch, ended: SubReply | Lost) -> Step:
        del flight.unsettled[dispatch.sub_id]
        at_s = self._clock()
        if isinstance(ended, Lost):
            return self.role.lost(dispatch.sub_id, fault=ended.fault, at_s=at_s, why=ended.why)
        return self.role.answered(
            dispatch.sub_id,
            ended.row_status,
            ended.partial,
            backlog_s=ended.backlog_s,
            backlog_seq=ended.backlog_seq,
            compute_s=ended.compute_s,
            at_s=at_s,
            queue_s=ended.queue_s,
        )

    async def _end(self, flight: Flight) -> tuple[Contribution, ...]:
        """Close the request and end its tasks: each tells the role that its sub-call is over."""
        del self._flights[flight.key]
        added = self.role.close_request(flight.key)
        try:
            await flight.end_tasks()
        finally:
            # A task that was cancelled before its first step has told nobody.
            for dispatch in list(flight.unsettled.values()):
                self._settle(flight, dispatch, CANCELLED)
            if self.role.waiting:
                self._tries.start_retries()
        return added

    async def _combine(self, flight: Flight, added: tuple[Contribution, ...]) -> ForwardOutput:
        request = flight.request
        if self._injector is not None:
            added = self._injector.apply(added)
        if self._facts is not None:
            self._facts.added(flight.key, added)
        rows, width = (int(n) for n in request.hidden.shape)
        size = sum(one.row_id.shape[0] for one in added) * width * 4
        combined = partial(combine_rows, rows, width, request.dtype, added)
        output = await self._offload.run(size, combined)
        if self.settings.ledger_entries:
            self.ledger.add(ledger_entries(flight, added))
        return ForwardOutput(output, *flight.order, flight.weights_version)

    async def _sub_call(self, flight: Flight, dispatch: Dispatch) -> SubCall:
        request, part = flight.request, dispatch.part
        size = part.row_id.shape[0] * request.hidden.shape[1] * request.hidden.itemsize
        rows = await self._offload.run(size, partial(gather_rows, request.hidden, part.row_id))
        return sub_call_of(flight, dispatch, self.settings.router, rows)

    # ------------------------------------------------------------------------------- inside

    def _fetched(self, table: RoutingTable) -> None:
        self.pulse.add("tables_fetched")
        self.install_table(table)

    def _disconnected(self, rank: int, incarnation: int, reason: str) -> None:
        self.pulse.add("disconnects")
        self.role.connection(rank, incarnation, reason)

    def _refresh_connections(self) -> bool:
        """Tell the role of connections that are back; whether there are any."""
        recovered = self._lanes.take_recovered()
        for rank, incarnation in recovered:
            self.role.connection(rank, incarnation, "")
        return bool(recovered)

    async def _tick(self) -> None:
        while True:
            due_s = self._clock() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self.pulse.lagged(max(0.0, self._clock() - due_s))
            if self._refresh_connections():
                self._tries.start_retries()
