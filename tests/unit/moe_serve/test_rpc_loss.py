"""Calls that are lost, whose answer is lost, or that are repeated while they still run, on every
method of every port: things end as they do where nothing is lost, and nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moe_serve.controller.names import parse
from moe_serve.controller.settings import ControllerSettings
from moe_serve.ports import Fleet, RouterPort, ShardPort
from placement.messages.events import AnyEvent, BudgetAsked, DrainAsked, PauseAsked
from tests.fakes.controller import Rig, controller, make_cluster, make_settings, shards
from tests.fakes.controller import until as until_within
from tests.fakes.fleet import FakeCluster, FakeFleet
from tests.fakes.lossy import Loss, LossyFleet, Network, at_random, calls_of, every_other

pytestmark = pytest.mark.timeout(200)

PORTS = (ShardPort, RouterPort, Fleet)
TIMES = 3
"""How often each method is hit by each loss."""
METHODS = tuple(name for port in PORTS for name in calls_of(port))
ROUNDS_MAX = 12
SLOT_BYTES = 1000
LAST_SLOTS = [6, 1, 1]
"""One slot of a rank stays free for staging: all experts end up on rank 0."""


@dataclass(frozen=True)
class End:
    """What there is at the end, without numbers that count lives."""

    places: tuple[tuple[str, str], ...]
    """Kind and place of every living part."""
    slots: tuple[int, ...]
    held: tuple[tuple[int, int, int], ...]
    """(rank, layer, expert) of everything resident."""
    reserved_bytes: int
    listed: tuple[tuple[int, ...], ...]
    draining: tuple[int, ...]
    paused: bool
    journalled: int
    """Living parts that the journal names, less the living ones."""


def end_of(rig: Rig, cluster: FakeCluster) -> End:
    parts = sorted((p.kind, p.place) for n in cluster.living() if (p := parse("tiny", n)))
    ledgers = [shard.slots.ledger for shard in shards(cluster)]
    held = [(rank, r.layer, r.expert) for rank, own in enumerate(ledgers) for r in own.resident()]
    return End(
        places=tuple((str(kind), place) for kind, place in parts),
        slots=tuple(own.num_slots for own in ledgers),
        held=tuple(sorted(held)),
        reserved_bytes=sum(own.reserved_bytes for own in ledgers),
        listed=tuple(tuple(sorted(rig.listed(expert))) for expert in range(4)),
        draining=tuple(r.rank for r in rig.state.ranks if r.draining),
        paused=rig.state.paused,
        journalled=len(rig.service.life.parts.names) - len(cluster.living()),
    )


async def ask(rig: Rig, make: Callable[[int], AnyEvent]) -> None:
    """An operator's request, asked again while the controller is busy with the last."""
    for _ in range(800):
        if (await rig.service.life.driver.ask(make)).code == "ok":
            return
        await asyncio.sleep(0.01)
    raise AssertionError("refused for ever")


async def until(condition: Callable[[], bool]) -> None:
    """Losses upon losses take their time; what never comes is a failure all the same."""
    await until_within(condition, wait_s=60.0)


async def set_budget(rig: Rig, rank: int, slots: int) -> None:
    await ask(
        rig,
        lambda n: BudgetAsked(at_s=0.0, request_id=n, rank=rank, budget_bytes=slots * SLOT_BYTES),
    )


def slots_of(cluster: FakeCluster, rank: int) -> int:
    shard = cluster.shard(rank)
    return 0 if shard is None else shard.slots.ledger.num_slots


async def rest(rig: Rig) -> None:
    await until(lambda: bool(rig.service.describe()["ready"]))
    await until(lambda: rig.state.run is None and not rig.state.parked)


