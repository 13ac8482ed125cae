"""Ranks that are added, removed and replaced, routers replaced, over a fleet in memory."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_serve.controller.admin_checks import check_node
from moe_serve.controller.admin_fleet import FleetAdmin
from moe_serve.controller.service import ControllerService
from moe_serve.controller.settings import ControllerSettings, RankKind
from moe_serve.controller.views import placement_view
from moe_serve.errors import FailedPrecondition, InvalidArgument, Unavailable
from moe_serve.ports import FILE_PLACE, NodeInfo, RankPlace
from moe_serve.rpc import placement_pb2 as pb
from tests.builders import PROFILE
from tests.fakes.controller import (
    SLOTS,
    Rig,
    controller,
    make_cluster,
    make_settings,
    until,
)
from tests.fakes.fleet import FakeCluster, FakeFleet, FakeRouterPort, FakeShardPort

GROUP_SLOTS = (4, 6)


def settings_of(folder: Path, **fields: object) -> ControllerSettings:
    groups = tuple(RankKind(profile=PROFILE.name, num_slots=n) for n in GROUP_SLOTS)
    return make_settings(folder, groups=groups, **fields)


def cluster_of() -> FakeCluster:
    cluster = make_cluster()
    cluster.group_slots = GROUP_SLOTS
    return cluster


def admin_of(rig: Rig) -> FleetAdmin:
    return FleetAdmin(rig.service)


def status(rig: Rig, rank: int) -> str:
    return str(rig.state.ranks[rank].status)


async def remove(rig: Rig, rank: int) -> None:
    await admin_of(rig).remove_rank(pb.RemoveRankRequest(rank=rank))
    await until(lambda: status(rig, rank) == "removed")
    await until(lambda: rig.cluster.shard(rank) is None)


async def add(rig: Rig, **fields: Any) -> int:
    added = await admin_of(rig).add_rank(pb.AddRankRequest(**fields))
    await until(lambda: status(rig, added.rank) == "live")
    return int(added.rank)


# -- leaving and joining -------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_removed_ranks_shard_is_ended_and_stays_so_over_restarts(tmp_path: Path) -> None:
    cluster = cluster_of()
    async with controller(settings_of(tmp_path), cluster) as rig:
        await rig.ready()
        await remove(rig, 1)
        assert rig.service.describe()["ready"]
        assert placement_view(rig.service.sight()).ranks[1].state == "removed"
        created = len(cluster.created)
    async with controller(settings_of(tmp_path), cluster) as rig:
        await rig.ready()
        assert status(rig, 1) == "removed"
        await until(lambda: rig.service.book.window is not None)
        assert len(cluster.created) == created
        assert not placement_view(rig.service.sight()).problems


@pytest.mark.asyncio
async def test_a_controller_that_died_before_it_ended_the_shard_ends_it_when_it_is_back(
    tmp_path: Path,
) -> None:
    cluster = cluster_of()
    async with controller(settings_of(tmp_path), cluster) as rig:
        await rig.ready()
        cluster.deaf_kills = 1 << 30
        await admin_of(rig).remove_rank(pb.RemoveRankRequest(rank=1))
        # That its end was tried also says that its leaving is in the journal.
        await until(lambda: any("must not live on" in problem for problem in _problems(rig)))
        assert status(rig, 1) == "removed"
        assert cluster.shard(1) is not None
    cluster.deaf_kills = 0
    async with controller(settings_of(tmp_path), cluster) as rig:
        await rig.ready()
        await until(lambda: cluster.shard(1) is None)
        assert sorted(rig.service.life.parts.shards) == [0, 2]


@pytest.mark.asyncio
async def test_an_added_rank_joins_under_load_is_used_and_is_known_after_a_restart(
    tmp_path: Path,
) -> None:
    cluster = cluster_of()
    async with controller(settings_of(tmp_path), cluster) as rig:
        await rig.ready()
        assert await add(rig, group=1, node="node2") == 3
        shard = cluster.shard(3)
        assert shard is not None
        assert (shard.node, shard.slots.ledger.num_slots) == ("node2", 6)
        cluster.demand = {0: 4000, 1: 4000, 2: 4000, 3: 4000}
        await until(lambda: any(3 in rig.listed(e) for e in range(4)))
        await until(lambda: len(rig.service.book.window.rank_pairs) == 4)  # type: ignore[union-attr]
        name = shard.name
    async with controller(settings_of(tmp_path), cluster) as rig:
        await rig.ready()
        assert status(rig, 3) == "live"
        assert str(rig.service.life.parts.shards[3].name) == name, "it was adopted"
        cluster.die(name)
        await until(lambda: (found := cluster.shard(3)) is not None and found.name != name)
        await until(lambda: status(rig, 3) == "live")
        again = cluster.shard(3)
        assert again is not None
        assert (again.node, again.place.group) == ("node2", 1)


@pytest.mark.asyncio
async def test_a_service_that_was_ended_and_begins_anew_has_the_same_ranks(tmp_path: Path) -> None:
    cluster = cluster_of()
    async with controller(settings_of(tmp_path), cluster) as rig:
        await rig.ready()
        await add(rig, group=1)
        await remove(rig, 0)
        await rig.service.down(0.1)
    assert cluster.living() == []
    async with controller(settings_of(tmp_path), cluster) as rig:
        await rig.ready()
        await until(lambda: status(rig, 3) == "live")
        assert status(rig, 0) == "removed"
        assert cluster.shard(0) is None


@pytest.mark.asyncio
async def test_another_service_file_wins_over_what_was_added_and_says_so(tmp_path: Path) -> None:
    cluster = cluster_of()
    async with controller(settings_of(tmp_path), cluster) as rig:
        await rig.ready()
        await add(rig, group=1)
        await rig.service.down(0.1)
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        assert len(rig.state.ranks) == len(SLOTS)
        assert any("had been added or removed" in p for p in rig.service.describe()["problems"])


@pytest.mark.asyncio
async def test_without_a_journal_added_ranks_are_known_by_their_shards(tmp_path: Path) -> None:
    cluster = cluster_of()
    async with controller(settings_of(tmp_path / "one"), cluster) as rig:
        await rig.ready()
        await add(rig, group=0)
        await add(rig, group=1, node="node0")
        await remove(rig, 3)
    async with controller(settings_of(tmp_path / "two"), cluster) as rig:
        await rig.ready()
        assert [status(rig, r) for r in (3, 4)] == ["removed", "live"]
        assert (rig.state.ranks[4].group, rig.state.ranks[4].only_node) == (1, "node0")


@pytest.mark.asyncio
async def test_a_removed_rank_comes_back_with_a_higher_incarnation(tmp_path: Path) -> None:
    cluster = cluster_of()
    async with controller(settings_of(tmp_path), cluster) as rig:
        await rig.ready()
        first = rig.state.ranks[2].incarnation
        await remove(rig, 2)
        assert await add(rig, rank=2) == 2
        assert rig.state.ranks[2].incarnation > first
        await remove(rig, 2)
        assert await add(rig, group=0) == 3, "its number names no other place"


@pytest.mark.asyncio
async def test_a_rank_that_will_not_start_may_be_given_up(tmp_path: Path) -> None:
    cluster = cluster_of()
    cluster.refuse = {"3": "no such device"}
    cluster.refuse_always = {"3"}
    async with controller(settings_of(tmp_path), cluster) as rig:
        await rig.ready()
        await admin_of(rig).add_rank(pb.AddRankRequest(group=0))
        await until(lambda: any("rank 3 does not start" in p for p in _problems(rig)))
        await admin_of(rig).remove_rank(pb.RemoveRankRequest(rank=3))
        await until(lambda: status(rig, 3) == "removed")
        await until(lambda: not _problems(rig))
        cluster.refuse, tried = {}, len(cluster.created)
        await asyncio.sleep(0.3)
        assert len(cluster.created) == tried, "nobody tries to start it any more"


def _problems(rig: Rig) -> list[str]:
    return list(placement_view(rig.service.sight()).problems)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (pb.AddRankRequest(group=2), InvalidArgument, "group"),
        (pb.AddRankRequest(group=-1), InvalidArgument, "group"),
        (pb.AddRankRequest(rank=7), InvalidArgument, "must lie in"),
        (pb.AddRankRequest(rank=0, node="node1"), InvalidArgument, "comes back as it was"),
        (pb.AddRankRequest(rank=0), FailedPrecondition, "was not removed"),
        (pb.AddRankRequest(node="n" * 201), InvalidArgument, "201 characters"),
    ],
)
async def test_what_cannot_be_added_is_named(
    tmp_path: Path, request_: pb.AddRankRequest, error: type[Exception], words: str
) -> None:
    async with controller(settings_of(tmp_path), cluster_of()) as rig:
        await rig.ready()
        with pytest.raises(error, match=words):
            await admin_of(rig).add_rank(request_)
        assert len(rig.state.ranks) == len(SLOTS)


@pytest.mark.asyncio
async def test_a_node_that_does_not_exist_is_refused_with_those_that_do(tmp_path: Path) -> None:
    cluster = cluster_of()
    cluster.nodes.append(NodeInfo("zz", alive=False, labels={}))
    async with controller(settings_of(tmp_path), cluster) as rig:
        await rig.ready()
        with pytest.raises(InvalidArgument) as refused:
            await admin_of(rig).add_rank(pb.AddRankRequest(node="zz"))
        (violation,) = refused.value.violations
        assert violation.field == "node"
        assert violation.description == (
            "the cluster has no alive node 'zz'; leave it out, or name one of node0, node1, node2"
        )
        assert len(rig.state.ranks) == len(SLOTS)
        assert await add(rig, node="node2") == 3


def test_a_refusal_names_some_of_many_nodes() -> None:
    nodes = [NodeInfo(f"n{number:02}", True, {}) for number in range(12)]
    with pytest.raises(InvalidArgument, match=r"one of n00, .*n07 and 4 more$"):
        check_node("zz", nodes)


class HeadAway(FakeFleet):
    """No answer about nodes: `hangs`, or a typed error at once."""

    def __init__(self, cluster: FakeCluster, hangs: bool) -> None:
        super().__init__(cluster)
        self.hangs = hangs

    async def nodes(self) -> tuple[NodeInfo, ...]:
        if self.hangs:
            await asyncio.Event().wait()
        raise Unavailable("Ray gives no answer: RaySystemError")


@pytest.mark.asyncio
@pytest.mark.parametrize("hangs", [False, True])
async def test_a_node_is_taken_on_trust_while_the_cluster_gives_no_answer(
    tmp_path: Path, hangs: bool
) -> None:
    cluster = cluster_of()
    fleet = HeadAway(cluster, hangs)
    async with controller(settings_of(tmp_path), cluster, fleet=fleet) as rig:
        await rig.ready()
        assert await add(rig, node="node2") == 3
        added = await admin_of(rig).add_rank(pb.AddRankRequest(node="zz"))
        assert rig.state.ranks[added.rank].only_node == "zz"


@pytest.mark.asyncio
async def test_a_request_asked_again_is_answered_though_its_node_has_died(tmp_path: Path) -> None:
    cluster = cluster_of()
    async with controller(settings_of(tmp_path), cluster) as rig:
        await rig.ready()
        request = pb.AddRankRequest(node="node2", key="mine")
        first = await admin_of(rig).add_rank(request)
        cluster.nodes[2] = replace(cluster.nodes[2], alive=False)
        assert (await admin_of(rig).add_rank(request)).rank == first.rank


@pytest.mark.asyncio
async def test_numbers_that_do_not_exist_come_with_the_next_step(tmp_path: Path) -> None:
    async with controller(settings_of(tmp_path), cluster_of()) as rig:
        await rig.ready()
        with pytest.raises(InvalidArgument, match=r"^rank: 9 .*; see `moe-serve status`$"):
            await admin_of(rig).remove_rank(pb.RemoveRankRequest(rank=9))
        with pytest.raises(InvalidArgument, match=r"^group: 2 .* fleet\.ranks .*status`"):
            await admin_of(rig).add_rank(pb.AddRankRequest(group=2))


@pytest.mark.asyncio
async def test_a_service_without_groups_takes_no_ranks(tmp_path: Path) -> None:
    async with controller(make_settings(tmp_path), make_cluster()) as rig:
        await rig.ready()
        with pytest.raises(FailedPrecondition, match="without groups"):
            await admin_of(rig).add_rank(pb.AddRankRequest())
        with pytest.raises(InvalidArgument, match="must lie in"):
            await admin_of(rig).remove_rank(pb.RemoveRankRequest(rank=3))


# -- ranks that leave while their shard is being made ---------------------------------------------


class SlowFleet(FakeFleet):
    """Shards come to life only when `go` is set; their makers wait for it, or give up first."""

    def __init__(self, cluster: FakeCluster) -> None:
        super().__init__(cluster)
        self.go = asyncio.Event()
        self.go.set()
        self.begun: list[str] = []
        self.gives_up = False
        self.may_kill = asyncio.Event()
        self.may_kill.set()
        self.kills: list[str] = []
        self._late: set[asyncio.Task[object]] = set()

    async def create_shard(
        self, name: str, rank: int, incarnation: int, place: RankPlace = FILE_PLACE
    ) -> FakeShardPort:
        self.begun.append(name)

        async def later() -> FakeShardPort:
            await self.go.wait()
            return await FakeFleet.create_shard(self, name, rank, incarnation, place)

        work = asyncio.ensure_future(later())
        self._late.add(work)
        if self.gives_up:
            self.gives_up = False
            raise Unavailable("Ray gives no answer: RaySystemError")
        return await work

    async def kill(self, name: str) -> None:
        self.kills.append(name)
        await self.may_kill.wait()
        await FakeFleet.kill(self, name)


def lives(cluster: FakeCluster, rank: int) -> list[str]:
    return [name for name in cluster.living() if name.startswith(f"tiny:shard:{rank}:")]


@pytest.mark.asyncio
async def test_a_shard_that_comes_to_life_after_its_rank_left_is_ended(tmp_path: Path) -> None:
    cluster = cluster_of()
    fleet = SlowFleet(cluster)
    async with controller(settings_of(tmp_path), cluster, fleet=fleet) as rig:
        await rig.ready()
        fleet.go.clear()
        await admin_of(rig).add_rank(pb.AddRankRequest(group=0))
        await until(lambda: len(fleet.begun) == 4)
        await admin_of(rig).remove_rank(pb.RemoveRankRequest(rank=3))
        # What was asked to end is ended, as far as anybody can tell: it does not live yet.
        await until(lambda: fleet.begun[-1] in cluster.killed)
        fleet.go.set()
        await until(lambda: fleet.begun[-1] in cluster.created)
        await until(lambda: not lives(cluster, 3))
        assert not [name for name in rig.service.life.parts.names if ":shard:3:" in name]


@pytest.mark.asyncio
async def test_a_rank_added_again_while_its_given_up_shard_is_made_gets_one_of_its_own(
    tmp_path: Path,
) -> None:
    cluster = cluster_of()
    fleet = SlowFleet(cluster)
    async with controller(settings_of(tmp_path), cluster, fleet=fleet) as rig:
        await rig.ready()
        fleet.go.clear()
        await admin_of(rig).add_rank(pb.AddRankRequest(group=0))
        await until(lambda: len(fleet.begun) == 4)
        await admin_of(rig).remove_rank(pb.RemoveRankRequest(rank=3))
        await until(lambda: fleet.begun[3] in cluster.killed)
        await admin_of(rig).add_rank(pb.AddRankRequest(rank=3))
        fleet.go.set()
        await until(lambda: status(rig, 3) == "live")
        name = str(rig.service.life.parts.shards[3].name)
        assert name in rig.service.life.parts.names, "a restarted controller must know it"
        assert lives(cluster, 3) == [name]
    async with controller(settings_of(tmp_path), cluster) as rig:
        await rig.ready()
        assert lives(cluster, 3) == [name], "it was adopted"


@pytest.mark.asyncio
async def test_a_rank_added_again_while_the_late_shard_is_ended_gets_one(tmp_path: Path) -> None:
    cluster = cluster_of()
    fleet = SlowFleet(cluster)
    async with controller(settings_of(tmp_path), cluster, fleet=fleet) as rig:
        await rig.ready()
        fleet.go.clear()
        await admin_of(rig).add_rank(pb.AddRankRequest(group=0))
        await until(lambda: len(fleet.begun) == 4)
        fleet.may_kill.clear()
        await admin_of(rig).remove_rank(pb.RemoveRankRequest(rank=3))
        await until(lambda: len(fleet.kills) == 1)
        fleet.go.set()
        await until(lambda: len(fleet.kills) == 2)  # by whoever asked, and by its maker
        await admin_of(rig).add_rank(pb.AddRankRequest(rank=3))
        fleet.may_kill.set()
        await until(lambda: status(rig, 3) == "live")
        await until(lambda: lives(cluster, 3) == [str(rig.service.life.parts.shards[3].name)])


@pytest.mark.asyncio
async def test_a_part_that_comes_to_life_after_its_creator_gave_up_is_ended(tmp_path: Path) -> None:
    cluster = cluster_of()
    fleet = SlowFleet(cluster)
    settings = settings_of(tmp_path)
    quick = replace(settings.supervision, strangers_s=0.05)
    async with controller(replace(settings, supervision=quick), cluster, fleet=fleet) as rig:
        await rig.ready()
        fleet.go.clear()
        fleet.gives_up = True
        await admin_of(rig).add_rank(pb.AddRankRequest(group=0))
        await until(lambda: len(fleet.begun) == 5)
        late, made = fleet.begun[3:]
        assert late in cluster.killed, "its next life may be made only then"
        fleet.go.set()
        await until(lambda: late in cluster.created and made in cluster.created)
        await until(lambda: lives(cluster, 3) == [made])
        assert status(rig, 3) == "live"


@pytest.mark.asyncio
async def test_parts_of_others_and_of_newer_controllers_are_not_ended(tmp_path: Path) -> None:
    cluster = cluster_of()
    settings = settings_of(tmp_path)
    quick = replace(settings.supervision, strangers_s=0.05)
    async with controller(replace(settings, supervision=quick), cluster) as rig:
        await rig.ready()
        theirs = [f"tiny:shard:7:{2_000_001}", "tiny:shard:7:900001", "tiny:dashboard"]
        for name in theirs:
            cluster.parts[name] = FakeShardPort(cluster, name, 0, 1, "node0")
        mine = f"tiny:shard:7:{1_000_900}"
        cluster.parts[mine] = FakeShardPort(cluster, mine, 0, 1, "node0")
        await until(lambda: mine not in cluster.living())
        assert set(theirs) <= set(cluster.living())
        for name in theirs:
            del cluster.parts[name]


@pytest.mark.asyncio
async def test_a_controller_whose_parts_are_anothers_by_now_ends_none_of_them(
    tmp_path: Path,
) -> None:
    cluster = cluster_of()
    settings = settings_of(tmp_path)
    quick = replace(settings.supervision, strangers_s=0.05)
    async with controller(replace(settings, supervision=quick), cluster) as rig:
        await rig.ready()
        first = rig.service.life
        cluster.terms.add(7)
        await until(lambda: rig.service.life is not first)
        assert rig.service.life.term > 7


@pytest.mark.asyncio
async def test_a_removed_ranks_shard_that_does_not_answer_is_ended_all_the_same(
    tmp_path: Path,
) -> None:
    cluster = cluster_of()
    async with controller(settings_of(tmp_path), cluster) as rig:
        await rig.ready()
        cluster.deaf_kills = 1 << 30
        await admin_of(rig).remove_rank(pb.RemoveRankRequest(rank=1))
        await until(lambda: any("must not live on" in problem for problem in _problems(rig)))
        shard = cluster.shard(1)
        assert shard is not None
    cluster.deaf_kills = 0
    shard.hang = True
    async with controller(settings_of(tmp_path), cluster) as rig:
        await until(lambda: shard.name not in cluster.living())


# -- replacing -----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_replaced_shard_holds_its_share_again(tmp_path: Path) -> None:
    cluster = cluster_of()
    async with controller(settings_of(tmp_path), cluster) as rig:
        await rig.ready()
        old = cluster.shard(1)
        assert old is not None
        held = {e for e in range(4) if 1 in rig.listed(e)}
        assert held
        request = pb.ReplaceRankRequest(rank=1, incarnation=old.incarnation)
        await admin_of(rig).replace_rank(request)
        await until(lambda: (new := cluster.shard(1)) is not None and new is not old)
        await until(lambda: held <= {e for e in range(4) if 1 in rig.listed(e)})
        assert not old.slots.ledger.resident(), "it was empty when it was ended"
        created = len(cluster.created)
        await admin_of(rig).replace_rank(request)  # sent again: there is a newer one already
        await until(lambda: rig.state.run is None)
        assert len(cluster.created) == created


@pytest.mark.asyncio
async def test_a_replacement_goes_on_after_the_controller_died(tmp_path: Path) -> None:
    cluster = cluster_of()
    settings = settings_of(tmp_path)
    async with controller(settings, cluster) as rig:
        await rig.ready()
        old = cluster.shard(1)
        router = cluster.router()
        assert old is not None
        assert router is not None
        router.held = True  # the emptying lasts
        await admin_of(rig).replace_rank(pb.ReplaceRankRequest(rank=1))
    router.held = False
    async with controller(settings, cluster) as rig:
        await until(lambda: (new := cluster.shard(1)) is not None and new is not old)
        await until(lambda: status(rig, 1) == "live" and not rig.state.ranks[1].draining)


@pytest.mark.asyncio
async def test_a_router_is_drained_and_made_anew_on_its_port(tmp_path: Path) -> None:
    cluster = cluster_of()
    async with controller(settings_of(tmp_path, num_routers=2), cluster) as rig:
        await rig.ready()
        old, other = cluster.router("router-0"), cluster.router("router-1")
        assert old is not None
        assert other is not None
        await until(lambda: len(other.peers) == 2)
        told_before = len(other.told_peers)
        request = pb.ReplaceRouterRequest(router="router-0", incarnation=old.incarnation)
        said = await admin_of(rig).replace_router(request)
        assert "has ended its calls" in said.message
        assert old.stopped_s is not None
        assert old.stopped_s > 0
        await until(lambda: (new := cluster.router("router-0")) is not None and new is not old)
        await rig.ready()
        new = cluster.router("router-0")
        assert new is not None
        assert new.port == old.port
        told = [len(peers) for peers in other.told_peers[told_before:]]
        assert set(told) <= {2}, "the other router must not forget it meanwhile"
        said = await admin_of(rig).replace_router(request)
        assert "newer one already" in said.message
        assert cluster.router("router-0") is new


@pytest.mark.asyncio
async def test_the_only_router_is_replaced_only_where_a_gap_is_accepted(tmp_path: Path) -> None:
    cluster = cluster_of()
    async with controller(settings_of(tmp_path), cluster) as rig:
        await rig.ready()
        old = cluster.router()
        with pytest.raises(FailedPrecondition, match="no other router serves"):
            await admin_of(rig).replace_router(pb.ReplaceRouterRequest(router="router-0"))
        with pytest.raises(InvalidArgument, match="is none of router-0"):
            await admin_of(rig).replace_router(pb.ReplaceRouterRequest(router="router-7"))
        assert cluster.router() is old
        await admin_of(rig).replace_router(
            pb.ReplaceRouterRequest(router="router-0", accept_gap=True)
        )
        await until(lambda: cluster.router() not in (old, None))


async def a_replacement(rig: Rig) -> tuple[FakeRouterPort, asyncio.Future[Any]]:
    """router-0 is replaced, and its open calls do not end: it, and the request that waits."""
    old = rig.cluster.router("router-0")
    assert old is not None
    old.calls_end.clear()
    asked = asyncio.ensure_future(
        admin_of(rig).replace_router(pb.ReplaceRouterRequest(router="router-0"))
    )
    await until(lambda: old.stopped_s is not None)
    return old, asked


@pytest.mark.asyncio
async def test_the_last_router_that_serves_is_not_replaced_while_the_other_one_is(
    tmp_path: Path,
) -> None:
    cluster = cluster_of()
    async with controller(settings_of(tmp_path, num_routers=2), cluster) as rig:
        await rig.ready()
        old, asked = await a_replacement(rig)
        with pytest.raises(Unavailable, match="being started or ended"):
            await admin_of(rig).replace_router(pb.ReplaceRouterRequest(router="router-0"))
        with pytest.raises(FailedPrecondition, match="no other router serves"):
            await admin_of(rig).replace_router(pb.ReplaceRouterRequest(router="router-1"))
        old.calls_end.set()
        await asked
        await until(lambda: cluster.router("router-0") not in (old, None))
        with pytest.raises(FailedPrecondition, match=r"has no life 99000000; its newest is"):
            await admin_of(rig).replace_router(
                pb.ReplaceRouterRequest(router="router-1", incarnation=99_000_000)
            )


@pytest.mark.asyncio
async def test_a_replacement_that_nobody_waits_for_any_more_is_done_all_the_same(
    tmp_path: Path,
) -> None:
    cluster = cluster_of()
    async with controller(settings_of(tmp_path, num_routers=2), cluster) as rig:
        await rig.ready()
        old, asked = await a_replacement(rig)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        with pytest.raises(FailedPrecondition, match="no other router serves"):
            await admin_of(rig).replace_router(pb.ReplaceRouterRequest(router="router-1"))
        old.calls_end.set()
        await until(lambda: cluster.router("router-0") not in (old, None))
        await rig.ready()


@pytest.mark.asyncio
async def test_a_router_that_was_stopped_by_a_controller_that_died_is_replaced(
    tmp_path: Path,
) -> None:
    cluster = cluster_of()
    async with controller(settings_of(tmp_path, num_routers=2), cluster) as rig:
        await rig.ready()
        old, asked = await a_replacement(rig)
    await asyncio.gather(asked, return_exceptions=True)
    old.calls_end.set()
    old.stopped = True  # its own work goes on when the controller that asked for it dies
    async with controller(settings_of(tmp_path, num_routers=2), cluster) as rig:
        await until(lambda: cluster.router("router-0") not in (old, None))
        await rig.ready()
        assert not old.alive


@pytest.mark.asyncio
async def test_a_controller_ends_when_it_is_asked_to_and_its_parts_live_on(tmp_path: Path) -> None:
    cluster = cluster_of()
    ended: list[BaseException] = []
    service = ControllerService(
        settings_of(tmp_path),
        FakeFleet(cluster),
        serve_admin=False,
        on_fatal=ended.append,
    )
    await service.start()
    await until(lambda: bool(service.describe()["ready"]))
    parts, admin = cluster.living(), FleetAdmin(service)
    old = await admin.restart_controller(pb.RestartControllerRequest(term=1))
    assert old.term == 1
    await until(lambda: bool(ended))
    assert cluster.living() == parts
    async with controller(settings_of(tmp_path), cluster) as rig:
        await rig.ready()
        assert rig.service.life.term == 2
        await admin_of(rig).restart_controller(pb.RestartControllerRequest(term=1))
        await asyncio.sleep(0.4)
        assert rig.service.life.term == 2, "term 1 has ended already"
        with pytest.raises(FailedPrecondition, match="term is 2"):
            await admin_of(rig).restart_controller(pb.RestartControllerRequest(term=9))


@pytest.mark.asyncio
async def test_a_controller_that_cannot_end_in_order_ends_all_the_same(tmp_path: Path) -> None:
    class Stuck(ControllerService):
        """Its journal does not close."""

        async def stop(self) -> None:
            await super().stop()
            raise OSError(5, "Input/output error")

    ended: list[BaseException] = []
    service = Stuck(
        settings_of(tmp_path), FakeFleet(cluster_of()), serve_admin=False, on_fatal=ended.append
    )
    await service.start()
    service.restart_soon()
    await until(lambda: bool(ended))
    assert service._restarting is not None
    await asyncio.wait({service._restarting})
    assert isinstance(service._restarting.exception(), OSError)
