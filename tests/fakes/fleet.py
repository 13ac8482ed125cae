"""A fleet in memory: parts of a cluster, shards over the production shard role, routers that report
what a test scripts.

`FakeCluster` is what outlives controllers (actors, nodes, claimed terms); each controller gets a
`FakeFleet` of its own over it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from moe_serve.errors import StaleTerm, StartRefused, Unavailable
from moe_serve.ports import (
    FILE_PLACE,
    NodeInfo,
    RankPlace,
    RouterInfo,
    RouterReport,
    ShardInfo,
    ShardReport,
)
from moe_serve.stage_counts import StageCounts
from placement.load import DemandReport, HotnessReport
from placement.messages.effects import (
    AbortAdd,
    CopyExpert,
    ReleaseSlot,
    ReserveSlot,
    SetRankSlots,
    ShardCommand,
    VerifyExpert,
)
from placement.messages.events import ShardAnswer
from placement.roles.shard import ShardSlots, Start, TermRefused, Work
from placement.routing import RankAddress, RoutingTable
from placement.topology import MoeSpec


class FakeShardPort:
    """One shard life. `copy_s`: seconds a copy takes. `hang`: reports and probes never answer."""

    def __init__(
        self,
        cluster: FakeCluster,
        name: str,
        rank: int,
        incarnation: int,
        node: str,
        place: RankPlace = FILE_PLACE,
    ) -> None:
        self.cluster = cluster
        self.place = place
        self.name, self.rank, self.incarnation, self.node = name, rank, incarnation, node
        spec = cluster.spec
        self.slots = ShardSlots(
            rank=rank,
            incarnation=incarnation,
            num_slots=(
                cluster.num_slots[rank] if place.group < 0 else cluster.group_slots[place.group]
            ),
            slot_bytes=spec.slot_bytes,
            weights_version=spec.weights_version,
        )
        self.weights_version = spec.weights_version
        self.alive = True
        self.hang = False
        self.busy = False
        self.executed: list[ShardCommand] = []
        self.reports: list[HotnessReport] = []
        self._bytes: dict[int, bytes] = {}
        self._waiting: dict[int, asyncio.Future[ShardAnswer]] = {}
        self._work: set[asyncio.Future[ShardAnswer]] = set()

    async def describe(self) -> ShardInfo:
        self._check()
        return ShardInfo(
            rank=self.rank,
            node=self.node,
            failure_domain=self.node,
            profile=self.cluster.profile,
            address=self.address,
            num_slots=self.slots.ledger.num_slots,
            budget_bytes=self.slots.ledger.num_slots * self.cluster.spec.slot_bytes,
            slot_bytes=self.cluster.spec.slot_bytes,
            backend="fake",
            simulated=True,
            pid=1000 + self.incarnation % 1000,
            highest_term=self.slots.highest_term,
            highest_epoch=max(0, self.slots.highest_epoch),
            resident=self.slots.ledger.resident(),
            group=self.place.group,
            only_node=self.place.only_node,
            weights_version=self.weights_version,
        )

    async def fence(self, term: int) -> ShardInfo:
        await self._reach()
        try:
            self.slots.accept_term(term)
        except TermRefused as error:
            raise StaleTerm(str(error), term=error.term) from error
        return await self.describe()

    @property
    def address(self) -> RankAddress:
        return RankAddress(
            rank=self.rank,
            node=self.node,
            address=f"fake://{self.rank}",
            incarnation=self.incarnation,
        )

    async def execute(self, term: int, command: ShardCommand) -> ShardAnswer:
        # The shard's own work goes on when the controller that asked for it dies.
        work = asyncio.ensure_future(self._execute(term, command))
        self._work.add(work)
        work.add_done_callback(self._work.discard)
        return await asyncio.shield(work)

    async def _execute(self, term: int, command: ShardCommand) -> ShardAnswer:
        await self._reach()
        try:
            self.slots.accept_term(term)
        except TermRefused as error:
            raise StaleTerm(str(error), term=error.term) from error
        self.executed.append(command)
        match command:
            case ReserveSlot():
                return self.slots.reserve(command)
            case CopyExpert():
                begun = self.slots.begin_copy(command)
                if isinstance(begun, Start) and begun.work is Work.COPY:
                    await self._copy(command, begun)
                return await self._answer(command.step_id, begun)
            case VerifyExpert():
                begun = self.slots.begin_verify(command)
                if isinstance(begun, Start):
                    key = self.cluster.spec.key(*self.slots.ledger.holder(begun.slot)[:2])
                    good = self._bytes.get(begun.slot) == marker(key)
                    self._deliver(
                        self.slots.verified(begun.slot, begun.tag, "" if good else "digest differs")
                    )
                return await self._answer(command.step_id, begun)
            case AbortAdd():
                return await self._answer(command.step_id, self.slots.abort(command))
            case ReleaseSlot():
                return await self._answer(command.step_id, self.slots.release(command))
            case SetRankSlots():
                return self.slots.resize(command)

    async def install_table(self, table: RoutingTable) -> int:
        await self._reach()
        try:
            return self.slots.install_table(table)
        except TermRefused as error:
            raise StaleTerm(str(error), term=error.term) from error

    async def report(self, acked_seq: int) -> ShardReport:
        await self._reach()
        self.reports = [r for r in self.reports if r.seq > acked_seq]
        ledger = self.slots.ledger
        return ShardReport(
            rank=self.rank,
            incarnation=self.incarnation,
            reports=tuple(self.reports),
            backlog_s=0.0,
            resident_bytes=ledger.resident_bytes,
            reserved_bytes=ledger.reserved_bytes,
            budget_bytes=ledger.num_slots * self.cluster.spec.slot_bytes,
            highest_term=self.slots.highest_term,
            highest_epoch=self.slots.highest_epoch,
            busy=self.busy,
        )

    async def probe(self) -> float:
        await self._reach()
        return 0.001

    def bytes_of(self, slot: int, tag: int) -> bytes | None:
        found = self.slots.ledger.holding(slot, tag)
        return None if found is None or not self.alive else self._bytes.get(slot)

    async def _copy(self, command: CopyExpert, begun: Start) -> None:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        while True:  # in parts, so that a source may die half-way, or a hang end
            await asyncio.sleep(min(self.cluster.copy_s / 10, 0.05))
            self._check()
            if clock() - began_s >= self.cluster.copy_s:
                break
        data: bytes | None = marker(self.cluster.spec.key(command.layer, command.expert))
        if command.source.rank >= 0:
            source = self.cluster.shard(command.source.rank)
            data = (
                None
                if source is None
                else source.bytes_of(command.source.slot, command.source.slot_tag)
            )
        if data is None:
            failed = self.slots.copy_failed(begun.slot, begun.tag, "source_lost", "it is gone")
            self._deliver(failed)
            return
        self._bytes[begun.slot] = data
        self._deliver(self.slots.copied(begun.slot, begun.tag, len(data), self.cluster.copy_s))

    async def _answer(self, step_id: int, begun: ShardAnswer | Start) -> ShardAnswer:
        if not isinstance(begun, Start):
            return begun
        ready = self._waiting.setdefault(step_id, asyncio.get_running_loop().create_future())
        answer = await ready
        self._waiting.pop(step_id, None)
        self._check()
        return answer

    def _deliver(self, answers: Sequence[ShardAnswer]) -> None:
        for answer in answers:
            step_id = getattr(answer, "step_id", -1)
            ready = self._waiting.setdefault(step_id, asyncio.get_running_loop().create_future())
            if not ready.done():
                ready.set_result(answer)

    async def _reach(self) -> None:
        self._check()
        if self.hang:
            await asyncio.sleep(3600)

    def _check(self) -> None:
        if not self.alive:
            raise Unavailable(f"{self.name} is gone")


class FakeRouterPort:
    """One router life. `demand`: pairs by key = (phase * layers + layer) * experts + expert, that
    each report adds. Reports no quiescence while `held`."""

    def __init__(self, cluster: FakeCluster, name: str, router: str, incarnation: int) -> None:
        self.cluster = cluster
        self.name, self.router, self.incarnation = name, router, incarnation
        self.alive = True
        self.hang = False
        self.held = False
        self.table: RoutingTable | None = None
        self.peers: tuple[str, ...] = ()
        self.suspects: tuple[tuple[int, int, str], ...] = ()
        self.counted: dict[int, int] = {}
        self.told_peers: list[tuple[str, ...]] = []
        self.told_suspects: list[tuple[int, ...]] = []
        """Each list of suspects that differs from the one told before."""
        self.port = incarnation % 50_000
        self.stopped_s: float | None = None
        """Grace of the first `stop`."""
        self.calls_end = asyncio.Event()
        """Unset: calls are open, and keep it from stopping."""
        self.calls_end.set()
        self.stopped = False
        self._term = 0
        self._seq = 0
        self._reports: list[DemandReport] = []
        self._quiesced = 0

    async def describe(self) -> RouterInfo:
        self._check()
        return RouterInfo(
            router=self.router,
            incarnation=self.incarnation,
            grpc_address=f"127.0.0.1:{self.port}",
            node="node0",
            pid=2000 + self.incarnation % 1000,
            highest_term=self._term,
            highest_epoch=self.applied,
        )

    @property
    def applied(self) -> int:
        return 0 if self.table is None else self.table.epoch

    async def install_table(
        self, table: RoutingTable, peers: Sequence[str], suspects: Sequence[int] = ()
    ) -> int:
        await self._reach()
        if table.term < self._term:
            raise StaleTerm(f"term {table.term} is over", term=self._term)
        self._term = table.term
        self.peers = tuple(peers)
        self.told_peers.append(self.peers)
        if [tuple(suspects)] != self.told_suspects[-1:]:
            self.told_suspects.append(tuple(suspects))
        if table.is_newer(self.table):
            self.cluster.check_table(table)
            self.table = table
        return self.applied

    async def report(self, acked_seq: int) -> RouterReport:
        await self._reach()
        self._reports = [r for r in self._reports if r.seq > acked_seq]
        if self.cluster.demand:
            key = np.array(sorted(self.cluster.demand), dtype=np.int32)
            pairs = np.array([self.cluster.demand[k] for k in key.tolist()], dtype=np.int64)
            self._reports.append(
                DemandReport(
                    source=self.router,
                    incarnation=self.incarnation,
                    seq=self._seq,
                    at_s=0.0,
                    key=key,
                    pairs=pairs,
                )
            )
            self._seq += 1
        if not self.held:
            self._quiesced = self.applied
        return RouterReport(
            router=self.router,
            incarnation=self.incarnation,
            applied_epoch=self.applied,
            quiesced_epoch=self._quiesced,
            reports=tuple(self._reports),
            suspects=self.suspects,
            counters={"requests": 1.0} | self.cluster.router_counters,
            stopped=self.stopped,
            stages=self.cluster.stages,
        )

    async def stop(self, grace_s: float) -> None:
        await self._reach()
        self.stopped_s = grace_s if self.stopped_s is None else self.stopped_s
        await self.calls_end.wait()
        self.stopped = True

    async def _reach(self) -> None:
        self._check()
        if self.hang:
            await asyncio.sleep(3600)

    def _check(self) -> None:
        if not self.alive:
            raise Unavailable(f"{self.name} is gone")


FakePart = FakeShardPort | FakeRouterPort


@dataclass
class FakeCluster:
    """What outlives controllers. `refuse`: words of StartRefused for the next creation, by rank or
    router name; for every one where the place is in `refuse_always`. `faults`: what a check found
    wrong."""

    spec: MoeSpec
    profile: str
    num_slots: list[int]
    nodes: list[NodeInfo]
    group_slots: tuple[int, ...] = ()
    """Slots of a rank that is added, by group."""
    copy_s: float = 0.0
    stages: StageCounts | None = None
    """Where the time went, as every router tells it."""
    router_counters: dict[str, float] = field(default_factory=dict)
    demand: dict[int, int] = field(default_factory=dict)
    parts: dict[str, FakePart] = field(default_factory=dict)
    terms: set[int] = field(default_factory=set)
    refuse: dict[str, str] = field(default_factory=dict)
    refuse_always: set[str] = field(default_factory=set)
    created: list[str] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    tables: list[RoutingTable] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    deaf_kills: int = 0
    """Kills to come that find the cluster's head away."""
    tables_come_late: bool = False
    """What a table lacks is not compared with what is held as it arrives."""

    def shard(self, rank: int) -> FakeShardPort | None:
        """The newest living shard of a rank."""
        found = [
            p
            for p in self.parts.values()
            if isinstance(p, FakeShardPort) and p.rank == rank and p.alive
        ]
        return max(found, key=lambda p: p.incarnation, default=None)

    def router(self, name: str = "router-0") -> FakeRouterPort | None:
        """The newest living router of that name."""
        found = [
            p
            for p in self.parts.values()
            if isinstance(p, FakeRouterPort) and p.router == name and p.alive
        ]
        return max(found, key=lambda p: p.incarnation, default=None)

    def living(self) -> list[str]:
        """Names of living parts."""
        return sorted(name for name, part in self.parts.items() if part.alive)

    def die(self, name: str) -> None:
        """A part's process ends."""
        self.parts[name].alive = False

    def drain_node(self, node: str) -> None:
        """The cluster wants a node emptied."""
        self.nodes = [
            replace(n, draining_deadline_s=100.0) if n.node == node else n for n in self.nodes
        ]

    def keep_node(self, node: str) -> None:
        """The cluster takes the drain of a node back."""
        self.nodes = [
            replace(n, draining_deadline_s=None) if n.node == node else n for n in self.nodes
        ]

    def check_table(self, table: RoutingTable) -> None:
        """A router was given a table: what it lists on living shards must be resident and proved,
        no expert that a living shard holds may be missing, and numbers must grow."""
        held = {
            (r.layer, r.expert)
            for part in self.parts.values()
            if isinstance(part, FakeShardPort) and part.alive and not part.hang
            for r in part.slots.ledger.resident()
            if r.verified
        }
        lost = held & set(table.missing())
        if lost and not self.tables_come_late:
            self.faults.append(f"epoch {table.epoch} loses {sorted(lost)}, which live on")
        newest = max((t.epoch for t in self.tables), default=0)
        if table.epoch <= newest and all(t.order != table.order for t in self.tables):
            self.faults.append(f"epoch {table.epoch} after {newest}")
        ranks = {a.rank: a.incarnation for a in table.ranks}
        for rank, slot, tag in zip(
            table.replica_rank.tolist(),
            table.replica_slot.tolist(),
            table.replica_tag.tolist(),
            strict=True,
        ):
            shard = self.shard(rank)
            if shard is None or shard.incarnation != ranks[rank]:
                continue
            verified = {(r.slot, r.tag) for r in shard.slots.ledger.resident() if r.verified}
            if (slot, tag) not in verified:
                self.faults.append(f"epoch {table.epoch} lists rank {rank} slot {slot} tag {tag}")
        self.tables.append(table)


