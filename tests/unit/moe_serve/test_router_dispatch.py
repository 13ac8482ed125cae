"""RouterCore over fake shards: right output through stale tables, losses and cancels."""

import asyncio
import itertools
import time
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from moe_serve.errors import (
    DeadlineExceeded,
    InvalidArgument,
    MoeServeError,
    ResourceExhausted,
    StaleTerm,
    Unavailable,
)
from moe_serve.ports import Cause, DType, RowStatus, SubReply
from moe_serve.router.checks import ForwardInput
from moe_serve.router.dispatch import RouterCore
from moe_serve.router.faults import ContributionFault, FaultKind
from moe_serve.router.flight import ForwardOutput
from moe_serve.router.ledger import CombinedEntry, RequestEntry
from moe_serve.rpc.codec import unpack_bits
from moe_serve.wire.frame import TIMEOUT_S_MAX, check_timeout
from placement.roles import calls
from placement.roles.router_records import RouterRules
from placement.split import count_ids
from placement.topology import Phase
from tests.fake_shards import (
    HIDDEN,
    FakeWorld,
    from_float,
    marker_spec,
    oracle,
    router_settings,
    to_float,
    until,
)


def a_request(
    rows: int = 5, k: int = 3, *, seed: int = 0, dtype: DType = DType.FLOAT32, **changes: object
) -> ForwardInput:
    rng = np.random.default_rng(seed)
    hidden = from_float(rng.standard_normal((rows, HIDDEN)).astype(np.float32), dtype)
    hidden.flags.writeable = False
    made = ForwardInput(
        layer=1,
        phase=Phase.DECODE,
        dtype=dtype,
        hidden=hidden,
        topk_ids=np.stack([rng.permutation(6)[:k] for _ in range(rows)]).astype(np.int32),
        gates=rng.standard_normal((rows, k)).astype(np.float32),
        valid=np.ones((rows, k), np.uint8),
        request_id="",
        attempt=0,
    )
    return replace(made, **changes)


def check(request: ForwardInput, got: ForwardOutput, *, rtol: float = 1e-5) -> None:
    """Within rtol of the sum of sizes: what cancels cannot be better than what was added."""
    hidden = to_float(request.hidden, request.dtype)
    want = oracle(hidden, request.topk_ids, request.gates, request.valid)
    size = oracle(np.abs(hidden), request.topk_ids, np.abs(request.gates), request.valid)
    assert np.all(np.abs(to_float(got.output, request.dtype) - want) <= rtol * size)


def a_core(world: FakeWorld, **changes: object) -> RouterCore:
    core = RouterCore(router_settings(world.spec, **changes), world.open_channel)
    core.install_table(world.table())
    return core


@pytest.fixture
def world() -> FakeWorld:
    made = FakeWorld(marker_spec())
    made.place()
    return made


def test_numbers_of_the_port_and_of_the_rules_agree() -> None:
    assert Cause is calls.Cause
    assert (RowStatus.STALE, RowStatus.REFUSED) == (calls.Ended.STALE, calls.Ended.REFUSED)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(DType.FLOAT32, 1e-5), (DType.BFLOAT16, 2e-2), (DType.FLOAT16, 5e-3)]
)
@pytest.mark.parametrize("rows", [1, 7, 600])
async def test_output_is_the_oracles(
    world: FakeWorld, dtype: DType, rtol: float, rows: int
) -> None:
    core = a_core(world, offload_bytes=4096)
    request = a_request(rows, dtype=dtype)
    got = await core.forward(request, 5.0)
    check(request, got, rtol=rtol)
    assert got.output.dtype == request.hidden.dtype
    assert (got.term, got.epoch, got.weights_version) == (1, 1, "v1")
    assert not core.report(-1).stopped
    await core.stop()
    assert all(channel.closed for channel in world.channels)
    assert core.report(-1).stopped, "its process lives until somebody ends it"


@pytest.mark.asyncio
async def test_a_row_travels_once_a_rank_and_every_pair_is_computed_once(world: FakeWorld) -> None:
    core = a_core(world)
    request = a_request(20)
    await core.forward(request, 5.0)
    for shard in world.shards:
        for call in shard.calls:
            assert len(set(call.row_id.tolist())) == call.row_id.shape[0]
    assert len(world.executed()) == len(set(world.executed())) == request.valid.sum()
    await core.stop()


