"""The demo's audit and balance figures find what they are there to find."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from moe_serve.demo.audit import Combined, Demanded, Executed, audit
from moe_serve.demo.measure import WindowCounts, balance_figures, merged
from moe_serve.demo.prompts import SCHEDULE, domain_at, load_prompts
from moe_serve.demo.report import checks
from moe_serve.ports import Cause
from placement.layout import ExpertLayout


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


WANTED = Demanded("r", 1, 0, ints(0, 0), ints(0, 1))


def ran(call: int, cause: Cause = Cause.FIRST, request: int = 1) -> Executed:
    return Executed("r", call, 0, request, 0, cause, ints(0, 0), ints(0, 1))


def test_each_once() -> None:
    result = audit([WANTED], [ran(1)], [Combined("r", 1, 0, ints(0))])
    assert (result.demand_pairs, result.executed_pairs, result.combined_pairs) == (2, 2, 2)
    assert (result.lost, result.doubled, result.unknown, result.retried) == (0, 0, 0, 0)


def test_lost_reply_that_was_retried_is_executed_twice_and_added_once() -> None:
    result = audit([WANTED], [ran(1), ran(2, Cause.RETRY)], [Combined("r", 2, 0, ints(0))])
    assert (result.executed_pairs, result.retried, result.lost, result.doubled) == (4, 2, 0, 0)


def test_refused_first_sending_is_resent_not_retried() -> None:
    result = audit([WANTED], [ran(2, Cause.RETRY)], [Combined("r", 2, 0, ints(0))])
    assert (result.executed_pairs, result.retried, result.resent) == (2, 0, 2)


def test_hedge_and_original_both_added_is_doubled() -> None:
    both = [Combined("r", 1, 0, ints(0)), Combined("r", 2, 0, ints(0))]
    result = audit([WANTED], [ran(1), ran(2, Cause.HEDGE)], both)
    assert (result.hedged, result.doubled) == (2, 2)


def test_row_left_out_or_added_twice() -> None:
    assert audit([WANTED], [ran(1)], []).lost == 2
    assert audit([WANTED], [ran(1)], [Combined("r", 1, 0, ints(0, 0))]).doubled == 2


def test_same_request_number_of_another_router_is_another_request() -> None:
    result = audit([WANTED], [ran(1, request=2)], [Combined("r", 1, 0, ints(0))])
    assert (result.lost, result.unknown) == (2, 2)


def test_balance_of_served_against_static() -> None:
    static = ExpertLayout.from_rows([[0, 1], [2, 3]], num_layers=1, num_experts=4)
    window = WindowCounts(np.array([[30, 30, 10, 10]]), np.array([[40], [40]]))
    found = balance_figures(
        [window, WindowCounts(np.zeros((1, 4), np.int64), np.zeros((2, 1)))], static
    )
    assert found.windows == 1
    assert found.imbalance_static == pytest.approx(0.5)
    assert found.imbalance_served == 0.0
    assert found.gain == 1.0


def test_windows_merge_by_number() -> None:
    def window(pairs: int) -> WindowCounts:
        return WindowCounts(np.full((1, 1), pairs), np.full((1, 1), pairs))

    found = merged({4: window(1), 5: window(2), 7: window(4)}, 2)
    assert [int(w.pairs.sum()) for w in found] == [3, 4]


def test_every_domain_comes_twice_and_has_prompts() -> None:
    shares = [n / 1000 for n in range(1000)]
    order = [domain_at(share) for share in shares]
    changes = [a for a, b in pairwise(order) if a != b] + [order[-1]]
    assert sorted(changes) == sorted(SCHEDULE * 2)
    assert set(load_prompts()) == set(SCHEDULE)


def test_one_bad_figure_fails_its_check_only() -> None:
    good = {
        "tokens": 500,
        "domains": {"a": 2, "b": 2},
        "failed_requests": 0,
        "parity_max_abs_diff": 1e-5,
        "parity_samples_during_moves": 20,
        "greedy_tokens_equal": True,
        "contributions_lost": 0,
        "contributions_doubled": 0,
        "contributions_unknown": 0,
        "demand_pairs": 10,
        "front_end_pairs": 10,
        "executed_pairs": 12,
        "retried": 2,
        "hedged": 0,
        "epochs_published": 3,
        "moves": {"replicate": 1, "migrate": 1, "evict": 1},
        "imbalance_gain": 0.3,
    }
    assert all(check.holds for check in checks(good, 2))
    for name, value in (
        ("tokens", 499),
        ("contributions_lost", 1),
        ("parity_max_abs_diff", None),
        ("executed_pairs", 13),
        ("imbalance_gain", 0.29),
    ):
        failed = [check.name for check in checks({**good, name: value}, 2) if not check.holds]
        assert failed == [name]
    assert [c.name for c in checks({**good, "domains": {"a": 9}}, 2) if not c.holds] == ["domains"]
