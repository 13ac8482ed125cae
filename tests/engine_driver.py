"""A hand-cranked driver for engine tests: answers what it may, holds back what a test wants to hold
back.

Ranks are real `ShardSlots`; time moves only when a test says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from placement.config import RebalanceConfig
from placement.engine import EngineSnapshot, RebalanceEngine, compute_target
from placement.messages import events as ev
from placement.messages.codec import decode_as, encode
from placement.messages.effects import (
    AbortAdd,
    Answer,
    ComputeTarget,
    CopyExpert,
    Effects,
    PublishTable,
    ReleaseSlot,
    ReserveSlot,
    SetRankSlots,
    ShardCommand,
    Transition,
    VerifyExpert,
    WakeAt,
)
from placement.messages.records import DecisionRecord
from placement.migration import AddState, RemoveState
from placement.roles.shard import ShardSlots, Start, Work
from placement.routing import RoutingTable
from placement.topology import MoeSpec, Topology
from tests.builders import make_address, make_demand, make_topology, make_window

WAKES_MAX = 1000
"""Times an engine of a few ranks may want to be woken during one `wait`."""


class EngineDriver:
    """`hold`: command types that are kept in `held` instead of being answered."""

    def __init__(
        self,
        spec: MoeSpec,
        topology: Topology,
        config: RebalanceConfig | None = None,
        *,
        routers: Iterable[str] = (),
        join: bool = True,
        paused: bool = False,
    ) -> None:
        self.spec, self.topology = spec, topology
        self.config = config or RebalanceConfig(cooldown_s=0.0, first_policy="incremental", floor=1)
        self.engine = RebalanceEngine(
            spec, topology, self.config, term=1, first_epoch=1, start_s=0.0, paused=paused
        )
        self.now_s = 0.0
        self.shards: dict[int, ShardSlots] = {}
        self.hold: set[type] = set()
        self.held: list[object] = []
        self.silent_routers: set[str] = set()
        self.tables: list[RoutingTable] = []
        self.records: list[DecisionRecord] = []
        self.transitions: list[object] = []
        self.commands: list[object] = []
        self.answers: dict[int, Answer] = {}
        self.routers = list(routers)
        self.window = 0
        for router in self.routers:
            self.feed(ev.RouterJoined(at_s=0.0, router=router, incarnation=1))
        if join:
            for rank in range(topology.num_ranks):
                self.join(rank)

    # -- feeding ---------------------------------------------------------------------------------

    def feed(self, event: ev.AnyEvent) -> Effects:
        """Step with the present time, answer everything that is not held, and return the first
        effects."""
        queue: list[ev.AnyEvent] = [event]
        first: Effects | None = None
        while queue:
            effects = self.engine.step(msgspec.structs.replace(queue.pop(0), at_s=self.now_s))
            first = first or effects
            self.records.extend(effects.records)
            self.transitions.extend(effects.transitions)
            for command in effects.commands:
                self.commands.append(command)
                queue.extend(self._answer(command))
        assert first is not None
        return first

    def _answer(self, command: object) -> list[ev.AnyEvent]:
        if type(command) in self.hold:
            self.held.append(command)
            return []
        match command:
            case ComputeTarget():
                return [compute_target(command, self.config)]
            case PublishTable():
                self.tables.append(command.table)
                return self.acks(command.table.epoch)
            case Answer():
                self.answers[command.request_id] = command
                return []
            case _ if isinstance(command, ShardCommand):
                return self.run_shard(command)
            case _:
                return []

    def run_shard(self, command: ShardCommand) -> list[ev.AnyEvent]:
        """What the rank's shard answers, its work done at once."""
        shard = self.shards.get(command.rank)
        if shard is None or shard.incarnation != command.incarnation:
            return []
        match command:
            case ReserveSlot():
                done = shard.reserve(command)
            case CopyExpert():
                done = shard.begin_copy(command)
            case VerifyExpert():
                done = shard.begin_verify(command)
            case AbortAdd():
                done = shard.abort(command)
            case ReleaseSlot():
                done = shard.release(command)
            case SetRankSlots():
                done = shard.resize(command)
        answers: list[ev.AnyEvent] = []
        if not isinstance(done, Start):
            answers.append(done)
        elif done.work is Work.COPY:
            answers.extend(shard.copied(done.slot, done.tag, self.spec.expert_bytes, 0.1))
        elif done.work is Work.VERIFY:
            answers.extend(shard.verified(done.slot, done.tag))
        elif done.work is Work.STOP_COPY:
            answers.extend(shard.copy_stopped(done.slot, done.tag))
        return [*answers, *shard.ledger.take_ready()]

    def acks(self, epoch: int) -> list[ev.AnyEvent]:
        """Every router that is not silent applies and quiesces the epoch."""
        loud = [r for r in self.routers if r not in self.silent_routers]
        return [
            *(ev.TableApplied(at_s=0.0, router=r, epoch=epoch) for r in loud),
            *(ev.TableQuiesced(at_s=0.0, router=r, epoch=epoch) for r in loud),
        ]

    def let_go(self, *kinds: type) -> None:
        """Answer held commands of these kinds (all without any), and hold them no more."""
        wanted = set(kinds) or set(self.hold)
        self.hold -= wanted
        mine = [c for c in self.held if type(c) in wanted]
        self.held = [c for c in self.held if type(c) not in wanted]
        for command in mine:
            for event in self._answer(command):
                self.feed(event)

    # -- events ----------------------------------------------------------------------------------

    def join(
        self,
        rank: int,
        incarnation: int = 1,
        shard: ShardSlots | None = None,
        resident: Sequence[ev.ResidentSlot] | None = None,
    ) -> Effects:
        """A rank's shard tells of itself. resident: what it says it holds; None is what it does."""
        spec = self.topology.ranks[rank]
        shard = shard or ShardSlots(
            rank=rank,
            incarnation=incarnation,
            num_slots=spec.num_slots,
            slot_bytes=self.spec.slot_bytes,
            weights_version=self.spec.weights_version,
        )
        self.shards[rank] = shard
        return self.feed(
            ev.RankJoined(
                at_s=0.0,
                rank=rank,
                node=spec.node,
                failure_domain=spec.failure_domain,
                profile=spec.profile,
                num_slots=shard.ledger.num_slots,
                address=make_address(rank, shard.incarnation),
                resident=shard.ledger.resident() if resident is None else tuple(resident),
            )
        )

    def lose(self, rank: int) -> Effects:
        shard = self.shards.pop(rank)
        return self.feed(
            ev.RankLost(at_s=0.0, rank=rank, incarnation=shard.incarnation, reason="killed")
        )

    def close_window(self, hot: dict[int, float] | None = None, base: float = 100.0) -> Effects:
        """A window of demand: `base` pairs an expert, `hot` by key."""
        self.now_s += self.config.window_s
        window = make_window(
            self.spec,
            make_demand(self.spec, hot, base),
            index=self.window,
            num_ranks=self.topology.num_ranks,
        )
        window = msgspec.structs.replace(
            window, start_s=self.now_s - self.config.window_s, end_s=self.now_s
        )
        self.window += 1
        return self.feed(ev.WindowClosed(at_s=0.0, window=window))

    def wait(self, seconds: float) -> None:
        """Let time pass, in steps that stop at every WakeAt."""
        end_s = self.now_s + seconds
        for _ in range(WAKES_MAX):
            if self.now_s >= end_s:
                return
            wake_s = self.engine.state.wake_at_s
            self.now_s = min(end_s, max(wake_s, self.now_s + 1e-6))
            self.feed(ev.TimerFired(at_s=0.0))
        raise AssertionError(f"woken {WAKES_MAX} times in {seconds} s: it waits for a time in vain")

    # -- looking ---------------------------------------------------------------------------------

    def rules(self, outcome: str | None = None) -> list[str]:
        return [r.rule for r in self.records if outcome is None or r.outcome == outcome]

    def keys(self) -> list[list[int]]:
        """Sorted keys of what is listed, by rank."""
        return [sorted(int(k) for k in row if k >= 0) for row in self.engine.layout().slots]

    def step_states(self) -> list[str]:
        run = self.engine.state.run
        return [] if run is None else [str(s.state) for s in run.steps.values()]

    @property
    def table(self) -> RoutingTable:
        return self.tables[-1]

    def check_agreement(self) -> None:
        """Shards hold exactly what the engine thinks they hold, and what the table lists is
        served."""
        for rank, shard in self.shards.items():
            mine = {
                i: s.key for i, s in enumerate(self.engine.state.ranks[rank].slots) if s.key >= 0
            }
            real = {
                r.slot: r.layer * self.spec.num_experts + r.expert for r in shard.ledger.resident()
            }
            assert mine == real, f"rank {rank}: engine {mine}, shard {real}"
        for layer in range(self.spec.num_layers):
            for expert in range(self.spec.num_experts):
                for rank, slot, tag in self.table.replicas(layer, expert):
                    pair = np.array([slot], np.int32), np.array([tag], np.int64)
                    assert self.shards[rank].ledger.served(*pair).all()


