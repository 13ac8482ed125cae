"""`moe-serve screen`: a verdict with its evidence, judged on what no plan had seen."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner, Result

from moe_serve.cli.app import app
from moe_serve.cli.views.screen import NO_PROMISE
from moe_serve.controller.journal_store import InputsStore

GOLDEN = Path(__file__).parents[2] / "golden" / "cli"
SMALL = ("--window-tokens", 100, "--ranks", 2)


def _run(*args: object) -> Result:
    return CliRunner().invoke(app, ["screen", *map(str, args)], catch_exceptions=False)


def _trace(folder: Path, *, skewed: bool, tokens: int = 2400) -> Path:
    rng = np.random.default_rng(1)
    weights = np.array([8.0, 7.0, 6.0, 5.0, 1.0, 1.0, 1.0, 1.0]) if skewed else np.ones(8)
    first = rng.choice(8, size=(tokens, 2, 1), p=weights / weights.sum())
    # Even load is even in every window: the experts in turn.
    if not skewed:
        first = np.broadcast_to(np.arange(tokens)[:, None, None] % 8, (tokens, 2, 1))
    ids = np.concatenate([first, (first + 1) % 8], axis=2).astype(np.uint8)
    file = folder / "trace.npz"
    np.savez(file, topk_ids=ids)
    return file


def test_a_lasting_skew_is_worth_a_trial(tmp_path: Path, rewrite: bool) -> None:
    result = _run(_trace(tmp_path, skewed=True), *SMALL, "--slots", 9)
    assert result.exit_code == 0
    file = GOLDEN / "screen.txt"
    if rewrite:
        file.write_text(result.stdout, encoding="utf-8")
    assert result.stdout == file.read_text(encoding="utf-8")
    assert result.stdout.startswith("Verdict: recommend_trial")
    assert NO_PROMISE in result.stdout
    assert "simulated: copies take no time" in result.stderr


def test_even_load_is_not_and_that_is_no_failure(tmp_path: Path) -> None:
    result = _run(_trace(tmp_path, skewed=False), *SMALL, "--slots", 9)
    assert result.exit_code == 0
    assert result.stdout.startswith("Verdict: not_recommended_now (not recommended now)")


def test_a_short_trace_says_what_is_missing(tmp_path: Path) -> None:
    result = _run(_trace(tmp_path, skewed=True, tokens=500), *SMALL)
    assert result.exit_code == 0
    assert result.stdout.startswith("Verdict: insufficient_evidence")
    assert "3 windows to judge on, at least 8 are needed" in result.stdout


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_programs_get_the_verdict_and_all_figures(tmp_path: Path, form: str) -> None:
    text = _run(_trace(tmp_path, skewed=True), *SMALL, "--first", 0.25, "-o", form).stdout
    found = json.loads(text) if form == "json" else yaml.safe_load(text)
    assert (found["first_windows"], found["judged_windows"]) == (6, 18)
    assert found["simulated"] is True
    assert found["note"] == NO_PROMISE
    assert [one["name"] for one in found["layouts"]] == [
        "never moves",
        "first part's plan",
        "engine",
        "foresight",
    ]
    assert found["reasons"]


@pytest.mark.parametrize(
    "args",
    [
        ("--first", 0),
        ("--first", 1),
        ("--worth", 0),
        ("--worth", 1),
        ("--ranks", 0),
        ("--window-tokens", 0),
        ("--window-tokens", 100_000),
        ("--slots", 3),
    ],
)
def test_wrong_options_are_exit_2(tmp_path: Path, args: tuple[object, ...]) -> None:
    assert _run(_trace(tmp_path, skewed=True), *args).exit_code == 2


def test_a_journal_takes_no_option_of_a_trace(tmp_path: Path) -> None:
    InputsStore(tmp_path).close()
    result = _run(tmp_path, "--ranks", 4)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--ranks has no say beside a journal" in " ".join(result.stderr.split())


def test_a_file_that_is_no_recording_is_exit_2(tmp_path: Path) -> None:
    file = tmp_path / "x.npz"
    file.write_text("nothing")
    result = _run(file)
    assert result.exit_code == 2
    assert "neither a journal" in result.stderr.replace("\n", " ")
    assert _run(tmp_path / "none").exit_code == 2
