"""Numbers, messages and streams as people and programs get them."""

import json
import math
import re
import sys
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from moe_serve.cli import main
from moe_serve.cli.app import app
from moe_serve.cli.exits import EPILOG, MEANINGS, ExitCode
from moe_serve.cli.figures import (
    shown_bytes,
    shown_counts,
    shown_imbalance,
    shown_number,
    shown_seconds,
)
from moe_serve.cli.options import Reach
from moe_serve.cli.output import Output, OutputFormat, columns, console
from moe_serve.cli.plain import enum_word, plain
from moe_serve.cli.views.events import event_line
from moe_serve.rpc import placement_pb2 as pb
from tests.fakes.admin import FakeAdmin, make_explanation, make_move, make_placement, make_window


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (98304, "96.0 KiB"), (3 << 20, "3.0 MiB"), (-2048, "-2.0 KiB")],
)
def test_bytes(count: int, text: str) -> None:
    assert shown_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.00042, "0.42 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (1.5, "1.5 s"),
        (75, "75 s"),
        (600, "10 min"),
        (4000, "1 h 06 min"),
        (-2.5, "-2.5 s"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert shown_seconds(seconds) == text


def test_imbalance_of_a_balancedness() -> None:
    assert (shown_imbalance(0.8), shown_imbalance(1.0), shown_imbalance(0.0)) == (
        "0.25",
        "0.00",
        "-",
    )


def test_counts_in_order_of_name() -> None:
    assert shown_counts({"replicate": 3, "migrate": 0, "evict": 1}) == "1 evict, 3 replicate"
    assert shown_counts({}) == "none"


def test_every_exit_code_has_a_meaning_and_stands_in_the_help() -> None:
    assert list(MEANINGS) == list(ExitCode)
    for code, text in MEANINGS.items():
        assert f"{code.value} {text}" in EPILOG


def test_enums_are_words() -> None:
    move = pb.Move(kind=pb.MOVE_KIND_MIGRATE, state=pb.MOVE_STATE_RUNNING)
    assert (enum_word(move, "kind"), enum_word(move, "state")) == ("migrate", "running")
    assert enum_word(pb.Move(), "kind") == ""
    assert plain(pb.Step(kind=pb.STEP_KIND_ADD))["kind"] == "add"


def test_an_enum_of_a_newer_server_is_its_number() -> None:
    move = pb.Move()
    move.ParseFromString(b"\x18\x63")  # field 3 (kind) = 99
    assert enum_word(move, "kind") == "99"


def test_a_message_as_plain_values() -> None:
    record = pb.DecisionRecord(seq=2**40, numbers={"b": 1.0, "a": 2.0})
    shown = plain(record)
    assert shown["seq"] == 2**40
    assert list(shown["numbers"].items()) == [("a", 2.0), ("b", 1.0)]
    assert shown["rule"] == ""
    json.dumps(shown)


def test_bytes_of_a_message_are_left_out() -> None:
    shown = plain(pb.GetLoadResponse(demand=b"\0" * 8, layer_imbalance=[0.5]))
    assert "demand" not in shown
    assert shown["layer_imbalance"] == [0.5]


def test_a_table_in_a_pipe_has_no_trailing_blanks_and_no_colour(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = columns(("N", "NAME"), right=("N",))
    table.add_row("1", "[bold]x[/bold]", style="red")
    table.add_row("22", "y" * 150)
    Output().data(None, [table])
    assert capsys.readouterr().out.splitlines() == [
        " N  NAME",
        " 1  [bold]x[/bold]",
        "22  " + "y" * 150,
    ]


def test_notes_and_errors_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(OutputFormat.JSON)
    output.note("starting")
    output.error("error: no")
    output.data({"a": "ü"}, ["not shown"])
    captured = capsys.readouterr()
    assert captured.err == "starting\nerror: no\n"
    assert captured.out == '{\n  "a": "ü"\n}\n'


def test_json_is_never_folded(capsys: pytest.CaptureFixture[str]) -> None:
    Output(OutputFormat.JSON).line({"a": "x " * 400}, "")
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_yaml_holds_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    plain = {"b": [1, 2.5, None], "a": "ü: x", "on": True, "no": "no", "long": "w " * 300}
    Output(OutputFormat.YAML).data(plain, ["not shown"])
    text = capsys.readouterr().out
    assert yaml.safe_load(text) == plain
    assert text.startswith("b:\n")
    assert "ü: x" in text


def test_a_stream_of_yaml_is_a_document_an_entry(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(OutputFormat.YAML)
    for number in (1, 2):
        output.line({"n": number}, "not shown")
    assert list(yaml.safe_load_all(capsys.readouterr().out)) == [{"n": 1}, {"n": 2}]


class _Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("no_color", ["", "1"])
def test_colour_only_on_a_terminal_without_no_color(
    monkeypatch: pytest.MonkeyPatch, no_color: str
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm")
    stream = _Terminal()
    console(stream).print("x", style="red")
    assert ("\x1b[31m" in stream.getvalue()) is not bool(no_color)


def test_output_takes_the_streams_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    Output().data(None, ["x"])
    assert stream.getvalue() == "x\n"


NO_NUMBERS = (math.nan, math.inf, -math.inf)


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_what_is_no_number_is_a_dash(value: float) -> None:
    assert {shown_seconds(value), shown_imbalance(value), shown_number(value, ".1f")} == {"-"}
    assert event_line(pb.DecisionRecord(wall_time_s=value, numbers={"a": value})).startswith("-  ")
    assert shown_number(0.75, ".1f") == "0.8"


@pytest.mark.parametrize("value", NO_NUMBERS)
@pytest.mark.parametrize("form", [OutputFormat.JSON, OutputFormat.YAML])
def test_what_is_no_number_is_null(
    form: OutputFormat, value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = {"a": [1.5, value, (value, "NaN")], "b": {"c": value}, "on": True, "n": None}
    found = {"a": [1.5, None, [None, "NaN"]], "b": {"c": None}, "on": True, "n": None}
    out = Output(form)
    for told in (out.data, out.line):
        told(plain, "not shown")
        text = capsys.readouterr().out
        assert (json.loads(text) if form is OutputFormat.JSON else yaml.safe_load(text)) == found


def _no_numbers() -> FakeAdmin:
    """A controller all of whose figures are none."""
    load = make_window(np.array([[[6, 2], [0, 0]]]), busy=np.array([[math.nan], [math.inf]]))
    load.end_s = load.age_s = load.balancedness = load.imbalance = math.nan
    load.layer_imbalance[:] = [math.nan, math.inf]
    seen = make_placement(uptime_s=math.nan)
    seen.ranks[0].backlog_s, seen.ranks[1].backlog_s = math.nan, math.inf
    seen.routers[0].quantiles["dispatch_p50_s"] = math.inf
    seen.routers[0].counters["requests"] = math.nan
    move = make_move(0, pb.MOVE_KIND_REPLICATE, gain_s_per_s=math.inf)
    seen.moves.append(move)
    plan = pb.PlanView(plan_id="2-4", moves=[move], cost_s=math.nan, gain_s_per_s=math.nan)
    plan.balancedness_before = plan.balancedness_after = math.nan
    explained = make_explanation(seconds=math.nan, age_s=math.inf, mean_s=math.nan, p99_s=math.nan)
    explained.stages[0].seconds, explained.stages[1].p50_s = math.inf, math.nan
    explained.ranks[0].slowness = explained.ranks[0].late_s = math.nan
    explained.causes[0].evidence["x"] = math.nan
    explained.causes[0].share = math.nan
    return FakeAdmin(placements=[seen], window=load, plan=plan, explanation=explained)


@pytest.mark.parametrize(
    "command",
    [
        *(["status"], ["heat"], ["heat", "--mode", "share"], ["explain"], ["explain", "plan"]),
        *(["top"], ["top", "ranks"], ["top", "layers"], ["plan"]),
    ],
    ids=" ".join,
)
def test_a_controller_without_a_number_is_shown(
    command: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("MOE_SERVE_ADDRESS", "127.0.0.1:4000")
    monkeypatch.delenv("MOE_SERVE_SERVICE", raising=False)

    def run(*args: str) -> str:
        reach = Reach(connect=_no_numbers())
        result = CliRunner().invoke(app, [*command, *args], obj=reach, catch_exceptions=False)
        assert result.exit_code == 0, result.stderr
        return result.stdout

    assert not re.search(r"\b(nan|inf)\b", run(), re.IGNORECASE)
    if command[0] != "heat":
        assert " - " in run()
    for form in ("json", "yaml"):
        text = run("-o", form)
        assert not re.search(r"\b(nan|inf|infinity)\b", text, re.IGNORECASE)
        assert "null" in text


@pytest.mark.parametrize(
    "closed", [("stdin", "stdout"), ("stderr",), ("stdin", "stdout", "stderr")]
)
@pytest.mark.parametrize("args", [["rules"], ["series", "-o", "json"], ["series", "--per-expert"]])
def test_a_stream_that_is_closed_is_no_traceback(
    closed: tuple[str, ...], args: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["moe-serve", "metrics", *args])
    with monkeypatch.context() as patched:
        for name in closed:
            patched.setattr(sys, name, None)
        try:
            with pytest.raises(SystemExit) as ended:
                main()
            assert not ended.value.code
        finally:
            for name in closed:
                if (stream := getattr(sys, name)) is not None:
                    stream.close()
