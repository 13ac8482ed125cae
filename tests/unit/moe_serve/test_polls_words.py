"""What becomes of a router's word on shards, of its acknowledgements, and of a shard's silence: at
times of the test's choice, over a fleet in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from moe_serve.controller.names import PartKind, PartName
from moe_serve.controller.parts import PartTable, RouterPart, ShardPart, router_part, shard_part
from moe_serve.controller.polls import Polls
from moe_serve.controller.settings import SupervisionLimits
from moe_serve.controller.stages import StageFolder
from moe_serve.ports import NodeInfo
from placement.config import RebalanceConfig
from placement.load import LoadFolder
from placement.messages.events import AnyEvent
from tests.builders import PROFILE, make_spec
from tests.fakes.controller import NoHost
from tests.fakes.fleet import FakeCluster, FakeFleet

TERM, LIFE = 2, 7
SILENCE_S, CALL_S = 5.0, 2.0
NOW_S = 100.0


class Polled:
    """The loops' insides over one shard, of life `LIFE`, and one router."""

    def __init__(self, shard: ShardPart, router: RouterPart, fleet: FakeFleet) -> None:
        self.shard, self.router = shard, router
        self.now_s = NOW_S
        self.posted: list[AnyEvent] = []
        parts = PartTable()
        parts.add(shard)
        parts.add(router)
        clock: Any = SimpleNamespace(now_s=lambda: self.now_s)

        async def post(event: AnyEvent) -> None:
            self.posted.append(event)

        self.polls = Polls(
            fleet,
            term=TERM,
            config=RebalanceConfig(rank_silence_s=SILENCE_S, router_silence_s=SILENCE_S),
            limits=SupervisionLimits(call_timeout_s=CALL_S),
            clock=clock,
            parts=parts,
            folder=LoadFolder(
                num_layers=1, num_experts=4, num_ranks=1, window_s=1.0, sub_windows=1, start_s=0.0
            ),
            stages=StageFolder(),
            host=NoHost(),
            post=post,
            fenced=lambda _error: None,
        )

    def told(self) -> list[str]:
        """Kinds of events since it was asked last."""
        kinds = [type(event).__name__ for event in self.posted]
        self.posted.clear()
        return kinds

    async def router_says(self, **words: Any) -> list[str]:
        """What the engine is told when the router reports this."""
        report = await self.router.port.report(-1)
        fields = {"applied_epoch": 0, "quiesced_epoch": 0, "applied_term": TERM, **words}
        await self.polls._router_reported(self.router, replace(report, **fields))
        return self.told()

    async def avoids(self, lives: Sequence[int]) -> list[str]:
        """What the engine is told when the router reports that it avoids these lives of rank 0."""
        said = tuple((0, life, "connection broke") for life in lives)
        return [kind for kind in await self.router_says(suspects=said) if kind.startswith("Rank")]


async def polled() -> Polled:
    cluster = FakeCluster(make_spec(), PROFILE.name, [4], [NodeInfo("node0", True, {})])
    fleet = FakeFleet(cluster)
    name = PartName("tiny", PartKind.SHARD, "0", LIFE)
    port = await fleet.create_shard(str(name), 0, LIFE)
    shard = shard_part(name, port, await port.describe(), NOW_S)
    name = PartName("tiny", PartKind.ROUTER, "router-0", 1)
    router = await fleet.create_router(str(name), "router-0", 1)
    return Polled(shard, router_part(name, router, await router.describe(), NOW_S), fleet)


@pytest.mark.asyncio
async def test_a_router_that_avoids_an_earlier_life_says_nothing_of_the_new_one() -> None:
    rig = await polled()
    assert await rig.avoids([LIFE - 1]) == []
    assert not rig.shard.suspected
    assert await rig.avoids([LIFE - 1, LIFE]) == ["RankSuspected"]


@pytest.mark.asyncio
async def test_a_router_that_goes_on_avoiding_a_shard_says_nothing_new() -> None:
    """A probe that was answered meanwhile counts: suspicion must not come and go with reports."""
    rig = await polled()
    assert await rig.avoids([LIFE]) == ["RankSuspected"]
    await rig.polls._clear(rig.shard)
    assert rig.told() == ["RankCleared"]
    assert await rig.avoids([LIFE]) == []
    assert await rig.avoids([]) == []
    assert await rig.avoids([LIFE]) == ["RankSuspected"], "it had used it in between"


@pytest.mark.asyncio
async def test_what_a_router_applied_under_another_term_acknowledges_nothing_of_ours() -> None:
    """Its numbers may be higher than ours, of tables that are not in force any more."""
    rig = await polled()
    said = await rig.router_says(applied_term=TERM - 1, applied_epoch=9, quiesced_epoch=9)
    assert said == []
    said = await rig.router_says(applied_epoch=3, quiesced_epoch=2)
    assert said == ["TableApplied", "TableQuiesced"]
    assert (rig.router.applied, rig.router.quiesced) == (3, 2)
    assert await rig.router_says(applied_epoch=3, quiesced_epoch=2) == [], "once is enough"


@pytest.mark.asyncio
async def test_a_router_that_was_silent_joins_and_acknowledges_anew() -> None:
    """It had left the acknowledging set, and what it said before no longer counts there."""
    rig = await polled()
    await rig.router_says(applied_epoch=3, quiesced_epoch=3)
    rig.now_s += SILENCE_S + 1
    await rig.polls._router_silent(rig.router, "no report")
    await rig.polls._router_silent(rig.router, "no report")
    assert rig.told() == ["RouterLeft"]
    said = await rig.router_says(applied_epoch=3, quiesced_epoch=3)
    assert said == ["RouterJoined", "TableApplied", "TableQuiesced"]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("busy", "heard_s", "worked_s", "suspected"),
    [
        (True, CALL_S / 2, SILENCE_S / 2, False),
        (False, CALL_S / 2, SILENCE_S / 2, True),
        (True, CALL_S * 2, SILENCE_S / 2, True),
        (True, CALL_S / 2, SILENCE_S * 2, True),
    ],
    ids=["works", "idle", "silent", "stands still"],
)
async def test_a_probe_without_an_answer_is_excused_only_by_work_that_goes_on(
    busy: bool, heard_s: float, worked_s: float, suspected: bool
) -> None:
    """heard_s, worked_s: how long ago it last reported, and last had done some work."""
    rig = await polled()
    report = await rig.shard.port.report(-1)
    rig.shard.report = replace(report, busy=busy)
    rig.shard.heard_s, rig.shard.progress_s = NOW_S - heard_s, NOW_S - worked_s
    await rig.polls._no_answer(rig.shard, "no answer to a probe")
    assert rig.told() == (["RankSuspected"] if suspected else [])
