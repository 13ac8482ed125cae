"""What a move removes so that what it adds fits: told by the planner's steps, kept with the move,
drawn, and said in words."""

import base64
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console

from moe_serve.cli.views.moves import moves_sum, moves_table
from moe_serve.controller.book import Book
from moe_serve.controller.journal_rows import StateSnapshot, image_of, snapshot_row
from moe_serve.controller.room import room_of
from moe_serve.controller.views import move_view, plan_view
from moe_serve.dashboard.history import History
from moe_serve.dashboard.plans import STATES, Layout, applied, drawn_plan
from moe_serve.documents.views import move_view as move_document
from moe_serve.rpc import placement_pb2 as pb
from placement.layout import ExpertLayout
from placement.messages.effects import Answer, CopyExpert
from placement.messages.events import PauseAsked
from placement.planner import WaveConfig, make_plan, prove
from placement.planner.plan import MoveKind, Plan, StepKind
from tests.builders import make_layout, make_request, make_spec, make_topology
from tests.engine_driver import EngineDriver, two_ranks
from tests.fakes.controller import controller, make_cluster, make_settings, until

E = -1
FULL = [[0, 1, 2, E], [3, 4, 5, E], [6, 7, 1, E]]
"""Each rank full but for its staging slot; expert 1 twice."""


def planned(before: list[list[int]], after: list[list[int]], slots: int = 4) -> Plan:
    """Of one layer of eight experts, three ranks."""
    current, target = (make_layout(rows, num_experts=8) for rows in (before, after))
    request = make_request(
        make_spec(num_experts=8), make_topology([slots] * 3), current, staging_slots=1
    )
    return make_plan(current, target, request, WaveConfig())


def told(plan: Plan) -> pb.PlanView:
    return plan_view(Answer(request_id=0, code="ok", message="", plan_id="p", plan=plan))


def held(pairs: Any) -> list[Counter[int]]:
    return [Counter(int(p) for p in row if p >= 0) for row in pairs]


def after_steps(plan: Plan, before: ExpertLayout, slots: int) -> ExpertLayout:
    return prove(before, plan.steps, slot_limit=[slots] * before.num_ranks, staging_slots=1)


def test_a_replica_that_is_replaced_is_named_by_the_move_that_replaces_it() -> None:
    plan = planned(FULL, [[0, 1, 2, E], [3, 4, 5, E], [6, 7, 0, E]])
    (move,) = plan.moves
    assert (move.kind, move.expert, move.target_rank) == (MoveKind.REPLICATE, 0, 2)
    assert room_of(plan) == {move.move_id: ((0, 1, 2),)}
    (view,) = told(plan).moves
    assert [(r.layer, r.expert, r.rank) for r in view.room] == [(0, 1, 2)]
    assert move_document(view)["room"] == [{"layer": 0, "expert": 1, "rank": 2}]


def test_what_a_migrate_or_an_evict_takes_from_its_own_expert_is_no_room() -> None:
    moved = planned(FULL, [[0, 1, E, E], [3, 4, 5, E], [6, 7, 2, E]])
    assert {m.kind for m in moved.moves} == {MoveKind.MIGRATE}
    assert list(room_of(moved).values()) == [((0, 1, 2),)]
    fewer = planned(FULL, [[0, 1, 2, E], [3, 4, 5, E], [6, 7, E, E]])
    assert [m.kind for m in fewer.moves] == [MoveKind.EVICT]
    assert room_of(fewer) == {}


def some_rows(random: np.random.Generator) -> list[list[int]]:
    """Eight experts, three full ranks of three and one empty slot each."""
    while True:
        spread = [random.permutation(8)[:3].tolist() for _ in range(3)]
        if len({key for row in spread for key in row}) == 8:
            return [[*row, E] for row in spread]


@pytest.mark.parametrize("seed", range(40))
def test_the_picture_after_a_plan_is_the_layout_after_its_steps(seed: int) -> None:
    random = np.random.default_rng(seed)
    before, after = some_rows(random), some_rows(random)
    plan = planned(before, after)
    start = make_layout(before, num_experts=8)
    was, now, pair = applied(Layout(1, 8, start.slots.astype(np.int32)), told(plan).moves)
    end = after_steps(plan, start, 4)
    assert held(pair) == held(end.slots)
    assert now["width"] == 4, "a rank is drawn with more slots than it has"
    leaves = Counter(STATES[n] for n in base64.b64decode(was["state"]))["LEAVES"]
    comes = Counter(STATES[n] for n in base64.b64decode(now["state"]))["COMES"]
    kinds = Counter(step.kind for step in plan.steps)
    # What only passes through a slot is added and removed by steps and drawn by neither picture.
    assert kinds[StepKind.REMOVE] - leaves == kinds[StepKind.ADD] - comes >= 0


