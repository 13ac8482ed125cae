"""The long run itself: findings are kept and counted, reports are complete, few inputs are kept."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from tests.fuzz import engine, keep, run
from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS, target


def broken(data: bytes) -> bool:
    if data.startswith(b"a"):
        raise KeyError(data)
    if data.startswith(b"b"):
        raise ZeroDivisionError
    return True


BROKEN = dataclasses.replace(TARGETS[0], name="broken", run=broken)


def started(tmp_path: Path, one: Target = BROKEN, most: int = 10) -> engine.Run:
    report = engine.Report(one.name, engine.OWN, 1)
    return engine.Run(one, report, tmp_path / "findings", most, 60.0)


def test_a_finding_is_kept_once_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = started(tmp_path)
    for data in (b"a1", b"a2", b"b1", b"x"):
        assert one.one(data) == (data == b"x")
    report = one.finish(tmp_path)
    assert (report.inputs, report.taken) == (4, 1)
    assert sorted(report.findings.values()) == [1, 2]
    files = sorted((tmp_path / "findings").iterdir())
    assert sorted(file.read_bytes() for file in files) == [b"a1", b"b1"]
    told = capsys.readouterr().out
    assert [told.count(file.name) for file in files] == [1, 1]
    assert run.bad(report)
    assert "KeyError in test_run.py" in run.line(report)


def test_an_input_that_takes_long_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.fuzz.watch.INPUT_S_MAX", -1.0)
    one = started(tmp_path)
    one.one(b"x")
    assert any("Costly" in place for place in one.finish(tmp_path).findings)


def test_a_run_ends_with_its_inputs_or_its_time(tmp_path: Path) -> None:
    one = started(tmp_path, most=2)
    assert not one.done
    one.one(b"x")
    one.one(b"x")
    assert one.done
    report = engine.Report("broken", engine.OWN, 1)
    assert engine.Run(BROKEN, report, tmp_path, 10, 0.0).done


def test_growth_beyond_the_limit_does_not_pass() -> None:
    report = engine.Report("x", engine.OWN, 1, inputs=10, grown_bytes=run.GROWN_BYTES_MAX)
    assert not run.bad(report)
    assert run.bad(dataclasses.replace(report, grown_bytes=run.GROWN_BYTES_MAX + 1))


def test_a_search_writes_its_report(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    engine.search(
        "wire_error", engine=engine.OWN, seed=3, inputs=300, seconds=60.0, work=tmp_path, out=out
    )
    report = engine.Report(**json.loads(out.read_text()))
    assert (report.target, report.inputs, report.findings) == ("wire_error", 300, {})
    assert report.taken > 0


def test_a_process_that_dies_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    given = run.parsed(["--inputs", "5", "--work", str(tmp_path), "--engine", engine.OWN])
    report = run.run_target("wire_error", given)
    assert run.bad(report)
    assert "ended with 1" in run.line(report)


def test_without_atheris_the_search_is_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "atheris", None)
    assert engine.load_atheris() is None


def test_only_decoders_guide_the_search() -> None:
    others = engine._others()
    assert "moe_serve.router.kernels" in others
    assert "placement.roles.kernels" in others
    assert "moe_serve.wire.codec" not in others
    assert "placement.messages.codec" not in others

    for name in engine.INSTRUMENTED:
        path = engine.ROOT / name.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), name


def test_the_smallest_that_reach_something_new_are_kept() -> None:
    one = target("wire_frames")
    seed = one.seeds()[0]
    short, long = b"\0MoEw", b"\0MoEw" + bytes(5)
    chosen = keep.smallest(one, [long, short, seed, short])
    assert short in chosen.values()
    assert long not in chosen.values(), "reaches nothing that the short one does not"
    assert seed not in chosen.values(), "seeds are there anyhow"


def test_what_is_kept_has_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    one = target("wire_frames")
    inputs = [b"", b"\0MoEw", b"\0" + bytes(30), b"\5" + bytes(40)]
    everything = keep.smallest(one, inputs)
    assert len(everything) > 1
    monkeypatch.setattr(keep, "FILES_MAX", 1)
    assert len(keep.smallest(one, inputs)) == 1
    monkeypatch.setattr(keep, "FILES_MAX", 40)
    monkeypatch.setattr(keep, "BYTES_MAX", 2)
    assert all(len(data) <= 2 for data in keep.smallest(one, inputs).values())
