"""`apply --wait`: when the moves of a plan have ended, and what became of each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from moe_serve.cli.app import app
from moe_serve.cli.exits import CannotReach
from moe_serve.cli.moving import UNKNOWN
from moe_serve.cli.options import Reach
from moe_serve.rpc import placement_pb2 as pb
from tests.fakes.admin import FakeAdmin, make_move, make_placement, make_record

PLAN = "2-4"
SHOWN = 200
"""Moves in one placement."""
DONE, ABORTED = pb.MOVE_STATE_DONE, pb.MOVE_STATE_ABORTED
PLANNED, RUNNING = pb.MOVE_STATE_PLANNED, pb.MOVE_STATE_RUNNING


@pytest.fixture(autouse=True)
def _no_service_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("MOE_SERVE_SERVICE", "MOE_SERVE_TOKEN_FILE", "MOE_SERVE_TLS_CA"):
        monkeypatch.delenv(name, raising=False)


def _moves(*states: pb.MoveState.ValueType) -> list[pb.Move]:
    return [
        make_move(number, pb.MOVE_KIND_MIGRATE, plan_id=PLAN, state=state)
        for number, state in enumerate(states)
    ]


def _admin(
    *seen: Sequence[pb.Move], records: Sequence[pb.DecisionRecord] = (), shown: int = SHOWN
) -> FakeAdmin:
    """A controller that shows the newest moves as they are one time after the other, and knows the
    whole plan as it is at last."""
    return FakeAdmin(
        placements=[make_placement(moves=moves[-shown:]) for moves in seen],
        plan=pb.PlanView(plan_id=PLAN, moves=seen[-1]),
        records=list(records),
    )


def _apply(admin: FakeAdmin, *args: str, wait: str = "30") -> Result:
    command = ["apply", PLAN, "--wait", wait, "--address", "127.0.0.1:4000", *args]
    return CliRunner().invoke(app, command, obj=Reach(connect=admin), catch_exceptions=False)


@pytest.mark.parametrize(("last", "code"), [(DONE, 0), (ABORTED, 1)], ids=["done", "aborted"])
def test_the_wait_is_over_when_every_move_has_ended(
    last: pb.MoveState.ValueType, code: int
) -> None:
    other = make_move(2, pb.MOVE_KIND_EVICT, plan_id="2-3", state=RUNNING)
    admin = _admin(_moves(RUNNING), _moves(last))
    for placement in admin.placements:
        placement.moves.append(other)
    result = _apply(admin)
    assert result.exit_code == code
    assert result.stderr.splitlines() == [
        f"plan {PLAN}: 0 of 1 moves ended",
        f"plan {PLAN}: 1 of 1 moves ended",
    ]
    said = "done, 1 of 1 moves" if code == 0 else "1 of 1 moves are not done; see"
    assert result.stdout.startswith(f"plan {PLAN}: {said}")


def test_it_waits_for_the_last_step() -> None:
    admin = _admin(_moves(DONE))
    admin.step_pages = [[pb.Step(plan_id=PLAN, step_id=2, state="drained")], []]
    assert _apply(admin).exit_code == 0
    assert admin.step_pages == []


@pytest.mark.parametrize(("first", "code"), [(DONE, 0), (ABORTED, 1)], ids=["done", "aborted"])
def test_moves_beyond_those_that_a_placement_shows_count(
    first: pb.MoveState.ValueType, code: int
) -> None:
    admin = _admin(_moves(*[RUNNING] * 300), _moves(first, *[DONE] * 299))
    result = _apply(admin, "-o", "json")
    assert (result.exit_code, len(json.loads(result.stdout)["moves"])) == (code, 300)
    assert result.stderr.splitlines() == [
        f"plan {PLAN}: 0 of 300 moves ended",
        f"plan {PLAN}: 300 of 300 moves ended",
    ]


@pytest.mark.parametrize(("first", "code"), [("done", 0), ("aborted", 1)])
def test_moves_beyond_those_that_the_controller_keeps_are_told_by_their_records(
    first: str, code: int
) -> None:
    records = [make_record(5, "migrate", move_id=0), make_record(6, "migrate", move_id=1)]
    records[0].outcome = first
    admin = _admin(_moves(PLANNED, PLANNED, DONE), records=records, shown=1)
    result = _apply(admin, "-o", "json")
    assert result.exit_code == code
    assert json.loads(result.stdout)["moves"] == {"0": first, "1": "done", "2": "done"}


def test_moves_of_which_no_record_is_kept_are_told_by_the_end_of_the_plan() -> None:
    last = make_record(9, "plan_done")
    assert _apply(_admin(_moves(PLANNED, DONE), records=[last], shown=1)).exit_code == 0
    last.outcome = "aborted"
    assert _apply(_admin(_moves(PLANNED, DONE), records=[last], shown=1)).exit_code == 1


def test_a_plan_that_does_not_begin_in_time_is_said_and_has_its_own_moves() -> None:
    admin = FakeAdmin()
    result = _apply(admin, "-o", "json", wait="0.01")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["moves"] == dict.fromkeys("012", "planned")
    result = _apply(admin, wait="0.01")
    assert (result.exit_code, result.stdout) == (
        1,
        f"plan {PLAN}: has not begun after 0.01 s; see `moe-serve events`\n",
    )
    assert result.stderr == f"plan {PLAN}: not begun yet\n"


def test_a_plan_that_has_begun_and_whose_moves_have_not_is_not_said_to_be_late() -> None:
    started = make_record(3, "asked", plan_id=PLAN)
    started.outcome = "started"
    result = _apply(_admin(_moves(PLANNED, PLANNED), records=[started]), wait="0.01")
    assert result.exit_code == 1
    assert result.stdout == f"plan {PLAN}: 2 of 2 moves are not done; see `moe-serve events`\n"


def test_a_controller_that_does_not_know_the_plan_any_more_says_so() -> None:
    class _Anew(FakeAdmin):
        def apply_plan(self, plan_id: str, validate_only: bool) -> str:
            self.plan = pb.PlanView(plan_id="3-1")
            return ""

    result = _apply(_Anew(), wait="0.01")
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"no plan '{PLAN}' is kept" in result.stderr


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, f"plan {PLAN} goes on; `moe-serve status` shows it"),
        (CannotReach("nobody"), 3, UNKNOWN),
    ],
)
def test_what_ends_the_wait_does_not_end_the_plan_and_it_is_said(
    error: BaseException, code: int, said: str
) -> None:
    class _Watched(FakeAdmin):
        def placement(self) -> pb.GetPlacementResponse:
            raise error

    result = _apply(_Watched(plan=pb.PlanView(plan_id=PLAN)))
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.splitlines()[0] == said


@pytest.mark.parametrize(("args", "told"), [((), True), (("--check",), False)])
def test_where_the_answer_to_apply_does_not_come_it_is_said(
    args: tuple[str, ...], told: bool
) -> None:
    class _Unheard(FakeAdmin):
        def apply_plan(self, plan_id: str, validate_only: bool) -> str:
            raise KeyboardInterrupt

    reach = Reach(connect=lambda _target: _Unheard())
    command = ["apply", PLAN, *args, "--address", "127.0.0.1:4000"]
    result = CliRunner().invoke(app, command, obj=reach)
    assert (result.exit_code, result.stderr) == (130, f"{UNKNOWN}\n" if told else "")


def test_calls_of_the_wait_end_with_it() -> None:
    admin = _admin(_moves(DONE))
    assert _apply(admin, wait="7").exit_code == 0
    assert admin.asked_within == [7.0]