@pytest.mark.asyncio
async def test_invalid_pairs_and_rows_add_nothing_and_are_no_demand(world: FakeWorld) -> None:
    core = a_core(world)
    valid = np.ones((4, 3), np.uint8)
    valid[0] = 0
    valid[1, 2] = 0
    ids = np.array([[6, 6, 6], [0, 1, 6], [3, 4, 5], [0, 2, 4]], np.int32)
    request = a_request(4, valid=valid, topk_ids=ids)
    got = await core.forward(request, 5.0)
    check(request, got)
    assert not got.output[0].any()
    (report,) = core.report(0).reports
    assert report.pairs.sum() == 8
    assert report.key.tolist() == [(1 * 2 + 1) * 6 + e for e in range(6)]
    assert report.pairs.tolist() == [2, 1, 1, 1, 2, 1]
    await core.stop()


@pytest.mark.asyncio
async def test_rows_without_pairs_need_nobody(world: FakeWorld) -> None:
    core = RouterCore(router_settings(world.spec), world.open_channel)
    empty = a_request(3, valid=np.zeros((3, 3), np.uint8))
    got = await core.forward(empty, 1.0)
    assert got.output.shape == (3, HIDDEN)
    assert not got.output.any()
    await core.stop()


@pytest.mark.asyncio
async def test_only_attempt_zero_is_demand_and_acknowledged_reports_go(world: FakeWorld) -> None:
    core = a_core(world)
    await core.forward(a_request(), 5.0)
    first = core.report(0)
    assert [r.seq for r in first.reports] == [1]
    await core.forward(a_request(attempt=1), 5.0)
    again = core.report(0)
    assert [(r.seq, int(r.pairs.sum())) for r in again.reports] == [(1, 15)]
    assert core.report(1).reports == ()
    assert again.counters["demand_pairs"] == 15
    assert again.counters["sent_pairs"] == 30 == again.counters["served_pairs"]
    assert again.counters["requests"] == 2
    await core.stop()


@pytest.mark.asyncio
async def test_what_is_refused_before_it_is_split_is_no_demand(world: FakeWorld) -> None:
    core = RouterCore(router_settings(world.spec), world.open_channel)
    with pytest.raises(Unavailable, match="no routing table"):
        await core.forward(a_request(), 5.0)
    table = world.table()
    nothing = msgspec.structs.replace(
        table,
        replica_ptr=np.zeros_like(table.replica_ptr),
        replica_rank=table.replica_rank[:0],
        replica_slot=table.replica_slot[:0],
        replica_tag=table.replica_tag[:0],
    )
    core.install_table(nothing)
    with pytest.raises(Unavailable, match="no ready replica"):
        await core.forward(a_request(), 5.0)
    assert core.report(0).reports == ()
    assert core.report(0).counters["demand_pairs"] == 0
    await core.stop()


@pytest.mark.asyncio
async def test_a_stale_table_is_healed_by_a_shard(world: FakeWorld) -> None:
    core = a_core(world)
    # Slot 0 of rank 0 is reused: its tag changes and its former expert has moved to a new slot.
    _, layer, expert = world.shards[0].slots[6]
    assert layer == 1
    world.shards[0].fill(6, 0, 5)
    world.shards[0].fill(40, layer, expert)
    newer = world.table()
    for shard in world.shards:
        shard.table = newer
    for seed in range(6):
        request = a_request(12, seed=seed)
        check(request, await core.forward(request, 5.0))
    report = core.report(0)
    assert report.counters["stale_pairs"] > 0
    assert report.counters["retried_pairs"] > 0
    assert report.counters["tables_fetched"] == 1
    assert report.applied_epoch == report.quiesced_epoch == newer.epoch
    await core.stop()


@pytest.mark.asyncio
async def test_an_old_table_whose_tags_match_is_served(world: FakeWorld) -> None:
    core = a_core(world)
    newer = world.table()
    for shard in world.shards:
        shard.table = newer
    request = a_request()
    check(request, await core.forward(request, 5.0))
    assert core.report(0).counters["retried_pairs"] == 0
    await core.stop()


@pytest.mark.asyncio
async def test_a_lost_rank_is_avoided_at_once_and_used_again_when_back(world: FakeWorld) -> None:
    core = a_core(world)
    gone = world.shards[1]
    gone.connected = False
    world.channels[1].disconnect()
    assert core.report(0).suspects == ((1, 1, "connection reset"),)
    for seed in range(5):
        request = a_request(seed=seed)
        check(request, await core.forward(request, 5.0))
    assert gone.calls == []
    gone.connected = True
    for seed in range(5):
        await core.forward(a_request(seed=seed), 5.0)
    assert gone.calls != []
    assert core.report(0).suspects == ()
    await core.stop()


