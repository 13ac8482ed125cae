"""Load by expert over the last minutes: rates, within a bound of bytes and age."""

from typing import Any

import numpy as np
import pytest

from moe_serve.dashboard import load_history
from moe_serve.dashboard.load_history import LoadHistory
from moe_serve.rpc import placement_pb2 as pb
from tests.fakes.admin import make_window


def load(demand: Any, *, seconds: float = 2.0) -> pb.GetLoadResponse:
    window = make_window(np.asarray(demand))
    window.end_s = window.start_s + seconds
    return window


def test_history_is_a_rate_over_both_phases() -> None:
    kept = LoadHistory()
    kept.add(load([[[1, 2]], [[3, 4]]]), 100.0)
    kept.add(load([[[0, 200_000]], [[6, 0]]]), 102.0)
    assert kept.of(0, 0) == {"wall_s": [100.0, 102.0], "pairs_per_s": [2.0, pytest.approx(3, 0.4)]}
    assert kept.of(0, 1)["pairs_per_s"] == [3.0, 100_000.0]


def test_an_expert_that_the_windows_do_not_have_has_no_points() -> None:
    kept = LoadHistory()
    nothing = {"wall_s": [], "pairs_per_s": []}
    assert kept.of(0, 0) == nothing
    kept.add(load(np.ones((1, 2, 3), dtype=np.int64)), 100.0)
    assert kept.of(1, 2)["wall_s"] == [100.0]
    for layer, expert in ((2, 0), (0, 3), (-1, 0), (0, -1)):
        assert kept.of(layer, expert) == nothing, (layer, expert)


def test_history_is_bounded_by_bytes_and_by_age() -> None:
    frame = np.ones((1, 4, 8), dtype=np.int64)
    small = LoadHistory(bytes_max=10 * 64)
    for n in range(50):
        small.add(load(frame), 100.0 + n)
        assert small.held_bytes() <= 10 * 64
    assert small.of(0, 0)["wall_s"] == [140.0 + n for n in range(10)]
    old = LoadHistory()
    for n in range(4):
        old.add(load(frame), n * load_history.HISTORY_S / 2)
    assert old.of(0, 0)["wall_s"] == [n * load_history.HISTORY_S / 2 for n in (1, 2, 3)]
    none = LoadHistory(bytes_max=10)
    none.add(load(frame), 0.0)
    assert (none.held_bytes(), none.of(0, 0)["wall_s"]) == (0, [])


def test_fifteen_minutes_of_a_large_model_fit_the_bound() -> None:
    frame_bytes = 58 * 256 * 2
    assert load_history.HISTORY_S * frame_bytes < load_history.HISTORY_BYTES_MAX


def test_another_shape_begins_anew() -> None:
    kept = LoadHistory()
    kept.add(load(np.ones((1, 2, 2))), 1.0)
    kept.add(load(np.ones((1, 2, 3))), 2.0)
    assert kept.of(1, 2)["wall_s"] == [2.0]
    assert kept.held_bytes() == 12


def test_a_long_history_is_averaged_and_keeps_its_total() -> None:
    kept = LoadHistory()
    count = 2 * load_history.POINTS_MAX + 300
    rng = np.random.default_rng(5)
    rates = rng.integers(0, 50, count)
    for n, rate in enumerate(rates):
        kept.add(load([[[rate]]], seconds=1.0), n * 0.4)
    points = kept.of(0, 0)
    assert len(points["wall_s"]) == len(points["pairs_per_s"]) == load_history.POINTS_MAX
    assert points["wall_s"] == sorted(points["wall_s"])
    assert np.mean(points["pairs_per_s"]) == pytest.approx(rates.mean(), rel=0.05)
    assert max(points["pairs_per_s"]) <= 50