def test_the_plans_above_do_replace_something() -> None:
    random = [np.random.default_rng(seed) for seed in range(40)]
    assert sum(len(room_of(planned(some_rows(r), some_rows(r)))) for r in random) > 20


def test_the_document_of_a_plan_counts_what_is_gone() -> None:
    plan = planned(FULL, [[0, 1, 2, E], [3, 4, 5, E], [6, 7, 0, E]])
    before = Layout(1, 8, make_layout(FULL, num_experts=8).slots.astype(np.int32))
    document = drawn_plan(pb.ExplainPlanResponse(plan=told(plan)), [], before, priced=True)
    assert list(base64.b64decode(document["replicas_before"])) == [1, 2, 1, 1, 1, 1, 1, 1]
    assert list(base64.b64decode(document["replicas_after"])) == [2, 1, 1, 1, 1, 1, 1, 1]


def test_room_of_another_model_or_rank_is_not_drawn() -> None:
    plan = planned(FULL, [[0, 1, 2, E], [3, 4, 5, E], [6, 7, 0, E]])
    moves = list(told(plan).moves)
    for gone in ((5, 1, 2), (0, 99, 2), (0, 1, 7), (0, 1, -1), (0, 5, 2)):
        del moves[0].room[:]
        moves[0].room.append(pb.Removed(layer=gone[0], expert=gone[1], rank=gone[2]))
        before = make_layout(FULL, num_experts=8).slots.astype(np.int32)
        was, _, _ = applied(Layout(1, 8, before), moves)
        assert STATES.index("LEAVES") not in base64.b64decode(was["state"])


# -- kept moves ------------------------------------------------------------------------------------


def a_replacing_run() -> tuple[EngineDriver, int]:
    """Ranks [0, 1, 2] and [0, 1, 3], and a plan under way that replaces expert 0 on rank 1 by 2;
    with it the number of records before it."""
    driver = two_ranks(slots=4)
    for hot in (0, 1):
        driver.close_window({hot: 5000.0})
        driver.wait(5.0)
    assert driver.keys() == [[0, 1, 2], [0, 1, 3]]
    before = len(driver.records)
    driver.hold.add(CopyExpert)
    driver.close_window({2: 5000.0})
    return driver, before


@pytest.mark.parametrize("moves_kept", [9, 0])
def test_a_kept_move_knows_its_room_to_its_end(moves_kept: int) -> None:
    driver, before = a_replacing_run()
    book = Book(records_kept=99, moves_kept=moves_kept)
    began = tuple(driver.records[before:])
    book.add(began, driver.engine.state.run)
    kept = [move.room for move in book.moves]
    assert kept == ([((0, 0, 1),)] if moves_kept else [])
    driver.let_go()
    assert driver.engine.state.run is None
    book.add(tuple(driver.records[before + len(began) :]), None)
    assert [(move.state, move.room) for move in book.moves] == [("done", r) for r in kept]
    assert book.replicas_replaced == 1
    (record,) = [k.record for k in book.newest(99) if (k.record.outcome, k.record.rule) == BEGUN]
    assert record.detail.endswith("; in place of layer 0 expert 0")


BEGUN = ("started", "replicate")


def test_a_kept_move_is_told_as_its_plan_told_it() -> None:
    driver, before = a_replacing_run()
    state, book = driver.engine.state, Book(records_kept=99, moves_kept=99)
    assert state.run is not None
    book.add(tuple(driver.records[before:]), state.run)
    (shown,) = [move_view(state, move) for move in book.moves]
    (computed,) = told(state.run.plan).moves
    same = ("kind", "layer", "expert", "source_rank", "target_rank", "cross_node", "room", "reason")
    assert shown.cross_node
    assert [getattr(shown, name) for name in same] == [getattr(computed, name) for name in same]


def test_after_a_restart_and_without_a_plan_room_is_what_is_known() -> None:
    driver, before = a_replacing_run()
    again = Book(records_kept=99, moves_kept=99)
    again.recall_run(driver.engine.state)
    assert [move.room for move in again.moves] == [((0, 0, 1),)]
    blind = Book(records_kept=99, moves_kept=99)
    blind.add(tuple(driver.records[before:]))
    assert [move.room for move in blind.moves] == [()]
    assert "in place of" not in str([kept.record.detail for kept in blind.newest(99)])


