"""Sums over slices, and quantiles out of buckets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.explain.sums import others_median, quantile_s, ratio, summed
from moe_serve.stage_counts import STAGE_BOUNDS_S, STAGES
from tests.explain_world import RANKS, World

BUCKETS = len(STAGE_BOUNDS_S) + 1


def test_slices_add_up_and_ranks_that_were_never_met_count_nothing() -> None:
    slices = World(slices=3).evidence().slices
    sums = summed(slices, RANKS + 2)
    assert sums.requests == 300
    assert sums.sub_calls.tolist() == [300] * RANKS + [0, 0]
    assert sums.batches.tolist() == [300] * RANKS + [0, 0]
    assert sums.total_s == pytest.approx(sum(float(s.stages.seconds.sum()) for s in slices))
    assert sums.service_s == pytest.approx(sums.total_s - sums.stage_s[STAGES.index("queue")])
    assert sums.at_rank_s[0] == pytest.approx(sums.wait_s[0] + sums.compute_s[0])
    fewer = summed(slices, 2)
    assert fewer.sub_calls.tolist() == [300, 300]


def test_no_slice_is_no_request() -> None:
    none = summed([], 2)
    assert (none.requests, none.total_s, none.service_s) == (0, 0.0, 0.0)
    assert none.sub_calls.tolist() == [0, 0]


def test_a_slice_tells_its_copies_without_those_into_cold_ranks() -> None:
    one = replace(World(slices=1).evidence().slices[0], copies=((0, 2), (-1, 3)))
    assert one.copying == {0, 2, 3}
    assert replace(one, cold=frozenset({2})).copying == {3}


def test_a_quantile_lies_evenly_within_its_bucket() -> None:
    counts = np.zeros(BUCKETS, np.int64)
    assert quantile_s(counts, 0.5) == 0.0
    counts[0] = 10
    assert quantile_s(counts, 0.5) == pytest.approx(STAGE_BOUNDS_S[0] / 2)
    counts[2] = 10
    assert quantile_s(counts, 0.75) == pytest.approx((STAGE_BOUNDS_S[1] + STAGE_BOUNDS_S[2]) / 2)
    counts[-1] = 80
    assert quantile_s(counts, 0.99) == STAGE_BOUNDS_S[-1]


@given(st.lists(st.integers(0, 50), min_size=BUCKETS, max_size=BUCKETS))
def test_quantiles_grow(counts: list[int]) -> None:
    found = [quantile_s(np.array(counts), share) for share in (0.0, 0.25, 0.5, 0.99, 1.0)]
    assert found == sorted(found)
    assert found[-1] <= STAGE_BOUNDS_S[-1]


def test_what_is_not_known_is_no_number() -> None:
    found = ratio(np.array([1.0, 2.0]), np.array([0, 4]))
    assert np.isnan(found[0])
    assert found[1] == 0.5
    assert others_median(found, 0, [0, 1]) == 0.5
    assert np.isnan(others_median(found, 1, [0, 1]))
