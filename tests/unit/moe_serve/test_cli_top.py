"""`moe-serve top`: tables, and a screen that goes on where the controller does not."""

import json
import os
import termios
import threading
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console, RenderableType
from typer.testing import CliRunner, Result

from moe_serve.cli.app import app
from moe_serve.cli.exits import CannotReach
from moe_serve.cli.options import Reach
from moe_serve.cli.watching import Following, Glance, Watch, keys_read, screen_of, show_live
from moe_serve.errors import PermissionDenied, Unavailable
from moe_serve.rpc import placement_pb2 as pb
from tests.fakes.admin import MIB, FakeAdmin, make_placement, make_window

GOLDEN = Path(__file__).parents[2] / "golden" / "cli"
DEMAND = np.array([[[6, 2], [0, 0]], [[1, 1], [0, 4]]])
RANK_PAIRS = np.array([[2, 4], [8, 0]])
BUSY = np.array([[0.5, 0.1], [1.2, 0.4]])
WAIT_S = 30.0


@pytest.fixture(autouse=True)
def _address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("MOE_SERVE_ADDRESS", "127.0.0.1:4000")
    monkeypatch.delenv("MOE_SERVE_SERVICE", raising=False)


def _admin() -> FakeAdmin:
    return FakeAdmin(window=make_window(DEMAND, RANK_PAIRS, BUSY))


def _run(admin: FakeAdmin, *args: str) -> Result:
    return CliRunner().invoke(app, ["top", *args], obj=Reach(connect=admin), catch_exceptions=False)


@pytest.mark.parametrize("kind", ["experts", "ranks", "layers"])
@pytest.mark.parametrize("phase", ["all", "decode"])
def test_a_pipe_gets_one_table(kind: str, phase: str, rewrite: bool) -> None:
    result = _run(_admin(), kind, "--phase", phase)
    assert (result.exit_code, result.stderr) == (0, "")
    file = GOLDEN / f"top_{kind}_{phase}.txt"
    if rewrite:
        file.write_text(result.stdout, encoding="utf-8")
    assert result.stdout == file.read_text(encoding="utf-8")
    assert "\x1b" not in result.stdout


def test_experts_are_what_is_listed_without_a_word() -> None:
    assert _run(_admin()).stdout == _run(_admin(), "experts", "--once").stdout


def test_rows_are_limited_and_the_rest_is_said() -> None:
    result = _run(_admin(), "-n", "1")
    assert result.stdout.splitlines()[-1] == "1 of 4 experts; more with -n"
    assert "more with" not in _run(_admin(), "-n", "4").stdout


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_programs_get_every_row_as_numbers(form: str) -> None:
    text = _run(_admin(), "-o", form).stdout
    shown = json.loads(text) if form == "json" else yaml.safe_load(text)
    assert (shown["kind"], shown["window"], shown["window_s"]) == ("experts", 12, 2.0)
    assert [(row["layer"], row["expert"]) for row in shown["rows"]] == [
        (0, 0),
        (1, 1),
        (0, 1),
        (1, 0),
    ]
    first = shown["rows"][0]
    assert (first["pairs"], first["pairs_per_s"], first["replicas"]) == (7, 3.5, 1)
    assert (first["share"], first["times_fair_share"], first["ranks"]) == (0.7, 1.4, [0])
    assert [row["rank_in_layer"] for row in shown["rows"]] == [1, 1, 2, 2]


def test_memory_of_a_rank_is_told_apart_for_programs_and_summed_for_people() -> None:
    placement = make_placement()
    placement.ranks[0].reserved_bytes = 3 * MIB
    admin = FakeAdmin(placements=[placement])
    row = json.loads(_run(admin, "ranks", "-o", "json").stdout)["rows"][0]
    assert (row["resident_bytes"], row["reserved_bytes"]) == (6 * MIB, 3 * MIB)
    assert "9.0 MiB  9.0 MiB" in _run(FakeAdmin(placements=[placement]), "ranks").stdout


def test_ranks_that_reported_nothing_are_there() -> None:
    rows = json.loads(_run(FakeAdmin(), "ranks", "-o", "json").stdout)["rows"]
    assert [(row["rank"], row["busy"]) for row in rows] == [(0, None), (1, None)]
    assert "-" in _run(FakeAdmin(), "ranks").stdout


def test_before_the_first_window_it_is_too_early() -> None:
    result = _run(FakeAdmin(window=None))
    assert result.exit_code == 3
    assert "no load window has closed yet" in result.stderr


@pytest.mark.parametrize(
    "args",
    [
        ("nodes",),
        ("-n", "0"),
        ("-n", "x"),
        ("--phase", "warm-up"),
        ("--interval", "0"),
        ("--interval", "x"),
        ("-o", "xml"),
    ],
)
def test_wrong_arguments_are_exit_2(args: tuple[str, ...]) -> None:
    assert _run(_admin(), *args).exit_code == 2


# -- live ----------------------------------------------------------------------------------------


class _Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def _terminal() -> Console:
    return Console(
        file=_Terminal(), force_terminal=True, width=100, height=12, highlight=False, _environ={}
    )


def _text(part: RenderableType) -> str:
    console = Console(file=StringIO(), width=120)
    console.print(part)
    return console.file.getvalue()  # type: ignore[attr-defined]


