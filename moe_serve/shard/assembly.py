"""A whole shard but for Ray: core, commands, copy server and wire, put together.

Responsible for building and ending the parts in the right order, and for what a shard says of
itself. Must never import Ray or decide anything. Called by the shard's actor, and by tests that
need a real shard in their process.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace

from moe_serve.errors import DeadlineExceeded, Unavailable
from moe_serve.ports import ShardInfo, ShardMemory, ShardReport
from moe_serve.shard.commands import ShardCommands
from moe_serve.shard.compute.base import ComputeBackend
from moe_serve.shard.compute.build import build_backend
from moe_serve.shard.copy_job import CopySources
from moe_serve.shard.copy_server import CopyServer
from moe_serve.shard.core import ShardCore
from moe_serve.shard.executed import LedgerEntry
from moe_serve.shard.facts import ShardFacts
from moe_serve.shard.faults import NO_FAULTS, FaultPoints, Faults, FaultyBackend
from moe_serve.shard.pages import process_resident_bytes
from moe_serve.shard.served_model import CheckpointSource, ExpertSource, ServedModel, served_model
from moe_serve.shard.server import ShardServer
from moe_serve.shard.settings import ShardSettings
from moe_serve.shard.slot_pool import SlotPool
from moe_serve.shard.watch import Watch
from moe_serve.shard.work_queue import QueueLimits
from moe_serve.telemetry.fact_log import open_log
from moe_serve.telemetry.traces import NO_TRACES, Traces, open_traces
from moe_serve.weights.checkpoint import Checkpoint
from moe_serve.weights.errors import WeightsError
from moe_serve.weights.host_cache import HostCache
from moe_serve.weights.manifest_cache import load_or_build
from moe_serve.wire.copy_client import CopyClient
from moe_serve.wire.frame import CHUNK_BYTES_MAX
from moe_serve.wire.security import CurveKeys, ServerSecurity
from moe_serve.wire.server import WireServer
from moe_serve.wire.token_bucket import TokenBucket
from placement.messages.effects import ShardCommand
from placement.messages.events import ShardAnswer
from placement.roles.shard import ShardSlots
from placement.routing import RankAddress, RoutingTable

_log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 30.0
"""Longest time a caller of `probe` is kept; liveness has its own, shorter deadline outside."""


class Shard:
    """One shard. `start` binds and serves; `stop` ends every thread."""

    def __init__(
        self,
        settings: ShardSettings,
        model: ServedModel,
        experts: ExpertSource,
        backend: ComputeBackend,
        clock: Callable[[], float] = time.monotonic,
        traces: Traces = NO_TRACES,
    ) -> None:
        self.settings = settings
        self._traces = traces
        self.faults = Faults()
        """What a test orders; nothing in production."""
        self.pool = SlotPool(
            num_slots=settings.num_slots,
            canonical_bytes=model.expert.canonical_bytes,
            derived_bytes=backend.derived_bytes(model.expert),
            budget_bytes=settings.budget_bytes,
            slab_slots=settings.slab_slots,
        )
        self._slots = ShardSlots(
            rank=settings.rank,
            incarnation=settings.incarnation,
            num_slots=settings.num_slots,
            slot_bytes=self.pool.slot_bytes,
            weights_version=model.weights_version,
        )
        self.core = ShardCore(
            model,
            self._slots,
            backend,
            limits=_queue_limits(settings),
            ledger_rows_max=settings.ledger_rows_max,
            clock=clock,
        )
        log = open_log(settings.history_dir, f"rank{settings.rank}")
        if log is not None:
            self.core.facts = ShardFacts(log, model, self._slots, self.pool, experts, backend)
        self._keys = CurveKeys.generate() if settings.client_keys else None
        self._peers = CopyClient(
            self._bucket(), keys=settings.client_keys, options=settings.wire, clock=clock
        )
        self._cache = _open_cache(settings)
        self._commands = ShardCommands(
            self.core,
            self.pool,
            CopySources(experts, self._peers, self._cache, settings.node),
            faults=self.faults,
        )
        self.copies = CopyServer(self.core, self.pool, self._bucket())
        server = ShardServer(self.core, self.copies, traces)
        self.wire = WireServer(
            server,
            burst_ended=server.burst_ended,
            host=settings.host,
            options=settings.wire,
            security=self._security(),
        )
        self._watch = Watch(self.core, self.wire)
        if settings.faults != NO_FAULTS:
            self.order_faults(settings.faults)
        self._address: RankAddress | None = None

    def start(self) -> RankAddress:
        """Warm up, bind, serve. Raises StartRefused where the host cannot be bound."""
        settings = self.settings
        endpoint = self.wire.bind()
        if self.core.facts is not None:
            self.core.facts.began()
        self.core.start()
        self.copies.start()
        self.wire.start()
        self._watch.start()
        self._address = RankAddress(
            rank=settings.rank,
            node=settings.node,
            address=endpoint,
            incarnation=settings.incarnation,
            public_key=self._keys.public if self._keys else "",
        )
        return self._address

    def stop(self) -> None:
        """End copies, wire and compute, in this order. Idempotent."""
        self.faults.release()
        self._commands.abort_all()
        self.wire.stop()
        self._watch.stop()
        self.copies.stop()
        self.core.stop()
        self._peers.close()
        self._traces.close()
        if self.core.facts is not None:
            self.core.facts.died()

    @property
    def address(self) -> RankAddress:
        """How to reach the shard, once started."""
        assert self._address is not None, "start comes first"
        return self._address

    def order_faults(self, points: FaultPoints) -> None:
        """For tests: from now on these faults and no others."""
        self.faults.points = points
        if not isinstance(self.core.backend, FaultyBackend):
            self.core.use_backend(FaultyBackend(self.core.backend, self.faults))

    def fence(self, term: int) -> ShardInfo:
        """Refuse lower terms from here on, and describe. Raises StaleTerm."""
        self.core.accept_term(term)
        # Whoever asks is the newest controller now, so what is held changes by its commands only.
        return self.describe()

    def describe(self) -> ShardInfo:
        """Identity, inventory, budgets."""
        settings, core = self.settings, self.core
        with core.lock:
            resident = self._slots.ledger.resident()
            num_slots, term = self._slots.ledger.num_slots, self._slots.highest_term
            epoch = self._slots.highest_epoch
        return ShardInfo(
            rank=settings.rank,
            node=settings.node,
            failure_domain=settings.failure_domain,
            profile=settings.profile.name,
            address=self.address,
            num_slots=num_slots,
            budget_bytes=self.pool.budget_bytes,
            slot_bytes=self.pool.slot_bytes,
            backend=core.backend.name,
            simulated=core.backend.simulated,
            pid=os.getpid(),
            highest_term=term,
            highest_epoch=epoch,
            resident=resident,
            group=settings.group,
            only_node=settings.only_node,
            weights_version=core.model.weights_version,
        )

    def execute(self, term: int, command: ShardCommand) -> ShardAnswer:
        """Run one placement command; blocks. Raises StaleTerm."""
        return self._commands.execute(term, command)

    def install_table(self, table: RoutingTable) -> int:
        """Keep the table if it is newer. Returns the newest epoch held. Raises StaleTerm."""
        return self.core.install_table(table)

    def report(self, acked_seq: int) -> ShardReport:
        """Hotness after `acked_seq` and gauges. `resident_bytes` are those of verified slots,
        `reserved_bytes` of the others held."""
        core = self.core
        reports = core.hotness.reports(acked_seq, core.clock())
        with core.lock:
            resident, reserved = (
                self._slots.ledger.resident_bytes,
                self._slots.ledger.reserved_bytes,
            )
            term, epoch = self._slots.highest_term, self._slots.highest_epoch
        stalled_s = core.stalled_s
        return ShardReport(
            rank=self.settings.rank,
            incarnation=self.settings.incarnation,
            reports=reports,
            backlog_s=core.backlog_s(),
            resident_bytes=resident,
            reserved_bytes=reserved,
            budget_bytes=self.pool.budget_bytes,
            highest_term=term,
            highest_epoch=epoch,
            busy=core.busy and not stalled_s,
            counters={**core.counters(), **self._counters()},
            stalled_s=stalled_s,
            memory=self._memory(),
            copies=self._commands.progress(),
        )

    def _counters(self) -> dict[str, float]:
        """Totals since start of the parts beside the core; hung_reads are those of now."""
        cache = {} if self._cache is None else self._cache.counts
        sources = self._commands.copies_by_source
        return {
            "copied_out_bytes": float(self.copies.sent_bytes),
            "malformed_messages": float(self.wire.malformed),
            "dropped_answers": float(self.wire.dropped_answers),
            "replaced_wire_threads": float(self.wire.replaced_threads),
            "hung_reads": float(self._commands.hung_reads),
            "copies_s": self._commands.copies_s,
            "copies_waited_s": self._peers.waited_s,
            "copies_from_ranks": float(
                sum(n for source, n in tuple(sources.items()) if source.startswith("rank"))
            ),
            "copies_from_host_cache": float(sources["host cache"]),
            "copies_from_checkpoint": float(sources["checkpoint"]),
            **{f"host_cache_{name}": float(total) for name, total in cache.items()},
        }

    def _memory(self) -> ShardMemory:
        pool = self.pool.figures()
        return ShardMemory(
            slab_bytes=pool.slab_bytes,
            free_bytes=pool.free_bytes,
            largest_free_run_bytes=pool.largest_free_run_bytes,
            loaded_bytes=self.core.backend.loaded_bytes,
            process_bytes=process_resident_bytes(),
            host_cache_bytes=0 if self._cache is None else self._cache.seen_bytes,
        )

    def probe(self) -> float:
        """Seconds of one row through queue and compute thread. Raises Unavailable (also where no
        router could reach the queue any more), DeadlineExceeded, ResourceExhausted."""
        if self._address is not None and not self.wire.alive:
            raise Unavailable("the wire thread has ended: no router reaches this shard")
        stalled_s = self.core.stalled_s
        if stalled_s:
            raise Unavailable(f"stalled: computing for {stalled_s:.1f} s")
        probed = self.core.probe()
        try:
            return probed.result(PROBE_TIMEOUT_S)
        except TimeoutError as error:
            probed.cancel()  # where it has not begun, nobody wants it any more
            raise DeadlineExceeded(f"no probe within {PROBE_TIMEOUT_S:g} s") from error

    def take_ledger(self) -> tuple[LedgerEntry, ...]:
        """Executed contributions since the last take."""
        return self.core.ledger.take()

    def _bucket(self) -> TokenBucket:
        rate = self.settings.copy_bytes_per_s
        # A tenth of a second may be saved up; a larger chunk goes into debt, so low rates hold too.
        burst = min(2.0 * CHUNK_BYTES_MAX, 0.1 * rate) if rate else 1.0
        return TokenBucket(rate, burst, self.core.clock())

    def _security(self) -> ServerSecurity | None:
        client = self.settings.client_keys
        if self._keys is None or client is None:
            return None
        return ServerSecurity(self._keys, frozenset({client.public}))


def _open_cache(settings: ShardSettings) -> HostCache | None:
    """The node's cache. A shard serves without one as well."""
    if not settings.host_cache_bytes:
        return None
    try:
        return HostCache(settings.host_cache_dir, settings.host_cache_bytes)
    except (OSError, WeightsError) as error:
        _log.warning("rank %d serves without a host cache: %s", settings.rank, error)
        return None


def _queue_limits(settings: ShardSettings) -> QueueLimits:
    """The queue's limits. An accelerator is driven by the compute thread alone: its library keeps
    handles and workspaces for each thread that calls it."""
    if settings.backend == "torch" and settings.device != "cpu":
        return replace(settings.queue, direct_rows_max=0)
    return settings.queue


def open_shard(settings: ShardSettings) -> Shard:
    """A shard over the checkpoint on this node, ready for `start`. Raises WeightsError, ValueError,
    StartRefused."""
    checkpoint = Checkpoint.open(settings.checkpoint, settings.model_name)
    manifest = load_or_build(checkpoint, settings.dtype, settings.manifest_dir)
    model = served_model(checkpoint, manifest, settings.weights_version)
    backend = build_backend(
        settings.backend, model.expert, device=settings.device, profile=settings.profile
    )
    traces = open_traces(
        settings.traces,
        service=settings.service,
        part=f"shard-{settings.rank}",
        node=settings.node,
    )
    return Shard(settings, model, CheckpointSource(checkpoint, manifest), backend, traces=traces)