@pytest.mark.asyncio
async def test_calls_in_flight_on_a_lost_connection_go_elsewhere(world: FakeWorld) -> None:
    core = a_core(world)
    world.shards[1].hold = asyncio.Event()
    request = a_request(30)
    running = asyncio.create_task(core.forward(request, 5.0))
    await until(lambda: bool(world.shards[1].calls))
    world.shards[1].connected = False
    world.channels[1].disconnect()
    check(request, await running)
    counters = core.report(0).counters
    assert counters["lost_pairs"] == counters["retried_pairs"] > 0
    await core.stop()


@pytest.mark.asyncio
async def test_a_busy_shard_is_retried_elsewhere_and_is_no_fault(world: FakeWorld) -> None:
    core = a_core(world)
    world.shards[2].refuse = True
    for seed in range(8):
        request = a_request(seed=seed)
        check(request, await core.forward(request, 5.0))
    report = core.report(0)
    assert report.counters["refused_pairs"] > 0
    assert report.suspects == ()
    await core.stop()


@pytest.mark.asyncio
async def test_a_shard_that_cannot_compute_is_retried_elsewhere_and_ejected(
    world: FakeWorld,
) -> None:
    core = a_core(world, rules=RouterRules(faults_to_eject=3))

    def fail(_reply: SubReply) -> SubReply:
        raise Unavailable("compute failed: RuntimeError")

    world.shards[2].change_reply = fail
    for seed in range(8):
        request = a_request(seed=seed)
        check(request, await core.forward(request, 5.0))
    assert [(rank, why[:7]) for rank, _, why in core.report(0).suspects] == [(2, "ejected")]
    assert len(world.shards[2].calls) == 3
    assert core.report(0).counters["ejections"] == 1.0
    await core.stop()


@pytest.mark.asyncio
async def test_a_shard_that_was_never_connected_is_avoided_until_it_is(world: FakeWorld) -> None:
    core = a_core(world)
    world.shards[2].connected = False
    for seed in range(4):
        request = a_request(seed=seed)
        check(request, await core.forward(request, 5.0))
    assert len(world.shards[2].calls) == 1
    assert core.report(0).suspects == ((2, 1, "not connected"),)
    world.shards[2].connected = True
    for seed in range(4):
        await core.forward(a_request(seed=seed), 5.0)
    assert len(world.shards[2].calls) > 1
    assert core.report(0).suspects == ()
    await core.stop()


@pytest.mark.asyncio
async def test_no_replica_left_fails_typed_and_names_the_expert() -> None:
    world = FakeWorld(marker_spec())
    world.place(copies=1)
    core = RouterCore(router_settings(world.spec), world.open_channel)
    with pytest.raises(Unavailable, match="no routing table"):
        await core.forward(a_request(), 1.0)
    core.install_table(world.table(without=(1,)))
    assert not core.ready
    ids = np.array([[0, 1, 2]], np.int32)
    with pytest.raises(Unavailable, match="layer 1 has no ready replica of expert 1"):
        await core.forward(a_request(1, topk_ids=ids), 1.0)
    core.install_table(world.table())
    assert core.ready
    await core.forward(a_request(1, topk_ids=ids), 1.0)
    world.shards[1].connected = False
    with pytest.raises(Unavailable, match="layer 1: no rank with expert 1 could be reached"):
        await core.forward(a_request(1, topk_ids=ids), 0.5)
    assert core.open_requests == 0
    await core.stop()


@pytest.mark.asyncio
async def test_the_deadline_ends_a_request_and_everything_of_it(world: FakeWorld) -> None:
    core = a_core(world)
    for shard in world.shards:
        shard.hold = asyncio.Event()
    with pytest.raises(DeadlineExceeded):
        await core.forward(a_request(), 0.02)
    assert (core.open_requests, core.role.open_calls, core.role.open_sub_calls) == (0, 0, 0)
    report = core.report(0)
    assert report.quiesced_epoch == report.applied_epoch
    # The caller's own time ran out: that is no fault of the shards.
    assert report.suspects == ()
    await core.stop()


@pytest.mark.asyncio
async def test_the_callers_short_deadline_is_no_fault_of_a_shard(world: FakeWorld) -> None:
    core = a_core(world, rules=RouterRules(faults_to_eject=1))
    for shard in world.shards:
        shard.hold = asyncio.Event()
        shard.gives_up_early_s = 0.0015
    with pytest.raises(DeadlineExceeded):
        await core.forward(a_request(30), 0.05)
    report = core.report(0)
    assert report.counters["lost_pairs"] > 0
    assert report.suspects == ()
    await core.stop()