def two_ranks(
    slots: int = 4, *, spec: MoeSpec | None = None, num_ranks: int = 2, **fields: object
) -> EngineDriver:
    """Four experts of one layer on `num_ranks` ranks, one router, all joined and filled."""
    from tests.builders import make_spec

    topology = make_topology([slots] * num_ranks, ranks_per_node=1)
    config = RebalanceConfig(
        **{  # type: ignore[arg-type]
            "cooldown_s": 0.0,
            "regret_decay": 0.9,
            "first_policy": "incremental",
            "floor": 1,
            **fields,
        }
    )
    return EngineDriver(spec or make_spec(), topology, config, routers=["r0"])


def restart(
    driver: EngineDriver,
    snapshot: EngineSnapshot,
    journal: Iterable[Transition],
    *,
    first: Sequence[int] = (),
    silent: Sequence[int] = (),
) -> int:
    """Put a restored engine in the driver's; ranks answer in the order `first`, `silent` ones not
    at all. Number of tables before."""
    snapshot = decode_as(encode(snapshot), EngineSnapshot)
    epoch = max([driver.engine.state.epoch, *(t.epoch for t in driver.tables)])
    driver.engine = RebalanceEngine.restore(
        snapshot,
        journal,
        term=driver.engine.state.term + 1,
        first_epoch=epoch + 1,
        start_s=driver.now_s,
    )
    driver.hold.clear()
    driver.held.clear()
    before = len(driver.tables)
    for router in driver.routers:
        driver.feed(ev.RouterJoined(at_s=0.0, router=router, incarnation=1))
    order = [*first, *(r for r in sorted(driver.shards) if r not in first)]
    for rank in order:
        if rank in silent:
            continue
        assert len(driver.tables) == before, "a table was published before every rank had spoken"
        driver.shards[rank].accept_term(driver.engine.state.term)
        driver.join(rank, shard=driver.shards[rank])
    return before


__all__ = ["AddState", "EngineDriver", "RemoveState", "WakeAt", "restart", "two_ranks"]
