"""Two router actors over real shards: gRPC in, ZeroMQ out, marker experts, one slot reused
meanwhile.
"""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import numpy as np
import pytest

from moe_serve.ports import RouterInfo
from moe_serve.router.actor import InstallAnswer, RouterActor, StartAnswer
from moe_serve.router.ledger import LedgerPage, RequestEntry
from moe_serve.rpc import codec, dispatch_pb2, dispatch_pb2_grpc
from moe_serve.rpc.options import channel_options
from moe_serve.shard.assembly import Shard
from placement.messages.codec import decode_as, encode
from placement.routing import RankAddress, RoutingTable
from tests.fake_shards import HIDDEN, marker_spec, oracle, router_settings
from tests.fakes.marker_experts import (
    MarkerBackend,
    add,
    marker_model,
    marker_shard,
    release,
)

EXPERTS, RANKS = 6, 3


class Cluster:
    """Three shards, each expert of layer 1 on two of them, and two routers."""

    def __init__(self) -> None:
        model = marker_model(layers=2, experts=EXPERTS, top_k=3, hidden=HIDDEN)
        self.shards = [
            marker_shard(model=model, rank=rank, num_slots=8, ledger_rows_max=100_000)
            for rank in range(RANKS)
        ]
        self.held: dict[tuple[int, int], tuple[int, int]] = {}
        """(rank, slot) -> (expert, tag), all of layer 1."""
        self.steps = 1
        self.epoch = 0
        self.addresses: list[RankAddress] = []
        settings = router_settings(marker_spec(), ledger_entries=100_000)
        self.routers = [
            RouterActor(replace(settings, router=f"r{n}", router_number=n)) for n in range(2)
        ]
        self.infos: list[RouterInfo] = []

    def fill(self, rank: int, slot: int, expert: int) -> None:
        self.steps += 1
        tag = add(self.shards[rank], slot, expert, layer=1, step_id=self.steps)
        self.held[rank, slot] = (expert, tag)

    def backend(self, rank: int) -> MarkerBackend:
        backend = self.shards[rank].core.backend
        assert isinstance(backend, MarkerBackend)
        return backend

    def empty(self, rank: int, slot: int) -> None:
        expert, tag = self.held.pop((rank, slot))
        release(self.shards[rank], slot, tag, layer=1, expert=expert)

    def table(self) -> RoutingTable:
        self.epoch += 1
        rows = sorted((e, rank, slot, tag) for (rank, slot), (e, tag) in self.held.items())
        ptr = np.zeros(2 * EXPERTS + 1, np.int32)
        counts = np.bincount([EXPERTS + row[0] for row in rows], minlength=2 * EXPERTS)
        ptr[1:] = np.cumsum(counts)
        return RoutingTable(
            term=1,
            epoch=self.epoch,
            model="marker",
            weights_version="v1",
            num_layers=2,
            num_experts=EXPERTS,
            replica_ptr=ptr,
            replica_rank=np.array([row[1] for row in rows], np.int32),
            replica_slot=np.array([row[2] for row in rows], np.int32),
            replica_tag=np.array([row[3] for row in rows], np.int64),
            ranks=tuple(self.addresses),
        )

    async def install(self, router: int, table: RoutingTable) -> None:
        reply = await self.routers[router].install_table(encode(table), ["a:1"])
        assert decode_as(reply, InstallAnswer).applied_epoch == table.epoch


@asynccontextmanager
async def a_cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    shards: list[Shard] = cluster.shards
    try:
        for shard in shards:
            cluster.addresses.append(shard.start())
        for expert in range(EXPERTS):
            cluster.fill(expert % RANKS, expert // RANKS * 2, expert)
            cluster.fill((expert + 1) % RANKS, expert // RANKS * 2 + 1, expert)
        for router in cluster.routers:
            answer = decode_as(await router.start(), StartAnswer)
            assert answer.info is not None, answer.fault
            cluster.infos.append(answer.info)
        yield cluster
    finally:
        for router in cluster.routers:
            await router.stop(0.0)
        for shard in shards:
            shard.stop()


def assert_set(event: threading.Event) -> None:
    assert event.wait(20)


async def ask(info: RouterInfo, seed: int, experts: tuple[int, ...] = tuple(range(6))) -> None:
    """One request over gRPC, compared with the oracle."""
    top_k = min(3, len(experts))
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 30))
    made = codec.ForwardArrays(
        model="marker",
        layer=1,
        phase=int(dispatch_pb2.FORWARD_PHASE_DECODE),
        data_type=codec.FP32,
        hidden=rng.standard_normal((rows, HIDDEN)).astype(np.float32),
        topk_ids=np.stack([rng.permutation(experts)[:top_k] for _ in range(rows)]).astype(np.int32),
        topk_weights=rng.random((rows, top_k)).astype(np.float32),
    )
    async with grpc.aio.insecure_channel(info.grpc_address, options=channel_options()) as channel:
        stub = dispatch_pb2_grpc.DispatchServiceStub(channel)
        answer = await stub.Forward(codec.forward_request(made), timeout=10)
    output, _ = codec.output_array(answer)
    want = oracle(made.hidden, made.topk_ids, made.topk_weights)
    np.testing.assert_allclose(output, want, rtol=1e-4, atol=1e-4)


