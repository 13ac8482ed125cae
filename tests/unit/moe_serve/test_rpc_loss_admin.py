"""Requests of operators that are lost, whose answer is lost, or that are sent again while the first
still runs: asked until there is an answer, all ends as where nothing is lost."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from moe_serve.controller.admin import PlacementServicer
from moe_serve.controller.settings import RankKind
from moe_serve.errors import MoeServeError, Unavailable
from moe_serve.rpc import placement_pb2 as pb
from tests.builders import PROFILE
from tests.fakes.controller import Rig, controller, make_cluster, make_settings, shards, until
from tests.fakes.fleet import FakeCluster
from tests.fakes.lossy import Loss, Network

UNARY = tuple(
    method.name
    for method in pb.DESCRIPTOR.services_by_name["PlacementService"].methods
    if not method.server_streaming
)
DONE = {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND}
"""What a second request may hear of something that the first has done."""
TIMES = 3
BUSY = grpc.StatusCode.RESOURCE_EXHAUSTED


class Aborted(MoeServeError):
    """What a call was ended with."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.status = code


class Call:
    """A call without a wire."""

    def time_remaining(self) -> float | None:
        return 10.0

    async def abort(self, code: grpc.StatusCode, details: str = "", metadata: Any = ()) -> None:
        raise Aborted(code, details)


class Operator:
    """Asks until there is an answer."""

    def __init__(self, rig: Rig, network: Network) -> None:
        self._network = network
        self.restarts = 0
        self._servicer = PlacementServicer(_Source(rig, self))

    async def ask(self, method: str, request: Any) -> Any:
        """The answer, None where the request had been carried out before."""
        lost = False
        for _ in range(2000):
            try:
                return await self._network.carry(method, lambda: self._asked(method, request))
            except Unavailable:
                lost = True
            except Aborted as error:
                if error.status in DONE and lost:
                    return None
                if error.status not in (BUSY, grpc.StatusCode.UNAVAILABLE, *DONE):
                    raise
                if error.status in DONE and not self._passing(str(error)):
                    raise
            await asyncio.sleep(0.005)
        raise AssertionError(f"{method}: no answer")

    async def _asked(self, method: str, request: Any) -> Any:
        return await getattr(self._servicer, method)(request, Call())

    @staticmethod
    def _passing(text: str) -> bool:
        """Refusals that pass by themselves: a rank that is not there yet or not yet gone."""
        return any(
            word in text for word in ("not up", "joined", "is lost", "being", "still", "yet")
        )


class _Source:
    """The controller, but that it is not really ended where somebody asks for that."""

    def __init__(self, rig: Rig, operator: Operator) -> None:
        self._rig = rig
        self._operator = operator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rig.service, name)

    def restart_soon(self) -> None:
        self._operator.restarts += 1


async def day_of_an_operator(folder: Path, network: Network) -> dict[str, object]:
    """Everything that can be asked for, and what there is afterwards."""
    cluster = make_cluster()
    cluster.group_slots = (4,)
    groups = (RankKind(profile=PROFILE.name, num_slots=4),)
    async with controller(make_settings(folder, groups=groups), cluster) as rig:
        await rest(rig)
        operator = Operator(rig, network)
        ask = operator.ask
        await ask("Pause", pb.PauseRequest(reason="tidy up"))
        for rank, slots in ((0, 7), (1, 5)):
            request = pb.SetBudgetRequest(rank=rank, budget_bytes=slots * 1000)
            await ask("SetBudget", request)
            await until(lambda rank=rank, slots=slots: slots_of(cluster, rank) == slots)
        await ask("DrainRank", pb.DrainRankRequest(rank=2))
        await until(lambda: not held(cluster, 2))
        await ask("UndrainRank", pb.UndrainRankRequest(rank=2))
        await rest(rig)
        plan = await ask("ComputePlan", pb.ComputePlanRequest(policy="static", max_moves=50))
        await ask("ApplyPlan", pb.ApplyPlanRequest(plan_id=plan.plan.plan_id))
        await rest(rig)
        await fleet_requests(rig, cluster, operator)
        for method, request in (
            ("GetPlacement", pb.GetPlacementRequest()),
            ("ListSteps", pb.ListStepsRequest()),
            ("GetLoad", pb.GetLoadRequest()),
            ("Explain", pb.ExplainRequest()),
            ("ExplainPlan", pb.ExplainPlanRequest()),
        ):
            assert await ask(method, request) is not None
        await ask("DrainRank", pb.DrainRankRequest(rank=2))
        await until(lambda: not held(cluster, 2))
        await ask("DrainRank", pb.DrainRankRequest(rank=1))
        await until(lambda: not held(cluster, 1))
        await ask("Resume", pb.ResumeRequest())
        await network.settle()
        await rest(rig)
        return {
            "parts": sorted(name.rpartition(":")[0] for name in cluster.living()),
            "slots": [slots_of(cluster, rank) for rank in range(3)],
            "held": [held(cluster, rank) for rank in range(3)],
            "reserved": sum(s.slots.ledger.reserved_bytes for s in shards(cluster)),
            "listed": [rig.listed(expert) for expert in range(4)],
            "draining": [rank.draining for rank in rig.state.ranks],
            "paused": rig.state.paused,
            "ranks": [str(rank.status) for rank in rig.state.ranks],
            "asked to end": operator.restarts > 0,
        }


