"""Plans as pictures: slots before and after, what was seen of their beginning."""

import base64
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.dashboard import plans
from moe_serve.dashboard.history import History
from moe_serve.dashboard.plans import Beginnings, Layout, applied, drawn_plan, replicas_of
from moe_serve.documents.plans import no_plan
from moe_serve.rpc import placement_pb2 as pb

KINDS = {"add": pb.MOVE_KIND_REPLICATE, "go": pb.MOVE_KIND_MIGRATE, "end": pb.MOVE_KIND_EVICT}


def layout(*rows: list[int], layers: int = 2, experts: int = 4) -> Layout:
    return Layout(layers, experts, np.array(rows, dtype=np.int32))


def move(kind: str, pair: int, source: int, target: int = -1, **more: Any) -> pb.Move:
    fields = {"plan_id": "p", "state": pb.MOVE_STATE_PLANNED, **more}
    return pb.Move(
        kind=KINDS[kind],
        layer=pair // 4,
        expert=pair % 4,
        source_rank=source,
        target_rank=target,
        **fields,
    )


def rows_of(slots: dict[str, Any], ranks: int) -> tuple[list[list[int]], list[list[str]]]:
    pair = np.frombuffer(base64.b64decode(slots["pair"]), dtype="<i4")
    state = np.frombuffer(base64.b64decode(slots["state"]), dtype="u1")
    shape = (ranks, slots["width"])
    names = [[slots["states"][n] for n in row] for row in state.reshape(shape)]
    return pair.reshape(shape).tolist(), names


def test_the_worked_example() -> None:
    before, after, pair = applied(layout([0, 1], [2, -1]), [move("add", 0, 0, 1)])
    assert rows_of(before, 2) == ([[0, 1], [2, -1]], [["LISTED", "LISTED"], ["LISTED", ""]])
    assert rows_of(after, 2) == ([[0, 1], [2, 0]], [["LISTED", "LISTED"], ["LISTED", "COMES"]])
    assert pair.tolist() == [[0, 1], [2, 0]]


def test_what_leaves_makes_room_for_what_comes() -> None:
    moves = [move("add", 3, 1, 0), move("end", 1, 0), move("go", 2, 1, 0)]
    before, after, _ = applied(layout([0, 1, -2], [2, 3, 4]), moves)
    assert rows_of(before, 2)[1] == [["LISTED", "LEAVES", ""], ["LEAVES", "LISTED", "LISTED"]]
    # Rank 0 has one place and gets two: the second is drawn behind, not over another.
    pair, names = rows_of(after, 2)
    assert pair == [[0, 3, -2, 2], [-1, 3, 4, -2]]
    assert names[0] == ["LISTED", "COMES", "", "COMES"]


@pytest.mark.parametrize("target", [-1, 0, 1])
def test_what_is_evicted_comes_nowhere(target: int) -> None:
    _, _, pair = applied(layout([0, 1], [2, -1]), [move("end", 1, 0, target)])
    assert pair.tolist() == [[0, -1], [2, -1]]


def test_moves_of_what_is_not_there_change_nothing_else() -> None:
    start = layout([0, 1], [2, -1])
    strange = [
        move("end", 3, 0),
        move("go", 0, 9, 7),
        move("add", 0, -1, -1),
        move("add", 0, 0, 1),
    ]
    strange[3].layer, strange[3].expert = 2**31 - 1, 2**31 - 1
    _, after, pair = applied(start, strange)
    assert pair.tolist() == start.pair.tolist()
    assert not [name for row in rows_of(after, 2)[1] for name in row if name == "COMES"]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_plan_moves_exactly_what_its_moves_say(data: st.DataObject) -> None:
    ranks, width = 3, 4
    cells = st.lists(st.integers(-1, 7), min_size=width, max_size=width, unique_by=lambda p: p + 1)
    rows = [data.draw(st.permutations([*dict.fromkeys(data.draw(cells))])) for _ in range(ranks)]
    rows = [[*row, *([-1] * (width - len(row)))] for row in rows]
    start = layout(*rows)
    held = [{p for p in row if p >= 0} for row in rows]
    moves = []
    for _ in range(data.draw(st.integers(0, 4))):
        source = data.draw(st.integers(0, ranks - 1))
        target = (source + data.draw(st.integers(1, ranks - 1))) % ranks
        if not held[source]:
            continue
        pair = data.draw(st.sampled_from(sorted(held[source])))
        kind = data.draw(st.sampled_from(sorted(KINDS)))
        if kind != "end":
            if pair in held[target]:
                continue
            held[target].add(pair)
        if kind != "add":
            held[source].discard(pair)
        moves.append(move(kind, pair, source, target))
        if kind != "end":
            # A second move of what has just come would need it listed first.
            held[target].discard(pair)
            held[target].add(pair)
            break
    before, after, pair = applied(start, moves)
    for rank in range(ranks):
        assert {p for p in pair[rank].tolist() if p >= 0} == held[rank]
    was, marks = rows_of(before, ranks)
    assert was == start.pair.tolist()
    now, arrived = rows_of(after, ranks)
    came = sum(name == "COMES" for row in arrived for name in row)
    left = sum(name == "LEAVES" for row in marks for name in row)
    assert came == sum(m.kind != pb.MOVE_KIND_EVICT for m in moves)
    assert left == sum(m.kind != pb.MOVE_KIND_REPLICATE for m in moves)
    counts = np.frombuffer(base64.b64decode(replicas_of(start, pair)), dtype="u1")
    assert counts.sum() == sum(p >= 0 for row in now for p in row)