@pytest.mark.asyncio
async def test_the_controller_counts_what_was_replaced_and_knows_it_after_a_restart(
    tmp_path: Path,
) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        book = rig.service.book
        for hot in range(4):
            cluster.demand = dict.fromkeys(range(4), 10) | {hot: 400}
            await until(lambda hot=hot: len(rig.listed(hot)) >= 2)  # type: ignore[misc]
        await until(lambda: book.replicas_replaced > 0)
        assert [move for move in book.moves if move.room]
        driver = rig.service.life.driver
        for _ in range(2):  # a snapshot follows each; only the second has the end of every plan
            await driver.ask(lambda n: PauseAsked(at_s=0.0, request_id=n, reason="quiet please"))
            await until(lambda: rig.state.run is None)
        replaced = book.replicas_replaced
    async with controller(make_settings(tmp_path), cluster) as rig:
        assert rig.service.book.replicas_replaced == replaced


def test_a_journal_from_before_tells_no_replaced_replicas_and_a_false_count_is_refused() -> None:
    driver = two_ranks(slots=4)
    snapshot = StateSnapshot(
        term=1,
        epoch=1,
        at_s=1.0,
        engine=driver.engine.snapshot(),
        parts=(),
        epochs_published=1,
        replicas_replaced=7,
    )
    row = snapshot_row(snapshot)
    image = image_of([row], {}, 1.0, dropped_tail=False)
    assert image.snapshot is not None
    assert image.snapshot.replicas_replaced == 7
    fields = msgspec.msgpack.decode(row.body)
    del fields["replicas_replaced"]
    older = replace(row, body=msgspec.msgpack.encode(fields))
    image = image_of([older], {}, 1.0, dropped_tail=False)
    assert image.snapshot is not None
    assert image.snapshot.replicas_replaced == 0
    most = snapshot_row(msgspec.structs.replace(snapshot, replicas_replaced=2**53))
    image = image_of([most], {}, 1.0, dropped_tail=False)
    assert image.snapshot is not None
    assert image.snapshot.replicas_replaced == 2**53
    for count in (-1, 2**53 + 1):
        false = snapshot_row(msgspec.structs.replace(snapshot, replicas_replaced=count))
        with pytest.raises(ValueError, match=f"{count} replaced replicas"):
            image_of([false], {}, 1.0, dropped_tail=False)


# -- words -----------------------------------------------------------------------------------------


def replacing(**fields: Any) -> pb.Move:
    room = [pb.Removed(layer=1, expert=3, rank=1), pb.Removed(layer=0, expert=4, rank=1)]
    return pb.Move(
        plan_id="p",
        kind=pb.MOVE_KIND_REPLICATE,
        expert=19,
        source_rank=0,
        target_rank=1,
        copy_bytes=1 << 20,
        room=room,
        **fields,
    )


def test_a_table_of_moves_says_in_place_of_what() -> None:
    def line(move: pb.Move) -> str:
        console = Console(width=200)
        with console.capture() as capture:
            console.print(moves_table([move], states=False))
        return " ".join(capture.get().split())

    wanted = "+ L0 E19 replicate rank 0 -> rank 1 in place of L1 E3, L0 E4 1.0 MiB cross-node"
    assert line(replacing(cross_node=True)) == wanted
    bare = pb.Move(kind=pb.MOVE_KIND_REPLICATE, source_rank=-1, copy_bytes=1024, cross_node=True)
    # The figure of bytes counts it among those from another node; the line says where from.
    assert line(bare) == "+ L0 E0 replicate checkpoint -> rank 0 1.0 KiB"


def test_a_sum_of_moves_says_how_many_replicas_they_replace() -> None:
    add, end = pb.Move(kind=pb.MOVE_KIND_REPLICATE), pb.Move(kind=pb.MOVE_KIND_EVICT)
    assert moves_sum([replacing(), add, end, replacing()]) == (
        "3 to replicate (in place of 4 replicas), 1 to evict"
    )
    one = pb.Move(kind=pb.MOVE_KIND_MIGRATE, room=[pb.Removed(layer=0, expert=4, rank=1)])
    assert moves_sum([add, one]) == "1 to replicate, 1 to migrate (in place of 1 replica)"
    assert moves_sum([add, end]) == "1 to replicate, 1 to evict"


def test_an_expert_that_made_room_finds_the_move_it_left_for() -> None:
    kept = History()
    kept.update_moves(pb.GetPlacementResponse(moves=[replacing(move_id=5)]))
    for layer, expert in ((0, 19), (1, 3), (0, 4)):
        assert [m["move_id"] for m in kept.moves_of_expert(layer, expert, 9)] == [5]
    assert kept.moves_of_expert(0, 3, 9) == []
