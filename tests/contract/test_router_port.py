"""What every RouterPort does: the controllers' fake, and the real one over an actor's methods in
this process. Ray's own part, carrying the calls, is played by `InProcess`."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
import pytest_asyncio
from msgspec.structs import replace
from ray.exceptions import RayActorError, RayTaskError

from moe_serve.errors import InvalidArgument, StaleTerm, StartRefused, Unavailable
from moe_serve.ports import NodeInfo, RouterPort, RouterReport
from moe_serve.router.actor import RouterActor, RouterRemote
from moe_serve.rpc import codec, dispatch_pb2, dispatch_pb2_grpc
from placement.routing import RoutingTable
from tests.fake_shards import HIDDEN, FakeWorld, marker_spec, router_settings
from tests.fakes.fleet import FakeCluster, FakeRouterPort

NOTHING_ACKED = -1
KEY = 1 * 6 + 2
"""(phase 0, layer 1, expert 2) of a model of 2 x 6 experts."""
PAIRS = 4
PREFILL = int(dispatch_pb2.FORWARD_PHASE_PREFILL)


class InProcess:
    """An actor handle whose actor lives here: `handle.method.remote(...)` runs the method. After
    `die` every call ends as Ray ends it."""

    def __init__(self, actor: object) -> None:
        self._actor = actor
        self.dead = False

    def die(self) -> None:
        self.dead = True

    def __getattr__(self, name: str) -> "InProcess.Method":
        return InProcess.Method(self, getattr(self._actor, name))

    class Method:
        def __init__(self, handle: "InProcess", call: Any) -> None:
            self._handle, self._call = handle, call

        async def remote(self, *arguments: Any) -> Any:
            if self._handle.dead:
                raise RayActorError
            try:
                return await self._call(*arguments)
            except Exception as error:
                # What an actor raises arrives as Ray's error and not as itself.
                raise RayTaskError(self._call.__name__, "", error) from error


class Rig:
    """One router life and the ways a test has to act on it."""

    port: RouterPort
    router = "r0"
    incarnation = 1

    async def serve(self) -> None:
        """PAIRS pairs of demand for KEY are counted."""
        raise NotImplementedError

    async def report(self, acked: int) -> RouterReport:
        return await self.port.report(acked)

    def die(self) -> None:
        raise NotImplementedError


class FakeRig(Rig):
    def __init__(self) -> None:
        spec = marker_spec()
        nodes = [NodeInfo("node0", True, {})]
        self.cluster = FakeCluster(spec, "p", [12], nodes)
        self.fake = FakeRouterPort(self.cluster, "name", self.router, self.incarnation)
        self.port = self.fake

    async def serve(self) -> None:
        self.cluster.demand = {KEY: PAIRS}

    async def report(self, acked: int) -> RouterReport:
        found = await self.port.report(acked)
        self.cluster.demand = {}
        return found

    def die(self) -> None:
        self.fake.alive = False


class RealRig(Rig):
    def __init__(self) -> None:
        actor = RouterActor(router_settings(marker_spec()))
        self.handle = InProcess(actor)
        self.remote = RouterRemote(self.handle)
        self.port = self.remote

    async def serve(self) -> None:
        # Nobody listens where the table points: demand is counted before dispatch all the same.
        made = codec.ForwardArrays(
            model="marker",
            layer=1,
            phase=PREFILL,
            data_type=codec.FP32,
            hidden=np.ones((PAIRS, HIDDEN), np.float32),
            topk_ids=np.full((PAIRS, 1), 2, np.int32),
            topk_weights=np.ones((PAIRS, 1), np.float32),
        )
        address = (await self.port.describe()).grpc_address
        async with grpc.aio.insecure_channel(address) as channel:
            stub = dispatch_pb2_grpc.DispatchServiceStub(channel)
            with suppress(grpc.aio.AioRpcError):
                await stub.Forward(codec.forward_request(made), timeout=0.3)

    def die(self) -> None:
        self.handle.die()


@pytest_asyncio.fixture(params=["fake", "real"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    if request.param == "fake":
        yield FakeRig()
        return
    made = RealRig()
    await made.remote.start()
    yield made
    made.handle.dead = False
    await made.remote.stop(0.0)


def a_table(epoch: int, term: int = 1) -> RoutingTable:
    world = FakeWorld(marker_spec())
    world.place()
    table = world.table(term=term)
    # Ports that nobody listens on.
    ranks = tuple(replace(r, address="tcp://127.0.0.1:1") for r in table.ranks)
    return replace(table, epoch=epoch, ranks=ranks)


@pytest.mark.asyncio
async def test_a_new_router_says_who_it_is_and_that_it_has_no_table(rig: Rig) -> None:
    info = await rig.port.describe()
    assert (info.router, info.incarnation) == (rig.router, rig.incarnation)
    assert (info.highest_term, info.highest_epoch) == (0, 0)
    host, _, port = info.grpc_address.rpartition(":")
    assert host == "127.0.0.1"
    assert int(port) > 0
    assert info.pid > 0
    report = await rig.report(NOTHING_ACKED)
    assert (report.applied_epoch, report.quiesced_epoch, report.reports) == (0, 0, ())


@pytest.mark.asyncio
async def test_a_newer_table_is_applied_and_acknowledged(rig: Rig) -> None:
    for epoch in (3, 7):
        assert await rig.port.install_table(a_table(epoch), ["a:1", "b:2"]) == epoch
        info = await rig.port.describe()
        assert (info.highest_term, info.highest_epoch) == (1, epoch)
        report = await rig.report(NOTHING_ACKED)
        # Nothing is in flight, so nothing older is under way either.
        assert (report.applied_epoch, report.quiesced_epoch) == (epoch, epoch)
        assert (report.router, report.incarnation) == (rig.router, rig.incarnation)


@pytest.mark.asyncio
async def test_an_older_or_equal_epoch_changes_nothing_and_is_no_error(rig: Rig) -> None:
    await rig.port.install_table(a_table(7), [])
    for epoch in (6, 7):
        assert await rig.port.install_table(a_table(epoch), []) == 7
    assert (await rig.report(NOTHING_ACKED)).applied_epoch == 7


@pytest.mark.asyncio
async def test_suspects_are_told_with_a_table_new_or_known(rig: Rig) -> None:
    assert await rig.port.install_table(a_table(3), [], (0,)) == 3
    assert await rig.port.install_table(a_table(3), [], (0, 99)) == 3
    assert await rig.port.install_table(a_table(3), []) == 3
    # What the controller suspects is no news to it.
    assert (await rig.report(NOTHING_ACKED)).suspects == ()


@pytest.mark.asyncio
async def test_a_lower_term_is_refused_with_the_higher_one(rig: Rig) -> None:
    await rig.port.install_table(a_table(3, term=1), [])
    await rig.port.install_table(a_table(4, term=5), [])
    with pytest.raises(StaleTerm) as refused:
        await rig.port.install_table(a_table(9, term=4), [])
    assert refused.value.term == 5
    info = await rig.port.describe()
    assert (info.highest_term, info.highest_epoch) == (5, 4)


@pytest.mark.asyncio
async def test_demand_is_told_again_until_it_is_acknowledged(rig: Rig) -> None:
    await rig.port.install_table(a_table(1), [])
    await rig.serve()
    (first,) = (await rig.report(NOTHING_ACKED)).reports
    assert (first.source, first.incarnation) == (rig.router, rig.incarnation)
    assert (first.key.tolist(), first.pairs.tolist()) == ([KEY], [PAIRS])
    (again,) = (await rig.report(NOTHING_ACKED)).reports
    assert (again.seq, again.pairs.tolist()) == (first.seq, [PAIRS])
    assert (await rig.report(first.seq)).reports == ()
    await rig.serve()
    (second,) = (await rig.report(first.seq)).reports
    assert second.seq == first.seq + 1
    assert second.pairs.tolist() == [PAIRS]


@pytest.mark.asyncio
async def test_a_router_that_is_gone_is_unavailable(rig: Rig) -> None:
    rig.die()
    calls: list[Callable[[], Awaitable[object]]] = [
        rig.port.describe,
        lambda: rig.port.install_table(a_table(1), []),
        lambda: rig.port.report(NOTHING_ACKED),
        lambda: rig.port.stop(0.0),
    ]
    for call in calls:
        with pytest.raises(Unavailable, match="gone"):
            await call()


# ------------------------------------------------------------------------- the real one alone


@pytest_asyncio.fixture
async def real() -> AsyncIterator[RealRig]:
    made = RealRig()
    await made.remote.start()
    yield made
    await made.remote.stop(0.0)


@pytest.mark.asyncio
async def test_a_table_of_another_shape_is_refused(real: RealRig) -> None:
    with pytest.raises(InvalidArgument, match="this router serves 2 x 6"):
        await real.port.install_table(replace(a_table(1), num_layers=1, num_experts=12), [])
    assert (await real.port.describe()).highest_epoch == 0


@pytest.mark.asyncio
async def test_started_twice_at_once_it_is_one_router() -> None:
    fresh = RealRig()
    infos = await asyncio.gather(*(fresh.remote.start() for _ in range(3)))
    assert len(set(infos)) == 1
    assert await fresh.remote.start() == await fresh.port.describe() == infos[0]
    await fresh.remote.stop(0.0)


@pytest.mark.asyncio
async def test_what_will_not_start_says_why_as_a_typed_error(real: RealRig) -> None:
    port = int((await real.port.describe()).grpc_address.rpartition(":")[2])
    twin = RouterRemote(InProcess(RouterActor(router_settings(marker_spec(), port=port))))
    with pytest.raises(StartRefused, match=str(port)):
        await twin.start()


@pytest.mark.asyncio
async def test_a_router_that_is_stopped_says_so_to_health_and_serves_no_more(
    real: RealRig,
) -> None:
    address = (await real.port.describe()).grpc_address
    await real.port.stop(0.2)
    assert (await real.port.describe()).grpc_address == address, "its part still answers"
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = dispatch_pb2_grpc.DispatchServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetModelSpec(dispatch_pb2.GetModelSpecRequest(), timeout=5.0)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.asyncio
async def test_a_next_life_listens_where_the_last_one_did_or_anywhere(real: RealRig) -> None:
    port = int((await real.port.describe()).grpc_address.rpartition(":")[2])
    settings = router_settings(marker_spec())
    beside = RouterRemote(InProcess(RouterActor(settings, last_port=port)))
    other = await beside.start()
    assert other.grpc_address != f"127.0.0.1:{port}", "it is taken: any other will do"
    await real.remote.stop(0.0)
    again = RouterRemote(InProcess(RouterActor(settings, last_port=port)))
    assert (await again.start()).grpc_address == f"127.0.0.1:{port}"
    for one in (beside, again):
        await one.stop(0.0)


@pytest.mark.asyncio
async def test_a_ledger_that_is_off_is_empty(real: RealRig) -> None:
    page = await real.remote.take_ledger(10)
    assert (page.router, page.entries, page.forgotten) == ("r0", (), 0)
