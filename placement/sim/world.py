"""A world in one thread: the production engine and roles, virtual time, seeded delays.

Responsible for driving the engine exactly as a controller does and for logging what happens. Holds
no rule of placement. Called by the runner and by tests, which may ask for things as an operator
would.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from placement.config import RebalanceConfig
from placement.engine import EngineSnapshot, RebalanceEngine, compute_target
from placement.load import DemandReport, LoadFolder
from placement.messages import events as ev
from placement.messages.effects import (
    Answer,
    AnyCommand,
    ComputeTarget,
    PublishTable,
    ReplaceRank,
    ReplaceRouter,
    WakeAt,
)
from placement.messages.records import DecisionRecord
from placement.roles.shard import ShardSlots
from placement.routing import RankAddress, RoutingTable
from placement.sim.clock import VirtualClock
from placement.sim.log import Entry, Published, RouterTold, Stepped
from placement.sim.parts import Delays, SimRouter, SimShard
from placement.topology import MoeSpec, Phase, Topology

REPLACE_S = 1.0
"""Seconds until a lost rank's replacement joins."""


class World:
    """All parts of one service. `demand` int64 [windows, layers, experts]: pairs asked for in each
    window."""

    def __init__(
        self,
        spec: MoeSpec,
        topology: Topology,
        config: RebalanceConfig,
        demand: npt.NDArray[np.int64],
        *,
        seed: int,
        num_routers: int = 2,
        delays: Delays | None = None,
    ) -> None:
        self.spec, self.topology, self.config = spec, topology, config
        self.delays = delays or Delays()
        self.rng = np.random.default_rng(seed)
        self.clock = VirtualClock(self.rng)
        self.log: list[Entry] = []
        self.records: list[DecisionRecord] = []
        self.answers: dict[int, Answer] = {}
        self.shards: dict[int, SimShard] = {}
        self.routers = [SimRouter(f"router{i}") for i in range(num_routers)]
        self.engine = RebalanceEngine(spec, topology, config, term=1, first_epoch=1, start_s=0.0)
        self.segments: list[tuple[EngineSnapshot, int]] = [(self.engine.snapshot(), 0)]
        self.table: RoutingTable | None = None
        self._demand = demand
        self._wake_at_s = -1.0
        self._told: dict[str, tuple[int, int]] = {}
        self._folder = LoadFolder(
            num_layers=spec.num_layers,
            num_experts=spec.num_experts,
            num_ranks=topology.num_ranks,
            window_s=config.window_s,
            sub_windows=config.sub_windows,
            start_s=0.0,
        )
        self._start()

    # -- driving the engine ----------------------------------------------------------------------

    def feed(self, event: ev.AnyEvent) -> None:
        """Give the engine an event, stamped with the present time, and carry out what it asks
        for."""
        event = msgspec.structs.replace(event, at_s=self.clock.now_s)
        effects = self.engine.step(event)
        self.log.append(Stepped(at_s=self.clock.now_s, event=event, effects=effects))
        self.records.extend(effects.records)
        for command in effects.commands:
            self._carry_out(command)

    def _carry_out(self, command: AnyCommand) -> None:
        match command:
            case ComputeTarget():
                self.clock.after(self.delays.plan_s, lambda: self._compute(command))
            case PublishTable():
                self._publish(command.table)
            case WakeAt():
                self._wake_at_s = command.at_s
                self.clock.at(command.at_s, lambda: self._wake(command.at_s))
            case Answer():
                self.answers[command.request_id] = command
            case ReplaceRank():
                self.clock.after(REPLACE_S, lambda: self._replace(command))
            case ReplaceRouter():
                raise AssertionError("routers do not die in a world without faults")
            case _:
                shard = self.shards.get(command.rank)
                if shard is not None and shard.slots.incarnation == command.incarnation:
                    shard.take(self.engine.state.term, command)

    def _compute(self, command: ComputeTarget) -> None:
        self.feed(compute_target(command, self.config))

    def _wake(self, at_s: float) -> None:
        if at_s == self._wake_at_s:
            self.feed(ev.TimerFired(at_s=at_s))

    def _publish(self, table: RoutingTable) -> None:
        self.table = table
        verified = [
            slot
            for shard in self.shards.values()
            if shard.alive
            for slot in shard.verified_slots(self.spec.num_experts)
        ]
        listed = frozenset(
            (layer * self.spec.num_experts + expert, *replica)
            for layer in range(self.spec.num_layers)
            for expert in range(self.spec.num_experts)
            for replica in table.replicas(layer, expert)
        )
        self.log.append(
            Published(
                at_s=self.clock.now_s,
                term=table.term,
                epoch=table.epoch,
                num_keys=self.spec.num_keys,
                listed=listed,
                verified=frozenset(verified),
            )
        )
        for router in self.routers:
            self.clock.after(self._hop_s(), partial(router.install, table))
        for shard in self.shards.values():
            self.clock.after(self._hop_s(), partial(shard.install, table))

    def forget_told(self, router: SimRouter) -> None:
        """The router registers anew: what it told an earlier controller is told again."""
        self._told.pop(router.name, None)

    def _hop_s(self) -> float:
        return self.delays.network_s * float(self.rng.uniform(0.5, 1.5))

    def last_demand(self) -> npt.NDArray[np.int64]:
        """Pairs of the last window: [layers, experts]."""
        last: npt.NDArray[np.int64] = self._demand[-1]
        return last

    # -- parts come and go -----------------------------------------------------------------------

    def _start(self) -> None:
        for spec in self.topology.ranks:
            self.clock.after(float(self.rng.uniform(0.0, 0.5)), partial(self._join, spec.rank, 1))
        for router in self.routers:
            self.clock.after(float(self.rng.uniform(0.0, 0.5)), partial(self._router_joins, router))
        for part in range(len(self._demand) * self.config.sub_windows):
            at_s = (part + 0.5) * self.config.window_s / self.config.sub_windows
            self.clock.at(at_s, partial(self._traffic, part))
        for window in range(1, len(self._demand) + 1):
            self.clock.at(window * self.config.window_s, self._close_window)

    def _join(self, rank: int, incarnation: int) -> None:
        spec = self.topology.ranks[rank]
        slots = ShardSlots(
            rank=rank,
            incarnation=incarnation,
            num_slots=spec.num_slots,
            slot_bytes=self.spec.slot_bytes,
            weights_version=self.spec.weights_version,
        )
        self.shards[rank] = SimShard(
            slots,
            self.clock,
            self.rng,
            self.delays,
            self.feed,
            self.log.append,
            self.shards,
            self.spec.expert_bytes,
        )
        self.feed(
            ev.RankJoined(
                at_s=0.0,
                rank=rank,
                node=spec.node,
                failure_domain=spec.failure_domain,
                profile=spec.profile,
                num_slots=spec.num_slots,
                address=RankAddress(
                    rank=rank,
                    node=spec.node,
                    address=f"sim://{rank}/{incarnation}",
                    incarnation=incarnation,
                ),
            )
        )

    def lose_rank(self, rank: int) -> None:
        """The rank's shard is gone, now."""
        shard = self.shards[rank]
        shard.alive = False
        self.feed(
            ev.RankLost(
                at_s=0.0,
                rank=rank,
                incarnation=shard.slots.incarnation,
                reason="killed by the test",
            )
        )

    def _replace(self, command: ReplaceRank) -> None:
        self._join(command.rank, command.lost_incarnation + 1)

    def _router_joins(self, router: SimRouter) -> None:
        self.feed(ev.RouterJoined(at_s=0.0, router=router.name, incarnation=1))
        if self.table is not None:
            router.install(self.table)
        self._report(router)

    def _report(self, router: SimRouter) -> None:
        told = (router.applied, router.quiesced)
        before = self._told.get(router.name, (-1, -1))
        self._told[router.name] = told
        self.log.append(
            RouterTold(
                at_s=self.clock.now_s,
                router=router.name,
                applied=told[0],
                quiesced=told[1],
                installs=router.applied,
            )
        )
        if told[0] > before[0]:
            self.feed(ev.TableApplied(at_s=0.0, router=router.name, epoch=told[0]))
        if told[1] > before[1]:
            self.feed(ev.TableQuiesced(at_s=0.0, router=router.name, epoch=told[1]))
        self.clock.after(
            self.delays.report_s * float(self.rng.uniform(0.5, 1.5)), lambda: self._report(router)
        )

    # -- traffic ---------------------------------------------------------------------------------

    def _traffic(self, part: int) -> None:
        """One sub-window's share of the demand, shared among routers that have a table."""
        window, nth = divmod(part, self.config.sub_windows)
        whole = self._demand[window]
        counts = (whole * (nth + 1)) // self.config.sub_windows - (
            whole * nth
        ) // self.config.sub_windows
        ready = [r for r in self.routers if r.table is not None]
        for number, router in enumerate(ready):
            share = counts // len(ready) + (number < counts % len(ready))
            self._dispatch(router, share)

    def _dispatch(self, router: SimRouter, counts: npt.NDArray[np.int64]) -> None:
        flat = counts.reshape(-1)
        key = np.flatnonzero(flat).astype(np.int32) + Phase.PREFILL * self.spec.num_keys
        report = DemandReport(
            source=router.name,
            incarnation=1,
            seq=router.seq,
            at_s=self.clock.now_s,
            key=key.astype(np.int32),
            pairs=flat[flat > 0],
        )
        router.seq += 1
        self._folder.add_demand(report, self.clock.now_s)
        router.wanted += int(flat.sum())
        for layer in range(self.spec.num_layers):
            if counts[layer].any():
                self._call(router, layer, counts[layer])

    def _call(self, router: SimRouter, layer: int, counts: npt.NDArray[np.int64]) -> None:
        assert router.table is not None, "only routers with a table dispatch"
        epoch, table = router.table.epoch, router.table
        lost = np.diff(table.replica_ptr)[
            layer * self.spec.num_experts : (layer + 1) * self.spec.num_experts
        ]
        counts = np.where(lost > 0, counts, 0)
        for rank, slots, tags, pairs in router.split(
            layer, counts, self.topology.num_ranks, router.seq
        ):
            shard = self.shards[rank]
            router.in_flight[epoch] = router.in_flight.get(epoch, 0) + 1

            def reply(
                served: npt.NDArray[np.bool_],
                slots: npt.NDArray[np.int32] = slots,
                tags: npt.NDArray[np.int64] = tags,
                pairs: npt.NDArray[np.int64] = pairs,
                rank: int = rank,
            ) -> None:
                router.in_flight[epoch] -= 1
                router.served += int(pairs[served].sum())
                router.stale += int(pairs[~served].sum())
                self._retry(
                    router, table, layer, rank, slots[~served], tags[~served], pairs[~served]
                )

            def arrive(
                shard: SimShard = shard,
                slots: npt.NDArray[np.int32] = slots,
                tags: npt.NDArray[np.int64] = tags,
                pairs: npt.NDArray[np.int64] = pairs,
                reply: Callable[[npt.NDArray[np.bool_]], None] = reply,
            ) -> None:
                if shard.alive:
                    shard.compute(slots, tags, pairs, reply)
                else:
                    reply(np.zeros(len(slots), dtype=np.bool_))

            self.clock.after(self._hop_s(), arrive)

    def _retry(
        self,
        router: SimRouter,
        table: RoutingTable,
        layer: int,
        rank: int,
        slots: npt.NDArray[np.int32],
        tags: npt.NDArray[np.int64],
        pairs: npt.NDArray[np.int64],
    ) -> None:
        """Send refused pairs again under the newest table: as counts of their experts."""
        if not len(slots):
            return
        counts = np.zeros(self.spec.num_experts, dtype=np.int64)
        low = layer * self.spec.num_experts
        for expert in range(self.spec.num_experts):
            for i in range(
                int(table.replica_ptr[low + expert]), int(table.replica_ptr[low + expert + 1])
            ):
                if int(table.replica_rank[i]) == rank:
                    hit = (slots == table.replica_slot[i]) & (tags == table.replica_tag[i])
                    counts[expert] += int(pairs[hit].sum())
        self._call(router, layer, counts)

    def _close_window(self) -> None:
        self.feed(ev.WindowClosed(at_s=0.0, window=self._folder.close(self.clock.now_s)))
