"""Progress: a bar for people who look, lines for a log, and never a bar in a pipe."""

from io import StringIO

import pytest
from typer.main import get_command

from moe_serve.cli.app import app
from moe_serve.cli.emptying import Emptying, wait_until_empty
from moe_serve.cli.moving import wait_for_moves
from moe_serve.cli.options import Reach
from moe_serve.cli.output import Output
from moe_serve.cli.progress import bar, counted, steps, tally
from moe_serve.rpc import placement_pb2 as pb
from tests.fakes.admin import FakeAdmin, make_move, make_placement


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


# -- what goes on elsewhere ----------------------------------------------------------------------


def _count() -> None:
    with tally(Output()) as told:
        told.tell("0 of 0 ended", 0, 0)
        for done in (1, 1, 3):
            told.tell(f"{done} of 3 ended", done, 3)


def test_a_tally_in_a_pipe_is_a_line_at_each_change(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = _pipe(monkeypatch)
    _count()
    assert pipe.getvalue() == "0 of 0 ended\n1 of 3 ended\n3 of 3 ended\n"


def test_a_tally_on_a_terminal_is_a_bar_of_which_the_last_words_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = _terminal(monkeypatch)
    _count()
    text = terminal.getvalue()
    assert "3/3" in text
    assert text.endswith("\x1b[2K3 of 3 ended\n")
    assert text.count(" ended\n") == 1


def test_a_wait_for_moves_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [pb.MOVE_STATE_DONE, pb.MOVE_STATE_DONE, pb.MOVE_STATE_RUNNING]
    moves = [
        make_move(n, pb.MOVE_KIND_MIGRATE, plan_id="2-4", state=state)
        for n, state in enumerate(states)
    ]
    terminal = _terminal(monkeypatch)
    wait_for_moves(FakeAdmin([make_placement(moves=moves)]), "2-4", 0.001, Output())
    text = terminal.getvalue()
    assert "2/3" in text
    assert text.endswith("\x1b[2Kplan 2-4: 2 of 3 moves ended\n")


def test_a_wait_for_an_empty_rank_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    full, half = make_placement(state="moving"), make_placement(state="moving")
    for placement, held in ((full, 3), (half, 1)):
        rank = placement.ranks[0]
        rank.state = "draining"
        for slot in rank.slots:
            slot.layer = 0 if slot.index < held else -1
    terminal = _terminal(monkeypatch)
    what = Emptying(0, "rank 0 is being emptied", leaves=False)
    wait_until_empty(FakeAdmin([full, half]), what, 0.01, Output())
    text = terminal.getvalue()
    assert text.startswith("rank 0 is being emptied\n")
    assert "2/3" in text
    assert text.endswith("\x1b[2Krank 0: 1 slot left\n")


@pytest.mark.parametrize("args", [["plan"], ["rollback", "--dry-run"]], ids=["plan", "rollback"])
def test_a_plan_that_is_computed_has_a_bar(
    monkeypatch: pytest.MonkeyPatch, args: list[str]
) -> None:
    terminal = _terminal(monkeypatch)
    command = [*args, "--address", "127.0.0.1:4000"]
    get_command(app).main(command, obj=Reach(connect=FakeAdmin()), standalone_mode=False)
    assert "computing a plan" in terminal.getvalue()
    pipe = _pipe(monkeypatch)
    get_command(app).main(command, obj=Reach(connect=FakeAdmin()), standalone_mode=False)
    assert pipe.getvalue() == ""
