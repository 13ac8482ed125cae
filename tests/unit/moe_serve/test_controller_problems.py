"""What the controller says is wrong is so, and what it says will happen does."""

from __future__ import annotations

from pathlib import Path

import pytest

from placement.messages.events import DrainAsked
from tests.fakes.controller import controller, make_cluster, make_settings, until


@pytest.mark.asyncio
async def test_a_rank_lost_while_drained_is_said_to_wait_for_the_end_of_its_drain(
    tmp_path: Path,
) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        await rig.service.life.driver.ask(lambda n: DrainAsked(at_s=0.0, request_id=n, rank=1))
        await until(lambda: all(1 not in rig.listed(expert) for expert in range(4)))
        shard = cluster.shard(1)
        assert shard is not None
        cluster.die(shard.name)
        said = "rank 1 was lost while drained; undrain it for a new shard"
        await until(lambda: said in rig.service.describe()["problems"])
        assert cluster.shard(1) is None
        await rig.service.life.supervision.undrain(1)
        await until(lambda: cluster.shard(1) is not None)
        await until(lambda: not rig.service.describe()["problems"])
