"""What the controller does for its routers: whom they shall avoid, where they listen, how they
end. Over a fleet in memory."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from moe_serve.controller.journal_store import INPUTS_FILE
from moe_serve.controller.settings import ControllerSettings, SupervisionLimits
from moe_serve.ports import ShardReport
from placement.engine.state import RankStatus
from placement.messages.codec import decode_event
from placement.messages.events import RankJoined, RouterJoined
from tests.fakes.controller import controller, make_cluster, make_settings, until
from tests.fakes.fleet import FakeCluster, FakeFleet, FakeRouterPort, FakeShardPort


def the_router(cluster: FakeCluster) -> FakeRouterPort:
    router = cluster.router()
    assert router is not None
    return router


def patient(folder: Path, silence_s: float) -> ControllerSettings:
    """Settings of a controller that takes a silent shard for lost only after this long."""
    settings = make_settings(folder)
    return replace(
        settings, config=msgspec.structs.replace(settings.config, rank_silence_s=silence_s)
    )


@pytest.mark.asyncio
async def test_routers_are_told_whom_to_avoid_before_anybody_is_lost(tmp_path: Path) -> None:
    cluster = make_cluster()
    async with controller(patient(tmp_path, 30.0), cluster) as rig:
        await rig.ready()
        router, shard = the_router(cluster), cluster.shard(2)
        assert shard is not None
        epoch = rig.state.epoch
        shard.hang = True
        await until(lambda: router.told_suspects[-1:] == [(2,)], wait_s=3.0)
        assert cluster.shard(2) is shard, "suspect is not dead"
        assert rig.state.epoch == epoch, "no table was needed"
        shard.hang = False
        await until(lambda: router.told_suspects[-1:] == [()])


@pytest.mark.asyncio
@pytest.mark.parametrize("busy", [False, True])
async def test_with_the_limits_of_production_a_hung_shard_leaves_rotation_in_time(
    tmp_path: Path, busy: bool
) -> None:
    cluster = make_cluster()
    settings = replace(patient(tmp_path, 5.0), supervision=SupervisionLimits())
    async with controller(settings, cluster) as rig:
        await rig.ready()
        router, shard = the_router(cluster), cluster.shard(2)
        assert shard is not None
        shard.busy = busy
        await until(lambda: rig.service.life.parts.shards[2].busy is busy)
        began_s = asyncio.get_running_loop().time()
        shard.hang = True
        await until(lambda: (2,) in router.told_suspects)
        took_s = asyncio.get_running_loop().time() - began_s
        print(f"out of rotation after {took_s:.2f} s (bar: 5 s)")
        assert cluster.shard(2) is shard, "before it is replaced"
        assert rig.state.ranks[2].status is RankStatus.LIVE


@pytest.mark.asyncio
async def test_a_new_router_is_told_with_its_first_table(tmp_path: Path) -> None:
    cluster = make_cluster()
    async with controller(patient(tmp_path, 30.0), cluster) as rig:
        await rig.ready()
        shard, old = cluster.shard(1), the_router(cluster)
        assert shard is not None
        shard.hang = True
        await until(lambda: old.told_suspects[-1:] == [(1,)])
        cluster.die(old.name)
        await until(lambda: cluster.router() not in (None, old))
        await until(lambda: the_router(cluster).told_suspects == [(1,)])


@pytest.mark.asyncio
async def test_a_busy_shard_that_stands_still_is_not_excused_by_what_it_said_before(
    tmp_path: Path,
) -> None:
    cluster = make_cluster()
    async with controller(patient(tmp_path, 30.0), cluster) as rig:
        await rig.ready()
        router, shard = the_router(cluster), cluster.shard(0)
        assert shard is not None
        shard.busy = True
        await until(lambda: rig.service.life.parts.shards[0].busy)
        shard.hang = True  # paused: neither probes nor reports
        await until(lambda: router.told_suspects[-1:] == [(0,)], wait_s=3.0)


@pytest.mark.asyncio
async def test_a_shard_that_says_that_computing_hangs_is_avoided_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster()
    settings = make_settings(tmp_path)
    rare = replace(settings.supervision, probe_s=3600.0)  # its word must be enough
    async with controller(replace(settings, supervision=rare), cluster) as rig:
        await rig.ready()
        router, plain = the_router(cluster), FakeShardPort.report

        async def report(port: FakeShardPort, acked_seq: int) -> ShardReport:
            found = await plain(port, acked_seq)
            return replace(found, stalled_s=4.0) if port.rank == 1 else found

        monkeypatch.setattr(FakeShardPort, "report", report)
        await until(lambda: (1,) in router.told_suspects, wait_s=3.0)
        why = [r.record.detail for r in rig.service.book.newest(1000)]
        assert any("computed for 4.0 s" in text for text in why)


@pytest.mark.asyncio
async def test_a_router_that_is_created_anew_listens_where_the_last_one_did(
    tmp_path: Path,
) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path, num_routers=2), cluster) as rig:
        await rig.ready()
        addresses = rig.service.describe()["router_addresses"]
        assert len(set(addresses)) == 2
        old = the_router(cluster)
        cluster.die(old.name)
        await until(lambda: cluster.router() not in (None, old))
        await rig.ready()
        assert rig.service.describe()["router_addresses"] == addresses
        await rig.service.down()
    async with controller(make_settings(tmp_path, num_routers=2), cluster) as rig:
        await rig.ready()  # another controller, and nothing is left but the journal
        assert rig.service.describe()["router_addresses"] == addresses


@pytest.mark.asyncio
async def test_a_port_that_is_taken_meanwhile_is_given_up(tmp_path: Path) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        old = the_router(cluster)
        cluster.die(old.name)
        other = await FakeFleet(cluster).create_router("other:router:x:1", "x", 1, old.port)
        assert other.port == old.port
        await until(lambda: cluster.router() not in (None, old))
        await rig.ready()
        assert the_router(cluster).port != old.port
        await until(
            lambda: (
                rig.service.describe()["router_addresses"]
                == [f"127.0.0.1:{the_router(cluster).port}"]
            )
        )


@pytest.mark.asyncio
async def test_down_lets_routers_end_their_calls_while_every_shard_still_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster()
    lived: list[list[str]] = []
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        router, all_of_them = the_router(cluster), cluster.living()
        plain = FakeRouterPort.stop

        async def stop(port: FakeRouterPort, grace_s: float) -> None:
            await asyncio.sleep(0.05)  # calls that are open
            lived.append(cluster.living())
            await plain(port, grace_s)

        monkeypatch.setattr(FakeRouterPort, "stop", stop)
        await rig.service.down(grace_s=2.5)
        assert router.stopped_s == 2.5
        assert lived == [all_of_them]
        assert cluster.living() == []


@pytest.mark.asyncio
async def test_a_router_that_hangs_does_not_keep_down_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_serve.controller.creation.DRAIN_SLACK_S", 0.1)
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        the_router(cluster).hang = True
        async with asyncio.timeout(5.0):
            await rig.service.down(grace_s=0.1)
        assert cluster.living() == []


@pytest.mark.asyncio
async def test_a_router_that_must_not_live_on_is_drained_first(tmp_path: Path) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
    stranger = await FakeFleet(cluster).create_router("tiny:router:router-0:9", "router-0", 9)
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        await until(lambda: cluster.killed == [stranger.name])
        assert stranger.stopped_s is not None


@pytest.mark.asyncio
async def test_after_a_restart_routers_are_known_before_any_shard(tmp_path: Path) -> None:
    """A removal goes on once its shard is heard of: it must find whom to wait for."""
    cluster = make_cluster()
    settings = make_settings(tmp_path)
    for _ in range(2):
        async with controller(settings, cluster) as rig:
            await rig.ready()
    with closing(sqlite3.connect(tmp_path / INPUTS_FILE)) as inputs:
        (newest,) = inputs.execute("SELECT max(segment) FROM inputs").fetchone()
        rows = inputs.execute(
            "SELECT body FROM inputs WHERE kind = 'event' AND segment = ? ORDER BY seq", (newest,)
        ).fetchall()
    kinds = [type(decode_event(row[0])) for row in rows]
    assert kinds.index(RouterJoined) < kinds.index(RankJoined)
