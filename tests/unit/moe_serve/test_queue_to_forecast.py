"""What waits in a router's queue reaches the engine's forecast of the next window: router, report,
controller's folder, closed window, forecasters, scenarios of the planner."""

import asyncio
import pickle
from contextlib import suppress

import numpy as np
import pytest

from moe_serve.controller.names import PartKind, PartName
from moe_serve.controller.parts import PartTable, router_part
from moe_serve.controller.polls import Polls
from moe_serve.controller.settings import SupervisionLimits
from moe_serve.controller.stages import StageFolder
from moe_serve.ports import DType, RouterReport
from moe_serve.router.checks import ForwardInput
from moe_serve.router.dispatch import RouterCore
from placement.config import RebalanceConfig
from placement.engine.outlook import scenarios_of
from placement.forecast import FORECASTERS, choose
from placement.load import LoadFolder
from placement.messages import events as ev
from placement.topology import Phase
from tests.builders import make_topology
from tests.engine_driver import EngineDriver
from tests.fake_shards import HIDDEN, FakeWorld, marker_spec, router_settings, until
from tests.fakes.controller import NoHost

SPEC = marker_spec(num_layers=1)
RANKS = 3
ROWS = 50
FIRST, SECOND = (30, 20), (20, 30)
"""Rows that want experts 0-2, and rows that want 3-5: what requests of even and of odd windows
ask for. Too alike to count as a shift, too unlike for a mean to serve both."""


def a_request(rows: tuple[int, int]) -> ForwardInput:
    ids = np.repeat(np.arange(6, dtype=np.int32).reshape(2, 3), rows, axis=0)
    return ForwardInput(
        layer=0,
        phase=Phase.PREFILL,
        dtype=DType.FLOAT32,
        hidden=np.ones((len(ids), HIDDEN), np.float32),
        topk_ids=ids,
        gates=np.ones(ids.shape, np.float32),
        valid=np.ones(ids.shape, np.uint8),
        request_id="",
        attempt=0,
    )


class Port:
    """The controller's way to the router. What it says goes through its bytes, as over the wire."""

    def __init__(self, core: RouterCore, made: list[RouterReport]) -> None:
        self._core = core
        self._made = made

    async def report(self, acked_seq: int) -> RouterReport:
        report: RouterReport = pickle.loads(pickle.dumps(self._core.report(acked_seq)))  # noqa: S301  # our own bytes
        self._made.append(report)
        return report


