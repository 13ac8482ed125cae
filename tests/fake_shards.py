"""Shards without processes: marker experts (expert e multiplies by e + 1) behind fake channels.

A fake shard computes from its own map tag -> (layer, expert), never from what the sub-call says of
experts, so an answer is right only if the fence is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from moe_serve.errors import InvalidArgument, WireLost
from moe_serve.ports import DType, RowStatus, SubCall, SubReply
from moe_serve.router.lanes import OnDisconnect
from moe_serve.router.settings import RouterSettings
from placement.routing import RankAddress, RoutingTable
from placement.topology import MoeSpec

HIDDEN = 8


def marker_spec(num_layers: int = 2, num_experts: int = 6, top_k: int = 3) -> MoeSpec:
    return MoeSpec(
        model="marker",
        weights_version="v1",
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=HIDDEN,
        intermediate_size=16,
        expert_bytes=1000,
        slot_bytes=1000,
    )


def to_float(raw: np.ndarray, dtype: DType) -> np.ndarray:
    if dtype is DType.BFLOAT16:
        return raw.view(ml_dtypes.bfloat16).astype(np.float64)
    return raw.astype(np.float64)


def from_float(values: np.ndarray, dtype: DType) -> np.ndarray:
    if dtype is DType.BFLOAT16:
        return values.astype(ml_dtypes.bfloat16).view(np.uint16)
    return values.astype(dtype.numpy)


@dataclass
class FakeShard:
    """One shard life: what its slots hold, and how it misbehaves."""

    rank: int
    incarnation: int = 1
    slots: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """slot -> (tag, layer, expert)"""
    table: RoutingTable | None = None
    connected: bool = True
    refuse: bool = False
    invalid: str = ""
    delay_s: float = 0.0
    gives_up_early_s: float = 0.0
    hold: asyncio.Event | None = None
    never_answers: set[int] = field(default_factory=set)
    """Keys of requests whose sub-calls hang."""
    calls: list[SubCall] = field(default_factory=list)
    executed: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(request_key, layer, row, k) of every pair computed."""
    next_tag: int = 1
    change_reply: Callable[[SubReply], SubReply] | None = None

    def fill(self, slot: int, layer: int, expert: int) -> int:
        tag = self.next_tag
        self.next_tag += 1
        self.slots[slot] = (tag, layer, expert)
        return tag

    def answer(self, call: SubCall) -> SubReply:
        rows = to_float(call.rows, call.dtype)
        status = np.zeros(call.row_id.shape[0], np.uint8)
        if self.refuse or call.incarnation != self.incarnation:
            status[:] = RowStatus.REFUSED
        partial = np.zeros(rows.shape)
        for i in range(call.pair_row.shape[0]):
            held = self.slots.get(int(call.pair_slot[i]))
            row = int(call.pair_row[i])
            if held is None or held[0] != call.pair_tag[i]:
                status[row] = max(int(status[row]), RowStatus.STALE)
            else:
                partial[row] += float(call.pair_gate[i]) * (held[2] + 1) * rows[row]
        for i in range(call.pair_row.shape[0]):
            row = int(call.pair_row[i])
            if status[row] == 0:
                self.executed.append(
                    (call.request_key, call.layer, int(call.row_id[row]), int(call.pair_k[i]))
                )
        term, epoch = (0, 0) if self.table is None else self.table.order
        reply = SubReply(
            call_id=call.call_id,
            sub_id=call.sub_id,
            incarnation=self.incarnation,
            term=term,
            epoch=epoch,
            row_status=status,
            partial=from_float(partial[status == 0], call.dtype),
            backlog_s=0.0,
            backlog_seq=len(self.calls),
            queue_s=0.0,
            compute_s=0.001,
            rest_s=0.0,
        )
        return reply if self.change_reply is None else self.change_reply(reply)


