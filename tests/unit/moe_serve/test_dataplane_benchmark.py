"""The data path benchmark: its modules import, and its arithmetic is right. Nothing is measured."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import dataplane_figures as figures
from benchmarks.dataplane_client import EDGE_STREAM, EDGE_UNARY, LOCAL, STREAM, UNARY, PathTimes
from benchmarks.dataplane_fanout import FanOutTimes, MessageBytes
from benchmarks.dataplane_model import ECHO, MODEL, ModelSize, token_batch, write_checkpoint
from benchmarks.dataplane_report import Report
from moe_serve.weights.checkpoint import Checkpoint

SMALL = ModelSize(16, 4, 8, 4, backend="numpy")


@pytest.mark.parametrize(
    "name", ["", "_client", "_fanout", "_figures", "_fleet", "_model", "_ray", "_report"]
)
def test_every_module_imports(name: str) -> None:
    assert importlib.import_module(f"benchmarks.dataplane{name}").__doc__


def test_median_and_the_interval_that_order_statistics_give() -> None:
    found = figures.figure([float(i) for i in range(16, 0, -1)])
    # Of 16 values the 4th smallest and the 4th largest enclose the median with 97.9%.
    assert (found.low, found.median, found.high) == (4.0, 8.5, 13.0)
    assert found.coverage == pytest.approx(1 - 2 * (1 + 16 + 120 + 560) / 2**16)
    few = figures.figure([3.0, 1.0, 2.0])
    assert (few.low, few.median, few.high, few.coverage) == (1.0, 2.0, 3.0, 0.75)
    alone = figures.figure([7.0])
    assert (alone.low, alone.high, alone.coverage) == (7.0, 7.0, 0.0)


def test_ratios_and_differences_are_taken_block_by_block() -> None:
    ratio = figures.ratios([2.0, 4.0, 3.0], [10.0, 10.0, 10.0])
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((0.2, 0.3, 0.4))
    # Slow blocks on both sides do not move the ratio.
    assert figures.ratios([1.0, 100.0, 1.0], [2.0, 200.0, 2.0]).high == 0.5
    assert figures.differences([5.0], [7.0]).median == -2.0
    assert ratio.scaled(10).text(1) == "3.0 [2.0..4.0]"


def test_expected_rows_against_a_draw() -> None:
    assert figures.saved_rows(8, 4) == pytest.approx(2.2225, abs=1e-4)
    assert figures.saved_rows(4, 4) == pytest.approx(1.4629, abs=1e-4)
    assert figures.saved_rows(8, 16) == pytest.approx(1.240, abs=1e-3)
    assert figures.rows_a_token(5, 1) == 1.0
    drawn = np.random.default_rng(1).integers(0, 4, (20_000, 8))
    rows = np.mean([len(set(token)) for token in drawn.tolist()])
    assert figures.rows_a_token(8, 4) == pytest.approx(rows, rel=0.01)
    assert figures.relative_error(0.95, 1.0) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((0.1, 0.09, 0.11), "holds"),
        ((0.1, 0.09, 0.2), "holds (unclear)"),
        ((0.2, 0.1, 0.3), "misses (unclear)"),
        ((0.2, 0.15, 0.3), "misses"),
    ],
)
def test_a_bar_says_when_its_interval_reaches_over_it(
    values: tuple[float, float, float], verdict: str
) -> None:
    bar = figures.Bar("x", 0.12, figures.Figure(*values, 0.95, 16))
    assert bar.verdict == verdict
    assert bar.holds is verdict.startswith("holds")


def test_a_table_has_aligned_columns() -> None:
    lines = figures.table(["size", "ms"], [["1 x 8", "12.5"], ["512 x 8", "7"]])
    assert lines == ["  size       ms", "  1 x 8    12.5", "  512 x 8     7"]


def test_batches_come_from_the_seed_and_name_distinct_experts() -> None:
    batch = token_batch(ECHO, 64, 4, 7)
    again, other = token_batch(ECHO, 64, 4, 7), token_batch(ECHO, 64, 4, 8)
    np.testing.assert_array_equal(batch.ids, again.ids)
    assert not np.array_equal(batch.ids, other.ids)
    assert all(len(set(row)) == 4 for row in batch.ids.tolist())
    assert batch.gates.sum(axis=1) == pytest.approx(np.ones(64))
    assert (batch.tokens, batch.top_k, batch.label) == (64, 4, "64 x 1024, top-4")


def test_the_synthetic_checkpoint_is_one_that_shards_open(tmp_path: Path) -> None:
    spec = Checkpoint.open(write_checkpoint(tmp_path, SMALL, 1), MODEL).spec
    assert (spec.num_layers, spec.num_experts, spec.top_k) == (1, 8, 4)
    assert (spec.hidden_size, spec.intermediate_size) == (16, 4)


def test_the_report_names_every_bar_and_counts_the_missed_ones() -> None:
    report = Report()
    batches = {tokens: token_batch(SMALL, tokens, 4, 1) for tokens in (1, 64)}
    report.add_fan_out(batches[1], FanOutTimes([0.9] * 8, [1.0] * 8))
    report.add_fan_out(batches[64], FanOutTimes([0.2] * 8, [1.0] * 8))
    times = {STREAM: 0.7, UNARY: 1.0, EDGE_STREAM: 0.9, EDGE_UNARY: 1.0, LOCAL: 0.5}
    paths = PathTimes({name: [value] * 8 for name, value in times.items()}, requests=10)
    report.add_stream(batches[1], paths)
    report.add_bytes(batches[64], 4, MessageBytes(1000, 1463, 1000, 1400, 10, 14))
    report.add_overhead(batches[64], paths, compute_s=0.001)
    held = {bar.name: bar.holds for bar in report.bars()}
    assert held == {
        "a  wire / Ray calls, 64 x 16, top-4": False,
        "b  stream / unary, 1 x 16, top-4": True,
        "c  bytes out off the formula, 64 x 16, top-4": True,
        "c  bytes back off the formula, 64 x 16, top-4": True,
    }
    assert "3 of 4 bars hold, 1 missed" in report.verdicts()[-1]
    assert report.overhead[0].added_ms.median == pytest.approx(200.0)
    for lines in (report.fan_out_lines(), report.stream_lines(), report.overhead_lines()):
        assert len(lines) >= 2
    assert json.loads(json.dumps(report.document()))["bars"][0]["verdict"] == "misses"
