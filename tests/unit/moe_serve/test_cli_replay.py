"""`moe-serve replay` on traces and on journals, as files."""

import json
import sqlite3
import sys
from contextlib import closing
from functools import cache
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from moe_serve.cli import main
from moe_serve.cli.app import app
from moe_serve.cli.exits import ExitCode
from moe_serve.cli.recordings import is_journal, read_segments
from moe_serve.cli.rehearsal import check_segments
from moe_serve.cli.views.replay import HEADERS, TOTALS
from moe_serve.controller.journal_store import INPUTS_FILE, InputsStore
from moe_serve.errors import InvalidArgument
from placement.messages.codec import encode
from placement.sim.world import World

Rows = list[tuple[int, str, float, bytes]]
EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny-moe.yaml"
GOLDEN = Path(__file__).parents[2] / "golden" / "cli"


def _run(*args: object) -> Result:
    return CliRunner().invoke(app, ["replay", *map(str, args)], catch_exceptions=False)


def _trace(folder: Path, tokens: int = 600, layers: int = 2, experts: int = 8) -> Path:
    """Half-way the hot experts change."""
    rng = np.random.default_rng(1)
    weights = 1.0 / np.arange(1, experts + 1)
    weights /= weights.sum()
    ids = rng.choice(experts, size=(tokens, layers, 1), p=weights)
    ids[tokens // 2 :] = experts - 1 - ids[tokens // 2 :]
    ids = np.concatenate([ids, (ids + 1) % experts], axis=2).astype(np.uint8)
    file = folder / "trace.npz"
    np.savez(file, topk_ids=ids)
    return file


# -- traces --------------------------------------------------------------------------------------


def test_a_trace_gives_a_line_a_window(tmp_path: Path) -> None:
    result = _run(_trace(tmp_path), "--window-tokens", 100)
    assert result.exit_code == 0
    header, *windows = result.stdout.splitlines()
    assert header.split() == list(HEADERS)
    assert [line.split()[0] for line in windows[:6]] == list("012345")
    assert windows[7].split()[: len(TOTALS)] == list(TOTALS)
    assert windows[8].split()[0] == "incremental"
    assert windows[9].startswith("The layout that never moves: 0.")
    assert "a lower bound (every window in balance, no write)" in windows[10]
    assert "simulated" in result.stderr
    assert "4 ranks of 6 slots (1 staging)" in result.stderr


def test_policies_can_be_compared(tmp_path: Path) -> None:
    file = _trace(tmp_path, tokens=6000)
    names = ("static", "eplb", "incremental")
    options = [word for name in (*names, "eplb") for word in ("-p", name)]
    shown = json.loads(_run(file, "--window-tokens", 1000, *options, "-o", "json").stdout)
    assert [one["policy"] for one in shown["policies"]] == list(names)
    static, eplb, incremental = (one["figures"] for one in shown["policies"])
    assert static["slot_writes"] == 0
    assert eplb["served"] > static["served"]
    assert incremental["served"] > static["served"]
    assert incremental["slot_writes"] > 0
    for one in shown["policies"]:
        assert one["regret_total_s"] == pytest.approx(sum(one["regret_s"]))
        assert len(one["figures"]["windows"]) == len(shown["clairvoyant"]) == 6
        assert [ratio["write_price"] for ratio in one["competitive"]] == [0.005, 0.02, 0.05]
    assert (shown["reference"], shown["simulated"]) == ("lower bound", True)
    assert (shown["measured"], shown["segments"]) == (None, [])


def test_a_replay_as_text(tmp_path: Path, rewrite: bool) -> None:
    # One layer on few slots: the offline optimum is computed.
    hot = np.array([[800, 400, 200, 120, 60, 20]])
    counts = np.array([hot] * 8 + [hot[:, ::-1]] * 8)
    file = tmp_path / "tiny.npz"
    np.savez(file, logical_count=counts)
    options = ["--slots", 3, "--top-k", 2, "--window-tokens", 1600, "--chart"]
    result = _run(file, *options, "-p", "static", "-p", "eplb", "-p", "incremental")
    golden = GOLDEN / "replay.txt"
    if rewrite:
        golden.write_text(result.stdout, encoding="utf-8")
    assert result.stdout == golden.read_text(encoding="utf-8"), "see the diff, then --rewrite"


def test_a_chart_is_drawn(tmp_path: Path) -> None:
    file, png = _trace(tmp_path), tmp_path / "chart.png"
    result = _run(file, "--window-tokens", 100, "--chart", "--png", png)
    assert "balancedness by window (simulated)" in result.stdout
    assert "best with foresight" in result.stdout
    assert png.read_bytes().startswith(b"\x89PNG")
    assert f"chart written to {png}" in result.stderr
    result = _run(file, "--window-tokens", 100, "--png", tmp_path / "absent" / "chart.png")
    assert result.exit_code == 2
    assert "name a file in a folder that exists" in result.stderr


def test_counts_of_other_engines_are_replayed(tmp_path: Path) -> None:
    counts = np.random.default_rng(2).integers(0, 30, size=(40, 2, 8))
    counts[:, 0] = 0  # a dense layer
    dump, log = tmp_path / "dump.pt", tmp_path / "stats.jsonl"
    torch.save({"rank": 0, "logical_count": torch.tensor(counts, dtype=torch.int32)}, dump)
    line = {"record_type": "eplb_load_stats", "version": 1, "p2l_map": [list(range(8))] * 2}
    log.write_text(
        "".join(json.dumps({**line, "expert_load": step.tolist()}) + "\n" for step in counts),
        encoding="utf-8",
    )
    shown = []
    for file in (dump, log):
        result = _run(file, "--top-k", 2, "--window-tokens", 500, "-o", "json")
        assert result.exit_code == 0, result.stderr
        assert "1 layers without load left out: 0" in result.stderr
        shown.append(json.loads(result.stdout))
    assert shown[0] == shown[1]
    assert len(shown[0]["clairvoyant"]) > 3


def test_a_chart_does_not_stand_among_the_comparison(tmp_path: Path) -> None:
    result = _run(_trace(tmp_path), "--png", "-")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--png - wants standard output, where the comparison goes" in result.stderr


def test_limits_and_prices_can_be_changed(tmp_path: Path) -> None:
    file = _trace(tmp_path, tokens=3000)
    writes = []
    for options in ((), ("--max-moves", 0), ("--max-moves", 1, "--free-copies")):
        result = _run(file, "--window-tokens", 300, "--decode", *options, "-o", "json")
        (one,) = json.loads(result.stdout)["policies"]
        writes.append([window["slot_writes"] for window in one["figures"]["windows"]])
    assert max(writes[1]) == 0 < max(writes[2]) <= 1
    assert writes[0] != writes[2]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("-p", "nonsense"), "policy 'nonsense' is not one of eplb, incremental, static"),
        (("--experts", 4), "--experts 4: the trace has expert 7"),
        (("--slots", 3), "slots short of one replica of 16 experts"),
        (("--window-tokens", 4096), "600 tokens are less than one window"),
        (("--ranks", 4096, "--slots", 100000), "x 4096 ranks are more than"),
        (tuple(word for name in "abcdefghi" for word in ("-p", name)), "9 policies, at most 8"),
        (("-f", EXAMPLE), "model tiny-moe has 4 layers of 32 experts"),
    ],
)
def test_what_cannot_be_replayed_is_a_usage_error(
    tmp_path: Path, args: tuple[object, ...], said: str
) -> None:
    result = _run(_trace(tmp_path), *args)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_trace_on_the_fleet_of_a_service_file(tmp_path: Path) -> None:
    file = _trace(tmp_path, layers=4, experts=32)
    result = _run(file, "-f", EXAMPLE, "--window-tokens", 200)
    assert result.exit_code == 0
    assert "4 ranks of 41 slots (1 staging) | experts of 96.0 KiB" in result.stderr