async def fleet_requests(rig: Rig, cluster: FakeCluster, operator: Operator) -> None:
    """A rank leaves and comes back, another is added and leaves, a shard and a router are replaced,
    the controller too."""
    ask = operator.ask
    await ask("RemoveRank", pb.RemoveRankRequest(rank=2, accept_lower_floor=True))
    await until(lambda: cluster.shard(2) is None)
    await ask("AddRank", pb.AddRankRequest(rank=2))
    await until(lambda: cluster.shard(2) is not None)
    await rest(rig)
    added = await ask("AddRank", pb.AddRankRequest(group=0, key="one more"))
    assert added.rank == 3, "one is added, however often it is asked for"
    await until(lambda: cluster.shard(3) is not None)
    await rest(rig)
    await ask("RemoveRank", pb.RemoveRankRequest(rank=3, accept_lower_floor=True))
    await until(lambda: cluster.shard(3) is None)
    await rest(rig)
    shard, router = cluster.shard(1), cluster.router()
    assert shard is not None
    assert router is not None
    await ask(
        "ReplaceRank",
        pb.ReplaceRankRequest(rank=1, incarnation=shard.incarnation, accept_lower_floor=True),
    )
    await until(lambda: cluster.shard(1) not in (None, shard))
    await rest(rig)
    await ask(
        "ReplaceRouter",
        pb.ReplaceRouterRequest(router="router-0", incarnation=router.incarnation, accept_gap=True),
    )
    await until(lambda: cluster.router() not in (None, router))
    await rest(rig)
    await ask("RestartController", pb.RestartControllerRequest(term=rig.state.term))


async def rest(rig: Rig) -> None:
    await rig.ready()
    await until(lambda: rig.state.run is None and not rig.state.parked)


def slots_of(cluster: FakeCluster, rank: int) -> int:
    shard = cluster.shard(rank)
    return 0 if shard is None else shard.slots.ledger.num_slots


def held(cluster: FakeCluster, rank: int) -> list[int]:
    shard = cluster.shard(rank)
    return [] if shard is None else sorted(r.expert for r in shard.slots.ledger.resident())


def lose_most(loss: Loss, _method: str, number: int) -> Loss | None:
    """TIMES in a row, then one that comes through: also a method's second request is lost."""
    return loss if number % (TIMES + 1) < TIMES else None


def nothing_lost(_method: str, _number: int) -> None:
    return None


@pytest.mark.asyncio
async def test_every_request_of_operators_may_be_lost_and_is_done_once(tmp_path: Path) -> None:
    calm = Network(nothing_lost)
    want = await day_of_an_operator(tmp_path / "calm", calm)
    assert set(UNARY) == set(calm.calls), "a method that nobody asks for here"
    assert want["parts"] == ["tiny:router:router-0", *(f"tiny:shard:{r}" for r in range(3))]
    assert want["held"] == [[0, 1, 2, 3], [], []]
    for loss in Loss:
        network = Network(partial(lose_most, loss), late_s=0.005)
        assert await day_of_an_operator(tmp_path / loss.name, network) == want, loss
        too_few = {method for method in UNARY if network.lost[method, loss] < TIMES}
        assert not too_few, f"{loss}: {too_few}"