class _Asked:
    """Answers as scripted, the last for ever; `all_asked` once it has come to it."""

    def __init__(self, *answers: int | Exception) -> None:
        self._answers = list(answers)
        self.all_asked = threading.Event()

    def __call__(self) -> int:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if len(self._answers) == 1:
            self.all_asked.set()
        if isinstance(answer, Exception):
            raise answer
        return answer


def _until(watch: Watch[int], holds: Callable[[Glance[int]], bool]) -> Glance[int]:
    ends = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        glance = watch.glance()
        if holds(glance):
            return glance
        ends.wait(0.01)
    raise AssertionError("it never came to that")


def test_a_screen_is_drawn_until_q() -> None:
    keys = iter(["", "x", "q"])
    console = _terminal()
    with Watch(lambda: 7, 0.01) as watch:
        _until(watch, lambda glance: glance.value == 7)
        show_live(console, watch, lambda value, _: [f"value {value}"], lambda _: next(keys))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "value 7" in text
    # The screen before is back, and nothing was wiped between two drawings.
    assert text.count("\x1b[?1049h") == text.count("\x1b[?1049l") == 1
    assert "\x1b[2J" not in text
    assert next(keys, None) is None


@pytest.mark.parametrize("error", [CannotReach("gone"), Unavailable("between two lives")])
def test_a_controller_that_goes_away_is_said_and_asked_again(error: Exception) -> None:
    with Watch(_Asked(1, error), 0.01) as watch:
        glance = _until(watch, lambda glance: glance.away_since_s is not None)
    assert glance.value == 1
    now_s = glance.away_since_s + 5.0 if glance.away_since_s else 0.0
    shown = _text(screen_of(glance, lambda value, _: [f"value {value}"], now_s))
    assert "NO ANSWER for 5 s; below is what it said" in shown
    assert "value 1" in shown


def test_a_controller_that_comes_back_is_shown_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_serve.cli.watching.AGAIN_S", 0.01)
    with Watch(_Asked(CannotReach("gone"), 2), 0.01) as watch:
        glance = _until(watch, lambda glance: glance.value == 2)
    assert glance.away_since_s is None
    assert "NO ANSWER" not in _text(screen_of(glance, lambda value, _: [str(value)], 0.0))


def test_before_any_answer_the_screen_says_what_it_waits_for() -> None:
    def draw(_: int, __: float) -> list[RenderableType]:
        raise AssertionError("nothing is there to draw")

    assert "asking the controller" in _text(screen_of(Glance(), draw, 0.0))
    away: Glance[int] = Glance(away_since_s=1.0, why="refused")
    assert "NO ANSWER for 2 s; trying again (refused)" in _text(screen_of(away, draw, 3.0))


def test_what_asking_again_cannot_mend_ends_it() -> None:
    asked = _Asked(PermissionDenied("not yours"))
    with Watch(asked, 0.01) as watch:
        assert asked.all_asked.wait(WAIT_S)
        with pytest.raises(PermissionDenied, match="not yours"):
            _until(watch, lambda _: False)


def test_a_stream_that_breaks_is_begun_anew() -> None:
    begun = []

    def begin() -> "list[int] | object":
        begun.append(None)

        def stream() -> object:
            yield len(begun)
            if len(begun) == 1:
                raise CannotReach("broke")

        return stream()

    follow: Following[int] = Following(begin)  # type: ignore[arg-type]
    assert follow() == 1
    with pytest.raises(CannotReach):
        follow()
    assert follow() == 2
    with pytest.raises(Unavailable, match="the stream ended"):
        follow()


def test_without_a_terminal_there_are_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", StringIO("qqq"))
    with keys_read() as wait_key:
        assert wait_key(0.0) == ""


def test_a_key_is_read_at_once_and_the_terminal_is_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    master, slave = os.openpty()
    with os.fdopen(slave) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        before = termios.tcgetattr(slave)
        with keys_read() as wait_key:
            assert wait_key(0.0) == ""
            os.write(master, b"xq")
            assert wait_key(WAIT_S) == "x"
            assert wait_key(WAIT_S) == "q"
        assert termios.tcgetattr(slave) == before
        with keys_read() as wait_key:
            monkeypatch.setattr(termios, "tcsetattr", lambda *_: None)  # it is gone
            os.close(master)
            assert wait_key(WAIT_S) == "q"


def test_a_live_table_fits_the_terminal_and_says_when_there_is_no_window_yet() -> None:
    from moe_serve.cli.commands.top import _parts
    from moe_serve.cli.views.top import Kind
    from moe_serve.documents.window import PhaseChoice

    seen = (make_placement(), None)
    (line,) = _parts(seen, Kind.EXPERTS, PhaseChoice.ALL, 5, 0.0)
    assert line == "tiny | steady | no window of load has closed yet"
    load: pb.GetLoadResponse = make_window(DEMAND)
    parts = _parts((make_placement(), load), Kind.EXPERTS, PhaseChoice.ALL, 2, 3.5)
    assert "4 s old" in str(parts[0])


def test_without_load_no_expert_is_listed() -> None:
    idle = FakeAdmin(window=make_window(np.zeros_like(DEMAND), RANK_PAIRS, BUSY))
    shown = _run(idle, "experts").stdout
    assert "No expert was asked for in this window." in shown
    assert "EXPERT" not in shown
    assert "RANK" in _run(idle, "ranks").stdout
