"""`moe-serve explain` and `moe-serve explain plan`, against a controller in memory."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from moe_serve.cli.app import app
from moe_serve.cli.exits import CannotReach
from moe_serve.cli.options import Reach
from moe_serve.errors import FailedPrecondition, MoeServeError, Unavailable
from moe_serve.rpc import placement_pb2 as pb
from tests.fakes.admin import FakeAdmin, make_explanation, make_plan, make_record

GOLDEN = Path(__file__).parents[2] / "golden" / "cli"


@pytest.fixture(autouse=True)
def _no_service_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("MOE_SERVE_SERVICE", "MOE_SERVE_TOKEN_FILE", "MOE_SERVE_TLS_CA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MOE_SERVE_ADDRESS", "127.0.0.1:4000")


def _run(admin: FakeAdmin, *args: str) -> Result:
    return CliRunner().invoke(app, list(args), obj=Reach(connect=admin), catch_exceptions=False)


def _assert_golden(name: str, text: str, rewrite: bool) -> None:
    file = GOLDEN / name
    if rewrite:
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


def test_the_verdict_comes_first_then_causes_then_where_the_time_went(rewrite: bool) -> None:
    admin = FakeAdmin()
    result = _run(admin, "explain", "--seconds", "30")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert admin.asked == [("explain", 30.0)]
    assert admin.closed
    assert result.stdout.startswith("It is slow:\n")
    _assert_golden("explain.txt", result.stdout, rewrite)


def test_check_exits_5_only_where_something_is_slow() -> None:
    assert _run(FakeAdmin(), "explain", "--check").exit_code == 5
    well = pb.ExplainResponse(verdict="nothing_slow", requests=3, seconds=20.0)
    result = _run(FakeAdmin(explanation=well), "explain", "--check")
    assert result.exit_code == 0
    assert result.stdout.startswith("Nothing is slow.\n")
    idle = _run(FakeAdmin(explanation=pb.ExplainResponse(verdict="idle")), "explain", "--check")
    assert idle.exit_code == 0
    assert idle.stdout.startswith("Idle")


def test_programs_get_every_number() -> None:
    found = json.loads(_run(FakeAdmin(), "explain", "-o", "json").stdout)
    assert [cause["kind"] for cause in found["causes"]] == ["hot_expert", "slow_rank"]
    assert found["causes"][0]["evidence"] == {"replicas": 1.0, "times_even_share": 3.25}
    assert found["stages"][0]["stage"] == "queue"
    assert found["newest"]["refused"] == ["plan: no"]
    bare = FakeAdmin(explanation=pb.ExplainResponse(verdict="idle"))
    assert json.loads(_run(bare, "explain", "-o", "json").stdout)["newest"] is None


@pytest.mark.parametrize(
    "error",
    [
        CannotReach("Explain: the controller at 127.0.0.1:4000 does not answer"),
        Unavailable("the controller is starting; ask again"),
        FailedPrecondition("the controller does not start: the journal is damaged"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_controller_that_is_away_is_the_cause(error: MoeServeError) -> None:
    shown = _run(FakeAdmin(explanation=error), "explain")
    assert shown.exit_code == 3
    assert "controller_away: the controller does not answer" in shown.stdout
    assert error.message in shown.stdout
    assert "next step:" in shown.stdout
    plain = _run(FakeAdmin(explanation=error), "explain", "-o", "json")
    assert plain.exit_code == 3
    found = json.loads(plain.stdout)
    assert found["verdict"] == "slow"
    assert [cause["kind"] for cause in found["causes"]] == ["controller_away"]
    assert found["causes"][0]["next_step"]
    assert found["reason"] == error.message


def test_a_port_that_is_no_controllers_is_no_controller_that_is_away() -> None:
    error = FailedPrecondition("that port does not serve this call: requests go to a router")
    result = _run(FakeAdmin(explanation=error), "explain")
    assert result.exit_code == 1
    assert "controller_away" not in result.stdout


def test_a_service_that_nobody_knows_is_no_controller_that_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MOE_SERVE_ADDRESS")
    result = _run(FakeAdmin(), "explain")
    assert result.exit_code == 3
    assert "controller_away" not in result.stdout


def test_a_plan_is_explained_with_its_records(rewrite: bool) -> None:
    records = [
        make_record(
            4,
            "pays_in_time",
            plan_id="2-4",
            refused=["gain_below_band: layer 3 not moved: the gain is within the band of noise"],
        ),
        make_record(9, "plan_done", plan_id="2-4", detail="3 of 3 moves done"),
    ]
    admin = FakeAdmin(records=records)
    result = _run(admin, "explain", "plan", "2-4")
    assert result.exit_code == 0
    assert admin.asked == [("explain_plan", "2-4")]
    _assert_golden("explain_plan.txt", result.stdout, rewrite)
    assert _run(FakeAdmin(), "explain", "plan").exit_code == 0


def test_of_a_plan_that_only_records_tell_of_no_figure_is_shown() -> None:
    shown = _run(FakeAdmin(plan=pb.PlanView(plan_id="2-4")), "explain", "plan", "2-4").stdout
    assert shown.startswith("Plan 2-4: what it moved is not kept any more\n")
    assert "Imbalance predicted not known -> not known; measured 0.96 in" in shown


def test_a_plan_that_is_not_kept_is_refused_by_name() -> None:
    result = _run(FakeAdmin(), "explain", "plan", "9-9")
    assert result.exit_code == 1
    assert "9-9" in result.stderr


def test_a_plan_id_without_plan_is_a_wrong_argument() -> None:
    result = _run(FakeAdmin(), "explain", "now", make_plan().plan_id)
    assert result.exit_code == 2
    assert "explain plan 2-4" in result.stderr


def test_where_nothing_is_known_of_a_phase_its_stages_are_left_out() -> None:
    only = make_explanation()
    for stage in only.stages:
        stage.requests = stage.requests if stage.phase == "decode" else 0
    shown = _run(FakeAdmin(explanation=only), "explain").stdout
    assert "decode" in shown
    assert "prefill" not in shown
