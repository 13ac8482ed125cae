"""The controller's date as the page tells it, where the clocks of the two differ."""

import math

import pytest

from moe_serve.dashboard.controller_clock import SKEW_MIN_S, ControllerClock
from moe_serve.rpc import placement_pb2 as pb

NOON = 1_700_000_000.0


class Page:
    """A page whose seconds and dates are set by hand, and the clock that it fills."""

    def __init__(self, wall_s: float = NOON) -> None:
        self.now_s = 1000.0
        self.began_wall_s = wall_s - self.now_s
        self.clock = ControllerClock(lambda: self.now_s, self.wall_s)

    def wall_s(self) -> float:
        return self.began_wall_s + self.now_s


def window(end_s: float, age_s: float = 0.0) -> pb.GetLoadResponse:
    return pb.GetLoadResponse(end_s=end_s, age_s=age_s)


def record(at_s: float, wall_time_s: float) -> pb.DecisionRecord:
    return pb.DecisionRecord(at_s=at_s, wall_time_s=wall_time_s)


def test_the_worked_example() -> None:
    page = Page(NOON + 102.0)
    page.clock.window(window(500.0, age_s=2.0))
    assert page.clock.now_s() == page.wall_s(), "no decision has told a date"
    page.clock.record(record(490.0, NOON))
    assert page.clock.now_s() == pytest.approx(NOON + 12.0)
    page.now_s += 5.0
    assert page.clock.now_s() == pytest.approx(NOON + 17.0)
    assert page.clock.date_of(NOON + 102.0) == pytest.approx(NOON + 12.0)


@pytest.mark.parametrize("ahead_s", [90.0, -90.0])
@pytest.mark.parametrize("first", ["window", "record"])
def test_whichever_comes_first_the_difference_is_the_same(ahead_s: float, first: str) -> None:
    page = Page()
    news = [lambda: page.clock.window(window(70.0, 1.0))]
    news.append(lambda: page.clock.record(record(11.0, page.wall_s() + ahead_s - 60.0)))
    for tell in news if first == "window" else reversed(news):
        tell()
    assert page.clock.now_s() == pytest.approx(page.wall_s() + ahead_s)


def test_a_second_is_no_difference_and_does_not_make_dates_jump() -> None:
    page = Page()
    page.clock.window(window(70.0))
    page.clock.record(record(70.0, NOON + 0.9 * SKEW_MIN_S))
    assert page.clock.now_s() == page.wall_s()
    page.clock.record(record(70.0, NOON + 5.0))
    page.clock.record(record(70.0, NOON + 5.0 - 0.9 * SKEW_MIN_S))
    assert page.clock.now_s() == NOON + 5.0


def test_a_clock_that_is_set_is_followed() -> None:
    page = Page()
    page.clock.window(window(70.0))
    page.clock.record(record(70.0, NOON))
    page.began_wall_s += 600.0  # ours
    page.clock.window(window(70.0))
    assert page.clock.now_s() == pytest.approx(NOON)
    page.clock.record(record(70.0, NOON + 30.0))  # the controller's
    assert page.clock.now_s() == pytest.approx(NOON + 30.0)


def test_seconds_of_two_lives_of_a_controller_are_not_compared() -> None:
    page = Page()
    page.clock.window(window(70.0))
    page.clock.record(record(70.0, NOON + 90.0))
    page.now_s += 600.0  # it is down, and its seconds stand still
    page.clock.connected()
    page.clock.window(window(75.0))
    assert page.clock.now_s() == pytest.approx(page.wall_s() + 90.0)
    page.clock.record(record(74.0, page.wall_s() + 89.0))
    assert page.clock.now_s() == pytest.approx(page.wall_s() + 90.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_changes_no_date(bad: float) -> None:
    page = Page()
    page.clock.window(window(bad))
    page.clock.record(record(5.0, NOON))
    assert page.clock.now_s() == page.wall_s()
    page.clock.window(window(5.0))
    page.clock.record(record(1.0, bad))
    assert page.clock.now_s() == page.wall_s()


def test_a_life_began_its_uptime_ago_in_its_own_seconds() -> None:
    page = Page()
    assert page.clock.life_began_s() == math.inf
    page.clock.placement(pb.GetPlacementResponse(uptime_s=20.0))
    assert page.clock.life_began_s() == math.inf, "no window has told its seconds"
    page.now_s += 1.0
    assert page.clock.window(window(70.0, age_s=1.0))
    assert not page.clock.window(window(70.0, age_s=1.0)), "the second of its connection"
    assert page.clock.life_began_s() == pytest.approx(50.0)
    page.clock.connected()
    assert page.clock.life_began_s() == math.inf
