"""Progress: a bar for people who look, lines for a log, and never a bar in a pipe."""

from io import StringIO

import pytest

from moe_serve.cli.output import Output
from moe_serve.cli.progress import bar, counted, steps


class _Terminal(StringIO):
    def isatty(self) -> bool:
        return True


# Not fixtures: the runner puts its own streams in place when a test's body begins.


def _terminal(monkeypatch: pytest.MonkeyPatch) -> _Terminal:
    stream = _Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    for name, value in {"TERM": "xterm", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    return stream


def _pipe(monkeypatch: pytest.MonkeyPatch) -> StringIO:
    stream = StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    return stream


def _work() -> None:
    out = Output()
    with steps(out) as shown:
        shown.say("starting")
        shown.say("filling")
        shown.tell(3, 8)
    with bar(out, "rolling", None) as shown:
        shown.tell(1, 2)


def test_a_pipe_gets_the_lines_and_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = _pipe(monkeypatch)
    _work()
    assert pipe.getvalue() == "starting\nfilling\n"


def test_a_terminal_gets_a_bar_and_keeps_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch)
    _work()
    text = terminal.getvalue()
    assert "starting\n" in text
    assert "filling\n" in text
    assert "3/8" in text
    assert "1/2" in text
    # What was drawn is gone at the end.
    assert text.rstrip("\n").endswith("\x1b[2K")


def test_things_gone_through_are_counted_over_all_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch)
    with counted(Output(), "replaying", ["a", "b", "c"], passes=2) as told:
        assert list(told) == ["a", "b", "c"]
        assert (len(told), told[1], told[1:]) == (3, "b", ["b", "c"])
        assert list(told) == ["a", "b", "c"]
    assert "6/6" in terminal.getvalue()


def test_counted_things_in_a_pipe_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = _pipe(monkeypatch)
    with counted(Output(), "replaying", ["a"], passes=1) as told:
        assert list(told) == ["a"]
    assert pipe.getvalue() == ""


def test_what_others_print_meanwhile_stays_theirs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _terminal(monkeypatch)
    with steps(Output()) as shown:
        shown.say("starting")
        print("said by Ray")
    assert capsys.readouterr().out == "said by Ray\n"
