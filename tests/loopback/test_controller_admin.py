"""PlacementService over a real gRPC port, the controller behind it over a fleet in memory."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from moe_serve.controller.admin_server import SERVICE_NAME
from moe_serve.controller.journal_store import StateStore, raise_full
from moe_serve.controller.service import ControllerService
from moe_serve.controller.settings import (
    ControllerSettings,
    ExpectedRank,
    SupervisionLimits,
)
from moe_serve.errors import (
    FailedPrecondition,
    InvalidArgument,
    MoeServeError,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    StartRefused,
    Unauthenticated,
)
from moe_serve.ports import NodeInfo
from moe_serve.rpc import placement_pb2 as pb
from moe_serve.rpc import placement_pb2_grpc
from moe_serve.rpc.auth import bearer_metadata
from moe_serve.rpc.status import from_rpc_error
from placement.config import RebalanceConfig
from tests.builders import PROFILE, make_spec
from tests.fakes.fleet import FakeCluster, FakeFleet

SLOTS = [4, 4, 4]


def make_settings(folder: Path, **fields: object) -> ControllerSettings:
    spec = make_spec()
    made = ControllerSettings(
        service_id="tiny",
        spec=spec,
        config=RebalanceConfig(
            window_s=0.1,
            windows_kept=2,
            sub_windows=2,
            cooldown_s=0.0,
            drain_wait_s=0.4,
            first_policy="incremental",
            floor=1,
        ),
        ranks=tuple(
            ExpectedRank(rank=r, profile=PROFILE.name, num_slots=n, budget_bytes=1000 * n)
            for r, n in enumerate(SLOTS)
        ),
        profiles=(PROFILE,),
        state_dir=folder / "state",
        supervision=SupervisionLimits(report_s=0.01, probe_s=0.05, nodes_s=0.05),
    )
    return replace(made, **fields)  # type: ignore[arg-type]


@asynccontextmanager
async def serving(
    settings: ControllerSettings,
) -> AsyncIterator[tuple[ControllerService, FakeCluster, Any]]:
    cluster = FakeCluster(
        spec=make_spec(),
        profile=PROFILE.name,
        num_slots=list(SLOTS),
        nodes=[NodeInfo(f"node{n}", True, {}) for n in range(3)],
    )
    service = ControllerService(settings, FakeFleet(cluster))
    await service.start()
    try:
        await until(lambda: bool(service.describe()["ready"]))
        async with grpc.aio.insecure_channel(service.admin_address) as channel:
            yield service, cluster, placement_pb2_grpc.PlacementServiceStub(channel)
    finally:
        await service.stop()
    assert not cluster.faults, cluster.faults


async def until(condition: Callable[[], bool], wait_s: float = 8.0) -> None:
    ends_s = asyncio.get_running_loop().time() + wait_s
    while not condition():
        assert asyncio.get_running_loop().time() < ends_s, "what was waited for did not come"
        await asyncio.sleep(0.01)


async def refused(call: Any) -> MoeServeError:
    """The typed error of a call that must fail."""
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return from_rpc_error(caught.value)


@pytest.mark.asyncio
async def test_placement_says_who_is_where(tmp_path: Path) -> None:
    async with serving(make_settings(tmp_path)) as (_, _cluster, stub):
        view = await stub.GetPlacement(pb.GetPlacementRequest())
        assert (view.model, view.num_layers, view.num_experts, view.service_id) == (
            "tiny",
            1,
            4,
            "tiny",
        )
        assert (view.term, view.epoch, view.epochs_published) == (1, 1, 1)
        assert [r.state for r in view.ranks] == ["up"] * 3
        assert sorted(s.expert for r in view.ranks for s in r.slots if s.state == "LISTED") == [
            0,
            1,
            2,
            3,
        ]
        assert [(r.router, r.state, r.applied_epoch) for r in view.routers] == [
            ("router-0", "up", 1)
        ]
        assert not view.missing
        assert not view.problems


@pytest.mark.asyncio
async def test_a_plan_is_computed_checked_and_applied(tmp_path: Path) -> None:
    async with serving(make_settings(tmp_path)) as (service, cluster, stub):
        await stub.Pause(pb.PauseRequest(reason="look first"))
        cluster.demand = {0: 400, 1: 10, 2: 10, 3: 10}
        await until(lambda: bool(service.book.window and service.book.window.demand.any()))
        plan = (await stub.ComputePlan(pb.ComputePlanRequest())).plan
        assert plan.moves
        assert all(move.reason for move in plan.moves)
        assert plan.balancedness_after > plan.balancedness_before
        view = await stub.GetPlacement(pb.GetPlacementRequest())
        assert (view.state, view.epoch) == ("paused", 1), "computing moves nothing"
        checked = await stub.ApplyPlan(
            pb.ApplyPlanRequest(plan_id=plan.plan_id, validate_only=True)
        )
        assert checked.message == f"plan {plan.plan_id} can be applied; nothing is started"
        assert service.life.driver.engine.state.apply_next is None, "a check starts nothing"
        await stub.ApplyPlan(pb.ApplyPlanRequest(plan_id=plan.plan_id))
        await until(lambda: {m.state for m in service.book.moves} == {"done"})
        view = await stub.GetPlacement(pb.GetPlacementRequest())
        assert {m.plan_id for m in view.moves} == {plan.plan_id}
        assert {m.state for m in view.moves} == {pb.MOVE_STATE_DONE}
        gone = await refused(stub.ApplyPlan(pb.ApplyPlanRequest(plan_id=plan.plan_id)))
        assert isinstance(gone, FailedPrecondition)
        assert isinstance(
            await refused(stub.ApplyPlan(pb.ApplyPlanRequest(plan_id="none"))), NotFound
        )


@pytest.mark.asyncio
async def test_a_plan_leads_back_to_the_placement_before_a_plan(tmp_path: Path) -> None:
    async with serving(make_settings(tmp_path)) as (service, cluster, stub):
        unknown = await refused(stub.ComputePlan(pb.ComputePlanRequest(before_plan="newest")))
        assert isinstance(unknown, NotFound)
        cluster.demand = {0: 400, 1: 10, 2: 10, 3: 10}
        await until(lambda: bool(service.book.befores.kept))
        await stub.Pause(pb.PauseRequest(reason="back"))
        state = service.life.driver.engine.state
        await until(lambda: state.run is None and state.outstanding is None)
        befores = service.book.befores
        before = befores.keys_of(befores.kept[0])
        answer = await stub.ComputePlan(pb.ComputePlanRequest(before_plan="newest"))
        assert answer.before_plan == service.book.befores.kept[0].plan_id
        assert answer.paused
        assert not answer.notes
        await stub.ApplyPlan(pb.ApplyPlanRequest(plan_id=answer.plan.plan_id))
        await until(lambda: state.run is None and state.apply_next is None)
        after = service.life.driver.engine.layout().slots.tolist()
        assert tuple(tuple(sorted(k for k in row if k >= 0)) for row in after) == before


@pytest.mark.asyncio
async def test_a_plan_leads_to_a_given_placement_or_says_why_not(tmp_path: Path) -> None:
    async with serving(make_settings(tmp_path)) as (_, _cluster, stub):
        rows = [[0, 1, 2], [3, 0], []]
        target = [pb.RankTarget(rank=rank, experts=row) for rank, row in enumerate(rows)]
        answer = await stub.ComputePlan(pb.ComputePlanRequest(target=target))
        assert answer.plan.moves
        assert not answer.paused
        assert not answer.notes
        applied = await stub.ApplyPlan(pb.ApplyPlanRequest(plan_id=answer.plan.plan_id))
        assert "may move things away from it again" in applied.message
        del target[2:]
        short = await refused(stub.ComputePlan(pb.ComputePlanRequest(target=target)))
        assert isinstance(short, InvalidArgument)
        target.append(pb.RankTarget(rank=2, experts=[0, 1, 2, 3]))
        full = await refused(stub.ComputePlan(pb.ComputePlanRequest(target=target)))
        assert isinstance(full, FailedPrecondition)
        assert "rank 2 can hold 3 experts" in full.message


@pytest.mark.asyncio
async def test_load_of_the_newest_window(tmp_path: Path) -> None:
    async with serving(make_settings(tmp_path)) as (service, cluster, stub):
        cluster.demand = {0: 7, 6: 3}
        await until(lambda: bool(service.book.window and service.book.window.demand.any()))
        load = await stub.GetLoad(pb.GetLoadRequest())
        demand = np.frombuffer(load.demand, "<i8").reshape(
            load.num_phases, load.num_layers, load.num_experts
        )
        assert demand[0, 0, 0] * 3 == demand[1, 0, 2] * 7
        assert load.age_s >= 0.0
        assert 0.0 < load.balancedness <= 1.0
        seen = []
        async for message in stub.WatchLoad(pb.WatchLoadRequest()):
            seen.append(message.load.window)
            if len(seen) == 3:
                break
        assert seen == sorted(set(seen)), "one message a window"


@pytest.mark.asyncio
async def test_placement_is_watched_from_now_on(tmp_path: Path) -> None:
    async with serving(make_settings(tmp_path)) as (_, _cluster, stub):
        states = []
        async for message in stub.WatchPlacement(pb.WatchPlacementRequest()):
            states.append(message.placement.state)
            if len(states) == 1:
                await stub.Pause(pb.PauseRequest())
            if states[-1] == "paused":
                await stub.Resume(pb.ResumeRequest())
            if "paused" in states and states[-1] == "steady":
                break
        assert states[0] != "paused"


@pytest.mark.asyncio
async def test_events_come_oldest_first_and_can_be_followed(tmp_path: Path) -> None:
    async with serving(make_settings(tmp_path)) as (_, _cluster, stub):
        kept = [m.record async for m in stub.WatchEvents(pb.WatchEventsRequest(no_follow=True))]
        assert [r.seq for r in kept] == sorted({r.seq for r in kept})
        assert {"rank_joined", "initial", "plan_done"} <= {r.rule for r in kept}
        assert all(r.wall_time_s > 1e9 for r in kept)
        stream = stub.WatchEvents(pb.WatchEventsRequest(after_seq=kept[-1].seq))
        await stub.Pause(pb.PauseRequest(reason="to be seen"))
        async for message in stream:
            assert message.record.seq > kept[-1].seq
            if message.record.rule == "paused" and message.record.detail == "to be seen":
                break


@pytest.mark.asyncio
async def test_steps_come_in_pages(tmp_path: Path) -> None:
    async with serving(make_settings(tmp_path)) as (service, cluster, stub):
        cluster.copy_s = 1.0
        cluster.demand = {0: 400, 1: 10, 2: 10, 3: 10}
        await until(lambda: service.life.driver.engine.state.run is not None)
        whole = await stub.ListSteps(pb.ListStepsRequest())
        assert whole.steps
        assert all(s.kind == pb.STEP_KIND_ADD and s.plan_id for s in whole.steps)
        first = await stub.ListSteps(pb.ListStepsRequest(page_size=1))
        found = list(first.steps)
        token = first.next_page_token
        while token:
            page = await stub.ListSteps(pb.ListStepsRequest(page_size=1, page_token=token))
            found += page.steps
            token = page.next_page_token
        assert [s.step_id for s in found] == [s.step_id for s in whole.steps]
        cluster.demand = {}


@pytest.mark.asyncio
async def test_budgets_drains_and_their_refusals(tmp_path: Path) -> None:
    async with serving(make_settings(tmp_path)) as (service, cluster, stub):
        answer = await stub.SetBudget(pb.SetBudgetRequest(rank=2, budget_bytes=2999))
        assert answer.num_slots == 2
        await until(lambda: cluster.shard(2).slots.ledger.num_slots == 2)  # type: ignore[union-attr]
        await stub.DrainRank(pb.DrainRankRequest(rank=1))
        await until(
            lambda: not any(s.key >= 0 for s in service.life.driver.engine.state.ranks[1].slots)
        )
        short = await refused(stub.SetBudget(pb.SetBudgetRequest(rank=0, budget_bytes=0)))
        assert isinstance(short, FailedPrecondition)
        assert short.violations[0].field == "missing_bytes"
        await stub.UndrainRank(pb.UndrainRankRequest(rank=1))
        view = await stub.GetPlacement(pb.GetPlacementRequest())
        assert view.ranks[1].state == "up"


@pytest.mark.asyncio
async def test_bad_requests_name_their_field(tmp_path: Path) -> None:
    async with serving(make_settings(tmp_path)) as (_, _cluster, stub):
        for call, field in (
            (stub.DrainRank(pb.DrainRankRequest(rank=-1)), "rank"),
            (stub.UndrainRank(pb.UndrainRankRequest(rank=3)), "rank"),
            (stub.SetBudget(pb.SetBudgetRequest(rank=0, budget_bytes=-1)), "budget_bytes"),
            (stub.ComputePlan(pb.ComputePlanRequest(max_moves=-2)), "max_moves"),
            (stub.ComputePlan(pb.ComputePlanRequest(policy="x" * 201)), "policy"),
            (stub.ListSteps(pb.ListStepsRequest(page_size=-1)), "page_size"),
            (stub.ListSteps(pb.ListStepsRequest(page_token="x")), "page_token"),
            (stub.ApplyPlan(pb.ApplyPlanRequest()), "plan_id"),
        ):
            error = await refused(call)
            assert isinstance(error, InvalidArgument), error
            assert error.violations[0].field == field
        unknown = await refused(stub.ComputePlan(pb.ComputePlanRequest(policy="magic")))
        assert "magic" in unknown.message


@pytest.mark.asyncio
async def test_watchers_are_bounded(tmp_path: Path) -> None:
    async with serving(make_settings(tmp_path, watchers_max=1)) as (_, _cluster, stub):
        first = stub.WatchPlacement(pb.WatchPlacementRequest())
        assert (await first.read()).placement.model == "tiny"
        error = await refused(stub.WatchPlacement(pb.WatchPlacementRequest()).read())
        assert isinstance(error, ResourceExhausted)
        first.cancel()


def tokens(folder: Path) -> Path:
    file = folder / "tokens"
    file.write_text(f"read {'r' * 20}\nadmin {'a' * 20}\n")
    file.chmod(0o600)
    return file


@pytest.mark.asyncio
async def test_roles_are_asked_for_on_every_method(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, token_file=tokens(tmp_path))
    async with serving(settings) as (service, _cluster, stub):
        read, admin = (bearer_metadata(c * 20) for c in "ra")
        view = pb.GetPlacementRequest()
        assert isinstance(await refused(stub.GetPlacement(view)), Unauthenticated)
        wrong = bearer_metadata("x" * 20)
        assert isinstance(await refused(stub.GetPlacement(view, metadata=wrong)), Unauthenticated)
        assert (await stub.GetPlacement(view, metadata=read)).model == "tiny"
        pause = pb.PauseRequest()
        assert isinstance(await refused(stub.Pause(pause, metadata=read)), PermissionDenied)
        await stub.Pause(pause, metadata=admin)
        stream = stub.WatchEvents(pb.WatchEventsRequest())
        assert isinstance(await refused(stream.read()), Unauthenticated)
        async with grpc.aio.insecure_channel(service.admin_address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(
                health_pb2.HealthCheckRequest(service="moe_serve.rpc.v1.PlacementService")
            )
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.asyncio
async def test_a_taken_port_refuses_the_start_and_leaves_nothing(tmp_path: Path) -> None:
    async with serving(make_settings(tmp_path)) as (service, _cluster, _stub):
        port = int(service.admin_address.rsplit(":", 1)[1])
        settings = make_settings(tmp_path / "b", admin_port=port)
        cluster = FakeCluster(make_spec(), PROFILE.name, list(SLOTS), [])
        second = ControllerService(settings, FakeFleet(cluster))
        with pytest.raises(StartRefused, match="cannot listen"):
            await second.start()
        assert cluster.created == []


@pytest.mark.asyncio
async def test_a_restarted_controller_is_found_at_the_same_port(tmp_path: Path) -> None:
    async with serving(make_settings(tmp_path)) as (service, _cluster, _stub):
        address = service.admin_address
    async with serving(make_settings(tmp_path)) as (service, _cluster, _stub):
        assert service.admin_address == address


@pytest.mark.asyncio
async def test_bytes_that_are_no_message_are_an_invalid_argument(tmp_path: Path) -> None:
    async with serving(make_settings(tmp_path)) as (service, _, stub):
        names = [m.name for m in pb.DESCRIPTOR.services_by_name["PlacementService"].methods]
        async with grpc.aio.insecure_channel(service.admin_address) as channel:
            for name in names:
                method = f"/{SERVICE_NAME}/{name}"
                watch = name.startswith("Watch")
                make = channel.unary_stream if watch else channel.unary_unary
                call: Any = make(method)(b"\xff\xff", timeout=5)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await (call.read() if watch else call)
                assert type(from_rpc_error(caught.value)) is InvalidArgument, name
        assert (await stub.GetPlacement(pb.GetPlacementRequest(), timeout=5)).state


@pytest.mark.asyncio
async def test_a_full_disk_is_named_at_once_by_everything_that_would_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(make_settings(tmp_path)) as (service, cluster, stub):
        await stub.Pause(pb.PauseRequest(reason="look first"))
        cluster.demand = {0: 400, 1: 10, 2: 10, 3: 10}
        await until(lambda: bool(service.book.window and service.book.window.demand.any()))
        plan = (await stub.ComputePlan(pb.ComputePlanRequest())).plan

        def full(_store: StateStore, **_given: object) -> None:
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise_full(error, tmp_path)

        with monkeypatch.context() as patched:
            patched.setattr(StateStore, "_transact", full)
            for ask, request in (
                (stub.SetBudget, pb.SetBudgetRequest(rank=0, budget_bytes=3000)),
                (stub.DrainRank, pb.DrainRankRequest(rank=1)),
                (stub.UndrainRank, pb.UndrainRankRequest(rank=1)),
                (stub.ApplyPlan, pb.ApplyPlanRequest(plan_id=plan.plan_id)),
                (stub.ApplyPlan, pb.ApplyPlanRequest(plan_id=plan.plan_id, validate_only=True)),
                (stub.Resume, pb.ResumeRequest()),
            ):
                error = await refused(ask(request, timeout=5.0))
                assert isinstance(error, FailedPrecondition)
                assert error.message == (
                    f"no new moves: the journal in {tmp_path} cannot be written: database or disk "
                    "is full; free space there, or make it writable; then ask again"
                )
            assert (await stub.ComputePlan(pb.ComputePlanRequest(), timeout=5.0)).plan.moves
            view = await stub.GetPlacement(pb.GetPlacementRequest(), timeout=5.0)
            assert view.state == "degraded"
            assert any(problem.startswith("no new moves: ") for problem in view.problems)