def placement(*moves: pb.Move, rows: tuple[list[int], ...]) -> pb.GetPlacementResponse:
    return pb.GetPlacementResponse(
        num_layers=2,
        num_experts=4,
        moves=moves,
        ranks=[
            pb.Rank(
                rank=rank,
                num_slots=len(row),
                slots=[
                    pb.Slot(
                        index=index,
                        layer=pair // 4 if pair >= 0 else -1,
                        expert=pair % 4 if pair >= 0 else -1,
                        state="LISTED" if pair >= 0 else "",
                    )
                    for index, pair in enumerate(row)
                ],
            )
            for rank, row in enumerate(rows)
        ],
    )


OLD, NEW = ([0, 1], [2, -1]), ([0, 1], [2, 0])
RUNNING, DONE = pb.MOVE_STATE_RUNNING, pb.MOVE_STATE_DONE


def test_a_plan_that_began_between_two_looks_began_in_the_first() -> None:
    seen = Beginnings()
    seen.see(placement(rows=OLD))
    seen.see(placement(move("add", 0, 0, 1, state=DONE), rows=NEW))
    found = seen.before("p", begun=True)
    assert found is not None
    assert found.pair.tolist() == [list(row) for row in OLD]
    assert seen.newest == "p"
    seen.see(placement(move("add", 0, 0, 1, state=DONE), rows=([0], [1])))
    assert seen.before("p", begun=True) is found, "it began once"


def test_a_plan_under_way_at_the_first_look_is_known_only_where_nothing_has_ended() -> None:
    running = Beginnings()
    running.see(placement(move("add", 0, 0, 1, state=RUNNING), rows=OLD))
    assert running.before("p", begun=True) is not None
    assert running.newest == "p"
    half = Beginnings()
    moves = [move("add", 0, 0, 1, state=DONE), move("add", 1, 0, 1, state=RUNNING)]
    half.see(placement(*moves, rows=NEW))
    assert half.before("p", begun=True) is None
    assert half.newest == "p"
    past = Beginnings()
    past.see(placement(move("add", 0, 0, 1, state=DONE), rows=NEW))
    assert past.before("p", begun=True) is None
    assert past.newest == "", "it ended before this page was there"


def test_a_plan_that_has_not_begun_would_begin_now() -> None:
    seen = Beginnings()
    assert seen.before("q", begun=False) is None
    seen.see(placement(rows=OLD))
    seen.computed(pb.PlanView(plan_id="q"))
    seen.see(placement(rows=NEW))
    found = seen.before("q", begun=False)
    assert found is not None
    assert found.pair.tolist() == [list(row) for row in NEW]
    assert seen.before("q", begun=True) is found, "it began, and no placement shows it yet"
    assert seen.before("p", begun=True) is None
    assert seen.newest == "q"
    assert seen.view("q") is not None
    assert seen.view("p") is None


def test_beginnings_are_bounded_and_an_old_plan_is_not_taken_for_a_new_one() -> None:
    seen = Beginnings()
    seen.see(placement(rows=OLD))
    moves: list[pb.Move] = []
    for number in range(3 * plans.PLANS_MAX):
        moves.append(move("add", 0, 0, 1, plan_id=f"p{number}", state=DONE))
        seen.see(placement(*moves, rows=OLD))
        seen.computed(pb.PlanView(plan_id=f"c{number}"))
    assert seen.before("p0", begun=True) is None
    assert seen.before(f"p{number}", begun=True) is not None
    assert seen.view("c0") is None
    seen.see(placement(*moves, rows=NEW))
    assert seen.newest == f"c{number}"
    assert seen.before("p0", begun=True) is None


def test_a_placement_with_strange_slots_has_a_layout() -> None:
    strange = placement(rows=OLD)
    strange.ranks[0].slots.append(pb.Slot(index=-1, layer=0, expert=0, state="LISTED"))
    strange.ranks[0].slots.append(pb.Slot(index=1, layer=2**31 - 1, expert=3, state="LISTED"))
    strange.ranks[0].slots.append(pb.Slot(index=5, layer=0, expert=3, state="COPYING"))
    assert plans.layout_of(strange).pair.tolist() == [
        [0, 1, -2, -2, -2, -2],
        [2, -1, -2, -2, -2, -2],
    ]


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ([DONE, DONE], "done"),
        ([DONE, RUNNING], "running"),
        ([DONE, pb.MOVE_STATE_PLANNED], "running"),
        ([DONE, pb.MOVE_STATE_ABORTED], "aborted"),
        ([pb.MOVE_STATE_PLANNED] * 2, "computed"),
    ],
)
def test_the_state_of_a_plan_is_that_of_its_moves(states: list[int], said: str) -> None:
    moves = [move("add", 0, 0, 1, move_id=n, state=state) for n, state in enumerate(states)]
    history = History()
    if said != "computed":
        history.update_moves(pb.GetPlacementResponse(moves=moves))
    answer = pb.ExplainPlanResponse(plan=pb.PlanView(plan_id="p", moves=moves))
    document = drawn_plan(answer, history.moves_of("p"), None, priced=True)
    assert document["plan"]["state"] == said
    assert document["before"] is document["after"] is None


def test_what_is_not_known_is_null_and_not_nothing() -> None:
    answer = plans.own_plan("p", [move("add", 0, 0, 1, copy_bytes=7, cross_node=True)])
    document = drawn_plan(answer, [], layout([0, 1], [2, -1]), priced=False)
    assert (document["copy_bytes"], document["cross_node_bytes"]) == (7, 7)
    for name in ("balancedness_before", "balancedness_after", "measured_before", "measured_after"):
        assert document[name] is None
    assert document["plan"]["cost_s"] is None
    assert document["after"] is not None
    assert no_plan()["plan"] is None