class FakeShardChannel:
    """`ports.ShardChannel` to a FakeShard in this process."""

    def __init__(self, world: FakeWorld, address: RankAddress, on_disconnect: OnDisconnect) -> None:
        self.address = address
        self.closed = False
        self._world = world
        self._on_disconnect = on_disconnect
        self._broken = asyncio.Event()

    @property
    def connected(self) -> bool:
        return not self.closed and self._shard().connected

    def _shard(self) -> FakeShard:
        return self._world.shards[self.address.rank]

    def disconnect(self) -> None:
        self._broken.set()
        self._broken = asyncio.Event()
        self._on_disconnect(self.address, "connection reset")

    async def forward(self, call: SubCall) -> SubReply:
        shard = self._shard()
        shard.calls.append(call)
        if not self.connected:
            raise WireLost(f"rank {shard.rank} is not connected")
        if shard.invalid:
            raise InvalidArgument(shard.invalid)
        try:
            async with asyncio.timeout(call.timeout_s - shard.gives_up_early_s):
                await self._wait(shard)
                if call.request_key in shard.never_answers:
                    await asyncio.Event().wait()
        except TimeoutError:
            raise WireLost(f"rank {shard.rank} did not answer") from None
        with np.errstate(all="ignore"):
            return shard.answer(call)

    async def _wait(self, shard: FakeShard) -> None:
        await asyncio.sleep(shard.delay_s)
        if not self.connected:
            raise WireLost(f"rank {shard.rank} disconnected")
        if shard.hold is None:
            return
        waits = [asyncio.ensure_future(e.wait()) for e in (shard.hold, self._broken)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if waits[1].done():
                raise WireLost(f"rank {shard.rank} disconnected")
        finally:
            for one in waits:
                one.cancel()

    async def fetch_table(self) -> RoutingTable | None:
        if not self.connected:
            raise WireLost("not connected")
        return self._shard().table

    async def close(self) -> None:
        self.closed = True
        self._broken.set()


class FakeWorld:
    """Shards, and the tables that describe what they hold."""

    def __init__(self, spec: MoeSpec, num_ranks: int = 3) -> None:
        self.spec = spec
        self.shards = [FakeShard(rank) for rank in range(num_ranks)]
        self.channels: list[FakeShardChannel] = []
        self.epoch = 0

    def open_channel(self, address: RankAddress, on_disconnect: OnDisconnect) -> FakeShardChannel:
        channel = FakeShardChannel(self, address, on_disconnect)
        self.channels.append(channel)
        return channel

    def place(self, *, copies: int = 2) -> None:
        """Every expert on `copies` ranks, one slot each."""
        for layer in range(self.spec.num_layers):
            for expert in range(self.spec.num_experts):
                for i in range(copies):
                    shard = self.shards[(expert + i) % len(self.shards)]
                    shard.fill(len(shard.slots), layer, expert)

    def table(self, *, term: int = 1, without: tuple[int, ...] = ()) -> RoutingTable:
        """Next epoch's table: all that the shards hold, except of ranks `without`."""
        self.epoch += 1
        held = sorted(
            (layer * self.spec.num_experts + expert, shard.rank, slot, tag)
            for shard in self.shards
            if shard.rank not in without
            for slot, (tag, layer, expert) in shard.slots.items()
        )
        keys = np.array([one[0] for one in held], np.int64)
        ptr = np.zeros(self.spec.num_keys + 1, np.int32)
        ptr[1:] = np.cumsum(np.bincount(keys, minlength=self.spec.num_keys))
        return RoutingTable(
            term=term,
            epoch=self.epoch,
            model=self.spec.model,
            weights_version="v1",
            num_layers=self.spec.num_layers,
            num_experts=self.spec.num_experts,
            replica_ptr=ptr,
            replica_rank=np.array([one[1] for one in held], np.int32),
            replica_slot=np.array([one[2] for one in held], np.int32),
            replica_tag=np.array([one[3] for one in held], np.int64),
            ranks=tuple(
                RankAddress(
                    rank=s.rank,
                    node=f"node{s.rank}",
                    address=f"inproc://{s.rank}.{s.incarnation}",
                    incarnation=s.incarnation,
                )
                for s in self.shards
                if s.rank not in without
            ),
        )

    def executed(self) -> list[tuple[int, int, int, int]]:
        return [one for shard in self.shards for one in shard.executed]


async def until(condition: Callable[[], bool], within_s: float = 2.0) -> None:
    """Wait until a condition holds; a test that waits longer has failed."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - the conditions are counters, not events
            await asyncio.sleep(0.001)


def router_settings(spec: MoeSpec, **changes: object) -> RouterSettings:
    return RouterSettings(router="r0", router_number=0, incarnation=1, spec=spec, **changes)  # type: ignore[arg-type]


def oracle(
    hidden: np.ndarray, ids: np.ndarray, gates: np.ndarray, valid: np.ndarray | None = None
) -> np.ndarray:
    """Float64 output of marker experts."""
    weight = gates.astype(np.float64) * (ids + 1)
    if valid is not None:
        weight = np.where(valid != 0, weight, 0.0)
    return weight.sum(axis=1)[:, None] * hidden.astype(np.float64)
