"""Health that stands still while a rebalance runs: the loop that answers it does not do the work.
Controller and router are asked 50 times a second while as much moves as fits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import msgspec
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from moe_serve.controller.admin_server import SERVICE_NAME as ADMIN
from moe_serve.controller.service import ControllerService
from moe_serve.controller.settings import ExpectedRank
from moe_serve.ports import NodeInfo
from moe_serve.router.dispatch import RouterCore
from moe_serve.router.service import SERVICE_NAME as DISPATCH
from moe_serve.router.service import RouterServer
from placement.messages.events import DrainAsked
from placement.routing import RankAddress, RoutingTable
from tests.builders import PROFILE, make_spec
from tests.fake_shards import FakeWorld, marker_spec, router_settings
from tests.fakes.controller import crash, make_settings, until
from tests.fakes.fleet import FakeCluster, FakeFleet

pytestmark = pytest.mark.loopback

PERIOD_S = 0.02
SERVING = health_pb2.HealthCheckResponse.SERVING


@asynccontextmanager
async def asked(address: str, service: str) -> AsyncIterator[list[tuple[int, float]]]:
    """(status, seconds) of a health call each 20 ms, the next one sent whether or not the last is
    answered."""
    answers: list[tuple[int, float]] = []
    calls: set[asyncio.Task[None]] = set()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def one() -> None:
            began_s = time.monotonic()
            got = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=20)
            answers.append((got.status, time.monotonic() - began_s))

        async def all_() -> None:
            while True:
                task = asyncio.create_task(one())
                calls.add(task)
                task.add_done_callback(calls.discard)
                await asyncio.sleep(PERIOD_S)

        asking = asyncio.create_task(all_())
        try:
            yield answers
        finally:
            asking.cancel()
            await asyncio.gather(asking, *calls, return_exceptions=True)


def told(what: str, answers: list[tuple[int, float]]) -> None:
    seconds = np.array([s for _, s in answers])
    print(
        f"{what}: {len(answers)} health calls, median {np.median(seconds) * 1e3:.1f} ms, slowest "
        f"{seconds.max() * 1e3:.1f} ms (bar 200 ms)"
    )
    assert len(answers) > 3
    assert {status for status, _ in answers} == {SERVING}, "readiness flapped"


LAYERS, EXPERTS, RANKS = 2, 48, 4
SLOTS = 56


@pytest.mark.asyncio
async def test_the_controller_says_it_is_well_while_a_whole_rank_moves(tmp_path: Path) -> None:
    spec = make_spec(num_layers=LAYERS, num_experts=EXPERTS)
    ranks = tuple(
        ExpectedRank(
            rank=rank, profile=PROFILE.name, num_slots=SLOTS, budget_bytes=SLOTS * spec.slot_bytes
        )
        for rank in range(RANKS)
    )
    settings = replace(make_settings(tmp_path), spec=spec, ranks=ranks)
    cluster = FakeCluster(
        spec=spec,
        profile=PROFILE.name,
        num_slots=[SLOTS] * RANKS,
        nodes=[NodeInfo(f"node{n}", True, {}) for n in range(RANKS)],
    )
    service = ControllerService(settings, FakeFleet(cluster), crash=crash)
    await service.start()
    try:
        await until(lambda: bool(service.describe()["ready"]), wait_s=60.0)
        on_rank = len(held_by(cluster, 0))
        async with asked(service.admin_address, ADMIN) as answers:
            answer = await service.life.driver.ask(
                lambda n: DrainAsked(at_s=0.0, request_id=n, rank=0)
            )
            assert answer.code == "ok", answer.message
            await until(lambda: not held_by(cluster, 0), wait_s=60.0)
        told(f"{on_rank} experts leave a rank", answers)
        assert service.describe()["ready"]
    finally:
        await service.stop()


def held_by(cluster: FakeCluster, rank: int) -> tuple[object, ...]:
    shard = cluster.shard(rank)
    return () if shard is None else shard.slots.ledger.resident()


def large_table(epoch: int, layers: int, experts: int, ranks: int) -> RoutingTable:
    """Two replicas of every expert; each epoch all of them are elsewhere."""
    keys = layers * experts
    replica = np.repeat(np.arange(keys), 2)
    second = np.arange(2 * keys) % 2
    rank = (replica + epoch + second) % ranks
    order = np.lexsort((rank, replica))
    return RoutingTable(
        term=1,
        epoch=epoch,
        model="marker",
        weights_version="v1",
        num_layers=layers,
        num_experts=experts,
        replica_ptr=(2 * np.arange(keys + 1)).astype(np.int32),
        replica_rank=rank[order].astype(np.int32),
        replica_slot=(replica * 2 + second)[order].astype(np.int32),
        replica_tag=np.full(2 * keys, epoch, np.int64),
        ranks=tuple(
            RankAddress(rank=r, node=f"node{r}", address=f"inproc://{r}", incarnation=1)
            for r in range(ranks)
        ),
    )


@pytest.mark.asyncio
async def test_a_router_says_it_is_well_while_table_follows_table() -> None:
    """Tables of a model of 61 layers of 256 experts, in which every replica has moved."""
    layers, experts, ranks = 61, 256, 32
    spec = msgspec.structs.replace(marker_spec(), num_layers=layers, num_experts=experts)
    world = FakeWorld(spec, ranks)
    core = RouterCore(router_settings(spec), world.open_channel)
    tables = [large_table(epoch, layers, experts, ranks) for epoch in range(1, 31)]
    core.install_table(tables[0])
    server = RouterServer(core)
    await server.start()
    async with asked(server.address, DISPATCH) as answers:
        for table in tables[1:]:
            core.install_table(table)
            await asyncio.sleep(PERIOD_S)
    told(f"{len(tables) - 1} tables of {2 * layers * experts} replicas", answers)
    assert core.role.applied_epoch == len(tables)
    await server.stop(grace_s=0.0)
