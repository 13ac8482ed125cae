"""Routers and shards of one process, no sockets: production cores, marker experts, a table of what
the shards really hold."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from moe_serve.ports import DType, ShardChannel
from moe_serve.router.checks import ForwardInput
from moe_serve.router.dispatch import ForwardOutput, RouterCore
from moe_serve.router.lanes import OnDisconnect
from moe_serve.shard.assembly import Shard
from moe_serve.shard.compute.base import ComputeBackend
from moe_serve.shard.served_model import ServedModel
from placement.messages.effects import ReleaseSlot
from placement.messages.events import SlotReleased
from placement.routing import RankAddress, RoutingTable
from placement.topology import Phase
from tests.fake_shards import HIDDEN, marker_spec, oracle, router_settings
from tests.fakes.lossy import Lossy, Network
from tests.fakes.marker_experts import MarkerBackend, MarkerSource, add, marker_model, marker_shard
from tests.fakes.shard_channel import FakeShardChannel

EXPERTS = 6
LAYER = 1
TOP_K = 3


def a_request(rows: int = 4, *, seed: int = 0, **changes: Any) -> ForwardInput:
    """A request of layer 1 with three different experts a row."""
    rng = np.random.default_rng(seed)
    made = ForwardInput(
        layer=LAYER,
        phase=Phase.DECODE,
        dtype=DType.FLOAT32,
        hidden=rng.standard_normal((rows, HIDDEN)).astype(np.float32),
        topk_ids=np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(rows)]).astype(np.int32)
        if rows
        else np.zeros((0, TOP_K), np.int32),
        gates=rng.standard_normal((rows, TOP_K)).astype(np.float32),
        valid=np.ones((rows, TOP_K), np.uint8),
        request_id="",
        attempt=0,
    )
    return replace(made, **changes)


def check(request: ForwardInput, got: ForwardOutput, rtol: float = 1e-5) -> None:
    """The output is that of one process that holds all experts: each row times the sum of gate x
    (expert + 1)."""
    want = oracle(request.hidden, request.topk_ids, request.gates, request.valid)
    size = oracle(np.abs(request.hidden), request.topk_ids, np.abs(request.gates), request.valid)
    assert got.output.shape == request.hidden.shape
    assert np.all(np.abs(got.output - want) <= rtol * size)


class Served:
    """Shards of marker experts in layer 1, their compute threads running, and what each slot holds.
    `stop` them. `network`: between routers and
    shards."""

    def __init__(
        self,
        num_ranks: int = 3,
        *,
        copies: int = 2,
        num_slots: int = 8,
        network: Network | None = None,
        backend: Callable[[ServedModel, int], ComputeBackend] | None = None,
        source: Callable[[ServedModel], MarkerSource] = MarkerSource,
        inner: int = 4,
        **settings: Any,
    ) -> None:
        model = marker_model(layers=2, experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, inner=inner)
        self.model = model
        self.spec = marker_spec()
        self.network = network
        self._make: Callable[..., Shard] = lambda rank, **more: marker_shard(
            model=model,
            rank=rank,
            num_slots=num_slots,
            source=source(model),
            backend=None if backend is None else backend(model, rank),
            **settings,
            **more,
        )
        self.shards = [self._make(rank) for rank in range(num_ranks)]
        self.held: dict[tuple[int, int], tuple[int, int]] = {}
        """(rank, slot) -> (expert, tag)."""
        self.channels: list[FakeShardChannel] = []
        self.epoch = 0
        self._steps = 10_000
        for shard in self.shards:
            shard.core.start()
        for expert in range(EXPERTS):
            for copy in range(copies):
                self.fill((expert + copy) % num_ranks, expert)

    def backend(self, rank: int) -> MarkerBackend:
        backend = self.shards[rank].core.backend
        assert isinstance(backend, MarkerBackend)
        return backend

    def slow(self, rank: int, seconds: float) -> None:
        """This rank alone takes longer with each batch from now on."""
        for other in range(len(self.shards)):
            wait_s = seconds if other == rank else 0.0
            self.backend(other).on_forward = lambda _pairs, wait_s=wait_s: time.sleep(wait_s)

    def fill(self, rank: int, expert: int) -> int:
        """Add the expert in the rank's first free slot; returns the slot."""
        shard = self.shards[rank]
        taken = {slot for r, slot in self.held if r == rank}
        slot = min(set(range(shard.settings.num_slots)) - taken)
        self._steps += 1
        tag = add(shard, slot, expert, layer=LAYER, step_id=self._steps)
        self.held[rank, slot] = (expert, tag)
        return slot

    def empty(self, rank: int, expert: int) -> None:
        """Release the rank's slot of the expert."""
        slot = next(s for (r, s), (e, _) in self.held.items() if (r, e) == (rank, expert))
        _, tag = self.held.pop((rank, slot))
        self._steps += 1
        answer = self.shards[rank].execute(
            1,
            ReleaseSlot(
                step_id=self._steps,
                rank=rank,
                incarnation=self.shards[rank].settings.incarnation,
                slot=slot,
                slot_tag=tag,
                layer=LAYER,
                expert=expert,
            ),
        )
        assert isinstance(answer, SlotReleased), answer

    def stop(self) -> None:
        for shard in self.shards:
            shard.core.stop()

    def restart(self, rank: int) -> None:
        """A new life of the rank that holds the same experts. The old one is stopped."""
        held = [expert for (r, _), (expert, _) in sorted(self.held.items()) if r == rank]
        for channel in self.channels:
            if channel.address.rank == rank:
                channel.cut("the shard died")
        old = self.shards[rank]
        old.core.stop()
        self.held = {key: value for key, value in self.held.items() if key[0] != rank}
        self.shards[rank] = self._make(rank, incarnation=old.settings.incarnation + 1)
        self.shards[rank].core.start()
        for expert in held:
            self.fill(rank, expert)

    def ranks_of(self, expert: int) -> list[int]:
        return sorted(rank for (rank, _), (e, _) in self.held.items() if e == expert)

    def address(self, rank: int) -> RankAddress:
        settings = self.shards[rank].settings
        return RankAddress(
            rank=rank,
            node=f"node{rank}",
            address=f"inproc://{rank}.{settings.incarnation}",
            incarnation=settings.incarnation,
        )

    def table(self) -> RoutingTable:
        """The next epoch's: all that is held. The shards have it."""
        self.epoch += 1
        rows = sorted((e, rank, slot, tag) for (rank, slot), (e, tag) in self.held.items())
        spec = self.spec
        ptr = np.zeros(spec.num_keys + 1, np.int32)
        keys = [LAYER * spec.num_experts + row[0] for row in rows]
        ptr[1:] = np.cumsum(np.bincount(keys, minlength=spec.num_keys))
        table = RoutingTable(
            term=1,
            epoch=self.epoch,
            model="marker",
            weights_version="v1",
            num_layers=spec.num_layers,
            num_experts=spec.num_experts,
            replica_ptr=ptr,
            replica_rank=np.array([row[1] for row in rows], np.int32),
            replica_slot=np.array([row[2] for row in rows], np.int32),
            replica_tag=np.array([row[3] for row in rows], np.int64),
            ranks=tuple(self.address(rank) for rank in range(len(self.shards))),
        )
        for shard in self.shards:
            shard.install_table(table)
        return table

    def open_channel(self, address: RankAddress, on_disconnect: OnDisconnect) -> ShardChannel:
        channel = FakeShardChannel(self.shards[address.rank].core, address, on_disconnect)
        self.channels.append(channel)
        if self.network is None:
            return channel
        lossy: Any = Lossy(channel, ShardChannel, self.network)
        return lossy  # type: ignore[no-any-return]

    def router(self, number: int = 0, **changes: Any) -> RouterCore:
        """A router that knows no table yet."""
        named = {"router": f"r{number}", "router_number": number}
        settings = replace(router_settings(self.spec), **named | changes)
        return RouterCore(settings, self.open_channel)


@asynccontextmanager
async def serving(
    served: Served, num_routers: int = 1, **changes: Any
) -> AsyncIterator[list[RouterCore]]:
    """Routers with the shards' table, all running."""
    table = served.table()
    routers = [served.router(number, **changes) for number in range(num_routers)]
    for router in routers:
        router.install_table(table)
        await router.start()
    try:
        yield routers
    finally:
        for router in routers:
            await router.stop()
        served.stop()
