"""Calls between router and shard that are lost, unanswered, or repeated while they still run: each
contribution counts once, and a router comes to the newest table all the same."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from moe_serve.errors import Unavailable, WireLost
from moe_serve.ports import ShardChannel
from moe_serve.router.dispatch import RouterCore
from placement.roles.router_records import RouterRules
from tests.fake_shards import until
from tests.fakes.lossy import Loss, Network, Pick, at_random, calls_of, every_other
from tests.fakes.served import Served, a_request, check, serving

TIMES = 20
ROWS = 6
METHODS = calls_of(ShardChannel)


def a_network(pick: Pick) -> Network:
    return Network(pick, late_s=0.002, error=lambda name: WireLost(f"{name}: no answer"))


async def asked(router: RouterCore, seed: int) -> None:
    """A request, asked again where the router gave up, as a client does."""
    request = a_request(ROWS, seed=seed)
    for attempt in range(20):
        try:
            got = await router.forward(replace(request, attempt=attempt), 10.0)
        except Unavailable:
            continue
        check(request, got)
        return
    raise AssertionError("twenty times in vain")


async def moved_under_loss(network: Network, moves: int) -> None:
    """An expert moves again and again while the router hears of it only from refusals."""
    served = Served(4, num_slots=10, network=network)
    patient = RouterRules(retries_least=100, budget_least=10_000, faults_to_eject=1_000_000)
    async with serving(served, rules=patient) as (router,):
        seed = 0
        for move in range(moves):
            expert, target = move % 6, served.ranks_of(move % 6)
            goal = next(rank for rank in range(4) if rank not in target)
            served.fill(goal, expert)
            served.empty(target[0], expert)
            newest = served.table()
            for _ in range(50):
                if router.role.applied_epoch == newest.epoch:
                    break
                await asyncio.gather(*(asked(router, seed + n) for n in range(8)))
                seed += 8
            assert router.role.applied_epoch == newest.epoch, "it heard of no newer table"
        await network.settle()
        await until(lambda: router.report(0).counters["open_requests"] == 0)
        report = router.report(0)
        counters = report.counters
        assert counters["requests"] == seed, "each was served in the end"
        assert counters["demand_pairs"] == seed * ROWS * 3, "and counted once"
        assert counters["retried_pairs"] > 0
        ended = ("served_pairs", "stale_pairs", "refused_pairs", "lost_pairs")
        assert counters["sent_pairs"] == sum(counters[name] for name in ended)
        assert (router.role.open_calls, router.role.open_sub_calls) == (0, 0)
        for shard in served.shards:
            await until(lambda shard=shard: shard.core.counters()["queued_rows"] == 0)
            with shard.core.lock:
                resident = shard.core.slots.ledger.resident()
            rank = shard.settings.rank
            assert {r.slot for r in resident} == {s for r, s in served.held if r == rank}


@pytest.mark.asyncio
@pytest.mark.parametrize("loss", list(Loss))
async def test_every_call_of_the_wire_may_be_lost_and_outputs_are_right(loss: Loss) -> None:
    network = a_network(every_other(loss, TIMES))
    await moved_under_loss(network, 24)
    assert all(network.lost[method, loss] >= 3 for method in METHODS), network.lost


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(3))
async def test_a_quarter_of_all_calls_of_the_wire_lost_at_random(seed: int) -> None:
    network = a_network(at_random(seed))
    await moved_under_loss(network, 12)
    assert sum(network.lost.values()) > 30