def _holds_a_port(part: FakePart) -> bool:
    return isinstance(part, FakeRouterPort) and part.alive


class FakeFleet:
    """`ports.Fleet` of one controller over a cluster."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster

    async def create_shard(
        self, name: str, rank: int, incarnation: int, place: RankPlace = FILE_PLACE
    ) -> FakeShardPort:
        self._may_create(str(rank), name)
        usable = [n.node for n in self.cluster.nodes if n.alive and n.draining_deadline_s is None]
        node = place.only_node or usable[rank % len(usable)]
        if node not in usable:
            raise StartRefused(f"no node named {node!r} that takes parts")
        part = FakeShardPort(self.cluster, name, rank, incarnation, node, place)
        self.cluster.parts[name] = part
        return part

    async def create_router(
        self, name: str, router: str, incarnation: int, port: int = 0
    ) -> FakeRouterPort:
        self._may_create(router, name)
        part = FakeRouterPort(self.cluster, name, router, incarnation)
        taken = {p.port for p in self.cluster.parts.values() if _holds_a_port(p)}
        part.port = port if port and port not in taken else part.port
        self.cluster.parts[name] = part
        return part

    async def find_shard(self, name: str) -> FakeShardPort | None:
        part = self.cluster.parts.get(name)
        return part if isinstance(part, FakeShardPort) and part.alive else None

    async def find_router(self, name: str) -> FakeRouterPort | None:
        part = self.cluster.parts.get(name)
        return part if isinstance(part, FakeRouterPort) and part.alive else None

    async def part_names(self) -> tuple[str, ...]:
        return tuple(self.cluster.living())

    async def kill(self, name: str) -> None:
        if self.cluster.deaf_kills:
            self.cluster.deaf_kills -= 1
            raise Unavailable("Ray gives no answer: RaySystemError")
        self.cluster.killed.append(name)
        if name in self.cluster.parts:
            self.cluster.die(name)

    async def alive(self, name: str) -> bool:
        return name in self.cluster.parts and self.cluster.parts[name].alive

    async def nodes(self) -> tuple[NodeInfo, ...]:
        return tuple(self.cluster.nodes)

    async def claim_term(self, term: int) -> bool:
        if term in self.cluster.terms:
            return False
        self.cluster.terms.add(term)
        return True

    async def highest_term(self) -> int:
        return max(self.cluster.terms, default=0)

    def _may_create(self, place: str, name: str) -> None:
        if place in self.cluster.refuse:
            why = self.cluster.refuse[place]
            if place not in self.cluster.refuse_always:
                del self.cluster.refuse[place]
            raise StartRefused(why)
        self.cluster.created.append(name)


def marker(key: int) -> bytes:
    """Canonical bytes of an expert."""
    return key.to_bytes(8, "little")
