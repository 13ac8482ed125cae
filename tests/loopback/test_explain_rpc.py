"""Explain and ExplainPlan over a real gRPC port, the controller behind them over a fleet in memory
whose routers tell made-up stages."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_serve.controller import explaining
from moe_serve.controller.admin import EXPLAINS_MAX
from moe_serve.controller.recent import WINDOWS_KEPT
from moe_serve.errors import (
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
)
from moe_serve.explain import Evidence, Finding
from moe_serve.rpc import placement_pb2 as pb
from moe_serve.rpc.auth import bearer_metadata
from moe_serve.stage_counts import STAGE_BOUNDS_S, STAGES, StageCounts
from placement.topology import NUM_PHASES
from tests.loopback.test_controller_admin import make_settings, refused, serving, until

RANKS = 3


def stages(requests: int, *, queue_s: float = 0.0) -> StageCounts:
    """Totals of a router after so many requests of decode: 4 ms each at its shard, and `queue_s`
    before."""
    counts = np.zeros((NUM_PHASES, len(STAGES), len(STAGE_BOUNDS_S) + 1), np.int64)
    seconds = np.zeros((NUM_PHASES, len(STAGES)))
    for stage in range(len(STAGES)):
        counts[1, stage, 0] = requests
    compute = STAGES.index("compute")
    counts[1, compute] = 0
    counts[1, compute, 6] = requests
    seconds[1, compute] = 0.004 * requests
    seconds[1, STAGES.index("queue")] = queue_s * requests
    each = np.full(RANKS, requests, np.int64)
    return StageCounts(
        requests=counts,
        seconds=seconds,
        sub_calls=each,
        pairs=4 * each,
        last=each // RANKS,
        late_s=1e-4 * each,
        wire_s=1e-3 * each,
        wait_s=1e-4 * each,
        compute_s=4e-3 * each,
    )


async def explained(stub: Any, requests: int) -> pb.ExplainResponse:
    """The first answer that has heard of so many requests."""
    found: list[pb.ExplainResponse] = []

    async def ask() -> bool:
        found[:] = [await stub.Explain(pb.ExplainRequest())]
        return found[0].requests >= requests

    for _ in range(3000):
        if await ask():
            return found[0]
    raise AssertionError(f"not heard of: {found}")


@pytest.mark.asyncio
async def test_it_says_where_the_time_went_and_that_nothing_is_slow(tmp_path: Path) -> None:
    async with serving(make_settings(tmp_path)) as (service, cluster, stub):
        idle = await stub.Explain(pb.ExplainRequest())
        assert (idle.verdict, idle.requests) == ("idle", 0)
        cluster.stages = stages(10)
        await until(lambda: service.life.stages.total is not None and heard(service, 10))
        cluster.stages = stages(110)
        answer = await explained(stub, 100)
        assert (answer.verdict, list(answer.causes)) == ("nothing_slow", [])
        assert answer.requests == 100
        assert answer.mean_s == pytest.approx(0.004)
        assert list(answer.bounds_s) == pytest.approx(STAGE_BOUNDS_S)
        assert [(s.phase, s.stage) for s in answer.stages] == [
            (phase, stage) for phase in ("prefill", "decode") for stage in STAGES
        ]
        compute = next(s for s in answer.stages if (s.phase, s.stage) == ("decode", "compute"))
        assert (compute.requests, sum(compute.buckets)) == (100, 100)
        assert STAGE_BOUNDS_S[5] < compute.p50_s < STAGE_BOUNDS_S[6]
        assert [r.rank for r in answer.ranks] == [0, 1, 2]
        assert answer.ranks[1].sub_calls == 100
        assert answer.ranks[1].slowness == pytest.approx(1.0)
        assert answer.newest.rule
        assert 0.0 <= answer.age_s < answer.seconds < 60.0


def heard(service: Any, requests: int) -> bool:
    """Whether the routers' first totals are known: from there on differences are counted."""
    reports = [part.report for part in service.life.parts.routers.values()]
    told = [r.stages for r in reports if r is not None and r.stages is not None]
    return any(int(s.requests[1, 0].sum()) == requests for s in told)


@pytest.mark.asyncio
async def test_requests_that_wait_for_a_permit_are_overload(tmp_path: Path) -> None:
    async with serving(make_settings(tmp_path)) as (service, cluster, stub):
        cluster.stages = stages(10)
        await until(lambda: heard(service, 10))
        cluster.router_counters = {"waiting_requests": 7.0, "open_requests": 3.0}
        cluster.stages = stages(200, queue_s=0.02)
        answer = await explained(stub, 150)
        (cause,) = answer.causes
        assert (answer.verdict, cause.kind, cause.rank) == ("slow", "overload", -1)
        assert cause.share > 0.7
        assert "7 wait for a permit" in cause.text
        assert cause.next_step
        assert cause.evidence["queue_share"] == pytest.approx(cause.share)


