"""Where the time went lately: differences of what routers tell, kept for a while."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.controller.stages import ENTRIES_MAX, GRAIN_S, KEPT_S, StageFolder
from moe_serve.stage_counts import STAGE_BOUNDS_S, STAGES, StageCounts
from placement.topology import NUM_PHASES

BUCKETS = len(STAGE_BOUNDS_S) + 1


def counts(requests: int, *, ranks: int = 1) -> StageCounts:
    """Totals after so many requests: each of 1 s in stage 2 and bucket 3, with a sub-call of two
    pairs to every rank."""
    made = np.zeros((NUM_PHASES, len(STAGES), BUCKETS), np.int64)
    made[1, 2, 3] = requests
    seconds = np.zeros((NUM_PHASES, len(STAGES)))
    seconds[1, 2] = requests
    calls, spent_s = np.full(ranks, requests, np.int64), np.full(ranks, float(requests))
    return StageCounts(
        requests=made,
        seconds=seconds,
        sub_calls=calls,
        pairs=2 * calls,
        last=calls,
        late_s=spent_s,
        wire_s=2 * spent_s,
        wait_s=3 * spent_s,
        compute_s=4 * spent_s,
    )


def check(found: StageCounts, requests: int, *by_rank: int) -> None:
    """It holds these requests, and of each rank so many sub-calls."""
    assert int(found.requests.sum()) == found.requests[1, 2, 3] == requests
    assert found.seconds.sum() == found.seconds[1, 2] == requests
    assert found.sub_calls.tolist() == found.last.tolist() == list(by_rank)
    assert found.pairs.tolist() == [2 * n for n in by_rank]
    assert found.late_s.tolist() == list(by_rank)
    assert found.wire_s.tolist() == [2 * n for n in by_rank]
    assert found.wait_s.tolist() == [3 * n for n in by_rank]
    assert found.compute_s.tolist() == [4 * n for n in by_rank]
    assert found.sub_calls.dtype == found.pairs.dtype == found.requests.dtype == np.int64


def test_nothing_is_of_no_rank() -> None:
    folder = StageFolder()
    check(folder.since(0.0), 0)
    check(folder.total, 0)


def test_counting_begins_with_the_first_report_of_a_router_that_was_there_before() -> None:
    folder = StageFolder()
    folder.add("r0", 3, counts(1000), 10.0)
    check(folder.since(0.0), 0)
    folder.add("r0", 3, counts(1030), 11.0)
    check(folder.since(0.0), 30, 30)
    check(folder.total, 30, 30)


def test_a_new_life_begins_at_zero_and_an_old_one_is_heard_no_more() -> None:
    folder = StageFolder()
    folder.add("r0", 1, counts(100), 10.0)
    folder.add("r0", 2, counts(20), 20.0)
    check(folder.since(0.0), 20, 20)
    folder.add("r0", 1, counts(150), 21.0)
    check(folder.since(0.0), 20, 20)
    folder.add("r0", 2, counts(25), 22.0)
    check(folder.since(0.0), 25, 25)
    check(folder.since(20.0), 5, 5)


def test_routers_are_added_up_each_by_its_own_totals() -> None:
    folder = StageFolder()
    for router, told in (("r0", 10), ("r1", 500), ("r0", 13), ("r1", 504)):
        folder.add(router, 1, counts(told), 5.0)
    check(folder.since(0.0), 7, 7)


def test_a_rank_that_is_met_later_adds_to_the_arrays() -> None:
    folder = StageFolder()
    folder.add("r0", 1, counts(0, ranks=0), 1.0)
    folder.add("r0", 1, counts(4, ranks=1), 2.0)
    folder.add("r0", 1, counts(6, ranks=3), 4.0)
    check(folder.since(3.0), 2, 2, 6, 6)
    check(folder.since(0.0), 6, 6, 6, 6)
    check(folder.total, 6, 6, 6, 6)


def test_what_is_not_newer_is_left_out() -> None:
    folder = StageFolder()
    for at_s in range(10):
        folder.add("r0", 1, counts(at_s), float(at_s))
    check(folder.since(7.0), 2, 2)
    check(folder.since(6.5), 3, 3)
    check(folder.since(9.0), 0)


def test_it_is_bounded_however_often_routers_report_and_for_however_long() -> None:
    folder = StageFolder()
    reports = int(3 * KEPT_S / 0.25)
    for i in range(reports):
        folder.add(f"r{i % 4}", 1, counts(i // 4), i * 0.25)
    assert len(folder._entries) <= ENTRIES_MAX
    now_s = (reports - 1) * 0.25
    kept = folder.since(0.0).requests.sum()
    assert KEPT_S * 0.9 < kept / 4 * 1.0 <= KEPT_S, "4 routers, each a request a second"
    assert folder.since(now_s - 60.0).requests.sum() == pytest.approx(240, abs=4 * GRAIN_S + 1)
    assert folder.total.requests.sum() == (reports // 4 - 1) * 4


def test_an_idle_router_takes_no_room() -> None:
    folder = StageFolder()
    for i in range(100):
        folder.add("r0", 1, counts(5), 10.0 * i)
    assert not folder._entries


@pytest.mark.parametrize(
    "other",
    [
        {"requests": np.zeros((NUM_PHASES, len(STAGES) + 1, BUCKETS), np.int64)},
        {"requests": np.zeros((NUM_PHASES, len(STAGES), BUCKETS - 1), np.int64)},
        {"seconds": np.zeros((NUM_PHASES, len(STAGES) + 1))},
        {"pairs": np.zeros(9, np.int64)},
    ],
)
def test_a_router_of_another_release_is_left_out(other: dict[str, Any]) -> None:
    folder = StageFolder()
    folder.add("r0", 1, counts(5), 1.0)
    folder.add("r0", 1, replace(counts(9), **other), 2.0)
    check(folder.since(0.0), 0)
    folder.add("r0", 1, counts(7), 3.0)
    check(folder.since(0.0), 2, 2)


steps = st.lists(
    st.tuples(
        st.sampled_from(["r0", "r1", "r2"]), st.booleans(), st.integers(0, 9), st.floats(0.0, 5.0)
    ),
    max_size=40,
)


@given(steps)
def test_all_that_routers_count_is_counted_once(told: list[tuple[str, bool, int, float]]) -> None:
    """told: (router, whether it is a new life, requests since its last report, seconds since the
    last report of any)."""
    folder = StageFolder()
    lives: dict[str, tuple[int, int]] = {}
    now_s, want = 0.0, 0
    for router, anew, requests, seconds in told:
        now_s += seconds
        if router not in lives:
            lives[router] = 1, requests
        else:
            life, total = lives[router]
            lives[router] = (life + 1, requests) if anew else (life, total + requests)
            want += requests
        folder.add(router, *lives[router][:1], counts(lives[router][1]), now_s)
    assert folder.total.requests.sum() == folder.since(-1.0).requests.sum() == want
