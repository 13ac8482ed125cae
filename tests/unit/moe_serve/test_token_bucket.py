"""The token bucket gives the rate asked for, whatever the caller's delays."""

import pytest

from moe_serve.wire.token_bucket import TokenBucket


def test_the_worked_example() -> None:
    bucket = TokenBucket(100, 10)
    assert bucket.take(10, 0.0) == 0.0
    assert bucket.take(5, 0.0) == pytest.approx(0.05)
    assert bucket.take(5, 0.1) == 0.0


def test_the_rate_holds_over_many_takes_with_late_callers() -> None:
    bucket = TokenBucket(1000, 100)
    at_s = 0.0
    for _ in range(200):
        at_s += bucket.take(50, at_s)
        at_s += 0.003  # what the caller does in between; saved up, not lost
    assert 200 * 50 / at_s == pytest.approx(1000, rel=0.02)


def test_no_rate_means_no_wait() -> None:
    assert TokenBucket(0, 1).take(10**9, 0.0) == 0.0


def test_no_more_than_the_burst_is_saved() -> None:
    bucket = TokenBucket(100, 10)
    assert bucket.take(20, 1000.0) == pytest.approx(0.1)


def test_a_clock_that_stands_still_gives_nothing_twice() -> None:
    bucket = TokenBucket(100, 10, at_s=5.0)
    assert bucket.take(10, 5.0) == 0.0
    assert bucket.take(10, 4.0) == pytest.approx(0.1)


@pytest.mark.parametrize(("rate", "burst"), [(-1, 1), (1, 0)])
def test_bad_figures_are_refused(rate: float, burst: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        TokenBucket(rate, burst)
