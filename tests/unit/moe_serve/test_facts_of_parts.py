"""What shard, router and controller note of themselves, where their settings name a folder."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from moe_serve.errors import DeadlineExceeded, StaleTerm
from moe_serve.ports import DType, SubReply
from moe_serve.router.checks import ForwardInput
from moe_serve.router.dispatch import RouterCore
from moe_serve.shard.assembly import Shard
from placement.messages import history as h
from placement.messages.history import AnyFact, Fact, from_lines
from placement.sim.checks import Coverage, Fence, InvariantBroken, JournalFirst, Memory, check_facts
from placement.topology import Phase
from tests.fake_shards import HIDDEN, FakeWorld, marker_spec, router_settings
from tests.fakes.controller import controller, make_cluster, make_settings, until
from tests.fakes.marker_experts import add, marker_shard, release
from tests.fakes.sub_calls import sub_call

_F = TypeVar("_F", bound=Fact)


def facts_in(folder: Path) -> list[AnyFact]:
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_bytes().splitlines()]
    return from_lines(lines)


def of(facts: list[AnyFact], kind: type[_F]) -> list[_F]:
    return [fact for fact in facts if isinstance(fact, kind)]


# -- a shard ---------------------------------------------------------------------------------------


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    made = marker_shard(history_dir=str(tmp_path))
    facts = made.core.facts
    assert facts is not None
    facts.began()
    made.core.start()
    yield made
    made.stop()


def serve(shard: Shard, slot: int, tag: int, expert: int, **fields: Any) -> Any:
    """The answer to one row for one expert."""
    answers: list[Any] = []
    row = np.ones((1, shard.core.model.expert.hidden_size), np.float32)
    call = sub_call(row, [(0, slot, tag, 1.0, expert)], **fields)
    done = threading.Event()

    def reply(answer: Any) -> None:
        answers.append(answer)
        done.set()

    shard.core.submit(call, 100, reply)
    assert done.wait(5)
    return answers[0]


def test_without_a_folder_nothing_is_noted(tmp_path: Path) -> None:
    made = marker_shard()
    assert made.core.facts is None
    assert list(tmp_path.iterdir()) == []


def test_a_shard_notes_an_expert_from_its_reservation_to_its_release(
    shard: Shard, tmp_path: Path
) -> None:
    tag = add(shard, 0, 2)
    assert isinstance(serve(shard, 0, tag, 2, request_key=9, sub_id=4), SubReply)
    assert isinstance(serve(shard, 0, tag + 1, 2), SubReply)  # stale: nothing is served
    release(shard, 0, tag, expert=2)
    with pytest.raises(StaleTerm):
        release(shard, 0, tag, expert=2, term=0)
    shard.stop()
    facts = facts_in(tmp_path)
    who = f"rank{shard.settings.rank}/{shard.settings.incarnation}"
    assert {fact.who for fact in facts} == {who}
    assert [fact.command for fact in of(facts, h.CommandTaken)] == [
        "ReserveSlot",
        "CopyExpert",
        "VerifyExpert",
        "ReleaseSlot",
    ]
    (proved,) = of(facts, h.SlotProved)
    assert (proved.slot, proved.slot_tag, proved.key, proved.held_key) == (0, tag, 2, 2)
    assert proved.intact
    (served,) = of(facts, h.RowsServed)
    assert (served.request, served.sub_id, served.row, served.k) == (9, 4, (0,), (0,))
    assert (served.key, served.held_key, served.slot_tag) == ((2,), (2,), (tag,))
    (freed,) = of(facts, h.SlotFreed)
    assert (freed.slot, freed.slot_tag, freed.readers) == (0, tag, 0)
    assert [(fact.term, fact.seen) for fact in of(facts, h.TermRefused)] == [(0, 1)]
    used = of(facts, h.MemoryUsed)
    assert used[0].reserved_bytes > 0
    assert (used[-1].resident_bytes, used[-1].reserved_bytes, used[-1].held_bytes) == (0, 0, 0)
    assert isinstance(facts[0], h.Began)
    assert of(facts, h.Died)[0].cause == "left"
    check_facts(facts, [Fence(), Memory(), Coverage()])


def test_memory_that_changed_under_a_proof_is_seen_where_rows_are_served(
    shard: Shard, tmp_path: Path
) -> None:
    tag = add(shard, 0, 2)
    shard.pool.buffer(0)[0] ^= 1
    serve(shard, 0, tag, 2)
    shard.stop()
    facts = facts_in(tmp_path)
    assert not of(facts, h.RowsServed)[0].intact
    with pytest.raises(InvariantBroken, match="I3"):
        check_facts(facts, [Fence()])


def test_who_copies_from_a_slot_reads_it(shard: Shard, tmp_path: Path) -> None:
    tag = add(shard, 0, 2)
    facts = shard.core.facts
    assert facts is not None
    facts.begin_reading(0)  # as the copy server does, but with no pin behind it
    release(shard, 0, tag, expert=2)
    shard.stop()
    (freed,) = of(facts_in(tmp_path), h.SlotFreed)
    assert freed.readers == 1


# -- a router --------------------------------------------------------------------------------------


def a_request(**changes: object) -> ForwardInput:
    made = ForwardInput(
        layer=1,
        phase=Phase.DECODE,
        dtype=DType.FLOAT32,
        hidden=np.ones((3, HIDDEN), np.float32),
        topk_ids=np.array([[0, 1, 2]] * 3, np.int32),
        gates=np.ones((3, 3), np.float32),
        valid=np.array([[1, 1, 1], [1, 0, 1], [0, 0, 0]], np.uint8),
        request_id="",
        attempt=0,
    )
    return replace(made, **changes)


@pytest.mark.asyncio
async def test_a_router_notes_requests_from_arrival_to_answer(tmp_path: Path) -> None:
    world = FakeWorld(marker_spec())
    world.place()
    core = RouterCore(router_settings(world.spec, history_dir=str(tmp_path)), world.open_channel)
    await core.start()
    core.install_table(world.table())
    with pytest.raises(StaleTerm):
        core.install_table(world.table(term=0))
    await core.forward(a_request(), 5.0)
    await core.forward(a_request(attempt=1), 5.0)
    core.report(-1)
    for one in world.shards:
        one.hold = asyncio.Event()
    with pytest.raises(DeadlineExceeded):
        await core.forward(a_request(), 0.05)
    task = asyncio.create_task(core.forward(a_request(), 5.0))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await core.stop()
    facts = facts_in(tmp_path)
    opened, ended = of(facts, h.RequestOpened), of(facts, h.RequestEnded)
    assert [fact.outcome for fact in ended] == ["ok", "ok", "deadline_exceeded", "cancelled"]
    assert [fact.counts for fact in opened] == [True, False, True, True]
    assert (opened[0].pairs, opened[0].keys) == ((0, 1, 2, 3, 5), (6, 7, 8, 6, 8))
    assert len({fact.request for fact in opened}) == 4
    assert [fact.request for fact in ended] == [fact.request for fact in opened]
    rows = sorted(row for _, rows in ended[0].added for row in rows)
    assert set(rows) == {0, 1}
    assert ended[2].added == ended[3].added == ()
    assert len(of(facts, h.RequestBegun)) == 4
    assert [(fact.term, fact.epoch) for fact in of(facts, h.TableInstalled)] == [(1, 1)]
    assert [(fact.term, fact.seen) for fact in of(facts, h.TermRefused)] == [(0, 1)]
    (told,) = of(facts, h.RouterTold)
    assert (told.term, told.applied) == (1, 1)
    (holds,) = of(facts, h.RouterHolds)
    assert (holds.permits, holds.rows, holds.calls, holds.sub_calls) == (0, 0, 0, 0)
    assert [type(fact) for fact in (facts[0], facts[-1])] == [h.Began, h.Died]


# -- a controller ----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_controller_notes_its_terms_and_what_its_engine_does(tmp_path: Path) -> None:
    cluster = make_cluster()
    settings = replace(make_settings(tmp_path / "state"), history_dir=str(tmp_path / "facts"))
    async with controller(settings, cluster) as rig:
        await rig.ready()
        cluster.demand = {0: 400, 1: 10, 2: 10, 3: 10}
        await until(lambda: len(rig.listed(0)) >= 2)
        await until(lambda: rig.state.run is None)
    facts = facts_in(tmp_path / "facts")
    assert {fact.who for fact in facts} == {"controller/1"}
    assert [type(fact) for fact in facts[:2]] == [h.Began, h.Recovered]
    assert of(facts, h.Died)[0].cause == "left"
    kinds = {type(fact) for fact in facts}
    assert kinds >= {
        h.TablePublished,
        h.StateWritten,
        h.CommandSent,
        h.PlanStarted,
        h.PlanEnded,
        h.WindowFolded,
        h.RouterHeard,
    }
    tables = of(facts, h.TablePublished)
    assert [table.epoch for table in tables] == sorted({table.epoch for table in tables})
    assert {key for key, *_ in tables[-1].listed} == set(range(tables[-1].num_keys))
    check_facts(facts, [JournalFirst()])
    late = [fact for fact in facts if not isinstance(fact, h.StateWritten)]
    with pytest.raises(InvariantBroken, match="I8"):
        check_facts(late, [JournalFirst()])