@pytest.mark.asyncio
async def test_a_callers_long_deadline_stays_within_what_the_wire_takes(world: FakeWorld) -> None:
    core = a_core(world, rules=RouterRules(max_attempts=1))
    await core.forward(a_request(1), 1e6)
    for shard in world.shards:
        for call in shard.calls:
            assert check_timeout(call.timeout_s) == TIMEOUT_S_MAX
    await core.stop()


@pytest.mark.asyncio
async def test_what_has_no_time_left_is_not_sent(world: FakeWorld) -> None:
    looks = itertools.count()
    # Each look at the clock takes 1 s: at the sixth, when the split is done, the time is over.
    core = RouterCore(
        router_settings(world.spec), world.open_channel, clock=lambda: 1.0 * next(looks)
    )
    core.install_table(world.table())
    with pytest.raises((DeadlineExceeded, Unavailable)):
        await core.forward(a_request(1), 4.0)
    assert core.role.counters["lost_pairs"] >= 3
    assert [shard.calls for shard in world.shards] == [[]] * len(world.shards)
    assert core.role.open_sub_calls == 0
    await core.stop()


@pytest.mark.asyncio
@pytest.mark.parametrize("twice", [False, True])
async def test_a_sub_call_cancelled_before_its_first_step_is_settled(
    world: FakeWorld, twice: bool
) -> None:
    until_cancel = -1
    running: asyncio.Task[ForwardOutput] | None = None

    def clock() -> float:
        nonlocal until_cancel
        until_cancel -= 1
        if until_cancel == 0:
            assert running is not None
            running.cancel()
            if twice:  # as where deadline and caller end a request at once
                asyncio.get_running_loop().call_soon(running.cancel)
        return time.monotonic()

    def then_cancel(reply: SubReply) -> SubReply:
        # The next look at the clock settles this reply, the second asks for retries, the third
        # plans one, the fourth sends it: its sub-call is made, and the request ends before it runs.
        nonlocal until_cancel
        until_cancel = 4
        stale = np.ones_like(reply.row_status)
        return replace(reply, row_status=stale, partial=reply.partial[:0])

    core = RouterCore(router_settings(world.spec), world.open_channel, clock=clock)
    core.install_table(world.table())
    world.shards[0].change_reply = then_cancel
    ids = np.zeros((1, 1), np.int32)
    request = a_request(
        1, 1, topk_ids=ids, gates=np.ones((1, 1), np.float32), valid=np.ones((1, 1), np.uint8)
    )
    while until_cancel < 0:
        running = asyncio.create_task(core.forward(request, 5.0))
        await asyncio.gather(running, return_exceptions=True)
        if running.cancelled():
            break
    assert core.role.counters["lost_pairs"] == 1, "it was made"
    assert all(call.cause is Cause.FIRST for shard in world.shards for call in shard.calls)
    assert core.role.open_sub_calls == 0
    newer = world.table()
    core.install_table(newer)
    assert core.role.quiesced_epoch == newer.epoch
    await core.stop()


@pytest.mark.asyncio
async def test_a_thousand_cancels_give_every_permit_back(world: FakeWorld) -> None:
    core = a_core(world)
    rng = np.random.default_rng(5)
    for shard in world.shards:
        shard.delay_s = 0.002
    for _ in range(20):
        tasks = [asyncio.create_task(core.forward(a_request(2), 5.0)) for _ in range(50)]
        for task in tasks:
            if rng.random() < 0.5:
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert (core.open_requests, core.role.open_calls, core.role.open_sub_calls) == (0, 0, 0)
    assert core.role.quiesced_epoch == core.role.applied_epoch
    check(request := a_request(), await core.forward(request, 5.0))
    await core.stop()


@pytest.mark.asyncio
async def test_a_cancel_while_the_split_runs_in_a_thread_leaves_nothing(world: FakeWorld) -> None:
    core = a_core(world, offload_bytes=0)
    for steps in range(12):
        running = asyncio.create_task(core.forward(a_request(40), 5.0))
        for _ in range(steps):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert core.role.open_sub_calls == 0
        newer = world.table()
        core.install_table(newer)
        assert core.role.quiesced_epoch == newer.epoch
    await core.stop()