def lost_and_doubled(cluster: Cluster, pages: list[LedgerPage]) -> tuple[int, int, int]:
    """(wanted, lost, doubled) contributions: shards' executed ledger joined with combined calls."""
    executed: dict[tuple[str, int, int, int], list[int]] = {}
    for shard in cluster.shards:
        for entry in shard.take_ledger():
            for row, k in zip(entry.row_id.tolist(), entry.pair_k.tolist(), strict=True):
                key = (entry.router, entry.call_id, entry.sub_id, row)
                executed.setdefault(key, []).append(k)
    wanted: set[tuple[str, int, int, int]] = set()
    added: list[tuple[str, int, int, int]] = []
    for page in pages:
        assert page.forgotten == 0
        for entry in page.entries:
            if isinstance(entry, RequestEntry):
                mask = codec.unpack_bits(entry.pair_valid, (entry.rows, entry.top_k))
                found = np.argwhere(mask).tolist()
                wanted |= {(page.router, entry.request_key, r, k) for r, k in found}
                continue
            for row in np.frombuffer(entry.row_id, "<i4").tolist():
                ks = executed[page.router, entry.call_id, entry.sub_id, row]
                added += [(page.router, entry.request_key, row, k) for k in ks]
    return len(wanted), len(wanted - set(added)), len(added) - len(set(added))


@pytest.mark.asyncio
async def test_right_output_through_two_routers_while_slots_are_reused() -> None:
    async with a_cluster() as cluster:
        first = cluster.table()
        for shard in cluster.shards:
            shard.install_table(first)
        for router in range(2):
            await cluster.install(router, first)
        await asyncio.gather(*(ask(cluster.infos[n % 2], n) for n in range(20)))
        # Expert 0 leaves rank 0 for rank 2 and its slot is filled again with expert 5. Shards and
        # router 0 hear of it; router 1 does not and must learn from a refusal.
        cluster.fill(2, 6, 0)
        cluster.empty(0, 0)
        cluster.fill(0, 0, 5)
        second = cluster.table()
        for shard in cluster.shards:
            shard.install_table(second)
        await cluster.install(0, second)
        await asyncio.gather(*(ask(cluster.infos[n % 2], n) for n in range(100, 140)))
        cores = [router._running() for router in cluster.routers]
        reports = [core.report(0) for core in cores]
        assert [r.applied_epoch for r in reports] == [2, 2]
        assert reports[0].counters["stale_pairs"] == 0
        assert reports[1].counters["stale_pairs"] > 0
        assert reports[1].counters["retried_pairs"] > 0
        # A shard dies without a word: its connection tells, the others answer.
        cluster.shards[1].stop()
        await asyncio.gather(*(ask(cluster.infos[n % 2], n) for n in range(200, 220)))
        reports = [core.report(0) for core in cores]
        assert all((1, 1) in [s[:2] for s in r.suspects] for r in reports)
        pages = [
            decode_as(await router.take_ledger(100_000), LedgerPage) for router in cluster.routers
        ]
        wanted, lost, doubled = lost_and_doubled(cluster, pages)
        assert (lost, doubled) == (0, 0)
        assert wanted == sum(r.counters["demand_pairs"] for r in reports)
        served = sum(r.counters["served_pairs"] for r in reports)
        assert served >= wanted
        for report in reports:
            c = report.counters
            assert c["sent_pairs"] == c["demand_pairs"] + c["retried_pairs"] + c["hedged_pairs"]
            ended = ("served_pairs", "stale_pairs", "refused_pairs", "lost_pairs")
            assert c["sent_pairs"] == sum(c[name] for name in ended)


@pytest.mark.asyncio
async def test_a_shard_that_cannot_compute_and_one_that_hangs_cost_no_request() -> None:
    hang = threading.Event()
    async with a_cluster() as cluster:
        table = cluster.table()
        for router in range(2):
            await cluster.install(router, table)
        cores = [router._running() for router in cluster.routers]
        for n in range(60):
            await ask(cluster.infos[n % 2], n)

        def fail(_pairs: int) -> None:
            raise RuntimeError("the device said no")

        # After three batches in a row it calls itself broken, and refuses what comes.
        cluster.backend(1).on_forward = fail
        for n in range(100, 140):
            await ask(cluster.infos[n % 2], n)
        assert cluster.shards[1].core.broken
        for core in cores:
            assert [rank for rank, _, _ in core.report(0).suspects] == [1]
            assert core.report(0).counters["ejections"] == 1.0
        # The next one hangs: its connection stays, and nothing is answered. Only one shard in ten
        # is ejected, but that is told of by the controller.
        cluster.backend(1).on_forward = lambda _pairs: None
        cluster.backend(2).on_forward = lambda _pairs: assert_set(hang)
        try:
            for router in cluster.routers:
                reply = await router.install_table(encode(table), ["a:1"], (2,))
                assert decode_as(reply, InstallAnswer).applied_epoch == table.epoch
            # Experts 0, 2, 3 and 5 have a replica on rank 0.
            for n in range(200, 220):
                await ask(cluster.infos[n % 2], n, (0, 2, 3, 5))
        finally:
            hang.set()


@pytest.mark.asyncio
async def test_starting_twice_gives_the_same_router_and_a_taken_port_a_reason() -> None:
    actor = RouterActor(router_settings(marker_spec()))
    info = decode_as(await actor.start(), StartAnswer).info
    assert info is not None
    assert decode_as(await actor.start(), StartAnswer).info == info
    port = int(info.grpc_address.rpartition(":")[2])
    other = RouterActor(router_settings(marker_spec(), port=port))
    assert str(port) in decode_as(await other.start(), StartAnswer).fault
    await other.stop()
    await actor.stop(0.0)