class Clock:
    """Driver time that the test moves."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def now_s(self) -> float:
        return self.at_s


class Service:
    """A router whose one permit is taken, a controller's loop that asks it, and the engine."""

    def __init__(self) -> None:
        self.world = FakeWorld(SPEC, RANKS)
        self.world.place()
        self.core = RouterCore(router_settings(SPEC, max_open_requests=1), self.world.open_channel)
        self.core.install_table(self.world.table())
        self.engine = EngineDriver(
            SPEC,
            make_topology([6] * RANKS, ranks_per_node=1),
            RebalanceConfig(cooldown_s=0.0),
            routers=["r0"],
        )
        self.clock = Clock()
        config = self.engine.config
        self.folder = LoadFolder(
            num_layers=SPEC.num_layers,
            num_experts=SPEC.num_experts,
            num_ranks=RANKS,
            window_s=config.window_s,
            sub_windows=config.sub_windows,
            start_s=0.0,
        )
        self.made: list[RouterReport] = []
        self.parts = PartTable()
        self.part = router_part(
            PartName("tiny", PartKind.ROUTER, "r0", 1),
            Port(self.core, self.made),  # type: ignore[arg-type]
            self.core.describe(grpc_address="", pid=1),
            0.0,
        )
        self.parts.add(self.part)
        self.polls = Polls(
            None,  # type: ignore[arg-type]  # nobody is asked whether a part lives
            term=1,
            config=config,
            limits=SupervisionLimits(report_s=0.001),
            clock=self.clock,  # type: ignore[arg-type]
            parts=self.parts,
            folder=self.folder,
            stages=StageFolder(),
            host=NoHost(),
            post=self._post,
            fenced=lambda _error: None,
        )
        self.waiting: asyncio.Task[object] | None = None
        self.gate = asyncio.Event()

    async def _post(self, event: ev.AnyEvent) -> None:
        self.engine.feed(event)

    async def window(self, following: tuple[int, int]) -> RouterReport:
        """Serve what waited, let what follows wait, ask the router, close the window. Its last
        report."""
        self.gate.set()
        if self.waiting is not None:
            await self.waiting
        self.gate = asyncio.Event()
        for shard in self.world.shards:
            shard.hold = self.gate
        blocker = asyncio.create_task(self.core.forward(a_request((1, 1)), 60.0))
        await until(lambda: self.core.report(0).counters["open_requests"] == 1.0)
        self.waiting = asyncio.create_task(self.core.forward(a_request(following), 60.0))
        await until(lambda: self.core.report(0).counters["waiting_requests"] == 1.0)
        last = await self._asked()
        self.clock.at_s += self.engine.config.window_s
        self.engine.now_s = self.clock.at_s
        self.engine.feed(ev.WindowClosed(at_s=0.0, window=self.folder.close(self.clock.at_s)))
        self.gate.set()
        await blocker
        return last

    async def _asked(self) -> RouterReport:
        """Run the controller's loop until it has taken in a report that was made from now on."""
        del self.made[:]
        asking = asyncio.create_task(self.polls.report_router(self.part))
        # The loop does not wait: it may have taken in the next one before anybody looks.
        await until(lambda: any(self.part.report is one for one in self.made))
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        report = self.part.report
        assert report is not None
        return report

    def expected(self) -> np.ndarray:
        """Prefill pairs a second by expert that the planner's scenarios mean."""
        demand, weights = scenarios_of(self.engine.engine._turn(self.clock.at_s))
        return np.tensordot(weights, demand, axes=1)[Phase.PREFILL, 0]

    async def stop(self) -> None:
        self.gate.set()
        if self.waiting is not None:
            await self.waiting
        await self.core.stop()


@pytest.mark.asyncio
async def test_requests_that_wait_in_a_router_are_the_prefill_expected_next() -> None:
    service = Service()
    for number in range(6):
        said = await service.window((FIRST, SECOND)[number % 2])
    state = service.engine.engine.state
    closed = state.history.windows[-1]
    assert said.queued_pairs.sum() == SPEC.top_k * ROWS
    assert closed.queued[Phase.PREFILL, 0].tolist() == [20] * 3 + [30] * 3
    assert FORECASTERS[choose(state.forecast)[Phase.PREFILL, 0]] == "prefill_leads"
    came = closed.demand.sum(axis=0)[Phase.PREFILL, 0]
    assert came[0] > came[5], "the window itself had asked for the others"
    share = service.expected() / service.expected().sum()
    assert share.tolist() == pytest.approx([20 / 150] * 3 + [30 / 150] * 3, abs=0.005)
    await service.window(FIRST)
    turned = service.expected()
    assert turned[0] > turned[5], "and what waits now is expected now"
    await service.stop()


@pytest.mark.asyncio
async def test_of_a_queue_said_twice_only_the_newest_word_counts_and_not_in_the_next_window() -> (
    None
):
    service = Service()
    await service.window(FIRST)
    queued = service.engine.engine.state.history.windows[-1].queued
    assert int(queued.sum()) == SPEC.top_k * ROWS, "asked several times in the window"
    service.clock.at_s += service.engine.config.window_s
    silent = service.folder.close(service.clock.at_s)
    assert not silent.queued.any(), "nobody has said anything since: it is not known to wait"
    await service.stop()
    await service._asked()
    service.clock.at_s += service.engine.config.window_s
    assert not service.folder.close(service.clock.at_s).queued.any(), "nobody waits any more"
