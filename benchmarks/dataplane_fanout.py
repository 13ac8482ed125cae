"""One call fanned out to all shards, over our wire and by Ray actor calls: the same arrays to the
same cores.

Responsible for the two ways, for alternating blocks of them, and for the bytes of the messages.
Must never time a reply that differs between the two. The classes become Ray actors in
`benchmarks.dataplane_fleet`; `FanOut` is an async actor, as a router is.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from concurrent.futures import Future
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import ray

from benchmarks.dataplane_model import TokenBatch
from moe_serve.errors import MoeServeError
from moe_serve.ports import DType, ShardChannel, SubCall, SubReply
from moe_serve.router import kernels as router_kernels
from moe_serve.router.actor import wire_channels
from moe_serve.router.checks import ForwardInput
from moe_serve.router.dispatch import RouterCore
from moe_serve.router.lanes import OnDisconnect
from moe_serve.router.settings import RouterSettings
from moe_serve.shard.actor import CONCURRENCY_GROUPS, ShardActor
from moe_serve.wire.codec import encode
from moe_serve.wire.frame import message_bytes
from placement.messages.codec import decode_as
from placement.roles import kernels as role_kernels
from placement.routing import RankAddress, RoutingTable
from placement.split import kernels as split_kernels
from placement.split.pairs import kernels as pair_kernels
from placement.topology import Phase

TIMEOUT_S = 30.0
WARM_CALLS = 5
ARRAY_THREADS = 4


class ArrayShard(ShardActor):
    """A shard that also takes a sub-call as arguments of an actor method."""

    @ray.method(concurrency_group="arrays")
    def forward_arrays(self, call: SubCall) -> SubReply:
        """Run a sub-call through the same queue and core as one from the wire."""
        done: Future[SubReply] = Future()

        def settle(result: SubReply | MoeServeError) -> None:
            if isinstance(result, MoeServeError):
                done.set_exception(result)
            else:
                done.set_result(result)

        self._shard.core.submit(call, call.rows.nbytes, settle)
        return done.result(TIMEOUT_S)


def remote_array_shard() -> Any:
    """The actor class, made as `moe_serve.shard.actor.remote_shard_actor` makes a shard's."""
    options: dict[str, Any] = {
        "concurrency_groups": {**CONCURRENCY_GROUPS, "arrays": ARRAY_THREADS},
        "max_restarts": 0,
        "max_task_retries": 0,
    }
    return ray.remote(**options)(ArrayShard)


@dataclass(frozen=True)
class FanOutTimes:
    """Median seconds of a call in each block, both ways."""

    wire_s: list[float]
    ray_s: list[float]


@dataclass(frozen=True)
class MessageBytes:
    """Bytes of one call each way, as sent, and as they would be with a row for each pair."""

    sent: int
    sent_copies: int
    answered: int
    answered_copies: int
    rows: int
    pairs: int


class _RecordingChannel:
    """A channel that keeps the sub-calls it carried."""

    def __init__(self, channel: ShardChannel, kept: list[tuple[int, SubCall]]) -> None:
        self._channel = channel
        self._kept = kept

    @property
    def address(self) -> RankAddress:
        return self._channel.address

    @property
    def connected(self) -> bool:
        return self._channel.connected

    async def forward(self, call: SubCall) -> SubReply:
        self._kept.append((self.address.rank, call))
        return await self._channel.forward(call)

    async def fetch_table(self) -> RoutingTable | None:
        return await self._channel.fetch_table()

    async def close(self) -> None:
        await self._channel.close()


class FanOut:
    """Measures fan-outs of calls that a real RouterCore made. `shards`: handles, by rank."""

    def __init__(self, settings: RouterSettings, shards: list[Any]) -> None:
        self._shards = shards
        self._kept: list[tuple[int, SubCall]] = []
        self._channels: dict[int, _RecordingChannel] = {}
        self._ids = itertools.count(1 << 50)
        self._core = RouterCore(settings, self._open)

    async def install(self, table: bytes) -> None:
        """Compile, connect to the shards of the table (msgpack) and use it."""
        for module in (split_kernels, pair_kernels, role_kernels, router_kernels):
            module.warm()
        self._core.install_table(decode_as(table, RoutingTable))

    async def measure(self, batch: TokenBatch, blocks: int, calls_a_block: int) -> FanOutTimes:
        """Blocks of both ways in turn; each begins every other pair of blocks."""
        calls = await self._calls_of(batch)
        await self._compare(calls)
        ways = (self._by_wire, self._by_ray)
        for way in ways:
            for _ in range(WARM_CALLS):
                await way(calls)
        times: tuple[list[float], list[float]] = ([], [])
        for block in range(blocks):
            for which in (0, 1) if block % 2 == 0 else (1, 0):
                times[which].append(await self._block(ways[which], calls, calls_a_block))
        return FanOutTimes(*times)

    async def count_bytes(self, batch: TokenBatch) -> MessageBytes:
        """Bytes of the call's messages, all shards together."""
        calls = await self._calls_of(batch)
        replies = await self._by_wire(calls)
        row_bytes = batch.hidden[0].nbytes
        rows = sum(len(call.rows) for _, call in calls)
        pairs = sum(len(call.pair_row) for _, call in calls)
        extra = (pairs - rows) * row_bytes
        sent = sum(message_bytes(encode(call)) for _, call in calls)
        answered = sum(message_bytes(encode(reply)) for reply in replies)
        return MessageBytes(sent, sent + extra, answered, answered + extra, rows, pairs)

    def _open(self, address: RankAddress, on_disconnect: OnDisconnect) -> ShardChannel:
        channel = _RecordingChannel(wire_channels(None)(address, on_disconnect), self._kept)
        self._channels[address.rank] = channel
        return channel

    async def _calls_of(self, batch: TokenBatch) -> list[tuple[int, SubCall]]:
        """The sub-calls into which a router cuts the batch, with their ranks."""
        self._kept.clear()
        request = ForwardInput(
            layer=0,
            phase=Phase.DECODE,
            dtype=DType.FLOAT32,
            hidden=batch.hidden,
            topk_ids=batch.ids,
            gates=batch.gates,
            valid=np.ones(batch.ids.shape, np.uint8),
            request_id="bench",
            attempt=0,
        )
        await self._core.forward(request, TIMEOUT_S)
        return list(self._kept)

    def _fresh(self, calls: list[tuple[int, SubCall]]) -> list[tuple[int, SubCall]]:
        return [(rank, replace(call, sub_id=next(self._ids))) for rank, call in calls]

    async def _by_wire(self, calls: list[tuple[int, SubCall]]) -> list[SubReply]:
        sends = [self._channels[rank].forward(call) for rank, call in self._fresh(calls)]
        return list(await asyncio.gather(*sends))

    async def _by_ray(self, calls: list[tuple[int, SubCall]]) -> list[SubReply]:
        sends = [
            self._shards[rank].forward_arrays.remote(call) for rank, call in self._fresh(calls)
        ]
        return list(await asyncio.gather(*sends))

    async def _compare(self, calls: list[tuple[int, SubCall]]) -> None:
        """Check that both ways give the same rows."""
        wire, other = await self._by_wire(calls), await self._by_ray(calls)
        for one, two in zip(wire, other, strict=True):
            assert not one.row_status.any(), one.detail
            assert np.array_equal(one.partial, two.partial), "the two ways differ"

    @staticmethod
    async def _block(way: Any, calls: list[tuple[int, SubCall]], count: int) -> float:
        seconds = []
        for _ in range(count):
            began_s = time.perf_counter()
            await way(calls)
            seconds.append(time.perf_counter() - began_s)
        return median(seconds)
