"""The budgets: a share of the calls of the last seconds, and of what is open."""

import pytest

from placement.roles.retry_budget import RetryBudget, ShareBudget


def a_budget(share: float = 0.2, least: int = 3, window_s: float = 10.0) -> ShareBudget:
    return ShareBudget(share=share, least=least, window_s=window_s)


def spend_all(budget: ShareBudget, at_s: float) -> int:
    spent = 0
    while budget.room(at_s):
        budget.spend(at_s)
        spent += 1
    return spent


@pytest.mark.parametrize(("calls", "allowed"), [(0, 3), (14, 3), (15, 3), (20, 4), (1000, 200)])
def test_a_share_of_the_calls_but_a_few_always(calls: int, allowed: int) -> None:
    budget = a_budget()
    budget.called(calls, 0.0)
    assert spend_all(budget, 0.0) == allowed


def test_a_hedge_in_twenty_calls_and_none_before() -> None:
    budget = a_budget(share=0.05, least=0)
    budget.called(19, 0.0)
    assert budget.room(0.0) == 0
    budget.called(1, 0.0)
    assert spend_all(budget, 0.0) == 1


def test_what_is_a_window_old_is_forgotten_calls_and_extras_alike() -> None:
    budget = a_budget()
    budget.called(100, 0.5)
    assert spend_all(budget, 0.5) == 20
    budget.called(100, 6.0)
    assert spend_all(budget, 6.0) == 20
    assert budget.room(9.9) == 0
    # The first hundred and their twenty have gone.
    assert budget.room(10.6) == 0
    budget.called(50, 10.6)
    assert spend_all(budget, 10.6) == 10
    assert budget.room(17.1) == 0
    assert budget.room(1000.0) == 3


def test_a_clock_that_goes_back_or_leaps_keeps_the_sums_right() -> None:
    budget = a_budget()
    budget.called(100, 50.0)
    budget.called(100, 20.0)
    assert spend_all(budget, 20.0) == 40
    assert budget.room(59.9) == 0
    assert spend_all(budget, 60.1) == 3
    assert budget.room(1e9) == 3


def test_a_storm_in_any_ten_seconds_sends_a_fifth_more_and_no_more() -> None:
    budget = a_budget(least=10)
    spent = []
    for tick in range(3000):
        at_s = tick / 100
        budget.called(2, at_s)
        for _ in range(2):
            if budget.room(at_s):
                budget.spend(at_s)
                spent.append(at_s)
    assert len(spent) <= 0.2 * 6000
    assert len(spent) > 0.15 * 6000


def test_retries_are_bounded_at_once_too_and_free_ones_only_at_once() -> None:
    budget = RetryBudget(share=0.2, least_at_once=3, least=4, window_s=10.0)
    assert [budget.grant(call, 5, 0.0) for call in range(4)] == [True, True, True, False]
    budget.ended(0)
    budget.ended(99)
    assert budget.grant(4, 5, 0.0)
    budget.ended(1)
    assert not budget.grant(5, 5, 0.0), "four of a window that may have four"
    assert budget.grant(5, 5, 0.0, free=True)
    assert not budget.grant(6, 5, 0.0, free=True), "three at once"
    assert budget.grant(6, 20, 0.0, free=True)
    budget.called(25, 0.0)
    budget.ended(6)
    assert budget.grant(7, 20, 0.0)