@pytest.mark.parametrize("name", ["absent.npz", "text.npz", "other.npz", "flat.npz"])
def test_a_file_that_is_no_trace_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "text.npz").write_text("no zip", encoding="utf-8")
    np.savez(tmp_path / "other.npz", ids=np.zeros(3))
    np.savez(tmp_path / "flat.npz", topk_ids=np.zeros((3, 2)))
    result = _run(tmp_path / name)
    assert result.exit_code == 2
    assert name in result.stderr


# -- journals ------------------------------------------------------------------------------------


@cache
def _rows(seed: int = 3) -> Rows:
    """Inputs log of a simulated run, in three segments."""
    world = World(seed, faults=0)
    (controller,) = world.fleet.controllers
    cuts = [(controller.started_from, 0)]
    for end_s in (1.6, 4.0, 10.0):
        world.stage.clock.run_until(end_s)
        cuts.append((controller.engine.snapshot(), len(controller.inputs)))
    rows: Rows = []
    for number, ((snapshot, start), (_, end)) in enumerate(pairwise(cuts), 1):
        rows.append((number, "snapshot", 0.0, encode(snapshot)))
        rows += [(number, "event", 0.0, encode(event)) for event, _ in controller.inputs[start:end]]
    return rows


def _journal(folder: Path, rows: Rows) -> Path:
    store = InputsStore(folder)
    store.append(rows)
    store.close()
    return folder


