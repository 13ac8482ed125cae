"""Plans back to an earlier placement, and to a given one, as the controller takes them: what it
knows, also after a restart, and what it refuses by field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_serve.controller.admin_plans import goal_of
from moe_serve.controller.befores import NEWEST
from moe_serve.errors import InvalidArgument, NotFound
from moe_serve.rpc import placement_pb2 as pb
from placement.messages.effects import Answer, CopyExpert
from placement.messages.events import ApplyAsked, PauseAsked, PlanAsked
from tests.fakes.controller import Rig, controller, make_cluster, make_settings, until
from tests.fakes.fleet import FakeCluster

Rows = tuple[tuple[int, ...], ...]
HOT = {0: 400, 1: 10, 2: 10, 3: 10}


def copies_ordered(cluster: FakeCluster) -> int:
    """Commands to copy that shards were given so far."""
    given = [c for part in cluster.parts.values() for c in getattr(part, "executed", ())]
    return sum(isinstance(command, CopyExpert) for command in given)


def held(rig: Rig) -> Rows:
    slots = rig.service.life.driver.engine.layout().slots.tolist()
    return tuple(tuple(sorted(key for key in row if key >= 0)) for row in slots)


def goal(rig: Rig, **fields: Any) -> Any:
    return goal_of(pb.ComputePlanRequest(**fields), rig.service.sight())


def target(rows: Rows) -> list[pb.RankTarget]:
    return [pb.RankTarget(rank=rank, experts=row) for rank, row in enumerate(rows)]


async def ask(rig: Rig, kind: Any, **fields: Any) -> Answer:
    return await rig.service.life.driver.ask(lambda n: kind(at_s=0.0, request_id=n, **fields))


async def a_move(rig: Rig) -> tuple[Rows, str]:
    """The placement before the first automatic plan, and that plan; nothing else follows it."""
    await rig.ready()
    before = held(rig)
    rig.cluster.demand = HOT
    await until(lambda: bool(rig.service.book.befores.kept))
    await ask(rig, PauseAsked, reason="a test")
    await until(lambda: rig.state.run is None and rig.state.outstanding is None)
    return before, rig.service.book.befores.kept[-1].plan_id


@pytest.mark.asyncio
async def test_the_placement_before_a_plan_is_known_and_comes_back(tmp_path: Path) -> None:
    async with controller(make_settings(tmp_path), make_cluster()) as rig:
        before, plan_id = await a_move(rig)
        assert held(rig) != before
        found = goal(rig, before_plan=plan_id)
        assert (found.target, found.before_plan, found.notes) == (before, plan_id, ())
        shown = await ask(rig, PlanAsked, target=found.target)
        assert (await ask(rig, ApplyAsked, plan_id=shown.plan_id)).code == "ok"
        await until(lambda: held(rig) == before and rig.state.run is None)
        newest = rig.service.book.befores.find(NEWEST)
        assert newest is not None
        assert (newest.plan_id, newest.cause) == (shown.plan_id, "asked")
        assert goal(rig, before_plan=NEWEST).target != before, "rolling back twice is going forth"


@pytest.mark.asyncio
async def test_it_is_known_after_a_restart(tmp_path: Path) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        before, plan_id = await a_move(rig)
    async with controller(make_settings(tmp_path), cluster) as rig:
        assert goal(rig, before_plan=plan_id).target == before


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.asyncio
async def test_so_is_what_was_there_before_a_plan_that_ran_when_the_controller_ended(
    tmp_path: Path, applied: bool
) -> None:
    """The snapshot of an applied plan is written before the plan begins."""
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        before = held(rig)
        cluster.copy_s = 60.0
        copies = copies_ordered(cluster)
        if applied:
            await ask(rig, PauseAsked, reason="a test")
            shown = await ask(rig, PlanAsked, target=((0, 1), (0, 1, 2), (0, 2, 3)))
            await ask(rig, ApplyAsked, plan_id=shown.plan_id)
        else:
            cluster.demand = HOT
        # A copy is ordered once its plan is on disk, not before.
        await until(lambda: copies_ordered(cluster) > copies)
        plan_id = rig.state.run.plan_id
    cluster.copy_s = 0.0
    async with controller(make_settings(tmp_path), cluster) as rig:
        assert goal(rig, before_plan=plan_id).target == before


@pytest.mark.asyncio
async def test_without_a_journal_nothing_is_known_any_more_and_it_says_so(tmp_path: Path) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path / "a"), cluster) as rig:
        _, plan_id = await a_move(rig)
    async with controller(make_settings(tmp_path / "b"), cluster) as rig:
        with pytest.raises(NotFound) as error:
            goal(rig, before_plan=plan_id)
    assert error.value.message == (
        f"the placement before plan {plan_id!r} is not known: no plan has moved anything since "
        "this controller's journal began"
    )


@pytest.mark.asyncio
async def test_an_unknown_plan_is_told_with_those_that_are_known(tmp_path: Path) -> None:
    async with controller(make_settings(tmp_path), make_cluster()) as rig:
        _, plan_id = await a_move(rig)
        with pytest.raises(NotFound) as error:
            goal(rig, before_plan="7-deadbeef")
        assert f"known are those before {plan_id} (auto), newest first" in error.value.message


@pytest.mark.asyncio
async def test_a_rank_that_was_added_since_holds_nothing_in_it(tmp_path: Path) -> None:
    async with controller(make_settings(tmp_path), make_cluster()) as rig:
        before, plan_id = await a_move(rig)
        rig.state.ranks.append(rig.state.ranks[-1])
        found = goal(rig, before_plan=plan_id)
        rig.state.ranks.pop()
        assert found.target == (*before, ())
        assert found.notes == ("rank 3 was added since, and would hold nothing",)


@pytest.mark.parametrize(
    ("request_", "field", "words"),
    [
        ({"before_plan": "x" * 201}, "before_plan", "has 201 characters"),
        ({"policy": "x" * 201}, "policy", "has 201 characters"),
        ({"max_moves": -1}, "max_moves", "must be >= 0"),
        (
            {"before_plan": "1-a", "target": target(((0, 1), (2,), (3,)))},
            "target",
            "leave one out",
        ),
        ({"before_plan": "1-a", "policy": "eplb"}, "before_plan", "leave policy and max_moves out"),
        (
            {"target": target(((0, 1), (2,), (3,))), "max_moves": 3},
            "target",
            "leave policy and max_moves out",
        ),
        ({"target": target(((0, 1), (2, 3)))}, "target", "names 2 of 3 ranks; rank 2 is missing"),
        (
            {"target": [*target(((0,), (1,), (2, 3))), pb.RankTarget(rank=1)]},
            "target[3].rank",
            "1 is named twice",
        ),
        ({"target": [pb.RankTarget(rank=3)]}, "target[0].rank", "3 must lie in [0, 3)"),
        ({"target": [pb.RankTarget(rank=-1)]}, "target[0].rank", "-1 must lie in [0, 3)"),
        (
            {"target": target(((0, 1), (2, 3, 4), ()))},
            "target[1].experts[2]",
            "4 must lie in [0, 4)",
        ),
        ({"target": target(((0, 0), (1, 2, 3), ()))}, "target[0].experts", "named twice"),
    ],
)
@pytest.mark.asyncio
async def test_a_wrong_request_names_its_field(
    tmp_path: Path, request_: dict[str, Any], field: str, words: str
) -> None:
    async with controller(make_settings(tmp_path), make_cluster()) as rig:
        await rig.ready()
        with pytest.raises(InvalidArgument) as error:
            goal(rig, **request_)
    assert [one.field for one in error.value.violations] == [field]
    assert words in error.value.message


@pytest.mark.asyncio
async def test_ranks_may_be_named_in_any_order(tmp_path: Path) -> None:
    async with controller(make_settings(tmp_path), make_cluster()) as rig:
        await rig.ready()
        rows: Rows = ((0, 1), (2,), (3,))
        assert goal(rig, target=target(rows)[::-1]).target == rows
        assert goal(rig).target == ()
