"""What the controller is told of load is what was asked for, to the pair: padding, retries, hedges,
callers' second tries, reports that are lost or come twice, a shard and a router that start again.

One router or four, the sum is the same.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from moe_serve.controller.names import PartKind, PartName
from moe_serve.controller.parts import AnyPart, PartTable, router_part, shard_part
from moe_serve.controller.polls import Polls
from moe_serve.controller.settings import SupervisionLimits
from moe_serve.controller.stages import StageFolder
from moe_serve.ports import (
    RouterInfo,
    RouterPort,
    RouterReport,
    ShardInfo,
    ShardPort,
    ShardReport,
)
from moe_serve.router.checks import ForwardInput
from moe_serve.router.dispatch import RouterCore
from moe_serve.shard.assembly import Shard
from moe_serve.shard.executed import LedgerEntry
from placement.config import RebalanceConfig
from placement.load import DemandReport, HotnessReport, LoadFolder, LoadWindow
from placement.messages.events import AnyEvent
from placement.roles.router_records import RouterRules
from placement.topology import NUM_PHASES, Phase
from tests.fake_shards import until
from tests.fakes.controller import NoHost
from tests.fakes.lossy import Lossy, Network, at_random
from tests.fakes.served import EXPERTS, LAYER, TOP_K, Served, a_request, check, serving

RANKS, ROWS, REQUESTS = 3, 5, 120


class Clock:
    """The loop's."""

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()


class AliveFleet:
    """Whoever is asked for lives."""

    async def alive(self, _name: str) -> bool:
        return True


class RouterSide:
    """RouterPort.report of a core in this process. What it said last comes again each time."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core
        self._last: tuple[DemandReport, ...] = ()

    async def report(self, acked_seq: int) -> RouterReport:
        said = self._core.report(acked_seq)
        again, self._last = self._last, said.reports
        return replace(said, reports=(*again, *said.reports))


class ShardSide:
    """ShardPort.report of a shard in this process. What it said last comes again each time."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._last: tuple[HotnessReport, ...] = ()

    async def report(self, acked_seq: int) -> ShardReport:
        said = self._shard.report(acked_seq)
        again, self._last = self._last, said.reports
        return replace(said, reports=(*again, *said.reports))


class Controller:
    """The controller's loops and folder over a network that loses four calls in ten."""

    def __init__(self, seed: int) -> None:
        self.network = Network(at_random(seed, 0.4), late_s=0.003)
        self.parts = PartTable()
        self._clock = Clock()
        config = RebalanceConfig()
        self.folder = LoadFolder(
            num_layers=2,
            num_experts=EXPERTS,
            num_ranks=RANKS,
            window_s=config.window_s,
            sub_windows=config.sub_windows,
            start_s=self._clock.now_s(),
        )
        self._polls = Polls(
            AliveFleet(),  # type: ignore[arg-type]
            term=1,
            config=config,
            limits=SupervisionLimits(report_s=0.002),
            clock=self._clock,  # type: ignore[arg-type]
            parts=self.parts,
            folder=self.folder,
            stages=StageFolder(),
            host=NoHost(),
            post=self._post,
            fenced=self._fenced,
        )
        self._loops: list[asyncio.Task[None]] = []

    async def _post(self, _event: AnyEvent) -> None:
        return

    def _fenced(self, error: Exception) -> None:
        raise AssertionError(error)

    def watch_router(self, core: RouterCore) -> None:
        """From now on this life of the router is asked."""
        settings = core.settings
        name = PartName("tiny", PartKind.ROUTER, settings.router, settings.incarnation)
        port = Lossy(RouterSide(core), RouterPort, self.network)
        info: RouterInfo = core.describe("", 1)
        part = router_part(name, port, info, self._clock.now_s())  # type: ignore[arg-type]
        self._replace(self.parts.routers.get(name.place), part)
        self._loops.append(asyncio.create_task(self._polls.report_router(part)))

    def watch_shard(self, shard: Shard, info: ShardInfo) -> None:
        """The same for a shard's life."""
        settings = shard.settings
        name = PartName("tiny", PartKind.SHARD, str(settings.rank), settings.incarnation)
        port = Lossy(ShardSide(shard), ShardPort, self.network)
        part = shard_part(name, port, info, self._clock.now_s())  # type: ignore[arg-type]
        self._replace(self.parts.shards.get(settings.rank), part)
        self._loops.append(asyncio.create_task(self._polls.report_shard(part)))

    def _replace(self, old: AnyPart | None, new: AnyPart) -> None:
        if old is not None:
            self.parts.drop(old)
        self.parts.add(new)

    async def told_all(self, core: RouterCore) -> None:
        """Wait until everything that the router has counted was taken in."""
        settings = core.settings

        def nothing_left() -> bool:
            acked = self.folder.acked_seq(settings.router, settings.incarnation)
            return core.demand.reports(acked, self._clock.now_s()) == ()

        await until(nothing_left, 10.0)

    async def told_all_executed(self, shard: Shard) -> None:
        """The same for a shard."""

        def nothing_left() -> bool:
            part = self.parts.shards[shard.settings.rank]
            incarnation = shard.settings.incarnation
            acked = self.folder.acked_seq(part.source, incarnation) if part.source else -1
            return shard.core.hotness.reports(acked, self._clock.now_s()) == ()

        await until(nothing_left, 10.0)

    async def close(self) -> LoadWindow:
        window = self.folder.close(self._clock.now_s())
        for loop in self._loops:
            loop.cancel()
            with suppress(asyncio.CancelledError):
                await loop
        await self.network.settle()
        return window