@pytest.mark.asyncio
async def test_windows_are_kept_and_seconds_bounded(tmp_path: Path) -> None:
    async with serving(make_settings(tmp_path)) as (service, _, stub):
        await until(lambda: len(service.life.recent.windows) == WINDOWS_KEPT)
        long = await stub.Explain(pb.ExplainRequest(seconds=600.0))
        whole = await stub.Explain(pb.ExplainRequest())
        short = await stub.Explain(pb.ExplainRequest(seconds=0.2))
        assert 0.0 < short.seconds < whole.seconds
        assert 0.0 < long.seconds < 60.0, "no longer than there is something to look at"
        for seconds in (-1.0, 601.0, float("nan")):
            error = await refused(stub.Explain(pb.ExplainRequest(seconds=seconds)))
            assert isinstance(error, InvalidArgument)
            assert error.violations[0].field == "seconds"


@pytest.mark.asyncio
async def test_a_plan_is_explained_from_its_beginning_to_what_it_brought(tmp_path: Path) -> None:
    async with serving(make_settings(tmp_path)) as (service, cluster, stub):
        first = await stub.ExplainPlan(pb.ExplainPlanRequest())
        assert first.plan.plan_id, "the first fill is a plan, too"
        await stub.Pause(pb.PauseRequest(reason="look first"))
        cluster.demand = {0: 400, 1: 10, 2: 10, 3: 10}
        await until(lambda: bool(service.book.window and service.book.window.demand.any()))
        plan = (await stub.ComputePlan(pb.ComputePlanRequest())).plan
        asked = await stub.ExplainPlan(pb.ExplainPlanRequest(plan_id=plan.plan_id))
        assert [m.state for m in asked.plan.moves] == [pb.MOVE_STATE_PLANNED] * len(plan.moves)
        assert [r.rule for r in asked.records] == ["asked"]
        assert asked.measured_after == 0.0
        await stub.ApplyPlan(pb.ApplyPlanRequest(plan_id=plan.plan_id))
        await until(lambda: {m.state for m in service.book.moves} == {"done"})
        done = await stub.ExplainPlan(pb.ExplainPlanRequest())
        assert done.plan.plan_id == plan.plan_id
        assert {m.state for m in done.plan.moves} == {pb.MOVE_STATE_DONE}
        assert all(0.0 < m.started_at_s <= m.ended_at_s for m in done.plan.moves)
        assert {r.plan_id for r in done.records} == {plan.plan_id}
        assert "plan_done" in [r.rule for r in done.records]
        for unknown in ("9-9", "x" * 300):
            error = await refused(stub.ExplainPlan(pb.ExplainPlanRequest(plan_id=unknown)))
            assert isinstance(error, NotFound | InvalidArgument)


@pytest.mark.asyncio
async def test_calls_beyond_a_few_are_told_to_ask_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, real, begun = threading.Event(), explaining.explain, list[Evidence]()

    def held_up(evidence: Evidence) -> Finding:
        begun.append(evidence)
        assert go_on.wait(30.0)
        return real(evidence)

    monkeypatch.setattr(explaining, "explain", held_up)
    async with serving(make_settings(tmp_path)) as (_, _cluster, stub):
        try:
            calls = [stub.Explain(pb.ExplainRequest()) for _ in range(EXPLAINS_MAX)]
            await until(lambda: len(begun) == EXPLAINS_MAX, 30.0)
            error = await refused(stub.Explain(pb.ExplainRequest()))
            assert isinstance(error, ResourceExhausted)
            assert error.retry_after_s
            calls[0].cancel()  # whoever leaves makes no room: the thread works on
            assert calls[0].cancelled()
            assert isinstance(await refused(stub.Explain(pb.ExplainRequest())), ResourceExhausted)
        finally:
            go_on.set()
        assert [(await one).verdict for one in calls[1:]] == ["idle"] * (EXPLAINS_MAX - 1)
        assert (await stub.Explain(pb.ExplainRequest())).verdict == "idle"


@pytest.mark.asyncio
async def test_why_nothing_moved_is_in_the_record(tmp_path: Path) -> None:
    async with serving(make_settings(tmp_path)) as (service, _, stub):
        await stub.Pause(pb.PauseRequest(reason="hands off"))
        await until(lambda: service.book.newest(1)[0].record.outcome == "kept")
        answer = await stub.Explain(pb.ExplainRequest())
        assert answer.newest.rule == "paused"
        assert list(answer.newest.refused) == ["plan: automatic plans are paused"]


@pytest.mark.asyncio
async def test_a_read_token_is_enough_and_none_is_refused(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"read {'r' * 32}\ndispatch {'d' * 32}\n")
    tokens.chmod(0o600)
    async with serving(make_settings(tmp_path, token_file=tokens)) as (_, _cluster, stub):
        read = bearer_metadata("r" * 32)
        assert (await stub.Explain(pb.ExplainRequest(), metadata=read)).verdict == "idle"
        await stub.ExplainPlan(pb.ExplainPlanRequest(), metadata=read)
        assert isinstance(await refused(stub.Explain(pb.ExplainRequest())), Unauthenticated)
        other = bearer_metadata("d" * 32)
        error = await refused(stub.ExplainPlan(pb.ExplainPlanRequest(), metadata=other))
        assert isinstance(error, PermissionDenied)
