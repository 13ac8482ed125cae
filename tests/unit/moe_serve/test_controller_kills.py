"""A controller that is killed at any edge of a move, before and after its journal write: the next
one goes on, no expert is lost and no slot is leaked. Over a fleet in memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from placement.messages.events import BudgetAsked
from tests.fakes.controller import (
    controller,
    crashed,
    leaving,
    make_cluster,
    make_settings,
    shards,
    until,
)

POINTS = [
    f"{when}:{step}"
    for when in ("before", "after")
    for step in (
        "add:reserved",
        "add:copying",
        "add:verified",
        "add:listed",
        "remove:unlisted",
        "remove:acked",
        "remove:drained",
        "remove:released",
        "publish",
    )
]


RUNS = [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 20))]
"""Each point once; the rest of twenty only where there is time."""


@pytest.mark.asyncio
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("point", POINTS)
async def test_a_controller_that_dies_anywhere_is_followed_by_one_that_goes_on(
    tmp_path: Path, point: str, run: int
) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
    before = cluster.living()
    # The second controller dies at the point: while it replicates, and evicts for a budget.
    armed = make_settings(tmp_path, fail_points=("", point))
    async with controller(armed, cluster) as rig:
        await until(lambda: rig.state.published and rig.state.run is None)
        await rig.ready()
        cluster.demand = {0: 400, 1: 10, 2: 10, 3: 10}
        if "remove" in point:
            await until(lambda: len(rig.listed(0)) >= 2)
            rank = min(rig.listed(0))
            asking = asyncio.ensure_future(
                rig.service.life.driver.ask(
                    lambda n: BudgetAsked(at_s=0.0, request_id=n, rank=rank, budget_bytes=1000)
                )
            )
            await crashed(rig)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        else:
            await crashed(rig)
    async with controller(make_settings(tmp_path), cluster) as rig:
        assert cluster.living() == before, "the same parts serve on"
        await rig.ready()
        await until(lambda: rig.state.run is None and not rig.state.parked)
        assert rig.state.term == 3
        cluster.demand = {3: 400, 0: 10, 1: 10, 2: 10}
        await until(lambda: len(rig.listed(3)) >= 2)
        assert not [n for n in cluster.killed if n in before]
        resident = [
            (r.layer, r.expert, shard.rank)
            for shard in shards(cluster)
            for r in shard.slots.ledger.resident()
            if r.verified
        ]
        assert len(resident) == len(set(resident)), "nothing is held twice"
    cluster.demand = {}


@pytest.mark.asyncio
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_controller_that_dies_aborting_a_copy_gives_the_slot_back(
    tmp_path: Path, when: str, run: int
) -> None:
    cluster = make_cluster()
    armed = make_settings(tmp_path, fail_points=(f"{when}:add:aborting",))
    async with controller(armed, cluster) as rig:
        await rig.ready()
        cluster.copy_s = 0.3
        cluster.demand = {0: 400, 1: 10, 2: 10, 3: 10}
        await until(lambda: bool(rig.state.copying))
        rank = rig.state.run.steps[min(rig.state.copying)].step.slot.rank
        asking = asyncio.ensure_future(
            rig.service.life.driver.ask(
                lambda n: BudgetAsked(
                    at_s=0.0, request_id=n, rank=(rank + 1) % 3, budget_bytes=3000
                )
            )
        )
        await crashed(rig)
        await asyncio.gather(asking, return_exceptions=True)
    cluster.copy_s, cluster.demand = 0.0, {}
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        await until(lambda: rig.state.run is None and not rig.state.copying)
        await until(lambda: all(s.slots.ledger.reserved_bytes == 0 for s in shards(cluster)))


@pytest.mark.asyncio
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_controller_that_dies_taking_a_removal_back_loses_no_expert(
    tmp_path: Path, when: str, run: int
) -> None:
    cluster = make_cluster()
    armed = make_settings(tmp_path, fail_points=(f"{when}:remove:listed",))
    async with controller(armed, cluster) as rig:
        await rig.ready()
        cluster.demand = {0: 400, 1: 10, 2: 10, 3: 10}
        await until(lambda: len(rig.listed(0)) >= 2 and rig.state.run is None)
        cluster.demand = {}
        router = cluster.router()
        assert router is not None
        router.held = True
        rank = min(rig.listed(0))
        asking = asyncio.ensure_future(
            rig.service.life.driver.ask(
                lambda n: BudgetAsked(at_s=0.0, request_id=n, rank=rank, budget_bytes=1000)
            )
        )
        await until(lambda: bool(rig.state.removing) and 0 in leaving(rig))
        for shard in shards(cluster):
            if shard.rank != rank and shard.rank in rig.listed(0):
                cluster.die(shard.name)
        await crashed(rig)
        await asyncio.gather(asking, return_exceptions=True)
        router.held = False
    keeper = cluster.shard(rank)
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        assert cluster.shard(rank) is keeper, "the last holder lives on"
        await until(lambda: all(rig.listed(expert) for expert in range(4)))
