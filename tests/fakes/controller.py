"""A controller over a fleet in memory: no Ray, no sockets, a journal in a temporary folder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from moe_serve.controller.parts import AnyPart
from moe_serve.controller.service import ControllerService
from moe_serve.controller.settings import (
    ControllerSettings,
    ExpectedRank,
    SupervisionLimits,
)
from moe_serve.errors import MoeServeError, Unavailable
from moe_serve.ports import Fleet, NodeInfo
from placement.config import RebalanceConfig
from tests.builders import PROFILE, make_spec
from tests.fakes.fleet import FakeCluster, FakeFleet, FakeShardPort

SLOTS = [4, 4, 4]
WAIT_S = 8.0


class NoHost:
    """A host of `Polls`. Nothing follows from what is found out."""

    def farewell(self, _part: AnyPart) -> None: ...

    def suspects_changed(self) -> None: ...


class Crash(BaseException):
    """What a fail point does in these tests."""


def crash() -> None:
    raise Crash


def make_settings(folder: Path, **fields: object) -> ControllerSettings:
    spec = make_spec()
    config = RebalanceConfig(
        window_s=0.1,
        windows_kept=2,
        sub_windows=2,
        cooldown_s=0.0,
        drain_wait_s=0.4,
        budget_drain_wait_s=0.2,
        router_silence_s=0.3,
        rank_silence_s=0.3,
        first_policy="incremental",  # leaves room for the moves these tests wait for
        floor=1,  # likewise
    )
    ranks = tuple(
        ExpectedRank(rank=r, profile=PROFILE.name, num_slots=n, budget_bytes=n * spec.slot_bytes)
        for r, n in enumerate(SLOTS)
    )
    settings = ControllerSettings(
        service_id="tiny",
        spec=spec,
        config=config,
        ranks=ranks,
        profiles=(PROFILE,),
        state_dir=folder,
        supervision=SupervisionLimits(
            report_s=0.01,
            probe_s=0.03,
            call_timeout_s=0.1,
            nodes_s=0.03,
            create_attempt_pause_s=0.02,
        ),
    )
    return replace(settings, **fields)  # type: ignore[arg-type]


def make_cluster() -> FakeCluster:
    return FakeCluster(
        spec=make_spec(),
        profile=PROFILE.name,
        num_slots=list(SLOTS),
        nodes=[NodeInfo(f"node{n}", True, {}) for n in range(3)],
    )


@dataclass
class Rig:
    """One controller and what it meets."""

    service: ControllerService
    cluster: FakeCluster

    @property
    def state(self):  # type: ignore[no-untyped-def]
        return self.service.life.driver.engine.state

    def listed(self, expert: int) -> set[int]:
        table = self.service.life.publisher.newest
        return set() if table is None else {r for r, _, _ in table.replicas(0, expert)}

    async def ready(self) -> None:
        await until(lambda: bool(self.service.describe()["ready"]))


@asynccontextmanager
async def controller(
    settings: ControllerSettings,
    cluster: FakeCluster,
    owner: str = "here",
    fleet: Fleet | None = None,
) -> AsyncIterator[Rig]:
    """`fleet`: its way to the cluster, where that is not the direct one."""
    fatal: list[BaseException] = []
    service = ControllerService(
        settings,
        fleet or FakeFleet(cluster),
        owner=owner,
        serve_admin=False,
        crash=crash,
        on_fatal=fatal.append,
    )
    while True:
        try:
            await service.start()
        except Unavailable:  # the cluster gave no answer: production tries again, too
            assert fleet is not None
            continue
        break
    try:
        yield Rig(service, cluster)
    finally:
        await service.stop()
    assert not [e for e in fatal if not isinstance(e, Crash)], fatal
    assert not cluster.faults, cluster.faults


async def until(condition: Callable[[], bool], wait_s: float = WAIT_S) -> None:
    ends_s = asyncio.get_running_loop().time() + wait_s
    while True:
        try:
            if condition():
                return
        except MoeServeError:
            pass  # between two lives
        assert asyncio.get_running_loop().time() < ends_s, "what was waited for did not come"
        await asyncio.sleep(0.005)


async def crashed(rig: Rig) -> None:
    """Wait until a fail point ended the controller."""
    keeper = rig.service._keeper
    assert keeper is not None
    async with asyncio.timeout(WAIT_S):
        await asyncio.wait({keeper})


def shards(cluster: FakeCluster) -> list[FakeShardPort]:
    return [s for s in map(cluster.shard, range(3)) if s is not None]


def leaving(rig: Rig) -> set[int]:
    """Experts of removals under way."""
    return {rig.state.run.steps[i].step.expert for i in rig.state.removing}
