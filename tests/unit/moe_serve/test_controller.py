"""The controller over a fleet in memory: no Ray, no sockets, a journal in a temporary folder."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from moe_serve.controller.service import ControllerService
from placement.engine import EngineSnapshot, RebalanceEngine
from placement.messages.codec import decode_as, decode_event, encode
from placement.messages.effects import CopyExpert
from placement.messages.events import BudgetAsked, DrainAsked, PauseAsked
from tests.fakes.controller import controller, make_cluster, make_settings, until
from tests.fakes.fleet import FakeFleet


@pytest.mark.asyncio
async def test_a_first_start_fills_ranks_and_publishes_one_table(tmp_path: Path) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        assert rig.service.describe()["epoch"] == 1
        assert all(rig.listed(expert) for expert in range(4))
        router, shard = cluster.router(), cluster.shard(0)
        assert router is not None
        assert shard is not None
        await until(lambda: shard.slots.highest_epoch == 1)
        assert router.peers == (rig.service.describe()["router_addresses"][0],)


@pytest.mark.asyncio
async def test_a_hot_expert_gets_a_replica_that_is_listed(tmp_path: Path) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        cluster.demand = {0: 400, 1: 10, 2: 10, 3: 10}
        await until(lambda: len(rig.listed(0)) >= 2)
        await until(lambda: rig.state.run is None)
        done = [m for m in rig.service.book.moves if m.state == "done"]
        assert done
        assert all(m.reason and m.kind == "replicate" for m in done)


@pytest.mark.asyncio
async def test_a_lower_budget_evicts_and_is_applied(tmp_path: Path) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        answer = await rig.service.life.driver.ask(
            lambda n: BudgetAsked(at_s=0.0, request_id=n, rank=0, budget_bytes=1000)
        )
        assert answer.code == "ok"
        shard = cluster.shard(0)
        assert shard is not None
        await until(lambda: shard.slots.ledger.num_slots == 1)
        assert all(rig.listed(expert) for expert in range(4))
        # One slot is the staging slot, so nothing may be left on the rank.
        await until(lambda: all(0 not in rig.listed(expert) for expert in range(4)))


@pytest.mark.asyncio
async def test_a_draining_node_is_emptied_and_its_lost_rank_returns_elsewhere(
    tmp_path: Path,
) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        old = cluster.shard(1)
        assert old is not None
        cluster.drain_node(old.node)
        await until(lambda: all(1 not in rig.listed(expert) for expert in range(4)))
        assert all(rig.listed(expert) for expert in range(4))
        cluster.die(old.name)
        await until(lambda: cluster.shard(1) not in (None, old))
        fresh = cluster.shard(1)
        assert fresh is not None
        assert fresh.node != old.node
        await until(lambda: not rig.state.ranks[1].draining)


@pytest.mark.asyncio
async def test_a_node_that_dies_drained_by_an_earlier_controller_does_not_keep_its_rank(
    tmp_path: Path,
) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        old = cluster.shard(1)
        assert old is not None
        cluster.drain_node(old.node)
        await until(lambda: all(1 not in rig.listed(expert) for expert in range(4)))
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        assert rig.state.ranks[1].draining
        assert cluster.shard(1) is old, "its shard is adopted, not undrained"
        cluster.die(old.name)
        await until(lambda: cluster.shard(1) not in (None, old))
        await until(lambda: not rig.state.ranks[1].draining)


@pytest.mark.asyncio
async def test_the_end_of_a_nodes_drain_leaves_the_operators_drain_alone(tmp_path: Path) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        shard = cluster.shard(1)
        assert shard is not None
        asked = await rig.service.life.driver.ask(
            lambda n: DrainAsked(at_s=0.0, request_id=n, rank=1)
        )
        assert asked.code == "ok"
        cluster.drain_node(shard.node)
        await until(lambda: len(rig.state.ranks[1].drained_by) == 2)
        cluster.keep_node(shard.node)
        await until(lambda: len(rig.state.ranks[1].drained_by) == 1)
        assert rig.state.ranks[1].draining
        await rig.service.life.supervision.undrain(1)
        assert not rig.state.ranks[1].draining


@pytest.mark.asyncio
async def test_a_shard_that_dies_in_the_middle_of_a_copy_is_replaced(tmp_path: Path) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        cluster.copy_s = 0.5
        cluster.demand = {0: 400, 1: 10, 2: 10, 3: 10}
        await until(lambda: bool(rig.state.copying))
        rank = rig.state.run.steps[min(rig.state.copying)].step.slot.rank
        old = cluster.shard(rank)
        assert old is not None
        cluster.die(old.name)
        cluster.copy_s = 0.0
        await until(lambda: cluster.shard(rank) not in (None, old))
        await until(lambda: len(rig.listed(0)) >= 2 and all(rig.listed(e) for e in range(4)))


@pytest.mark.asyncio
async def test_a_hung_shard_is_suspected_then_replaced(tmp_path: Path) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        old = cluster.shard(2)
        assert old is not None
        old.hang = True
        await until(lambda: cluster.shard(2) not in (None, old))
        assert old.name in cluster.killed
        await until(lambda: all(rig.listed(e) for e in range(4)))
        rules = [k.record.rule for k in rig.service.book.newest(1000)]
        assert rules.index("rank_suspected") < rules.index("rank_lost")


@pytest.mark.asyncio
async def test_a_suspect_that_answers_again_is_cleared(tmp_path: Path) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        shard, router = cluster.shard(2), cluster.router()
        assert shard is not None
        assert router is not None
        router.suspects = ((2, shard.incarnation, "connection broke"),)

        def rules() -> list[str]:
            return [k.record.rule for k in rig.service.book.newest(1000)]

        await until(lambda: "rank_cleared" in rules())
        assert cluster.shard(2) is shard


@pytest.mark.asyncio
async def test_a_dead_router_is_replaced_and_gets_the_table(tmp_path: Path) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        old = cluster.router()
        assert old is not None
        cluster.die(old.name)
        await until(lambda: cluster.router() not in (None, old))
        await until(lambda: cluster.router().table is not None)  # type: ignore[union-attr]
        await rig.ready()


@pytest.mark.asyncio
async def test_a_part_that_refuses_to_start_is_tried_again_and_told(tmp_path: Path) -> None:
    cluster = make_cluster()
    cluster.refuse["1"] = "too little memory"
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        assert not rig.service.life.parts.problems
        # The name that was tried is not used again.
        assert len({n for n in cluster.created if ":shard:1:" in n}) == 1


@pytest.mark.asyncio
async def test_a_second_controller_fences_the_first(tmp_path: Path) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path / "a"), cluster) as first:
        await first.ready()
        old_life = first.service.life
        async with controller(make_settings(tmp_path / "b"), cluster) as second:
            assert second.state.term == 2
            await second.ready()
            # The first meets a part that has seen term 2, and ends that life.
            await until(lambda: first.service._life is not old_life)
            assert second.state.paused, "rebuilt without a journal"
        assert len(cluster.living()) == 4


@pytest.mark.asyncio
async def test_without_a_journal_parts_are_adopted_and_none_is_killed(tmp_path: Path) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path / "a"), cluster) as rig:
        await rig.ready()
    before = cluster.living()
    async with controller(make_settings(tmp_path / "b"), cluster) as rig:
        await rig.ready()
        assert cluster.living() == before
        assert cluster.killed == []
        assert rig.state.paused
        assert "no journal" in " ".join(rig.service.describe()["problems"])


@pytest.mark.asyncio
async def test_with_a_journal_parts_it_does_not_name_are_killed(tmp_path: Path) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
    await FakeFleet(cluster).create_shard("tiny:shard:0:999", 0, 999)
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        await until(lambda: cluster.killed == ["tiny:shard:0:999"])


@pytest.mark.asyncio
async def test_a_head_that_is_away_at_the_start_costs_nothing_but_time(tmp_path: Path) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
    await FakeFleet(cluster).create_shard("tiny:shard:0:999", 0, 999)
    cluster.deaf_kills = 3
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        await until(lambda: cluster.killed == ["tiny:shard:0:999"])
        await until(lambda: not rig.service.life.parts.problems)
        assert rig.state.term == 2, "the same life all the time"


@pytest.mark.asyncio
async def test_a_part_that_cannot_be_ended_is_told_and_left(tmp_path: Path) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
    await FakeFleet(cluster).create_shard("tiny:shard:0:999", 0, 999)
    cluster.deaf_kills = 10_000
    settings = make_settings(tmp_path)
    brief = replace(settings, supervision=replace(settings.supervision, end_within_s=0.1))
    async with controller(brief, cluster) as rig:
        await until(lambda: any("by hand" in p for p in rig.service.describe()["problems"]))
        assert 10_000 - cluster.deaf_kills <= 4, "pauses grow"
        cluster.deaf_kills = 0


@pytest.mark.asyncio
async def test_a_journal_of_another_machine_is_not_gone_on_with(tmp_path: Path) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
    async with controller(make_settings(tmp_path), cluster, owner="elsewhere") as rig:
        await rig.ready()
        assert rig.state.paused
        assert any("written on here" in p for p in rig.service.describe()["problems"])
    async with controller(make_settings(tmp_path, state_dir_shared=True), cluster) as rig:
        await rig.ready()
        assert not any("set aside" in p for p in rig.service.describe()["problems"])


@pytest.mark.asyncio
async def test_a_journal_behind_a_newer_controller_is_not_gone_on_with(tmp_path: Path) -> None:
    cluster = make_cluster()
    for folder in ("a", "b"):
        async with controller(make_settings(tmp_path / folder), cluster) as rig:
            await rig.ready()
    async with controller(make_settings(tmp_path / "a"), cluster) as rig:
        await rig.ready()
        assert rig.state.paused
        assert any("newer controller (term 2)" in p for p in rig.service.describe()["problems"])
        assert cluster.killed == []


@pytest.mark.asyncio
async def test_a_rank_that_died_while_nobody_looked_is_repaired_without_it(
    tmp_path: Path,
) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
    victim = cluster.shard(1)
    assert victim is not None
    cluster.die(victim.name)
    cluster.refuse["1"] = "no GPU is free"
    cluster.refuse_always.add("1")
    async with controller(make_settings(tmp_path), cluster) as rig:
        await until(lambda: all(rig.listed(expert) for expert in range(4)))
        found = rig.service.describe()
        assert "no GPU is free" in " ".join(found["problems"])
        await until(lambda: "no GPU is free" in rig.service.describe()["refused"])
        assert rig.service.describe()["state"] == "degraded"


@pytest.mark.asyncio
async def test_what_operators_asked_for_outlives_the_controller(tmp_path: Path) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        driver = rig.service.life.driver
        await driver.ask(lambda n: PauseAsked(at_s=0.0, request_id=n, reason="quiet please"))
        await driver.ask(lambda n: DrainAsked(at_s=0.0, request_id=n, rank=1))
    async with controller(make_settings(tmp_path), cluster) as rig:
        assert rig.state.paused
        assert rig.state.ranks[1].draining


@pytest.mark.asyncio
async def test_six_starts_in_a_row_end_in_a_paused_one(tmp_path: Path) -> None:
    cluster = make_cluster()
    settings = make_settings(tmp_path, restarts_max=2)
    paused = []
    for _ in range(4):
        async with controller(settings, cluster) as rig:
            await rig.ready()
            paused.append(rig.state.paused)
            problems = rig.service.describe()["problems"]
    assert paused == [False, False, False, True]
    assert any("started paused" in p for p in problems)


@pytest.mark.asyncio
async def test_down_ends_every_part_and_the_next_start_is_a_new_one(tmp_path: Path) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        epoch = rig.state.epoch
        ended = await rig.service.down()
        assert cluster.living() == []
        assert len(ended) == 4
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        assert rig.state.term == 2
        assert rig.state.epoch > epoch
        assert not rig.state.paused


@pytest.mark.asyncio
async def test_down_between_two_lives_ends_the_service_for_good(tmp_path: Path) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        shard = cluster.shard(0)
        assert shard is not None
        shard.slots.accept_term(7)  # the word of another controller: this life ends
        await until(lambda: rig.service._life is None)
        assert len(await rig.service.down()) == 4
        await asyncio.sleep(1.2)  # longer than the pause before a next life
        assert cluster.living() == []
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        assert not rig.service.life.beginning.going_on
        assert not rig.state.paused


@pytest.mark.asyncio
async def test_down_before_the_first_life_closes_what_an_earlier_controller_left(
    tmp_path: Path,
) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
    service = ControllerService(make_settings(tmp_path), FakeFleet(cluster), serve_admin=False)
    await service.down()
    assert cluster.living() == []
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        assert not rig.service.life.beginning.going_on


@pytest.mark.asyncio
async def test_copies_are_sent_after_their_reservation_is_journalled(tmp_path: Path) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
    for rank in range(3):
        shard = cluster.shard(rank)
        assert shard is not None
        seen: set[int] = set()
        for command in shard.executed:
            step_id = getattr(command, "step_id", -1)
            if isinstance(command, CopyExpert):
                assert step_id in seen
            seen.add(step_id)


@pytest.mark.asyncio
async def test_the_inputs_of_a_segment_replay_to_the_same_state(tmp_path: Path) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        cluster.demand = {0: 400, 1: 10, 2: 10, 3: 10}
        await until(lambda: len(rig.listed(0)) >= 2 and rig.state.run is None)
        engine = rig.service.life.driver.engine
    with closing(sqlite3.connect(tmp_path / "inputs.db")) as inputs:
        rows = inputs.execute("SELECT kind, body FROM inputs ORDER BY seq").fetchall()
    assert [kind for kind, _ in rows].index("snapshot") == 0
    twin = RebalanceEngine.replayed(decode_as(rows[0][1], EngineSnapshot))
    for _, body in rows[1:]:
        twin.step(decode_event(body))
    assert encode(twin.snapshot()) == encode(engine.snapshot())