def info_of(served: Served, shard: Shard) -> ShardInfo:
    """What the shard would say of itself, had it a socket."""
    rank = shard.settings.rank
    return ShardInfo(
        rank=rank,
        node=f"node{rank}",
        failure_domain=f"node{rank}",
        profile="test",
        address=served.address(rank),
        num_slots=8,
        budget_bytes=1 << 20,
        slot_bytes=1,
        backend="marker",
        simulated=True,
        pid=1,
        highest_term=1,
        highest_epoch=0,
        resident=(),
    )


def troubled(served: Served, rng: np.random.Generator) -> None:
    """Each shard fails one batch in thirty and is slow now and then: retries and hedges."""

    def on_forward(_pairs: int) -> None:
        if rng.random() < 0.03:
            raise RuntimeError("no")

    for rank in range(RANKS):
        served.backend(rank).on_forward = on_forward


def padded(seed: int, rng: np.random.Generator) -> ForwardInput:
    """Three real rows in a buffer of many: what fills it names expert 5, and counts for nothing.
    Each fifth is a caller's second try."""
    valid = np.zeros((ROWS * 4, TOP_K), np.uint8)
    valid[:ROWS] = rng.random((ROWS, TOP_K)) < 0.8
    request = a_request(ROWS * 4, seed=seed, valid=valid, attempt=int(seed % 5 == 4))
    request.topk_ids[ROWS:] = 5
    phase = Phase.PREFILL if seed % 3 else Phase.DECODE
    return replace(request, phase=phase)


def count(request: ForwardInput, into: np.ndarray) -> None:
    ids = request.topk_ids[request.valid != 0]
    np.add.at(into[request.phase, request.layer], ids, 1)