def test_a_journal_is_stepped_and_scored(tmp_path: Path) -> None:
    result = _run(_journal(tmp_path, _rows()))
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].split()[:3] == ["SEGMENT", "EVENTS", "WINDOWS"]
    assert [line.split()[3] for line in lines[1:3]] == ["yes", "yes"]
    assert lines[3].split()[3:5] == ["nothing", "follows"]
    assert [line.split()[-1] for line in lines[1:4]] == ["0", "0", "0"]
    assert lines[5].split()[-1] == "MEASURED"
    assert "The layout that never moves" in result.stdout


@pytest.mark.parametrize(
    "options",
    [
        ("--file", EXAMPLE),
        ("--ranks", 4),
        ("--slots", 0),
        ("--experts", 0),
        ("--top-k", 8),
        ("--window-tokens", 2048),
        ("--decode",),
        ("--free-copies",),
    ],
    ids=lambda options: str(options[0]),
)
def test_a_journal_takes_no_option_of_a_trace(tmp_path: Path, options: tuple[object, ...]) -> None:
    result = _run(_journal(tmp_path, []), *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{options[0]} has no say beside a journal" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--top-k", 2), "--top-k has no say beside a trace of tokens"),
        (("-f", EXAMPLE, "--ranks", 4), "--ranks has no say beside --file"),
        (("-f", EXAMPLE, "--slots", 9, "--experts", 8), "--slots, --experts have no say"),
        (("--chart", "-o", "json"), "--chart has no say beside -o json"),
    ],
)
def test_a_trace_takes_no_option_that_is_not_heard(
    tmp_path: Path, options: tuple[object, ...], said: str
) -> None:
    result = _run(_trace(tmp_path), *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in " ".join(result.stderr.split())


def test_a_journal_as_json_and_by_its_file(tmp_path: Path) -> None:
    _journal(tmp_path, _rows())
    shown = json.loads(_run(tmp_path / INPUTS_FILE, "-p", "static", "-o", "json").stdout)
    assert [one["reaches_next"] for one in shown["segments"]] == [True, True, None]
    (static,) = shown["policies"]
    assert (static["policy"], static["figures"]["slot_writes"]) == ("static", 0)
    assert len(shown["measured"]) == len(static["figures"]["windows"])
    two = _run(tmp_path, "-p", "static", "-p", "eplb", "--chart").stdout.splitlines()
    assert two[5].split()[:7] == [
        "WINDOW",
        "PAIRS",
        "STATIC",
        "LEVELED",
        "SERVED",
        "STATIC",
        "EPLB",
    ]
    assert two[5].split()[-1] == "MEASURED"
    assert two[-1].split() == ["#", "measured"]


def test_a_journal_without_a_window_says_so(tmp_path: Path) -> None:
    result = _run(_journal(tmp_path, _rows()[:2]))
    assert result.exit_code == 0
    assert "No window is recorded: nothing to score." in result.stdout


def test_a_journal_that_today_s_engine_does_not_follow_fails(tmp_path: Path) -> None:
    rows = _rows()
    window = next(
        at for at, row in enumerate(rows) if row[0] == 1 and b"WindowClosed" in row[3][:64]
    )
    result = _run(_journal(tmp_path, rows[:window] + rows[window + 1 :]))
    assert result.exit_code == 1
    assert "NO: today's engine differs" in result.stdout


def test_a_restart_is_not_a_difference(tmp_path: Path) -> None:
    rows = _rows()
    segments = read_segments(_journal(tmp_path, rows))
    state = msgspec.structs.replace(segments[1].snapshot.state, term=9, epoch=99)
    later = msgspec.structs.replace(segments[1].snapshot, state=state)
    changed = [
        (number, kind, at_s, encode(later) if (number, kind) == (2, "snapshot") else body)
        for number, kind, at_s, body in rows
        if number < 3
    ]
    folder = tmp_path / "other"
    folder.mkdir()
    checks = check_segments(read_segments(_journal(folder, changed)))
    assert [check.reaches_next for check in checks] == [None, None]


def test_a_tail_without_its_snapshot_is_left_out(tmp_path: Path) -> None:
    rows = [row for row in _rows() if row[:2] != (1, "snapshot")]
    assert [one.number for one in read_segments(_journal(tmp_path, rows))] == [2, 3]


def test_an_empty_journal_says_so(tmp_path: Path) -> None:
    result = _run(_journal(tmp_path, []))
    assert result.exit_code == 2
    assert "no whole segment" in result.stderr


def test_a_journal_of_another_version_says_so(tmp_path: Path) -> None:
    result = _run(_journal(tmp_path, [(1, "snapshot", 0.0, b"\x80")]))
    assert result.exit_code == 2
    assert "the version that wrote it" in result.stderr


def test_another_database_is_no_journal(tmp_path: Path) -> None:
    (tmp_path / INPUTS_FILE).write_bytes(b"SQLite format 3\0" + b"\0" * 200)
    assert is_journal(tmp_path)
    with pytest.raises(InvalidArgument, match="not an inputs log"):
        read_segments(tmp_path)


@pytest.mark.parametrize("row", [(None, b""), ("x", b""), (1, "text"), (1, None)])
def test_a_database_that_only_looks_like_one_is_no_journal(
    tmp_path: Path, row: tuple[object, object]
) -> None:
    with closing(sqlite3.connect(tmp_path / INPUTS_FILE)) as db, db:
        db.execute("CREATE TABLE inputs (seq INTEGER, segment, kind, body)")
        db.execute("INSERT INTO inputs VALUES (1, ?, 'snapshot', ?)", row)
    result = _run(tmp_path)
    assert result.exit_code == 2
    assert "is not an inputs log" in result.stderr
    assert "folder of state" in result.stderr


def test_reading_leaves_a_journal_as_it_is(tmp_path: Path) -> None:
    _journal(tmp_path, _rows())
    before = (tmp_path / INPUTS_FILE).read_bytes()
    _run(tmp_path)
    assert (tmp_path / INPUTS_FILE).read_bytes() == before


def test_a_view_in_the_place_of_the_table_is_not_run(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / INPUTS_FILE)) as db, db:
        db.execute(
            "CREATE VIEW inputs AS WITH RECURSIVE endless(n) AS (SELECT 1 UNION ALL SELECT n + 1 "
            "FROM endless) SELECT n AS seq, 1 AS segment, 'event' AS kind, zeroblob(99) AS body "
            "FROM endless"
        )
    result = _run(tmp_path)
    assert result.exit_code == 2
    assert "no table of inputs" in result.stderr


def test_a_body_that_is_a_number_is_not_taken_for_a_length(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / INPUTS_FILE)) as db, db:
        db.execute("CREATE TABLE inputs (seq INTEGER, segment, kind, body)")
        db.execute("INSERT INTO inputs VALUES (1, 1, 'snapshot', 1000000000000)")
    result = _run(tmp_path)
    assert result.exit_code == 2
    assert "not bytes" in result.stderr


def test_an_interrupt_while_the_commands_load_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Loading:
        @property
        def app(self) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "moe_serve.cli.app", Loading())
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == ExitCode.INTERRUPTED
