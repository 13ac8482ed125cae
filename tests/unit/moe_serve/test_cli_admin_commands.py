"""status, plan, apply, events and the steering commands, against a controller in memory."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from moe_serve.bootstrap.record import ServiceRecord, read_record, write_record
from moe_serve.cli.admin import AdminTarget
from moe_serve.cli.app import app
from moe_serve.cli.options import Reach
from moe_serve.rpc import placement_pb2 as pb
from tests.fakes.admin import MIB, FakeAdmin, make_move, make_placement, make_record

GOLDEN = Path(__file__).parents[2] / "golden" / "cli"
ADDRESS = "127.0.0.1:4000"


@pytest.fixture(autouse=True)
def _no_service_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("MOE_SERVE_SERVICE", "MOE_SERVE_TOKEN_FILE", "MOE_SERVE_TLS_CA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MOE_SERVE_ADDRESS", ADDRESS)


def _run(admin: FakeAdmin, *args: str) -> Result:
    return CliRunner().invoke(app, list(args), obj=Reach(connect=admin), catch_exceptions=False)


def _assert_golden(name: str, text: str, rewrite: bool) -> None:
    file = GOLDEN / name
    if rewrite:
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


def _unwell() -> pb.GetPlacementResponse:
    return make_placement(
        state="degraded",
        simulated=True,
        accepts_insecure=True,
        missing=[0, 3],
        problems=["rank 1 is lost; a new shard starts"],
        moves=[
            make_move(0, pb.MOVE_KIND_REPLICATE, state=pb.MOVE_STATE_RUNNING, reason="repair"),
            make_move(1, pb.MOVE_KIND_MIGRATE, state=pb.MOVE_STATE_DONE, reason="over"),
        ],
    )


# -- status --------------------------------------------------------------------------------------


def test_status_of_a_healthy_service(rewrite: bool) -> None:
    admin = FakeAdmin()
    result = _run(admin, "status", "--check")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert admin.targets[0].address == ADDRESS
    assert admin.closed
    _assert_golden("status.txt", result.stdout, rewrite)


def test_status_tells_scattered_memory_and_what_is_being_copied() -> None:
    placement = make_placement()
    placement.ranks[0].copies.add(done_bytes=1 << 20, total_bytes=3 << 20)
    shown = _run(FakeAdmin(placements=[placement]), "status").stdout.splitlines()
    head, first, second = (line.split() for line in shown[4:7])
    assert head[6:8] == ["SCATTERED", "COPYING"]
    assert " ".join(first[7:]) == "MiB 0% 1.0 MiB/3.0 MiB 0 ms 100 declared-cpu"
    assert second[8:10] == ["33%", "-"]


def test_status_of_a_degraded_service(rewrite: bool) -> None:
    result = _run(FakeAdmin(placements=[_unwell()], window=None), "status")
    assert result.exit_code == 0
    _assert_golden("status_degraded.txt", result.stdout, rewrite)


def test_status_says_how_many_plans_stood_still() -> None:
    assert "stood still" not in _run(FakeAdmin(), "status").stdout
    shown = _run(FakeAdmin(placements=[make_placement(plans_stalled=2)]), "status").stdout
    assert "plans that stood still: 2" in shown


@pytest.mark.parametrize("by_address", [False, True])
def test_status_brings_the_record_up_to_date(
    monkeypatch: pytest.MonkeyPatch, by_address: bool
) -> None:
    placement = make_placement()
    write_record(
        ServiceRecord(
            service=placement.service_id,
            ray_address="",
            namespace="moe_serve",
            admin_address=ADDRESS,
            router_addresses=("127.0.0.1:1",),
            dashboard_url="",
            config_file="",
            network="loopback",
        )
    )
    if not by_address:
        monkeypatch.delenv("MOE_SERVE_ADDRESS")
    _run(FakeAdmin(placements=[placement]), "status")
    now = tuple(router.address for router in placement.routers)
    noted = read_record(placement.service_id).router_addresses
    assert noted == (("127.0.0.1:1",) if by_address else now)
    # While one is being created anew nobody knows where it will be: what is known stays.
    half = make_placement()
    half.routers.add(router="router-9", state="lost")
    _run(FakeAdmin(placements=[half]), "status")
    assert read_record(placement.service_id).router_addresses == noted


@pytest.mark.parametrize(
    "fields",
    [{"state": "degraded"}, {"state": "starting"}, {"missing": [1]}, {"problems": ["disk full"]}],
)
def test_status_check_tells_scripts(fields: dict[str, object]) -> None:
    admin = FakeAdmin(placements=[make_placement(**fields)])
    assert _run(admin, "status", "--check").exit_code == 5


def test_status_check_allows_a_pause() -> None:
    admin = FakeAdmin(placements=[make_placement(state="paused")])
    assert _run(admin, "status", "--check").exit_code == 0


def test_status_as_json_has_numbers_for_numbers() -> None:
    shown = json.loads(_run(FakeAdmin(placements=[_unwell()]), "status", "-o", "json").stdout)
    assert shown["degraded"] is True
    assert shown["slot_bytes"] == 3 * MIB
    assert shown["moves_done"] == {"migrate": 1, "replicate": 3}
    assert [move["kind"] for move in shown["moves"]] == ["replicate", "migrate"]
    assert shown["moves"][0]["state"] == "running"
    assert shown["ranks"][0]["memory"]["free_bytes"] == 3 * MIB
    assert shown["routers"][0]["address"] == "127.0.0.1:4711"
    assert shown["ranks"][0]["slots"][2]["layer"] == -1
    assert shown["load"]["layer_imbalance"] == [0.1, 0.4]
    assert "demand" not in shown["load"]


def test_status_watch_shows_every_change() -> None:
    admin = FakeAdmin(placements=[make_placement(), _unwell()])
    lines = _run(admin, "status", "--watch", "-o", "json").stdout.splitlines()
    assert [json.loads(line)["state"] for line in lines] == ["steady", "degraded"]


# -- plan and apply ------------------------------------------------------------------------------


def test_plan_prints_a_diff_and_moves_nothing(rewrite: bool) -> None:
    admin = FakeAdmin()
    result = _run(admin, "plan")
    assert result.exit_code == 0
    assert admin.asked == [("compute_plan", "", 0)]
    _assert_golden("plan.txt", result.stdout, rewrite)


def test_plan_without_moves(rewrite: bool) -> None:
    empty = pb.PlanView(plan_id="", refused=["rank 1 has no empty slot"])
    result = _run(FakeAdmin(plan=empty), "plan", "--exit-code")
    assert result.exit_code == 0
    _assert_golden("plan_empty.txt", result.stdout, rewrite)


def test_plan_exit_code_says_that_there_is_something() -> None:
    result = _run(FakeAdmin(), "plan", "--exit-code", "-p", "eplb", "--max-moves", "2")
    assert result.exit_code == 4
    assert "moe-serve apply 2-4" in result.stdout


def test_plan_passes_policy_and_limit_on() -> None:
    admin = FakeAdmin()
    shown = json.loads(_run(admin, "plan", "-p", "eplb", "--max-moves", "2", "-o", "json").stdout)
    assert admin.asked == [("compute_plan", "eplb", 2)]
    assert (shown["plan_id"], shown["term"], shown["epoch"]) == ("2-4", 2, 7)
    assert [move["kind"] for move in shown["moves"]] == ["replicate", "migrate", "evict"]
    assert (shown["state"], shown["records"]) == ("computed", [])


def test_plan_with_an_unknown_policy_is_a_usage_error() -> None:
    result = _run(FakeAdmin(), "plan", "-p", "nonsense")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "error: policy 'nonsense' is not one of" in result.stderr


def test_apply_runs_exactly_that_plan() -> None:
    admin = FakeAdmin()
    result = _run(admin, "apply", "2-4")
    assert (result.exit_code, admin.asked) == (0, [("apply_plan", "2-4", False)])
    assert "plan 2-4: accepted" in result.stdout


def test_apply_check_only_asks() -> None:
    admin = FakeAdmin()
    result = _run(admin, "apply", "2-4", "--check")
    assert (result.exit_code, admin.asked) == (0, [("apply_plan", "2-4", True)])
    assert result.stdout == "plan 2-4 still fits; nothing was started\n"


def test_apply_of_an_unknown_plan_fails() -> None:
    result = _run(FakeAdmin(), "apply", "9-9")
    assert result.exit_code == 1
    assert "plan 9-9 is not known" in result.stderr


# -- steering ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "asked"),
    [
        (("pause", "--reason", "release"), ("pause", "release")),
        (("resume",), ("resume",)),
        (("drain", "0"), ("drain", 0)),
        (("undrain", "0"), ("undrain", 0)),
        (
            ("add-rank", "--group", "1", "--node", "b", "--key", "k1"),
            ("add_rank", 1, "b", None, "k1"),
        ),
        (("add-rank", "--again", "0", "--key", "k2"), ("add_rank", 0, "", 0, "k2")),
        (("remove-rank", "0"), ("remove_rank", 0, False)),
        (("remove-rank", "0", "--accept-lower-floor"), ("remove_rank", 0, True)),
        (("budget", "1", "6MiB"), ("set_budget", 1, 6 * MIB)),
        (("budget", "1", "6291456"), ("set_budget", 1, 6 * MIB)),
        (("budget", "1", "2 slots"), ("set_budget", 1, 6 * MIB)),
        (("budget", "1", "2slots"), ("set_budget", 1, 6 * MIB)),
    ],
)
@pytest.mark.parametrize("form", ["table", "json"])
def test_steering_asks_the_controller(
    args: tuple[str, ...], asked: tuple[object, ...], form: str
) -> None:
    admin = FakeAdmin()
    result = _run(admin, *args, "-o", form)
    assert (result.exit_code, admin.asked) == (0, [asked])
    if form == "json":
        json.loads(result.stdout)


def test_a_refusal_is_one_line_and_exit_1() -> None:
    result = _run(FakeAdmin(), "drain", "1")
    assert result.exit_code == 1
    assert result.stderr == "error: rank 1 cannot be drained: 4 slots short on the others\n"


def test_a_roll_that_begins_with_something_wrong_is_one_line_and_exit_1() -> None:
    admin = FakeAdmin([make_placement(problems=["rank 1 is lost"])])
    result = _run(admin, "roll", "--only", "ranks")
    assert (result.exit_code, admin.asked) == (1, [])
    assert result.stderr.splitlines() == [
        "error: nothing is replaced while something is wrong: rank 1 is lost. Mend it first, or go "
        "on with --accept-problems where it is of the past"
    ]


@pytest.mark.parametrize(
    "args",
    [
        ("drain", "7"),
        ("drain", "-1"),
        ("drain", "x"),
        ("remove-rank", str(1 << 31)),
        ("add-rank", "--group", str(1 << 31)),
        ("add-rank", "--again", str(1 << 31)),
        ("plan", "--max-moves", str(1 << 31)),
        ("events", "--after", str(1 << 63)),
        ("budget", "0", "many"),
        ("plam",),
    ],
)
def test_wrong_arguments_are_exit_2(args: tuple[str, ...]) -> None:
    assert _run(FakeAdmin(), *args).exit_code == 2


def test_an_argument_that_is_not_text_is_said_and_exit_2() -> None:
    class Wire(FakeAdmin):
        def add_rank(
            self, group: int, node: str, again: int | None, key: str = ""
        ) -> pb.AddRankResponse:
            pb.AddRankRequest(group=group, node=node, rank=again, key=key)
            return super().add_rank(group, node, again, key)

    result = _run(Wire(), "add-rank", "--node", "n\udcff")
    assert result.exit_code == 2
    assert result.stderr == "error: an argument is not UTF-8: 'n\\udcff'\n"
    assert _run(Wire(), "add-rank", "--node", "n\u00f6d").exit_code == 0


def test_a_wrong_size_names_the_argument() -> None:
    result = _run(FakeAdmin(), "budget", "0", "many")
    assert "  SIZE: 'many' is neither bytes" in result.stderr


def test_ctrl_c_is_exit_130() -> None:
    def interrupted(_target: AdminTarget) -> FakeAdmin:
        raise KeyboardInterrupt

    result = CliRunner().invoke(app, ["status"], obj=Reach(connect=interrupted))
    assert result.exit_code == 130
    assert result.stdout == ""


def test_status_without_load_says_so() -> None:
    result = _run(FakeAdmin(window=pb.GetLoadResponse(window=3, balancedness=1.0)), "status")
    assert "Imbalance - (no load in window 3)" in result.stdout


# -- events --------------------------------------------------------------------------------------


def _records() -> list[pb.DecisionRecord]:
    return [
        make_record(1, "plan_started", detail="3 moves", plan_id="2-4", copy_bytes=6 * MIB),
        make_record(2, "in_balance", detail="[steady]", numbers={"balancedness": 0.98}),
        make_record(
            3,
            expected_gain_s_per_s=0.01,
            realised_gain_s_per_s=0.008,
            detail="3 moves",
            plan_id="2-4",
        ),
    ]


def test_events_as_text(rewrite: bool) -> None:
    result = _run(FakeAdmin(records=_records()), "events")
    _assert_golden("events.txt", result.stdout, rewrite)


def test_events_follow_after_a_number_as_json_lines() -> None:
    admin = FakeAdmin(records=_records())
    result = _run(admin, "events", "--follow", "--after", "1", "-o", "json")
    assert admin.asked == [("events", 1, True)]
    assert [json.loads(line)["seq"] for line in result.stdout.splitlines()] == [2, 3]


@pytest.mark.parametrize("form", ["table", "json"])
def test_a_rule_without_records_is_said_on_stderr(form: str) -> None:
    result = _run(FakeAdmin(records=_records()), "events", "--rule", "foo", "-o", form)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == (
        "no record of rule 'foo'; rules there: in_balance, plan_done, plan_started\n"
    )
    result = _run(FakeAdmin(), "events", "--rule", "foo")
    assert result.stderr == "no record of rule 'foo'; rules there: none\n"


def test_events_of_one_rule() -> None:
    result = _run(FakeAdmin(records=_records()), "events", "--rule", "in_balance")
    assert len(result.stdout.splitlines()) == 1
    assert not result.stderr
    assert "[steady] (balancedness 0.98)" in result.stdout