async def a_round(settings: ControllerSettings, cluster: FakeCluster, fleet: Fleet) -> None:
    """A controller takes over from the last: parts that the journal does not know are ended, one
    rank is emptied and filled again, a shard and a router die and are made anew."""
    direct = FakeFleet(cluster)
    number = len(cluster.created)
    await direct.create_router(f"tiny:router:router-7:{number + 1}", "router-7", number + 1)
    async with controller(settings, cluster, fleet=fleet) as rig:
        await rest(rig)
        await ask(rig, lambda n: DrainAsked(at_s=0.0, request_id=n, rank=2))
        await until(lambda: all(2 not in rig.listed(expert) for expert in range(4)))
        await rig.service.life.supervision.undrain(2)
        slots = 9 - slots_of(cluster, 0)
        await set_budget(rig, 0, slots)
        await until(lambda: slots_of(cluster, 0) == slots)
        await rest(rig)
        for part in (cluster.shard(1), cluster.router()):
            assert part is not None
            cluster.die(part.name)
        await until(lambda: cluster.shard(1) is not None and cluster.router() is not None)
        await rest(rig)


async def the_end(settings: ControllerSettings, cluster: FakeCluster, fleet: Fleet) -> End:
    """Budgets leave all experts no place but rank 0."""
    async with controller(settings, cluster, fleet=fleet) as rig:
        await rest(rig)
        await ask(rig, lambda n: PauseAsked(at_s=0.0, request_id=n, reason="tidy up"))
        for rank, slots in enumerate(LAST_SLOTS):
            await set_budget(rig, rank, slots)
        await rest(rig)
        if isinstance(fleet, LossyFleet):
            await fleet.network.settle()
        want = [{0}] * 4
        await until(lambda: [rig.listed(expert) for expert in range(4)] == want)
        await until(lambda: [slots_of(cluster, rank) for rank in range(3)] == LAST_SLOTS)
        await until(lambda: sum(len(s.slots.ledger.resident()) for s in shards(cluster)) == 4)
        return end_of(rig, cluster)


async def run_until(
    folder: Path, network: Network | None, enough: Callable[[], bool]
) -> tuple[End, FakeCluster]:
    """Rounds until `enough`, then the end."""
    cluster = make_cluster()
    cluster.copy_s = 0.02
    settings = make_settings(folder, restarts_max=1000)
    hasty = msgspec.structs.replace(settings.config, retry_s=0.1)
    settings = replace(settings, config=hasty)
    fleet: Any = FakeFleet(cluster)
    if network is not None:
        fleet = LossyFleet(fleet, network)
        cluster.tables_come_late = True
    async with controller(settings, cluster, fleet=fleet) as rig:
        await rest(rig)
    for _ in range(ROUNDS_MAX):
        await a_round(settings, cluster, fleet)
        if enough():
            break
    return await the_end(settings, cluster, fleet), cluster


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> End:
    """How it ends where nothing is lost."""
    end, _ = asyncio.run(run_until(tmp_path_factory.mktemp("calm"), None, lambda: True))
    assert end.held == tuple((0, 0, expert) for expert in range(4))
    assert end.places == (("router", "router-0"), *(("shard", str(r)) for r in range(3)))
    return end


@pytest.mark.asyncio
@pytest.mark.parametrize("loss", list(Loss))
async def test_every_method_may_lose_calls_and_all_ends_as_without(
    tmp_path: Path, calm: End, loss: Loss
) -> None:
    network = Network(every_other(loss, TIMES))

    def enough() -> bool:
        return all(network.lost[method, loss] >= TIMES for method in METHODS)

    end, cluster = await run_until(tmp_path, network, enough)
    assert enough(), {m: network.lost[m, loss] for m in METHODS}
    assert end == calm
    assert not cluster.faults


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 12))]
)
async def test_a_quarter_of_all_calls_lost_at_random_ends_as_without(
    tmp_path: Path, calm: End, seed: int
) -> None:
    network = Network(at_random(seed))
    rounds = iter((False, True))
    end, cluster = await run_until(tmp_path, network, lambda: next(rounds))
    assert sum(network.lost.values()) > 100
    assert end == calm
    assert not cluster.faults
