"""Numbers, messages and streams as people and programs get them."""

import json
import sys
from io import StringIO

import pytest
import yaml

from moe_serve.cli.exits import EPILOG, MEANINGS, ExitCode
from moe_serve.cli.figures import shown_bytes, shown_counts, shown_imbalance, shown_seconds
from moe_serve.cli.output import Output, OutputFormat, columns, console
from moe_serve.cli.plain import enum_word, plain
from moe_serve.rpc import placement_pb2 as pb


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