@pytest.mark.asyncio
async def test_a_fault_of_our_own_fails_one_request_typed(world: FakeWorld) -> None:
    core = a_core(world)

    def broken(_reply: SubReply) -> SubReply:
        raise ZeroDivisionError

    world.shards[0].change_reply = broken
    with pytest.raises(MoeServeError) as caught:
        await core.forward(a_request(30), 5.0)
    assert caught.value.code == "INTERNAL"
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert core.role.open_sub_calls == 0
    world.shards[0].change_reply = None
    check(request := a_request(30), await core.forward(request, 5.0))
    await core.stop()


@pytest.mark.asyncio
async def test_what_is_open_when_a_router_stops_fails_typed(world: FakeWorld) -> None:
    core = a_core(world)
    await core.start()
    for shard in world.shards:
        shard.hold = asyncio.Event()
    running = asyncio.create_task(core.forward(a_request(), 5.0))
    await until(lambda: bool(world.shards[0].calls))
    await core.stop()
    with pytest.raises(Unavailable, match="shutting down"):
        await running


@pytest.mark.asyncio
async def test_too_many_open_requests_are_refused_with_a_wait(world: FakeWorld) -> None:
    core = a_core(world, max_open_requests=1, max_waiting_requests=0)
    world.shards[0].hold = world.shards[1].hold = world.shards[2].hold = asyncio.Event()
    first = asyncio.create_task(core.forward(a_request(), 5.0))
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted) as refused:
        await core.forward(a_request(), 5.0)
    assert refused.value.retry_after_s is not None
    world.shards[0].hold.set()
    await first
    await core.stop()


@pytest.mark.asyncio
async def test_what_waits_for_a_permit_is_reported_as_queued_and_is_no_demand_yet(
    world: FakeWorld,
) -> None:
    core = a_core(world, max_open_requests=1)
    world.shards[0].hold = world.shards[1].hold = world.shards[2].hold = asyncio.Event()
    assert core.report(0).queued_pairs.size == 0
    tasks = [asyncio.create_task(core.forward(a_request(seed=n), 5.0)) for n in range(2)]
    tasks.append(asyncio.create_task(core.forward(replace(a_request(seed=2), attempt=1), 5.0)))
    await until(lambda: core.report(0).counters["waiting_requests"] == 2.0)
    waiting = a_request(seed=1)
    report = core.report(0)
    assert report.queued_pairs.sum() == waiting.valid.sum()
    counts = count_ids(waiting.topk_ids, waiting.valid, core.settings.spec.num_experts)
    first = (waiting.phase * core.settings.spec.num_layers + waiting.layer) * len(counts)
    assert report.queued_key.tolist() == (first + np.flatnonzero(counts)).tolist()
    assert report.queued_pairs.tolist() == counts[counts > 0].tolist()
    assert sum(int(r.pairs.sum()) for r in report.reports) == a_request(seed=0).valid.sum()
    world.shards[0].hold.set()
    await asyncio.gather(*tasks)
    assert core.report(0).queued_pairs.size == 0
    await core.stop()


@pytest.mark.asyncio
async def test_malformed_replies_are_the_shards_fault_and_never_added(world: FakeWorld) -> None:
    core = a_core(world)
    world.shards[0].change_reply = lambda reply: replace(reply, partial=reply.partial[:, :3])
    for seed in range(4):
        request = a_request(seed=seed)
        check(request, await core.forward(request, 5.0))
    assert core.report(0).counters["malformed_replies"] > 0
    await core.stop()


@pytest.mark.asyncio
async def test_a_shards_word_that_the_request_is_wrong_fails_only_it(world: FakeWorld) -> None:
    core = a_core(world)
    world.shards[0].invalid = "pair_slot[3]: must be below 8"
    with pytest.raises(InvalidArgument, match="pair_slot"):
        await core.forward(a_request(30), 5.0)
    world.shards[0].invalid = ""
    request = a_request(30)
    check(request, await core.forward(request, 5.0))
    await core.stop()


@pytest.mark.asyncio
async def test_a_hedge_answers_for_a_slow_shard_and_the_late_reply_is_dropped() -> None:
    world = FakeWorld(marker_spec())
    world.place(copies=2)
    rules = RouterRules(hedge_after_s=0.005, hedge_share=1.0)
    core = a_core(world, rules=rules)
    await core.start()
    world.shards[0].delay_s = 0.2
    request = a_request(20)
    check(request, await core.forward(request, 5.0))
    counters = core.report(0).counters
    assert counters["hedged_pairs"] > 0
    assert counters["retried_pairs"] == 0
    assert core.role.open_sub_calls == 0
    await core.stop()


