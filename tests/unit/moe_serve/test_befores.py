"""The placements from before the newest plans: kept in little space, found again, told from the
journal."""

from __future__ import annotations

import hypothesis.strategies as st
import msgspec
from hypothesis import given

from moe_serve.controller.befores import KEPT_MAX, NEWEST, Before, Befores
from moe_serve.controller.journal_rows import StateSnapshot
from placement.engine.state import PlanRun
from placement.layout import ExpertLayout
from placement.messages.codec import decode_as, encode
from placement.planner.plan import Plan
from tests.engine_driver import two_ranks

EMPTY_PLAN = Plan(
    moves=(),
    steps=(),
    copy_bytes=0,
    cross_node_bytes=0,
    cost_s=0.0,
    gain_s_per_s=0.0,
    balancedness_before=1.0,
    balancedness_after=1.0,
)


def run_of(plan_id: str, rows: list[list[int]], cause: str = "auto") -> PlanRun:
    return PlanRun(
        plan_id=plan_id,
        cause=cause,
        plan=EMPTY_PLAN,
        steps={},
        started_at_s=0.0,
        drain_wait_s=0.0,
        before=ExpertLayout.from_rows(rows, num_layers=1, num_experts=9),
    )


def keys(befores: Befores, plan_id: str) -> tuple[tuple[int, ...], ...]:
    before = befores.find(plan_id)
    assert before is not None
    return befores.keys_of(before)


def test_each_plan_is_known_by_what_was_there_before_it() -> None:
    befores = Befores()
    assert befores.find(NEWEST) is None
    befores.note(run_of("1-a", [[2, 0, -1], [1, 3, -1]]))
    befores.note(run_of("2-b", [[0, 1, -1], [3, 1, -1]], "drain"))
    assert keys(befores, "1-a") == ((0, 2), (1, 3))
    assert keys(befores, "2-b") == keys(befores, NEWEST) == ((0, 1), (1, 3))
    assert befores.find("3-c") is None
    assert [(one.plan_id, one.cause) for one in befores.kept] == [("2-b", "drain"), ("1-a", "auto")]


def test_a_plan_is_kept_once_however_often_it_is_told_of() -> None:
    befores = Befores()
    for _ in range(3):
        befores.note(run_of("1-a", [[0], [1]]))
        befores.note(None)
    assert len(befores.kept) == 1
    befores.note(run_of("1-b", [[1], [0]]))
    befores.note(run_of("1-a", [[1], [1]]))
    assert [one.plan_id for one in befores.kept] == ["1-b", "1-a"]
    assert keys(befores, "1-a") == ((0,), (1,))


def test_before_a_plan_there_may_have_been_nothing() -> None:
    befores = Befores()
    befores.note(run_of("1-a", [[0], [1]]))
    befores.note(run_of("1-b", [[-1], [-1]]))
    assert keys(befores, "1-b") == ((), ())
    assert keys(befores, "1-a") == ((0,), (1,))


def test_plans_that_fill_or_clean_up_are_passed_over() -> None:
    befores = Befores()
    for cause in ("initial", "restore", "refill", "cleanup"):
        befores.note(run_of(f"1-{cause}", [[-1], [-1]], cause))
    assert befores.kept == ()


def test_only_the_newest_are_kept() -> None:
    befores = Befores()
    for number in range(KEPT_MAX + 5):
        befores.note(run_of(f"1-{number}", [[number % 9], [(number + 1) % 9]]))
    assert len(befores.kept) == KEPT_MAX
    assert befores.find("1-4") is None
    assert keys(befores, "1-5") == ((5,), (6,))


def test_older_ones_take_the_space_of_what_changed() -> None:
    befores = Befores()
    rows = [[n for n in range(9)] for _ in range(50)]
    for number in range(4):
        rows[number] = rows[number][:-1]
        befores.note(run_of(f"1-{number}", rows))
    assert [(len(one.more), len(one.less)) for one in befores.kept] == [
        (446, 0),
        (1, 0),
        (1, 0),
        (1, 0),
    ]


placements = st.lists(
    st.lists(st.sets(st.integers(0, 8), max_size=5), min_size=1, max_size=4),
    min_size=1,
    max_size=20,
)


@given(placements)
def test_every_kept_placement_comes_back_also_through_the_journal(
    found: list[list[set[int]]],
) -> None:
    befores = Befores()
    for number, rows in enumerate(found):
        befores.note(run_of(f"1-{number}", [sorted(row, reverse=True) for row in rows]))
    again = Befores()
    again.recall(decode_as(encode(befores.kept), tuple[Before, ...]))
    again.note(run_of("2-x", [[0], [1, 2]]))
    for number, rows in list(enumerate(found))[1 - KEPT_MAX :]:
        want = tuple(tuple(sorted(row)) for row in rows)
        assert keys(again, f"1-{number}") == want
    assert keys(again, NEWEST) == ((0,), (1, 2))


def test_a_snapshot_of_a_journal_from_before_tells_none() -> None:
    befores = Befores()
    befores.note(run_of("1-a", [[0], [1]]))
    engine = two_ranks().engine
    snapshot = StateSnapshot(
        term=1,
        epoch=1,
        at_s=0.0,
        engine=engine.snapshot(),
        parts=(),
        epochs_published=1,
        befores=befores.kept,
    )
    written = encode(snapshot)
    assert decode_as(written, StateSnapshot).befores == befores.kept
    older = msgspec.msgpack.decode(written)
    del older["befores"]
    assert decode_as(msgspec.msgpack.encode(older), StateSnapshot).befores == ()


def test_a_rank_that_a_damaged_row_names_and_nobody_has_is_left_out() -> None:
    befores = Befores()
    befores.note(run_of("1-a", [[0], [1]]))
    odd = msgspec.structs.replace(befores.kept[0], more=((-1, 2), (0, 0), (9, 1)))
    befores.recall((odd,))
    assert keys(befores, "1-a") == ((0,), ())
