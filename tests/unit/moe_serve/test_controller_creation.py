"""Creating parts and ending earlier lives: whose, in which order, and what the journal says
meanwhile. Over a fleet in memory."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from moe_serve.controller.clock import DriverClock
from moe_serve.controller.creation import PartCreator
from moe_serve.controller.journal import open_journal
from moe_serve.controller.journal_rows import Row, RowKind, image_of, part_row
from moe_serve.controller.journal_store import STATE_FILE
from moe_serve.controller.parts import AnyPart, PartTable
from moe_serve.controller.settings import JournalLimits, SupervisionLimits
from moe_serve.controller.tasks import Tasks
from moe_serve.errors import StaleTerm
from moe_serve.ports import FILE_PLACE, NodeInfo, RankPlace
from placement.messages.events import AnyEvent, RankJoined, RouterJoined
from tests.builders import PROFILE, make_spec
from tests.fakes.controller import controller, make_cluster, make_settings, until
from tests.fakes.fleet import FakeCluster, FakeFleet, FakeShardPort


class JournalWatched(FakeFleet):
    """Notes what the journal names as parts are created and ended."""

    def __init__(self, cluster: FakeCluster, folder: Path) -> None:
        super().__init__(cluster)
        self._folder = folder
        self.unnamed: list[str] = []
        """Parts that the journal did not name as they were created, or ended."""

    def _look(self, name: str) -> None:
        with closing(sqlite3.connect(self._folder / STATE_FILE)) as log:
            rows = log.execute("SELECT kind, at_s, body FROM log ORDER BY seq").fetchall()
        image = image_of([Row(RowKind(k), at, b) for k, at, b in rows], {}, 0.0, dropped_tail=False)
        if name not in image.parts:
            self.unnamed.append(name)

    async def create_shard(
        self, name: str, rank: int, incarnation: int, place: RankPlace = FILE_PLACE
    ) -> FakeShardPort:
        self._look(name)
        return await super().create_shard(name, rank, incarnation, place)

    async def kill(self, name: str) -> None:
        self._look(name)
        await super().kill(name)


class Creating:
    """A creator alone. `told`: events it posted, and kinds of parts it handed over, in order."""

    def __init__(self, folder: Path, *names: str) -> None:
        nodes = [NodeInfo("node0", True, {})]
        self.cluster = FakeCluster(make_spec(), PROFILE.name, [4, 4], nodes)
        self.fleet = JournalWatched(self.cluster, folder)
        self.parts = PartTable(names=dict.fromkeys(names))
        self.tasks = Tasks()
        self.told: list[object] = []

    async def post(self, event: AnyEvent) -> None:
        await asyncio.sleep(0)  # the driver's queue may be full: whoever posts waits
        self.told.append(type(event))

    def welcome(self, part: AnyPart) -> None:
        self.told.append(part.name.kind.value)

    def farewell(self, part: AnyPart) -> None:
        self.told.append(f"no {part.name}")

    def fenced(self, error: StaleTerm) -> None:
        raise AssertionError(error)


@asynccontextmanager
async def creating(folder: Path, *names: str) -> AsyncIterator[tuple[Creating, PartCreator]]:
    """`names`: parts that the journal names."""
    rig = Creating(folder, *names)
    journal, _ = await open_journal(folder, "tiny", JournalLimits())
    await journal.commit([part_row(name, 1.0) for name in names])
    creator = PartCreator(
        "tiny",
        rig.fleet,
        term=1,
        journal=journal,
        clock=DriverClock(0.0),
        parts=rig.parts,
        host=rig,
        tasks=rig.tasks,
        limits=SupervisionLimits(create_attempt_pause_s=0.01),
        post=rig.post,
        fenced=rig.fenced,
        routers=("router-0", "router-1"),
        router_ports={},
        rank_place=lambda _rank: FILE_PLACE,
    )
    try:
        yield rig, creator
    finally:
        await rig.tasks.stop()
        await journal.close()


@pytest.mark.asyncio
async def test_a_place_whose_name_begins_as_anothers_is_left_alone(tmp_path: Path) -> None:
    mine = {"tiny:shard:1:5", "tiny:router:router-1:6"}
    theirs = {"tiny:shard:11:7", "tiny:router:router-10:8"}
    async with creating(tmp_path, *mine, *theirs) as (rig, creator):
        creator.replace_shard(1, -1)
        creator.replace_router("router-1")
        await until(lambda: {"shard", "router"} <= set(rig.told))
        assert set(rig.cluster.killed) == mine
        assert theirs < rig.parts.names.keys()
        creator._rank_place = lambda _rank: None
        creator.end_shard(1)
        await until(lambda: len(rig.cluster.killed) == 3)
        assert "tiny:shard:11:7" in rig.parts.names


@pytest.mark.asyncio
async def test_the_engine_knows_of_a_part_before_anything_is_sent_to_it(tmp_path: Path) -> None:
    """A router that has a table and is in no acknowledging set is waited for by nobody."""
    async with creating(tmp_path) as (rig, creator):
        creator.replace_router("router-1")
        await until(lambda: "router" in rig.told)
        creator.replace_shard(1, -1)
        await until(lambda: "shard" in rig.told)
        assert rig.told == [RouterJoined, "router", RankJoined, "shard"]


@pytest.mark.asyncio
async def test_the_journal_names_a_part_before_it_exists_and_until_it_has_ended(
    tmp_path: Path,
) -> None:
    old = "tiny:shard:1:5"
    async with creating(tmp_path, old) as (rig, creator):
        rig.cluster.deaf_kills = 1  # the cluster's head is away, the first time it is asked
        creator.replace_shard(1, -1)
        await until(lambda: "shard" in rig.told)
        assert rig.cluster.killed == [old], "before its next life is made"
        assert rig.fleet.unnamed == []
        assert old not in rig.parts.names


@pytest.mark.asyncio
async def test_a_shard_that_is_newer_than_the_one_to_be_replaced_stays(tmp_path: Path) -> None:
    async with creating(tmp_path) as (rig, creator):
        creator.replace_shard(1, -1)
        await until(lambda: "shard" in rig.told)
        part = rig.parts.shards[1]
        creator.replace_shard(1, part.name.incarnation - 1)  # asked for again
        assert rig.parts.holds(part)
        creator.replace_shard(1, part.name.incarnation)
        assert not rig.parts.holds(part)
        await until(lambda: 1 in rig.parts.shards)
        assert rig.cluster.killed == [str(part.name)]


@pytest.mark.asyncio
async def test_a_router_that_is_not_to_be_ends_and_no_other_takes_its_place(tmp_path: Path) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path, num_routers=2), cluster) as rig:
        await rig.ready()
    surplus = next(name for name in cluster.living() if ":router-1:" in name)
    async with controller(make_settings(tmp_path, num_routers=1), cluster) as rig:
        await rig.ready()
        await until(lambda: surplus in cluster.killed)
        await until(lambda: surplus not in rig.service.life.parts.names)
        assert not [name for name in cluster.living() if ":router-1:" in name]
        assert list(rig.state.routers) == ["router-0"]


@pytest.mark.asyncio
async def test_a_surplus_router_that_outlived_its_end_is_ended_by_the_next_controller(
    tmp_path: Path,
) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path, num_routers=2), cluster) as rig:
        await rig.ready()
    surplus = next(name for name in cluster.living() if ":router-1:" in name)
    for deaf in (10**6, 0):
        cluster.deaf_kills = deaf
        async with controller(make_settings(tmp_path, num_routers=1), cluster) as rig:
            await rig.ready()
            await until(lambda: "router-1" not in rig.state.routers)
            if not deaf:
                await until(lambda: surplus not in cluster.living())
