"""Load that is counted wrongly: padding as load, a request once a router, one replica for all. The
whole chain up to the controller's window is in tests/unit/moe_serve/test_load_truth.py."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from moe_serve.router.dispatch import RouterCore
from placement.split import assign_pairs, compile_layer, count_ids, split_counts
from tests.fakes.served import EXPERTS, TOP_K, Served, a_request, check, serving


def asked_of(routers: list[RouterCore]) -> np.ndarray:
    """Pairs by expert of everything the routers report."""
    pairs = np.zeros(EXPERTS, np.int64)
    for router in routers:
        for report in router.report(-1).reports:
            np.add.at(pairs, report.key % EXPERTS, report.pairs)
    return pairs


def executed_of(served: Served) -> np.ndarray:
    """Pairs by expert of everything the shards report."""
    pairs = np.zeros(EXPERTS, np.int64)
    for shard in served.shards:
        for report in shard.report(-1).reports:
            np.add.at(pairs, report.key % EXPERTS, report.pairs)
    return pairs


@pytest.mark.asyncio
@pytest.mark.parametrize("buffer_rows", [3, 64, 2000])
async def test_rows_that_fill_a_buffer_are_no_load(buffer_rows: int) -> None:
    """Three real rows in a larger buffer; what fills it names expert 5."""
    served = Served()
    ids = np.full((buffer_rows, TOP_K), 5, np.int32)
    ids[:3] = [[0, 1, 2]] * 3
    valid = np.zeros((buffer_rows, TOP_K), np.uint8)
    valid[:3] = 1
    async with serving(served) as routers:
        request = a_request(buffer_rows, topk_ids=ids, valid=valid)
        check(request, await routers[0].forward(request, 10.0))
        want = [3, 3, 3, 0, 0, 0]
        assert asked_of(routers).tolist() == want
        assert executed_of(served).tolist() == want


@pytest.mark.asyncio
@pytest.mark.parametrize("num_routers", [1, 2, 4])
async def test_the_sum_over_routers_is_what_was_asked_for(num_routers: int) -> None:
    """1,000 assignments of three experts each, through one router or split over several, experts
    near and far: neither left out nor counted once a router."""
    served = Served()
    async with serving(served, num_routers) as routers:
        want = np.zeros(EXPERTS, np.int64)
        requests = [a_request(20, seed=seed) for seed in range(50)]
        sent = [routers[n % num_routers].forward(one, 10.0) for n, one in enumerate(requests)]
        for request, got in zip(requests, await asyncio.gather(*sent), strict=True):
            check(request, got)
            np.add.at(want, request.topk_ids, 1)
        assert want.sum() == 1000 * TOP_K
        assert asked_of(routers).tolist() == want.tolist()
        assert executed_of(served).tolist() == want.tolist()


@pytest.mark.parametrize("stride", [1, 2, 4, 8, 64])
@pytest.mark.parametrize("rows_a_call", [1, 7, 1000])
def test_replicas_share_a_hot_expert_whatever_the_indices_of_its_tokens(
    stride: int, rows_a_call: int
) -> None:
    """100,000 assignments at regular token indices to an expert with four replicas."""
    layer = compile_layer([0, 0, 0, 0, 1], [0, 1, 2, 3, 0], num_experts=2, num_ranks=4)
    shares = np.zeros(5, np.int64)
    calls = 100_000 // rows_a_call if rows_a_call > 1 else 4000
    ids = np.ones((rows_a_call * stride, 1), np.int32)
    ids[::stride] = 0
    valid = ids == 0
    counts = count_ids(ids, valid, 2)
    for call in range(calls):
        quotas = split_counts(layer, counts, tie_offset=call)
        chosen = assign_pairs(layer, ids, valid, quotas)
        shares += np.bincount(chosen[valid], minlength=5)
    assert shares.sum() == calls * rows_a_call
    assert np.abs(shares[:4] / shares.sum() - 0.25).max() < 0.03
