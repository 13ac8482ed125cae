"""An expert with several replicas that is summed several times: each (token, k-slot) is computed
and added once, whichever router asks whichever replica."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tests.fakes.served import EXPERTS, TOP_K, Served, a_request, check, serving


@pytest.mark.asyncio
@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("num_routers", [1, 2])
async def test_an_expert_on_several_ranks_counts_once(copies: int, num_routers: int) -> None:
    served = Served(3, copies=copies)
    assert all(len(served.ranks_of(expert)) == copies for expert in range(EXPERTS))
    async with serving(served, num_routers) as routers:
        requests = [a_request(1 + seed % 9, seed=seed) for seed in range(60)]
        sent = [routers[n % num_routers].forward(one, 10.0) for n, one in enumerate(requests)]
        for request, got in zip(requests, await asyncio.gather(*sent), strict=True):
            check(request, got)
        executed = Counter(
            (entry.router, entry.request_key, row, k)
            for shard in served.shards
            for entry in shard.take_ledger()
            for row, k in zip(entry.row_id.tolist(), entry.pair_k.tolist(), strict=True)
        )
        pairs = sum(len(one.topk_ids) for one in requests) * TOP_K
        assert executed.total() == len(executed) == pairs
        if copies > 1:
            ranks_used = [len(shard.report(-1).reports) > 0 for shard in served.shards]
            assert all(ranks_used), "the replicas share the work"