async def load_of(num_routers: int, seed: int = 3) -> tuple[np.ndarray, np.ndarray, int]:
    """(demand as told, as it was, retried and hedged pairs)."""
    rng = np.random.default_rng(seed)
    served = Served(RANKS)
    troubled(served, rng)
    rules = RouterRules(hedge_after_s=0.001, hedge_share=0.3, budget_least=1000, max_attempts=9)
    asked = np.zeros((NUM_PHASES, 2, EXPERTS), np.int64)
    extra = 0
    async with serving(served, num_routers, rules=rules, demand_sub_window_s=0.01) as routers:
        controller = Controller(seed)
        for router in routers:
            controller.watch_router(router)
        for shard in served.shards:
            controller.watch_shard(shard, info_of(served, shard))
        for first in range(0, REQUESTS, 8):
            requests = [padded(n, rng) for n in range(first, first + 8)]
            sent = [routers[n % num_routers].forward(one, 10.0) for n, one in enumerate(requests)]
            for request, got in zip(requests, await asyncio.gather(*sent), strict=True):
                check(request, got)
                if request.attempt == 0:
                    count(request, asked)
            if first == 40:
                served.restart(1)
                served.backend(1).on_forward = served.backend(0).on_forward
                controller.watch_shard(served.shards[1], info_of(served, served.shards[1]))
                table = served.table()
                for router in routers:
                    router.install_table(table)
            if first == 80:
                # Drained, asked for the last time, ended: its next life counts from nothing.
                old = routers[0]
                await controller.told_all(old)
                extra += extra_pairs(old)
                await old.stop()
                routers[0] = served.router(0, rules=rules, incarnation=2)
                routers[0].install_table(served.table())
                await routers[0].start()
                controller.watch_router(routers[0])
        for router in routers:
            await controller.told_all(router)
            extra += extra_pairs(router)
        for shard in served.shards:
            await controller.told_all_executed(shard)
        window = await controller.close()
        assert sum(controller.network.lost.values()) > 20
    return window.demand.sum(axis=0), asked, extra


def extra_pairs(router: RouterCore) -> int:
    counters = router.report(-1).counters
    return int(counters["retried_pairs"] + counters["hedged_pairs"])


@pytest.mark.asyncio
@pytest.mark.parametrize("num_routers", [1, 4])
async def test_demand_as_told_is_what_was_asked_for(num_routers: int) -> None:
    told, asked, extra = await load_of(num_routers)
    assert extra > 0, "nothing was sent twice"
    assert told.tolist() == asked.tolist()


@pytest.mark.asyncio
async def test_executed_pairs_as_told_are_those_of_the_ledgers() -> None:
    served = Served(RANKS)
    async with serving(served, 2) as routers:
        controller = Controller(5)
        for shard in served.shards:
            controller.watch_shard(shard, info_of(served, shard))
        asked: dict[str, list[ForwardInput]] = {"r0": [], "r1": []}
        sent: dict[tuple[str, int], list[LedgerEntry]] = {}

        async def some(first: int) -> None:
            for n in range(first, first + 30):
                request = a_request(ROWS, seed=n)
                asked[f"r{n % 2}"].append(request)
                check(request, await routers[n % 2].forward(request, 10.0))

        def take(shard: Shard) -> None:
            for entry in shard.take_ledger():
                sent.setdefault((entry.router, entry.request_key), []).append(entry)

        await some(0)
        old = served.shards[1]
        await controller.told_all_executed(old)
        take(old)
        served.restart(1)
        controller.watch_shard(served.shards[1], info_of(served, served.shards[1]))
        table = served.table()
        for router in routers:
            router.install_table(table)
        await some(30)
        for shard in served.shards:
            await controller.told_all_executed(shard)
            take(shard)
        extra = sum(map(extra_pairs, routers))  # a slow machine hedges
        window = await controller.close()
    counted = np.zeros((NUM_PHASES, 2, EXPERTS), np.int64)
    for router, requests in asked.items():
        keys = sorted(key for name, key in sent if name == router)
        for key, request in zip(keys, requests, strict=True):  # keys grow from request to request
            for entry in sent[router, key]:
                ids = request.topk_ids[entry.row_id, entry.pair_k]
                np.add.at(counted, (Phase.DECODE, entry.layer, ids), 1)
    assert 60 * ROWS * TOP_K <= counted.sum() <= 60 * ROWS * TOP_K + extra
    assert window.executed_pairs.tolist() == counted.tolist()
    assert window.rank_pairs.sum(axis=0)[LAYER] == counted.sum()
