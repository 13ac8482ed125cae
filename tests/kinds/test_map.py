"""A path that goes around the map of experts: it works until the first move. Every way a request
may take to a shard gives the outputs of one process that holds everything, before and after experts
move and their old slots are filled with others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from moe_serve.router.dispatch import RouterCore
from placement.roles.router_records import RouterRules
from tests.fakes.served import Served, a_request, check, serving


@dataclass(frozen=True)
class Path:
    """One way: settings of router and shards, what to do to the shards, and a sign that it was
    taken."""

    taken: Callable[[Served, RouterCore], float]
    rows: int = 5
    router: dict[str, Any] = field(default_factory=dict)
    shards: dict[str, Any] = field(default_factory=dict)
    slow_s: float = 0.0
    fails: bool = False
    told: bool = True
    """Whether the router hears of moves from the controller, not only from refusals."""


def counter(name: str) -> Callable[[Served, RouterCore], float]:
    return lambda _served, router: router.report(-1).counters[name]


PATHS = {
    "one call": Path(counter("served_pairs")),
    "one row": Path(counter("served_pairs"), rows=1),
    "split in a thread": Path(counter("served_pairs"), rows=40, router={"offload_bytes": 1}),
    "retry on another rank after a failure": Path(
        counter("retried_pairs"),
        router={"rules": RouterRules(budget_least=1000, retries_least=20, max_attempts=9)},
        fails=True,
    ),
    "retry after a refusal of a stale map": Path(counter("stale_pairs"), told=False),
    "map fetched from a shard": Path(counter("tables_fetched"), told=False),
    "hedge": Path(
        counter("hedged_pairs"),
        router={"rules": RouterRules(hedge_after_s=0.001, hedge_share=0.5)},
        slow_s=0.01,
    ),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", PATHS)
async def test_every_path_follows_the_map_after_a_move(name: str) -> None:
    path = PATHS[name]
    served = Served(4, copies=2, **path.shards)
    async with serving(served, **path.router) as (router,):
        fails = iter(range(10**9))

        def on_forward(_pairs: int) -> None:
            if path.fails and asking and next(fails) % 3 == 2:
                raise RuntimeError("no")

        served.backend(1).on_forward = on_forward
        asking = False

        async def ask(first: int) -> None:
            nonlocal asking
            asking = True
            for seed in range(first, first + 12):
                request = a_request(path.rows, seed=seed)
                if path.slow_s:
                    served.slow(seed % 4, path.slow_s)
                check(request, await router.forward(request, 10.0))
            asking = False

        await ask(0)
        for round_, expert in enumerate((0, 5, 0, 5)):
            # To a rank without it; then its old slot gets another expert.
            old = served.ranks_of(expert)[0]
            goal = next(r for r in range(4) if r not in served.ranks_of(expert))
            served.fill(goal, expert)
            served.empty(old, expert)
            other = next(e for e in range(6) if old not in served.ranks_of(e) and e != expert)
            served.fill(old, other)
            table = served.table()
            if path.told:
                router.install_table(table)
            await ask(100 * (round_ + 1))
            served.empty(old, other)
            newest = served.table()
            if path.told:
                router.install_table(newest)
            await ask(100 * (round_ + 1) + 50)
        assert path.taken(served, router) > 0, f"{name}: the path was not taken"


@pytest.mark.asyncio
async def test_requests_computed_in_one_batch_follow_the_map_each() -> None:
    """Rows of calls before and after a move wait together and are computed together."""
    served = Served(3, copies=2)
    async with serving(served, 2) as (old, new):
        expert = 0
        goal = next(r for r in range(3) if r not in served.ranks_of(expert))
        served.fill(goal, expert)
        new.install_table(served.table())
        requests = [a_request(6, seed=seed) for seed in range(40)]
        sent = [(old, new)[n % 2].forward(one, 10.0) for n, one in enumerate(requests)]
        for request, got in zip(requests, await asyncio.gather(*sent), strict=True):
            check(request, got)
        assert goal in {rank for rank in served.ranks_of(expert)}