@pytest.mark.asyncio
async def test_tables_only_grow_and_old_terms_are_refused(world: FakeWorld) -> None:
    core = a_core(world)
    old, new = world.table(term=1), world.table(term=2)
    assert core.install_table(new, ["a:1"]) == new.epoch
    assert core.peers == ("a:1",)
    with pytest.raises(StaleTerm) as refused:
        core.install_table(old)
    assert refused.value.term == 2
    assert core.install_table(replace_epoch(new, old.epoch)) == new.epoch
    misfit = FakeWorld(marker_spec(num_layers=1))
    misfit.place()
    misfit.epoch = 50
    with pytest.raises(InvalidArgument, match="1 x 6"):
        core.install_table(misfit.table(term=2))
    await core.stop()


def replace_epoch(table: object, epoch: int) -> object:
    return msgspec.structs.replace(table, epoch=epoch)


@pytest.mark.asyncio
async def test_a_new_life_of_a_shard_gets_a_new_channel(world: FakeWorld) -> None:
    core = a_core(world)
    world.shards[0].hold = asyncio.Event()
    request = a_request(30)
    running = asyncio.create_task(core.forward(request, 5.0))
    await until(lambda: bool(world.shards[0].calls))
    old = world.channels[0]
    world.shards[0].hold = None
    world.shards[0].incarnation = 2
    core.install_table(world.table())
    check(request, await running)
    await asyncio.sleep(0)
    assert old.closed
    assert [c.address.incarnation for c in world.channels if c.address.rank == 0] == [1, 2]
    await core.stop()


@pytest.mark.asyncio
async def test_a_rank_that_leaves_the_table_finishes_what_it_began(world: FakeWorld) -> None:
    core = a_core(world)
    hold = world.shards[0].hold = asyncio.Event()
    request = a_request(30)
    running = asyncio.create_task(core.forward(request, 5.0))
    await until(lambda: bool(world.shards[0].calls))
    newer = world.table(without=(0,))
    core.install_table(newer)
    assert core.role.quiesced_epoch < core.role.applied_epoch == newer.epoch
    assert not world.channels[0].closed
    hold.set()
    check(request, await running)
    await asyncio.sleep(0)
    assert world.channels[0].closed
    assert core.role.quiesced_epoch == newer.epoch
    assert core.report(0).counters["retried_pairs"] == 0
    await core.stop()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("fault", "lost", "doubled"), [(None, 0, 0), ("drop-one", 1, 0), ("double-one", 0, 1)]
)
async def test_the_ledger_joined_with_the_shards_finds_every_fault(
    world: FakeWorld, fault: str | None, lost: int, doubled: int
) -> None:
    injected = None if fault is None else ContributionFault(FaultKind(fault), skip_requests=2)
    core = a_core(world, ledger_entries=1000, fault=injected)
    world.shards[2].refuse = True
    for seed in range(5):
        await core.forward(a_request(seed=seed), 5.0)
    page = core.ledger.take(10_000)
    assert page.forgotten == 0
    executed: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for shard in world.shards:
        for call in shard.calls:
            if shard.rank != 2:
                rows = call.row_id[call.pair_row].tolist()
                executed[call.sub_id, call.call_id] = [
                    (call.request_key, r, k)
                    for r, k in zip(rows, call.pair_k.tolist(), strict=True)
                ]
    wanted, added = set(), []
    for entry in page.entries:
        if isinstance(entry, RequestEntry):
            mask = unpack_bits(entry.pair_valid, (entry.rows, entry.top_k))
            wanted |= {(entry.request_key, int(r), int(k)) for r, k in np.argwhere(mask)}
        else:
            assert isinstance(entry, CombinedEntry)
            rows = set(np.frombuffer(entry.row_id, np.int32).tolist())
            added += [p for p in executed[entry.sub_id, entry.call_id] if p[1] in rows]
    assert len(wanted) == 5 * 15
    assert (len(wanted - set(added)) > 0) == bool(lost)
    assert (len(added) > len(set(added))) == bool(doubled)
    await core.stop()


@pytest.mark.asyncio
async def test_a_full_ledger_says_what_it_forgot(world: FakeWorld) -> None:
    core = a_core(world, ledger_entries=2)
    await core.forward(a_request(), 5.0)
    page = core.ledger.take(10)
    assert page.entries == ()
    assert page.forgotten >= 3
    await core.stop()
