"""Ports and roll-outs: a second server on a used port takes calls away, a page that cannot be
served takes others with it, and a new life that does not start makes the old ones count as gone."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc
import pytest

from moe_serve.controller.views import placement_view
from moe_serve.dashboard.server import DashboardServer
from moe_serve.dashboard.settings import DashboardSettings
from moe_serve.errors import StartRefused
from moe_serve.router.dispatch import RouterCore
from moe_serve.router.service import RouterServer
from moe_serve.rpc import codec, dispatch_pb2_grpc
from moe_serve.rpc.options import channel_options
from tests.fake_shards import FakeWorld, marker_spec, router_settings
from tests.fakes.controller import controller, make_cluster, make_settings, until
from tests.loopback.test_router_service import a_rig, arrays, check

pytestmark = pytest.mark.loopback


async def ask(address: str, times: int) -> None:
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        stub = dispatch_pb2_grpc.DispatchServiceStub(channel)
        for seed in range(times):
            made = arrays(seed=seed)
            check(made, await stub.Forward(codec.forward_request(made), timeout=10))


@pytest.mark.asyncio
async def test_a_second_router_on_a_used_port_is_refused_and_gets_no_call() -> None:
    async with a_rig() as rig:
        port = int(rig.server.address.rpartition(":")[2])
        world = FakeWorld(marker_spec())
        world.place()
        second = RouterCore(router_settings(world.spec, port=port), world.open_channel)
        second.install_table(world.table())
        began_s = time.monotonic()
        with pytest.raises(StartRefused, match=f"127.0.0.1:{port}"):
            await RouterServer(second).start()
        print(f"refused after {time.monotonic() - began_s:.2f} s (bar 5 s)")
        for _ in range(5):
            await ask(rig.server.address, 4)  # a new connection each
        assert rig.core.report(-1).counters["requests"] == 20
        assert not any(shard.calls for shard in world.shards)
        await second.stop()


@pytest.mark.asyncio
async def test_a_page_that_cannot_be_served_or_ends_touches_no_call() -> None:
    """Its port is taken: one line says so, and calls go on. It runs and is ended while calls run:
    they go on too."""
    async with a_rig() as rig:
        taken = int(rig.server.address.rpartition(":")[2])
        nobody = "127.0.0.1:1"
        with pytest.raises(StartRefused, match=str(taken)) as refused:
            await DashboardServer(DashboardSettings(admin_address=nobody, port=taken)).start()
        assert "\n" not in refused.value.message
        await ask(rig.server.address, 3)
        page = DashboardServer(DashboardSettings(admin_address=nobody))
        await page.start()
        running = asyncio.create_task(ask(rig.server.address, 50))
        await asyncio.sleep(0.01)
        await page.stop()
        await running
        assert rig.core.report(-1).counters["failed"] == 0


@pytest.mark.asyncio
async def test_a_new_life_that_refuses_to_start_leaves_the_others_serving(tmp_path: Path) -> None:
    """A shard and a router are to be replaced by what fails its own start check, again and again:
    what runs serves on, the tables keep every expert, and people are told which part it is."""
    cluster = make_cluster()
    async with controller(make_settings(tmp_path, num_routers=2), cluster) as rig:
        await rig.ready()
        old = cluster.shard(1)
        router = cluster.router("router-1")
        assert old is not None
        assert router is not None
        cluster.refuse = {"1": "weights do not verify", "router-1": "its port is taken"}
        cluster.refuse_always = {"1", "router-1"}
        for part in (old, router):
            cluster.die(part.name)

        def problems() -> str:
            return " ".join(placement_view(rig.service.sight()).problems)

        await until(lambda: "weights do not verify" in problems())
        await until(lambda: "its port is taken" in problems())
        await until(lambda: all(rig.listed(expert) - {1} for expert in range(4)))
        # The others are where they were, and have a table that holds every expert.
        kept = [cluster.shard(0), cluster.shard(2), cluster.router("router-0")]
        assert all(part is not None and part.alive for part in kept)
        first = cluster.router("router-0")
        assert first is not None
        await until(lambda: first.table is not None and not first.table.missing())
        await until(lambda: "does not start" in rig.service.describe()["refused"])
        cluster.refuse_always.clear()
        await until(lambda: cluster.shard(1) is not None)
        await until(lambda: cluster.router("router-1") is not None)
        await rig.ready()
