"""Log lines: one JSON object each, bounded, without payload and without secrets."""

import json
import stat
from enum import StrEnum
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_serve.telemetry import Level, LogFile, make_logger
from moe_serve.telemetry.scrub import HIDDEN, ITEMS_MAX, TEXT_MAX, scrub


def _lines(stream: StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


class _Printing:
    """Prints what it holds, as a request would."""

    def __repr__(self) -> str:
        return "hidden states 0.1 0.2"


class Colour(StrEnum):
    RED = "red"


def test_a_line_has_time_level_event_and_fields() -> None:
    stream = StringIO()
    log = make_logger(stream, service="tiny", part="router-0").bind(term=3)
    log.info("table applied", epoch=7)
    (line,) = _lines(stream)
    assert list(line)[:3] == ["ts", "level", "event"]
    assert line.pop("ts").endswith("Z")
    assert line == {
        "level": "info",
        "event": "table applied",
        "service": "tiny",
        "part": "router-0",
        "term": 3,
        "epoch": 7,
    }


def test_lines_below_the_level_are_not_written() -> None:
    stream = StringIO()
    log = make_logger(stream, level=Level.WARNING)
    log.info("no")
    log.warning("yes")
    assert [line["event"] for line in _lines(stream)] == ["yes"]


def test_no_field_breaks_the_line() -> None:
    stream = StringIO()
    make_logger(stream).info("one\ntwo", reason='"\n}')
    assert len(stream.getvalue().splitlines()) == 1
    assert _lines(stream)[0]["event"] == "one\ntwo"


def test_an_exception_is_named_without_its_stack() -> None:
    stream = StringIO()
    log = make_logger(stream)
    try:
        raise ValueError("rank 3 is lost")
    except ValueError:
        log.exception("repair failed")
    (line,) = _lines(stream)
    assert line["error"] == "ValueError: rank 3 is lost"
    assert "Traceback" not in stream.getvalue()


@pytest.mark.parametrize(
    ("name", "value", "written"),
    [
        ("token", "abc", HIDDEN),
        ("read_token", b"abc", HIDDEN),
        ("Authorization", "Bearer abc", HIDDEN),
        ("tls_key", "-----BEGIN", HIDDEN),
        ("metadata", (("authorization", "Bearer abc"),), HIDDEN),
        ("header", "Bearer abc def", f"Bearer {HIDDEN} def"),
        ("tokens", 512, 512),
        ("token", 17, 17),
        ("body", b"abc", "<3 bytes>"),
        ("rows", np.zeros((8, 64), np.float32), "<float32 [8, 64]>"),
        ("count", np.int64(4), 4),
        ("request", _Printing(), "<_Printing>"),
        ("colour", Colour.RED, "red"),
        ("path", Path("a/b"), "a/b"),
        ("nothing", None, None),
        ("long", "x" * 1000, "x" * (TEXT_MAX - 3) + "..."),
        ("many", list(range(100)), list(range(ITEMS_MAX))),
        ("inner", {"token": "abc", "n": 1}, {"token": HIDDEN, "n": 1}),
        ("deep", [[[[[1]]]]], [[[["<list>"]]]]),
    ],
)
def test_what_may_be_written_of_a_value(name: str, value: Any, written: Any) -> None:
    assert scrub(name, value) == written


def test_a_secret_that_is_bound_stays_out() -> None:
    stream = StringIO()
    make_logger(stream, admin_token="abcdef").info("started", headers={"authorization": "abcdef"})
    assert "abcdef" not in stream.getvalue()


def test_a_log_file_is_bounded_and_private(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "router-0.log"
    sink = LogFile(path, bytes_max=1000, kept=3)
    log = make_logger(sink)
    for number in range(100):
        log.info("line", number=number)
    sink.close()
    names = sorted(file.name for file in path.parent.iterdir())
    assert names == ["router-0.log", "router-0.log.1", "router-0.log.2"]
    assert all(file.stat().st_size <= 1000 for file in path.parent.iterdir())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    texts = [(path.parent / name).read_text() for name in reversed(names)]
    numbers = [json.loads(line)["number"] for text in texts for line in text.splitlines()]
    assert numbers == list(range(numbers[0], 100))


def test_a_log_file_goes_on_where_it_was(tmp_path: Path) -> None:
    for number in range(2):
        sink = LogFile(tmp_path / "a.log")
        make_logger(sink).info("line", number=number)
        sink.close()
    assert len((tmp_path / "a.log").read_text().splitlines()) == 2


def test_a_log_file_that_keeps_nothing_starts_over(tmp_path: Path) -> None:
    sink = LogFile(tmp_path / "a.log", bytes_max=10, kept=1)
    sink.write("12345678\n")
    sink.write("abcdefgh\n")
    sink.close()
    assert (tmp_path / "a.log").read_text() == "abcdefgh\n"
    assert len(list(tmp_path.iterdir())) == 1
