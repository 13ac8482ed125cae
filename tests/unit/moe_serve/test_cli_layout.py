"""rollback, export and import, against a controller in memory."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401  # loaded here, not within the time of a test
import yaml
from typer.testing import CliRunner, Result

from moe_serve.cli.app import app
from moe_serve.cli.layouts import holding_of, parse_layers, read_layout
from moe_serve.cli.options import Reach
from moe_serve.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, Unavailable
from moe_serve.rpc import placement_pb2 as pb
from tests.fakes.admin import FakeAdmin, make_move, make_placement

HELD = ((0, 2), (1, 3))


@pytest.fixture(autouse=True)
def _no_service_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("MOE_SERVE_SERVICE", "MOE_SERVE_TOKEN_FILE", "MOE_SERVE_TLS_CA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MOE_SERVE_ADDRESS", "127.0.0.1:4000")


def _run(admin: FakeAdmin, *args: str, answer: str = "") -> Result:
    reach = Reach(connect=admin)
    return CliRunner().invoke(app, list(args), obj=reach, input=answer, catch_exceptions=False)


def _moved(state: pb.MoveState.ValueType = pb.MOVE_STATE_DONE) -> FakeAdmin:
    moves = [make_move(n, pb.MOVE_KIND_REPLICATE, plan_id="2-4", state=state) for n in range(3)]
    return FakeAdmin(placements=[make_placement(moves=moves)])


class _Changed(FakeAdmin):
    """Something that the plan touches has changed."""

    def apply_plan(self, plan_id: str, validate_only: bool) -> str:
        super().apply_plan(plan_id, validate_only)
        raise FailedPrecondition("rank 1 slot 0 changed since the plan was computed")


# -- rollback ------------------------------------------------------------------------------------


def test_rollback_shows_asks_pauses_applies_and_waits() -> None:
    admin = _moved()
    result = _run(admin, "rollback", answer="y\n")
    assert result.exit_code == 0
    assert admin.asked == [
        ("plan_to", "newest", ()),
        ("pause", "towards the placement before plan 2-3"),
        ("apply_plan", "2-4", False),
        ("explain_plan", "2-4"),
    ]
    lines = result.stdout.splitlines()
    assert lines[0] == "Towards the placement before plan 2-3"
    assert any("frees rank 1" in line for line in lines)
    assert "Nothing moved" not in result.stdout
    assert lines[-2:] == [
        "plan 2-4: done, this is the placement before plan 2-3",
        "Automatic plans are paused; `moe-serve resume` lets them run, and move things again.",
    ]
    assert "Run these 3 moves? [y/N]:" in result.stderr
    assert result.stderr.endswith("plan 2-4: 3 of 3 moves ended\n")


@pytest.mark.parametrize("answer", ["n\n", "", "\n"])
def test_who_does_not_say_yes_moves_nothing(answer: str) -> None:
    admin = _moved()
    result = _run(admin, "rollback", "2-3", answer=answer)
    assert result.exit_code == 1
    assert admin.asked == [("plan_to", "2-3", ())]


def test_dry_run_only_shows() -> None:
    admin = _moved()
    result = _run(admin, "rollback", "--dry-run")
    assert (result.exit_code, admin.asked) == (0, [("plan_to", "newest", ())])
    assert result.stdout.splitlines()[-1] == "Nothing moved. Run: moe-serve rollback 2-3 --yes"


def test_automatic_plans_may_be_left_on() -> None:
    admin = _moved()
    result = _run(admin, "rollback", "-y", "--keep-automatic")
    assert "pause" not in [name for name, *_ in admin.asked]
    assert result.stdout.splitlines()[-1] == (
        "Automatic plans run, and may move things away from it again."
    )


def test_what_is_paused_already_is_not_paused_again() -> None:
    admin = _moved()
    admin.paused = True
    result = _run(admin, "rollback", "-y", "--keep-automatic")
    assert [name for name, *_ in admin.asked] == ["plan_to", "apply_plan", "explain_plan"]
    assert "Automatic plans are paused;" in result.stdout


@pytest.mark.parametrize("paused", [False, True])
def test_where_the_plan_is_refused_automatic_plans_are_as_they_were(paused: bool) -> None:
    admin = _Changed(paused=paused)
    result = _run(admin, "rollback", "-y")
    assert result.exit_code == 1
    assert "rank 1 slot 0 changed since" in result.stderr
    names = [name for name, *_ in admin.asked]
    assert names == (
        ["plan_to", "apply_plan"] if paused else ["plan_to", "pause", "apply_plan", "resume"]
    )


class _Silent(FakeAdmin):
    """`what` meets `error`."""

    what = "apply_plan"
    error: BaseException = Unavailable("the answer was lost")

    def pause(self, reason: str) -> None:
        super().pause(reason)
        if self.what == "pause":
            raise self.error

    def apply_plan(self, plan_id: str, validate_only: bool) -> str:
        super().apply_plan(plan_id, validate_only)
        if self.what == "apply_plan":
            raise self.error
        return ""

    def steps(self) -> list[pb.StepView]:
        if self.what == "steps":
            raise self.error
        return []


@pytest.mark.parametrize(
    "error",
    [Unavailable("the answer was lost"), DeadlineExceeded("too late"), KeyboardInterrupt()],
    ids=["unavailable", "deadline", "ctrl-c"],
)
@pytest.mark.parametrize("what", ["pause", "apply_plan", "steps"])
def test_where_it_is_not_known_what_came_of_it_the_pause_is_told(
    what: str, error: BaseException
) -> None:
    moves = [make_move(n, pb.MOVE_KIND_REPLICATE, plan_id="2-4") for n in range(3)]
    moves = [m for m in moves if setattr(m, "state", pb.MOVE_STATE_DONE) is None]
    admin = _Silent(placements=[make_placement(moves=moves)])
    admin.what, admin.error = what, error
    result = _run(admin, "rollback", "-y")
    assert result.exit_code in (1, 3, 130)
    assert ("may be paused" if what == "pause" else "are paused") in result.stderr
    assert "`moe-serve resume`" in result.stderr
    goes_on = what == "steps" and isinstance(error, KeyboardInterrupt)
    assert ("not known" in result.stderr) == (what != "pause" and not goes_on)
    assert ("plan 2-4 goes on; `moe-serve status` shows it" in result.stderr) == goes_on
    assert "resume" not in [name for name, *_ in admin.asked], "it may be running"


def test_what_was_paused_before_or_is_left_on_is_not_told_as_ours() -> None:
    for paused, args in ((True, ()), (False, ("--keep-automatic",))):
        result = _run(_Silent(paused=paused), "rollback", "-y", *args)
        assert result.exit_code == 3
        assert "paused" not in result.stderr
        assert "not known" in result.stderr


def test_a_pause_that_cannot_be_ended_is_told() -> None:
    class Gone(_Changed):
        def resume(self) -> None:
            raise Unavailable("it ended")

    result = _run(Gone(), "rollback", "-y")
    assert result.exit_code == 3
    assert "automatic plans are paused; `moe-serve resume`" in result.stderr


def test_the_command_to_run_is_whole_and_can_be_pasted(tmp_path: Path) -> None:
    file = tmp_path / "a file's name.json"
    file.write_text(_export(), encoding="utf-8")
    roots = tmp_path / "ca.pem"
    given = ["--tls-ca", str(roots), "import", str(file), "--format", "moe-serve"]
    given += ["--keep-automatic", "--wait", "9", "--address", "127.0.0.1:4000"]
    result = _run(_moved(), *given, "--dry-run", "-o", "table")
    assert result.exit_code == 0, result.stderr
    _, _, said = result.stdout.splitlines()[-1].partition("Run: ")
    program, *words = shlex.split(said)
    assert program == "moe-serve"
    assert words[:4] == ["--tls-ca", str(roots), "import", str(file)]
    assert set(words[4:]) == {
        "--format", "moe-serve", "--keep-automatic", "--wait", "9.0",
        "--address", "127.0.0.1:4000", "--yes",
    }  # fmt: skip
    admin = _moved()
    assert _run(admin, *words).exit_code == 0
    assert "apply_plan" in [name for name, *_ in admin.asked]


def test_rollback_to_a_plan_that_is_not_known_names_those_that_are() -> None:
    result = _run(FakeAdmin(), "rollback", "9-9", "-y")
    assert result.exit_code == 1
    assert "known are those before 2-3 (auto), newest first" in result.stderr


def test_moves_that_failed_make_the_command_fail() -> None:
    result = _run(_moved(pb.MOVE_STATE_ABORTED), "rollback", "-y")
    assert result.exit_code == 1
    assert "plan 2-4: 0 of 3 moves are done; see `moe-serve events`" in result.stdout


def test_a_plan_that_does_not_begin_in_time_is_said() -> None:
    result = _run(FakeAdmin(), "rollback", "-y", "--wait", "0.01")
    assert result.exit_code == 1
    assert "plan 2-4: has not begun; see `moe-serve events`" in result.stdout.splitlines()


def test_who_does_not_wait_is_told_that_it_began() -> None:
    result = _run(_moved(pb.MOVE_STATE_RUNNING), "rollback", "-y", "--wait", "0")
    assert result.exit_code == 0
    assert "plan 2-4: accepted" in result.stdout


@pytest.mark.parametrize(
    ("refused", "words"),
    [([], "it is that already"), (["migrate left out"], "what differs cannot be moved")],
)
def test_where_nothing_moves_nothing_is_asked(refused: list[str], words: str) -> None:
    admin = FakeAdmin(plan=pb.PlanView(plan_id="2-9", refused=refused))
    result = _run(admin, "rollback")
    assert result.exit_code == 0
    assert words in result.stdout.splitlines()[-1]
    assert [name for name, *_ in admin.asked] == ["plan_to"]


def test_what_was_left_out_is_said_at_the_end_too() -> None:
    admin = _moved()
    admin.plan.refused.append("migrate of layer 0 expert 1 left out: no empty slot")
    result = _run(admin, "rollback", "-y")
    assert "this is the placement before plan 2-3 but for 1 moves" in result.stdout


def test_notes_of_the_controller_are_shown() -> None:
    admin = _moved()
    admin.plan_notes = ("rank 3 was added since, and would hold nothing",)
    shown = _run(admin, "rollback", "--dry-run").stdout
    assert "Note: rank 3 was added since, and would hold nothing" in shown.splitlines()


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_for_programs_there_is_one_answer_and_nobody_is_asked(form: str) -> None:
    asked = _run(_moved(), "rollback", "-o", form)
    assert asked.exit_code == 2
    assert "cannot ask: add -y" in asked.stderr
    result = _run(_moved(), "rollback", "-y", "-o", form)
    found = json.loads(result.stdout) if form == "json" else yaml.safe_load(result.stdout)
    assert (found["applied"], found["paused"], found["before_plan"]) == (True, True, "2-3")
    assert found["plan"]["plan_id"] == "2-4"
    assert list(found["moves"].values()) == ["done"] * 3
    looked = json.loads(_run(_moved(), "rollback", "--dry-run", "-o", "json").stdout)
    assert (looked["applied"], looked["paused"], looked["moves"]) == (False, False, {})


# -- export --------------------------------------------------------------------------------------


def _export(*args: str, admin: FakeAdmin | None = None) -> str:
    result = _run(admin or FakeAdmin(), "export", *args)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_export_writes_what_is_listed() -> None:
    assert json.loads(_export()) == {
        "format": "moe-serve/placement",
        "version": 1,
        "model": "tiny-moe",
        "weights_version": "v1",
        "num_layers": 2,
        "num_experts": 2,
        "ranks": [
            {"rank": 0, "layers": [[0], [0]]},
            {"rank": 1, "layers": [[1], [1]]},
        ],
    }
    assert json.loads(_export("--format", "vllm")) == [[0, 1], [0, 1]]
    assert json.loads(_export("--format", "sglang")) == {
        "physical_to_logical_map": [[0, 1], [0, 1]]
    }
    assert _export("--format", "trtllm") == (
        "num_slots: 2\nlayer_updates_per_iter: 0\ninitial_global_assignments:\n"
        "  0: [0, 1]\n  1: [0, 1]\n"
    )


def test_a_dash_is_standard_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert _export("-f", "-") == _export()
    assert list(tmp_path.iterdir()) == []
    result = _run(FakeAdmin(), "export", "-f", "-", "-o", "json")
    assert result.exit_code == 2
    assert "--output has no say beside an export to stdout" in result.stderr


def test_layers_are_numbered_as_the_engine_does() -> None:
    found = yaml.safe_load(_export("--format", "trtllm", "--layers", "3,5"))
    assert sorted(found["initial_global_assignments"]) == [3, 5]
    found = json.loads(_export("--format", "sglang", "--layers", "1-2"))
    assert len(found["physical_to_logical_map"]) == 3
    assert (
        "name its MoE layers with --layers"
        in _run(FakeAdmin(), "export", "--format", "sglang").stderr
    )


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ("3", "names 1 layers, the service has 2"),
        ("a", "'a' is neither a number nor a range"),
        ("3-", "'3-' is neither a number nor a range"),
        ("-3", "'-3' is neither a number nor a range"),
        ("5-3", "5-3 is no range"),
        ("0-9999999", "0-9999999 is no range"),
        ("3,3", "each layer once, ascending"),
        ("4,3", "each layer once, ascending"),
        (",".join(f"{n}-{n + 999}" for n in range(0, 4000, 1000)), "more than 1024 layers"),
        ("1" * 19, "is neither"),
    ],
)
def test_wrong_layers_are_refused(layers: str, words: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        parse_layers(layers, 2)
    assert words in error.value.message


def test_an_uneven_placement_has_no_such_form_and_it_is_said_where_it_is_uneven() -> None:
    placement = make_placement()
    placement.ranks[1].slots[2].MergeFrom(pb.Slot(layer=1, expert=1, tag=3, state="LISTED"))
    placement.ranks[1].slots[2].layer, placement.ranks[1].slots[2].expert = 1, 0
    for form in ("vllm", "sglang", "trtllm"):
        result = _run(FakeAdmin(placements=[placement]), "export", "--format", form)
        assert result.exit_code == 2
        assert "rank 1 has 2 of layer 1, most have 1" in result.stderr
        assert "rebalance.uniform: true" in result.stderr
        assert result.stdout == ""
    own = json.loads(_export(admin=FakeAdmin(placements=[placement])))
    assert own["ranks"][1] == {"rank": 1, "layers": [[1], [0, 1]]}


def test_only_what_is_listed_counts_and_a_rank_that_has_left_has_no_slots() -> None:
    placement = make_placement()
    placement.ranks[0].slots[2].CopyFrom(
        pb.Slot(index=2, layer=0, expert=1, tag=4, state="COPYING")
    )
    placement.ranks.add(rank=2, state="removed")
    admin = FakeAdmin(placements=[placement])
    assert json.loads(_export("--format", "vllm", admin=admin)) == [[0, 1], [0, 1]]
    placement.ranks.add(rank=3, state="lost")
    result = _run(admin, "export", "--format", "vllm")
    assert "rank 3 has 0 of layer 0, most have 1" in result.stderr


def test_a_plan_that_runs_is_told() -> None:
    admin = FakeAdmin(placements=[make_placement(state="moving")])
    assert "a plan is running" in _run(admin, "export").stderr


def test_export_leaves_out_what_the_model_does_not_have() -> None:
    placement = make_placement()
    whole = holding_of(placement).rows
    for layer, expert in ((2**31 - 1, 2**31 - 1), (2, 0), (0, 2), (-1, 0)):
        slots = placement.ranks[0].slots
        slots.append(pb.Slot(index=len(slots), layer=layer, expert=expert, state="LISTED"))
    admin = FakeAdmin(placements=[placement])
    assert holding_of(placement).rows == whole == HELD
    result = _run(admin, "export", "--format", "vllm")
    assert result.exit_code == 0, result.stderr
    placement.num_layers = placement.num_experts = 2**31 - 1
    result = _run(admin, "export")
    assert result.exit_code in (1, 2)
    assert "cells" in result.stderr


def test_export_to_a_file_is_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "here.json"
    said = _export("-f", str(out), "-o", "json")
    assert json.loads(said) == {
        "file": str(out),
        "format": "moe-serve",
        "num_layers": 2,
        "num_ranks": 2,
        "replicas": 4,
    }
    assert json.loads(out.read_text())["num_layers"] == 2
    assert [file.name for file in tmp_path.glob("*.json*")] == ["here.json"]
    assert "4 replicas of 2 layers on 2 ranks" in _export("-f", str(out))
    nowhere = _run(FakeAdmin(), "export", "-f", str(tmp_path / "no" / "x.json"))
    assert nowhere.exit_code == 2
    assert "cannot be written" in nowhere.stderr


@pytest.mark.parametrize("name", ["a fifo", "a folder", "links in a circle"])
def test_export_replaces_no_device_and_nothing_else_that_is_no_file(
    tmp_path: Path, name: str
) -> None:
    file = tmp_path / "there"  # never a device of this machine: a fault would replace it
    if name == "a fifo":
        os.mkfifo(file)
    elif name == "a folder":
        file.mkdir()
    elif name == "links in a circle":
        file.symlink_to(file)
    before = os.lstat(file)
    result = _run(FakeAdmin(), "export", "-f", str(file))
    assert result.exit_code == 2
    assert f"--file {file} cannot be written" in result.stderr
    after = os.lstat(file)
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)


def test_export_through_a_link_writes_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    file, link = tmp_path / "real" / "file.json", tmp_path / "link"
    link.symlink_to(file)
    for _ in ("there is none yet", "there is one"):
        assert _run(FakeAdmin(), "export", "-f", str(link)).exit_code == 0
        assert link.is_symlink()
        assert file.read_text(encoding="utf-8") == _export()
        file.write_text("older", encoding="utf-8")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file.json", "link", "real"]


def test_tensors_are_for_sglang_alone(tmp_path: Path) -> None:
    result = _run(FakeAdmin(), "export", "--format", "vllm", "-f", str(tmp_path / "x.pt"))
    assert result.exit_code == 2
    assert "only SGLang reads" in result.stderr
    assert not list(tmp_path.glob("*.pt"))


# -- import --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["moe-serve", "sglang", "vllm", "trtllm", "pt"])
@pytest.mark.parametrize("named", [False, True])
def test_what_was_exported_is_imported_as_it_was(tmp_path: Path, form: str, named: bool) -> None:
    file = tmp_path / ("x.pt" if form == "pt" else "x.txt")
    form = "sglang" if form == "pt" else form
    _export("--format", form, "-f", str(file))
    admin = _moved()
    args = ["--format", form] if named else []
    result = _run(admin, "import", str(file), "-y", *args)
    assert result.exit_code == 0, result.stderr
    assert admin.asked[0] == ("plan_to", "", HELD)
    assert f"this is the placement of {file}" in result.stdout


def test_layers_of_a_model_with_dense_ones_come_back(tmp_path: Path) -> None:
    crossed = make_placement()
    for rank in crossed.ranks:
        rank.slots[1].expert = 1 - rank.rank
    for form in ("sglang", "trtllm"):
        file = tmp_path / form
        admin = FakeAdmin(placements=[crossed])
        _export("--format", form, "--layers", "1,3", "-f", str(file), admin=admin)
        admin = _moved()
        assert _run(admin, "import", str(file), "-y", "--layers", "1,3").exit_code == 0
        assert admin.asked[0] == ("plan_to", "", ((0, 3), (1, 2)))
    plain = _run(_moved(), "import", str(tmp_path / "sglang"), "-y")
    assert plain.exit_code == 2
    assert "has 4 layers, the service has 2 MoE layers" in plain.stderr
    assert "--layers" in plain.stderr


def test_import_dry_run_only_looks(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    _export("-f", str(file))
    admin = _moved()
    result = _run(admin, "import", str(file), "--dry-run")
    assert [name for name, *_ in admin.asked] == ["plan_to"]
    assert result.stdout.splitlines()[-1] == f"Nothing moved. Run: moe-serve import {file} --yes"


def _import(tmp_path: Path, content: Any, *args: str) -> tuple[FakeAdmin, Result]:
    file = tmp_path / "x"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    admin = _moved()
    return admin, _run(admin, "import", str(file), "--dry-run", *args)


def test_one_list_of_vllm_stands_for_every_layer_and_an_empty_slot_is_none(tmp_path: Path) -> None:
    admin, _ = _import(tmp_path, [1, -1, 0, 1])
    assert admin.asked[0] == ("plan_to", "", ((1, 3), (0, 1, 2, 3)))
    admin, _ = _import(tmp_path, {"physical_to_logical_map": [[1, -1], [0, 1]]}, "--format", "vllm")
    assert admin.asked[0] == ("plan_to", "", ((1, 2), (3,)))


def test_an_expert_twice_on_a_rank_is_once_enough_and_it_is_said(tmp_path: Path) -> None:
    admin, result = _import(tmp_path, [[0, 0, 1, 0], [0, 1, 1, 1]])
    assert admin.asked[0] == ("plan_to", "", ((0, 2, 3), (0, 1, 3)))
    assert "Note: 2 slots of the file hold what their rank holds already" in result.stdout


OWN = {
    "format": "moe-serve/placement",
    "version": 1,
    "num_layers": 2,
    "num_experts": 2,
    "ranks": [{"rank": 0, "layers": [[0, 1], [0, 1]]}],
}


def test_a_rank_that_is_not_named_would_hold_nothing_and_it_is_said(tmp_path: Path) -> None:
    admin, result = _import(tmp_path, {**OWN, "model": "other", "weights_version": "v1"})
    assert admin.asked[0] == ("plan_to", "", ((0, 1, 2, 3), ()))
    assert "Note: rank 1 is not named in the file, and would hold nothing" in result.stdout
    assert "Note: model is other in the file, the service serves tiny-moe" in result.stdout


def _own(**fields: Any) -> dict[str, Any]:
    return {**OWN, **fields}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (_own(version=2), "$.version"),
        (_own(form="x"), "form"),
        ({**OWN, "format": "something"}, "$.format"),
        (_own(num_layers=3), "ranks[0].layers: has 2, num_layers is 3"),
        (
            _own(num_layers=1, ranks=[{"rank": 0, "layers": [[0, 1]]}]),
            "num_layers: is 1, the service has 2",
        ),
        (_own(num_experts=4), "num_experts: is 4, the service has 2"),
        (_own(num_experts=1), "ranks[0].layers[0]: names expert 1, num_experts is 1"),
        (_own(ranks=[]), "$.ranks"),
        (_own(ranks=[{"rank": -1, "layers": [[0], [1]]}]), "$.ranks[0].rank"),
        (_own(ranks=[{"rank": 0, "layers": [[0, "1"], [1]]}]), "$.ranks[0].layers[0][1]"),
        (_own(ranks=[{"rank": 0, "layers": [[0, -1], [1]]}]), "$.ranks[0].layers[0][1]"),
        (_own(ranks=[{"rank": 0, "layers": [[0, 0], [1]]}]), "names an expert twice"),
        (_own(ranks=[OWN["ranks"][0]] * 2), "ranks[1]: names rank 0 again"),  # type: ignore[index]
        (
            _own(ranks=[{"rank": 7, "layers": [[0, 1], [0, 1]]}]),
            "ranks[0].rank: is 7, the service has ranks 0 to 1",
        ),
        ("{", "is no JSON"),
        ("", "has no initial_global_assignments"),
        ({}, "has neither physical_to_logical_map nor logical_count"),
        ({"logical_count": [[[1, 2], [3, 4]]]}, "logical_count: is load"),
        ({"physical_to_logical_map": [[0, 1]]}, "has 1 layers, the service has 2"),
        ([[0, 1, 0], [0, 1, 1]], "has 3 slots a layer, which 2 ranks cannot share equally"),
        ([[0, 1], [0, 2]], "physical_to_logical_map[1][1]: experts must lie in [0, 2), got 2"),
        ([[0, 1], [0, -2]], "physical_to_logical_map[1][1]: experts must lie in [0, 2), got -2"),
        ([[0, 1], [0]], "is not an array"),
        ([[0, 1.5], [0, 1]], "must hold integers"),
        ([[[0, 1]], [[0, 1]]], "must be [layers, slots], got [2, 1, 2]"),
        ([], "must hold integers"),
        ("initial_global_assignments:\n  0: [0, 1]\n", "has 1 layers, the service has 2"),
        (
            "num_slots: 2\ninitial_global_assignments:\n  0: [0, 1]\n  1: [0]\n",
            "initial_global_assignments[1]: has 1 slots, num_slots is 2",
        ),
        (
            "initial_global_assignments:\n  0: [0, x]\n  1: [0, 1]\n",
            "initial_global_assignments[0][1]: must be an expert, got 'x'",
        ),
        ("initial_global_assignments:\n  a: [0, 1]\n", "has the key 'a', which is no layer"),
        ("initial_global_assignments: 3\n", "must map 1 to 1024 layers to lists"),
        ("initial_global_assignments:\n  0: 3\n", "must be a list of 1 to"),
        ("initial_global_assignments:\n  0: &a [0, 1]\n  1: *a\n", "line 3: aliases are not read"),
        ("a: [\n", "line 2"),
        ("num_slots: 3\n", "has no initial_global_assignments (it has num_slots)"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, content: Any, words: str) -> None:
    file = tmp_path / "x"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(InvalidArgument) as error:
        read_layout(file, None, holding_of(make_placement()), None)
    assert words in error.value.message
    assert str(file) in error.value.message


def test_a_refused_file_asks_nothing_of_the_controller(tmp_path: Path) -> None:
    admin, result = _import(tmp_path, [[0, 1, 0], [0, 1, 1]])
    assert (result.exit_code, admin.asked) == (2, [])
    assert result.stderr.startswith(f"error: {tmp_path / 'x'}: physical_to_logical_map: has 3")


def test_assignments_are_found_in_the_engines_option_file(tmp_path: Path) -> None:
    text = (
        "moe_config:\n  load_balancer:\n    num_slots: 2\n    initial_global_assignments:\n"
        "      4: [1, 0]\n      5: [0, 1]\n"
    )
    admin, _ = _import(tmp_path, text)
    assert admin.asked[0] == ("plan_to", "", ((1, 2), (0, 3)))
    _, wrong = _import(tmp_path, text, "--layers", "4,6")
    assert "initial_global_assignments: has no layer 6" in wrong.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--format", "moe-serve"), "unknown field"),
        (("--format", "trtllm"), "has no initial_global_assignments"),
        (("--layers", "2,5"), "has 2 layers, no layer 5"),
    ],
)
def test_a_format_that_is_named_is_taken_at_its_word(
    tmp_path: Path, args: tuple[str, ...], words: str
) -> None:
    _, result = _import(tmp_path, {"physical_to_logical_map": [[0, 1], [0, 1]]}, *args)
    assert result.exit_code == 2
    assert words in result.stderr


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    gone = _run(FakeAdmin(), "import", str(tmp_path / "gone"), "-y")
    assert gone.exit_code == 2
    assert "cannot be read" in gone.stderr
    folder = _run(FakeAdmin(), "import", str(tmp_path), "-y")
    assert "is no regular file" in folder.stderr
    (tmp_path / "b").write_bytes(b"\xff\xfe\x00")
    binary = _run(FakeAdmin(), "import", str(tmp_path / "b"), "-y")
    assert binary.exit_code == 2
    assert "is not text" in binary.stderr


def test_tensors_of_another_format_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.pt"
    _export("--format", "sglang", "-f", str(file))
    result = _run(FakeAdmin(), "import", str(file), "-y", "--format", "trtllm")
    assert result.exit_code == 2
    assert "holds tensors, which are no trtllm file" in result.stderr
