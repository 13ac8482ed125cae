"""The command line's client against a controller over a fleet in memory: what is asked for arrives
as it was meant, and what is refused comes back as the error it is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_serve.cli.admin import AdminTarget, GrpcAdmin
from moe_serve.cli.exits import CannotReach
from moe_serve.cli.layouts import holding_of
from moe_serve.controller.service import ControllerService
from moe_serve.errors import FailedPrecondition, InvalidArgument, NotFound
from tests.loopback.test_controller_admin import make_settings, serving, until

ask = asyncio.to_thread
"""The client blocks, and the controller lives in this thread."""


@pytest.fixture
def clients() -> Iterator[list[GrpcAdmin]]:
    made: list[GrpcAdmin] = []
    yield made
    for client in made:
        client.close()


def client_of(service: ControllerService, clients: list[GrpcAdmin]) -> GrpcAdmin:
    clients.append(GrpcAdmin(AdminTarget(service.admin_address)))
    return clients[-1]


@pytest.mark.asyncio
async def test_a_pause_is_kept_with_its_reason_and_ends_when_asked(
    tmp_path: Path, clients: list[GrpcAdmin]
) -> None:
    async with serving(make_settings(tmp_path)) as (service, _, _stub):
        client = client_of(service, clients)
        await ask(client.pause, "to look")
        assert service.life.driver.engine.state.paused
        found = await ask(lambda: list(client.events(0, follow=False)))
        (paused,) = [record for record in found if record.rule == "paused"]
        assert paused.detail == "to look"
        seen = [record.seq for record in found]
        assert seen == sorted(set(seen)), "oldest first, each once"
        later = await ask(lambda: list(client.events(paused.seq, follow=False)))
        assert all(record.seq > paused.seq for record in later)
        await ask(client.resume)
        assert not service.life.driver.engine.state.paused


@pytest.mark.asyncio
async def test_a_plan_is_only_checked_where_no_more_is_asked(
    tmp_path: Path, clients: list[GrpcAdmin]
) -> None:
    async with serving(make_settings(tmp_path)) as (service, cluster, _stub):
        client = client_of(service, clients)
        await ask(client.pause, "plans come by hand")
        cluster.demand = {0: 400, 1: 10, 2: 10, 3: 10}
        await until(lambda: bool(service.book.window and service.book.window.demand.any()))
        plan = await ask(client.compute_plan, "", 0)
        assert plan.moves
        assert "can be applied" in await ask(client.apply_plan, plan.plan_id, True)
        assert service.life.driver.engine.state.apply_next is None, "a check starts nothing"
        await ask(client.apply_plan, plan.plan_id, False)
        await until(lambda: {move.state for move in service.book.moves} == {"done"})
        with pytest.raises(NotFound):
            await ask(client.apply_plan, "no-such-plan", False)
        cluster.demand = {}


@pytest.mark.asyncio
async def test_a_plan_to_a_placement_is_to_that_one(
    tmp_path: Path, clients: list[GrpcAdmin]
) -> None:
    async with serving(make_settings(tmp_path)) as (service, _cluster, _stub):
        client = client_of(service, clients)
        await ask(client.pause, "plans come by hand")
        with pytest.raises(NotFound):
            await ask(client.plan_to, "newest")
        wanted = ((0, 1, 2), (0, 3), ())
        there = await ask(client.plan_to, "", wanted)
        assert (there.before_plan, there.paused, list(there.notes)) == ("", True, [])
        await ask(client.apply_plan, there.plan.plan_id, False)
        engine = service.life.driver.engine
        await until(lambda: engine.state.run is None and engine.state.apply_next is None)
        held = holding_of(await ask(client.placement))
        assert tuple(tuple(sorted(keys)) for keys in held.rows) == wanted
        back = await ask(client.plan_to, "newest")
        assert back.before_plan == there.plan.plan_id


@pytest.mark.asyncio
async def test_steps_are_read_page_by_page_to_the_end(
    tmp_path: Path, clients: list[GrpcAdmin], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(make_settings(tmp_path)) as (service, cluster, _stub):
        client = client_of(service, clients)
        await until(lambda: service.life.driver.engine.state.run is None)
        assert await ask(lambda: list(client.steps())) == []
        cluster.copy_s = 5.0
        await ask(client.drain, 1)
        await until(lambda: service.life.driver.engine.state.run is not None)
        run = service.life.driver.engine.state.run
        assert run is not None
        whole = await ask(lambda: list(client.steps()))
        assert sorted(step.step_id for step in whole) == sorted(run.steps)
        assert len(whole) > 1
        monkeypatch.setattr("moe_serve.cli.admin.STEPS_PAGE", 1)
        paged = await ask(lambda: list(client.steps()))
        assert [step.step_id for step in paged] == [step.step_id for step in whole]


@pytest.mark.asyncio
async def test_a_drain_and_a_budget_are_of_the_rank_that_was_named(
    tmp_path: Path, clients: list[GrpcAdmin]
) -> None:
    async with serving(make_settings(tmp_path)) as (service, _, _stub):
        client = client_of(service, clients)
        await ask(client.drain, 1)
        state = service.life.driver.engine.state
        assert [rank.draining for rank in state.ranks] == [False, True, False]
        answer = await ask(client.set_budget, 2, 2999)
        assert answer.num_slots == 2
        with pytest.raises(FailedPrecondition) as short:
            await ask(client.set_budget, 0, 0)
        assert short.value.violations[0].field == "missing_bytes"
        await ask(client.undrain, 1)
        assert not any(rank.draining for rank in state.ranks)
        with pytest.raises(InvalidArgument, match="rank"):
            await ask(client.drain, 3)


@pytest.mark.asyncio
async def test_a_controller_that_has_gone_is_told_from_one_that_refuses(
    tmp_path: Path, clients: list[GrpcAdmin]
) -> None:
    async with serving(make_settings(tmp_path)) as (service, _, _stub):
        client = client_of(service, clients)
        await ask(client.placement)
    with pytest.raises(CannotReach, match=r"Pause: .* is the service up\?"):
        await ask(client.pause, "nobody hears it")
