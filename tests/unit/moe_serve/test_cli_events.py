"""`moe-serve events`: runs of windows in which nothing moved are folded; nothing else ever is."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from moe_serve.cli.app import app
from moe_serve.cli.commands.events import _Lines
from moe_serve.cli.exits import CannotReach
from moe_serve.cli.options import Reach
from moe_serve.cli.output import Output
from moe_serve.rpc import placement_pb2 as pb
from tests.fakes.admin import FakeAdmin


@pytest.fixture(autouse=True)
def _address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("MOE_SERVE_ADDRESS", "127.0.0.1:4000")
    monkeypatch.delenv("MOE_SERVE_SERVICE", raising=False)


def _record(seq: int, rule: str = "no_load", outcome: str = "kept", **more: object) -> object:
    given = {"detail": "nothing was asked for in this window", **more}
    return pb.DecisionRecord(
        at_s=2.0 * seq,
        seq=seq,
        rule=rule,
        outcome=outcome,
        wall_time_s=1_800_000_000.0 + 2.0 * seq,
        **given,
    )


def _idle(*seqs: int) -> list[object]:
    return [_record(seq, numbers={"regret_s": 0.1 * seq}) for seq in seqs]


def _run(records: list[object], *args: str) -> Result:
    admin = FakeAdmin(records=records)  # type: ignore[arg-type]
    return CliRunner().invoke(
        app, ["events", *args], obj=Reach(connect=admin), catch_exceptions=False
    )


def _seqs(text: str) -> list[str]:
    """Numbers of the records shown, and counts of those folded as `+N`."""
    words = [line.split() for line in text.splitlines()]
    return [f"+{w[1]}" if w[0] == "..." else w[2] for w in words]


def test_a_run_of_idle_windows_is_one_line_and_a_count() -> None:
    text = _run([*_idle(1, 2, 3), _record(4, "replicate", "started")], "--all").stdout
    assert _seqs(text) == ["1", "2", "3", "4"]
    text = _run([*_idle(1, 2, 3), _record(4, "replicate", "started")]).stdout
    assert _seqs(text) == ["1", "+2", "4"]
    assert "      ... 2 more like it, until 3 at 2027-01-15 08:00:06Z" in text.splitlines()


def test_a_run_at_the_end_is_counted_too() -> None:
    assert _seqs(_run(_idle(1, 2)).stdout) == ["1", "+1"]
    assert _seqs(_run(_idle(1)).stdout) == ["1"]


def test_what_differs_in_more_than_its_numbers_is_not_folded() -> None:
    records = [
        _record(1),
        _record(2, "in_balance", detail=""),
        _record(3),
        _record(4, detail="another reason"),
        _record(5, detail="another reason", refused=["eplb: worse"]),
    ]
    assert _seqs(_run(records).stdout) == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize("outcome", ["started", "done", "aborted", "refused", "noted"])
def test_only_kept_records_are_folded(outcome: str) -> None:
    records = [_record(seq, "budget", outcome) for seq in (1, 2, 3)]
    assert _seqs(_run(records).stdout) == ["1", "2", "3"]


def test_another_rule_left_out_does_not_end_a_run() -> None:
    records = [*_idle(1, 2), _record(3, "budget", "noted"), *_idle(4)]
    assert _seqs(_run(records, "--rule", "no_load").stdout) == ["1", "+2"]
    assert _seqs(_run(records).stdout) == ["1", "+1", "3", "4"]


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_programs_get_every_record(form: str) -> None:
    text = _run(_idle(1, 2, 3), "-o", form).stdout
    if form == "json":
        found = [json.loads(line) for line in text.splitlines()]
    else:
        found = list(yaml.safe_load_all(text))
    assert [one["seq"] for one in found] == [1, 2, 3]
    assert [one["wall_s"] for one in found] == [1_800_000_000.0 + 2.0 * seq for seq in (1, 2, 3)]


@pytest.mark.parametrize("option", ["-v", "--why"])
def test_what_was_refused_is_shown_where_asked_for(option: str) -> None:
    refused = ["eplb: 12 writes for 0.1 s/s", "layer 3: cools down"]
    records = [_record(1, "replicate", "started", refused=refused)]
    assert "refused" not in _run(records).stdout
    assert _run(records, option).stdout.splitlines()[1:] == [
        "      refused  eplb: 12 writes for 0.1 s/s",
        "      refused  layer 3: cools down",
    ]
    (line,) = _run(records, option, "-o", "json").stdout.splitlines()
    assert json.loads(line)["refused"] == refused


def test_since_leaves_older_ones_out() -> None:
    old, new = _record(1), _record(2, "budget", "noted")
    old.wall_time_s = datetime.now(UTC).timestamp() - 7 * 86_400  # type: ignore[attr-defined]
    new.wall_time_s = datetime.now(UTC).timestamp() - 30  # type: ignore[attr-defined]
    for span in ("90s", "90", "10m", "2 h", "1d"):
        assert _seqs(_run([old, new], "--since", span).stdout) == ["2"]
    assert _run([old, new], "--since", "5s").stdout == ""


@pytest.mark.parametrize("span", ["soon", "10w", "-5m", "1.5h", "m"])
def test_a_span_that_is_none_is_exit_2(span: str) -> None:
    result = _run([], f"--since={span}")
    assert result.exit_code == 2
    assert "--since" in result.stderr


def test_a_stream_that_breaks_first_tells_what_it_counted() -> None:
    class Broken(FakeAdmin):
        def events(self, after_seq: int, follow: bool) -> Iterator[pb.DecisionRecord]:
            yield from super().events(after_seq, follow)
            raise CannotReach("the controller does not answer")

    admin = Broken(records=_idle(1, 2, 3))  # type: ignore[arg-type]
    result = CliRunner().invoke(app, ["events", "-f"], obj=Reach(connect=admin))
    assert result.exit_code == 3
    assert _seqs(result.stdout) == ["1", "+2"]
    assert "does not answer" in result.stderr


def test_on_a_terminal_that_follows_the_count_is_written_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setenv("COLUMNS", "200")
    lines = _Lines(Output(), follow=True, every=False, why=False)
    for record in (*_idle(1, 2, 3), _record(4, "budget", "noted"), *_idle(5)):
        lines.add(record)  # type: ignore[arg-type]
    lines.end()
    first, counts, fourth, fifth, end = stream.getvalue().split("\n")
    assert " 1  no_load" in first
    assert [part.split()[1] for part in counts.split("\r")[1:]] == ["1", "2"]
    assert " 4  budget" in fourth
    assert " 5  no_load" in fifth
    assert end == ""
