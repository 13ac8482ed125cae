"""The router's small parts: checks, demand, rounding, settings, faults, the actor's bytes."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.errors import InvalidArgument, StaleTerm, StartRefused, Unavailable
from moe_serve.ports import DType, RouterReport
from moe_serve.router.actor import RouterActor, RouterRemote
from moe_serve.router.checks import ForwardInput, check_forward
from moe_serve.router.combine import gather_rows, round_to
from moe_serve.router.demand import QUEUED_PAIRS_MAX, REPORTS_KEPT_MAX, DemandLog
from moe_serve.router.dispatch import RouterCore
from moe_serve.router.ledger import CombinedLedger, LedgerPage, RequestEntry
from moe_serve.router.service import RouterServer
from moe_serve.rpc import codec, dispatch_pb2
from placement.messages.codec import decode_as, encode
from placement.topology import Phase
from tests.fake_shards import HIDDEN, FakeWorld, marker_spec, router_settings

LIMIT = 1_000_000


def a_request(rows: int = 2, k: int = 2) -> dispatch_pb2.ForwardRequest:
    return codec.forward_request(
        codec.ForwardArrays(
            model="",
            layer=0,
            phase=int(dispatch_pb2.FORWARD_PHASE_PREFILL),
            data_type=codec.FP32,
            hidden=np.zeros((rows, HIDDEN), np.float32),
            topk_ids=np.tile(np.arange(k, dtype=np.int32), (rows, 1)),
            topk_weights=np.ones((rows, k), np.float32),
        )
    )


def test_a_sound_request_passes_and_shares_no_memory_it_could_change() -> None:
    checked = check_forward(a_request(), marker_spec(), LIMIT)
    assert (checked.layer, int(checked.phase), checked.dtype) == (0, 0, DType.FLOAT32)
    assert checked.valid.tolist() == [[1, 1], [1, 1]]
    assert not checked.hidden.flags.writeable


@given(data=st.data())
def test_ids_are_accepted_exactly_when_in_range_and_distinct(data: st.DataObject) -> None:
    ids = np.array(
        data.draw(st.lists(st.lists(st.integers(-2, 7), min_size=3, max_size=3), max_size=4)),
        np.int32,
    ).reshape(-1, 3)
    valid = np.array(
        data.draw(st.lists(st.booleans(), min_size=ids.size, max_size=ids.size)), np.bool_
    ).reshape(ids.shape)
    request = a_request(ids.shape[0], 3)
    request.topk_ids.CopyFrom(codec.tensor(ids, codec.INT32))
    request.pair_valid = codec.pack_bits(valid)
    rows = [row[mask] for row, mask in zip(ids, valid, strict=True)]
    sound = all(((r >= 0) & (r < 6)).all() and len(set(r.tolist())) == len(r) for r in rows)
    if sound:
        checked = check_forward(request, marker_spec(), LIMIT)
        np.testing.assert_array_equal(checked.valid, valid)
    else:
        with pytest.raises(InvalidArgument):
            check_forward(request, marker_spec(), LIMIT)


def test_nothing_is_allocated_for_a_shape_that_lies() -> None:
    request = a_request()
    request.hidden_states.shape[:] = [2**45, HIDDEN]
    request.row_valid = b"\xff" * 100
    with pytest.raises(InvalidArgument, match="needs"):
        check_forward(request, marker_spec(), LIMIT)


# ------------------------------------------------------------------------------- demand


def a_log() -> DemandLog:
    return DemandLog("r0", 3, num_phases=2, num_layers=2, num_experts=3, sub_window_s=1.0)


def test_demand_is_kept_until_acknowledged_and_split_at_sub_windows() -> None:
    log = a_log()
    log.count(0, 1, np.array([1, 0, 2]), 10.0)
    log.count(1, 0, np.array([0, 5, 0]), 10.9)
    log.count(1, 0, np.array([0, 1, 0]), 11.0)
    reports = log.reports(0, 11.5)
    assert [(r.seq, r.key.tolist(), r.pairs.tolist()) for r in reports] == [
        (1, [3, 5, 7], [1, 2, 5]),
        (2, [7], [1]),
    ]
    assert [r.calls for r in reports] == [(1, 1), (0, 1)]
    assert log.reports(0, 12.0) == reports
    assert log.reports(1, 12.0) == reports[1:]
    assert log.reports(2, 12.0) == ()
    assert log.total_pairs == 9


def test_demand_that_nobody_fetches_is_bounded_and_whole() -> None:
    log = a_log()
    for second in range(1000):
        log.count(0, 0, np.array([1, 0, 0]), float(second))
    reports = log.reports(0, 1000.0)
    assert len(reports) == REPORTS_KEPT_MAX
    total = sum(int(r.pairs.sum()) for r in reports)
    total += sum(int(r.pairs.sum()) for r in log.reports(reports[-1].seq, 1001.0))
    assert total == 1000


def waiting(rows: int, *, attempt: int = 0) -> ForwardInput:
    return ForwardInput(
        layer=1,
        phase=Phase.DECODE,
        dtype=DType.FLOAT32,
        hidden=np.zeros((rows, 0), np.float32),
        topk_ids=np.full((rows, 1), 2, np.int32),
        gates=np.ones((rows, 1), np.float32),
        valid=np.ones((rows, 1), np.uint8),
        request_id="",
        attempt=attempt,
    )


def test_what_waits_is_told_as_long_as_it_waits_up_to_a_bound() -> None:
    log = a_log()
    assert [a.tolist() for a in log.queued()] == [[], []]
    with log.waits(waiting(3)), log.waits(waiting(4, attempt=1)):
        with log.waits(waiting(QUEUED_PAIRS_MAX)), log.waits(waiting(5)):
            assert [a.tolist() for a in log.queued()] == [[11], [3]]
        with log.waits(waiting(5)):
            assert [a.tolist() for a in log.queued()] == [[11], [8]]
    assert log.queued()[0].dtype == np.int32
    assert log.queued()[1].tolist() == []


# ------------------------------------------------------------------------------- arithmetic


def test_bfloat16_rounds_like_the_reference() -> None:
    rng = np.random.default_rng(1)
    words = rng.integers(0, 2**32, (50, 200), dtype=np.uint32)
    special = [0.0, -0.0, np.inf, -np.inf, 3.4e38, 1.0039062, 1.0117188, 1e-40]
    values = np.concatenate([words.reshape(-1).view(np.float32), np.float32(special)])[None]
    got = round_to(values, DType.BFLOAT16)
    with np.errstate(all="ignore"):
        want = values.astype(ml_dtypes.bfloat16)
    back = got.view(ml_dtypes.bfloat16)
    nan = np.isnan(values)
    assert np.isnan(back[nan].astype(np.float32)).all()
    np.testing.assert_array_equal(got[~nan], want.view(np.uint16)[~nan])


@pytest.mark.parametrize("dtype", list(DType))
def test_gathered_rows_are_the_same_bits(dtype: DType) -> None:
    bits = np.random.default_rng(2).integers(0, 256, (6, 8 * dtype.itemsize), dtype=np.uint8)
    rows = bits.view(dtype.numpy)
    picked = np.array([5, 0, 0], np.int32)
    got = gather_rows(rows, picked)
    assert got.dtype == dtype.numpy
    assert got.tobytes() == rows[picked].tobytes()


# ------------------------------------------------------------------------------- settings, ledger


def test_an_open_port_needs_tokens_and_tls_or_an_explicit_word(tmp_path: object) -> None:
    settings = router_settings(marker_spec())
    with pytest.raises(StartRefused, match="a token file and TLS files"):
        replace(settings, host="10.0.0.5")
    with pytest.raises(StartRefused, match="both"):
        replace(settings, tls_key=tmp_path)
    assert not replace(settings, host="10.0.0.5", accept_insecure=True).loopback


def test_a_ledger_page_crosses_as_bytes() -> None:
    ledger = CombinedLedger("r0", 1, 4)
    ledger.add([RequestEntry(1, 0, 2, 2, b"\x0f")])
    page = ledger.take(10)
    assert decode_as(encode(page), LedgerPage) == page
    assert ledger.take(10).entries == ()


# ------------------------------------------------------------------------------- the actor's bytes


class Method:
    """`handle.method` of an actor handle: `.remote(...)` gives an awaitable."""

    def __init__(self, method: object) -> None:
        self.remote = method


class Handle:
    """An actor handle to an object in this process."""

    def __init__(self, actor: object) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Method:
        return Method(getattr(self._actor, name))


class HandMadeActor(RouterActor):
    """A RouterActor whose core has fake channels and whose port is not bound."""

    def __init__(self, world: FakeWorld) -> None:
        settings = router_settings(world.spec)
        super().__init__(settings)
        self._core = RouterCore(settings, world.open_channel)
        self._server = object.__new__(RouterServer)
        self._server.address = "127.0.0.1:1"


@pytest.mark.asyncio
async def test_the_port_of_a_router_works_over_bytes() -> None:
    world = FakeWorld(marker_spec())
    world.place()
    actor = HandMadeActor(world)
    port = RouterRemote(Handle(actor))
    info = await port.start()
    assert (info.router, info.grpc_address, info.highest_epoch) == ("r0", "127.0.0.1:1", 0)
    old, new = world.table(term=1), world.table(term=3)
    assert await port.install_table(new, ("127.0.0.1:1",)) == new.epoch
    with pytest.raises(StaleTerm) as refused:
        await port.install_table(old, ())
    assert refused.value.term == 3
    other = FakeWorld(marker_spec(num_layers=1))
    other.place()
    other.epoch = 9
    with pytest.raises(InvalidArgument):
        await port.install_table(other.table(term=3), ())
    report = await port.report(0)
    assert isinstance(report, RouterReport)
    assert (report.applied_epoch, report.quiesced_epoch) == (new.epoch, new.epoch)
    assert (await port.describe()).highest_term == 3
    assert (await port.take_ledger(5)).entries == ()


@pytest.mark.asyncio
async def test_a_dead_actor_is_unavailable() -> None:
    import ray.exceptions

    class Dead:
        async def describe(self) -> bytes:
            raise ray.exceptions.RayActorError

    with pytest.raises(Unavailable):
        await RouterRemote(Handle(Dead())).describe()


@pytest.mark.asyncio
async def test_a_router_that_was_never_started_is_unavailable_and_no_bug_of_the_caller() -> None:
    import ray.exceptions

    class Remote:
        """What Ray makes of an exception in an actor's method."""

        def __init__(self, actor: RouterActor) -> None:
            self._actor = actor

        async def describe(self) -> bytes:
            try:
                return await self._actor.describe()
            except AssertionError as error:
                raise ray.exceptions.RayTaskError("describe", "", error) from error

    world = FakeWorld(marker_spec())
    port = RouterRemote(Handle(Remote(RouterActor(router_settings(world.spec)))))
    with pytest.raises(Unavailable, match="RayTaskError"):
        await port.describe()
