"""Quantiles of recent calls, from bounded counts."""

import numpy as np
import pytest

from placement.roles.latency import SAMPLES_LEAST, CallLatencies, LatencySketch


@pytest.mark.parametrize("share", [0.5, 0.95, 0.99])
@pytest.mark.parametrize("scale_s", [1e-4, 5e-3, 2.0])
def test_a_quantile_is_never_below_the_true_one_and_a_tenth_above_at_most(
    share: float, scale_s: float
) -> None:
    drawn = np.random.default_rng(3).lognormal(np.log(scale_s), 0.7, 900)
    sketch = LatencySketch()
    for one in drawn:
        sketch.add(float(one))
    exact = float(np.quantile(drawn, share, method="inverted_cdf"))
    assert exact <= sketch.quantile(share) * (1 + 1e-9)
    assert sketch.quantile(share) <= exact * 1.1 * (1 + 1e-9)


def test_old_durations_fade_and_the_memory_is_bounded() -> None:
    sketch = LatencySketch()
    for _ in range(900):
        sketch.add(1.0)
    for _ in range(9000):
        sketch.add(0.001)
    assert sketch.quantile(0.95) < 0.002
    assert sketch.total < 1000


@pytest.mark.parametrize("odd", [0.0, -1.0, float("nan"), float("inf"), 1e30])
def test_odd_durations_stay_in_range(odd: float) -> None:
    sketch = LatencySketch()
    assert sketch.quantile(0.95) == 0.0
    sketch.add(odd)
    assert sketch.quantile(0.0) == 1e-5
    assert 0.0 < sketch.quantile(0.95) < 200.0


def test_sizes_are_apart_and_nothing_is_said_of_few() -> None:
    latencies = CallLatencies(0.95)
    for _ in range(SAMPLES_LEAST - 1):
        latencies.add(3, 0.001)
    assert latencies.of(3) is None
    assert latencies.least_s is None
    latencies.add(2, 0.001)
    for _ in range(SAMPLES_LEAST):
        latencies.add(512, 0.1)
    small, large = latencies.of(2), latencies.of(1000)
    assert small is not None
    assert large is not None
    assert small == pytest.approx(0.001, rel=0.11)
    assert large == pytest.approx(0.1, rel=0.11)
    assert latencies.of(4) is None
    assert latencies.least_s == small


def test_what_is_known_follows_what_happens() -> None:
    latencies = CallLatencies(0.95)
    for _ in range(200):
        latencies.add(1, 0.001)
    for _ in range(200):
        latencies.add(1, 0.01)
    now = latencies.of(1)
    assert now is not None
    assert now == pytest.approx(0.01, rel=0.11)
