"""RouterCore while shards fail, hang, lag or refuse: bounded work, no failed request where a
replica survives, and nothing left behind."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from moe_serve.errors import (
    DeadlineExceeded,
    MoeServeError,
    ResourceExhausted,
    Unavailable,
)
from moe_serve.ports import Cause, SubReply
from moe_serve.router.checks import ForwardInput
from moe_serve.router.dispatch import RouterCore
from placement.roles.router_records import RouterRules
from tests.fake_shards import FakeWorld, marker_spec, until
from tests.unit.moe_serve.test_router_dispatch import a_core, a_request, check


def a_world(num_ranks: int = 3, *, copies: int = 2) -> FakeWorld:
    made = FakeWorld(marker_spec(), num_ranks)
    made.place(copies=copies)
    return made


def cannot_compute(_reply: SubReply) -> SubReply:
    raise Unavailable("compute failed: RuntimeError")


async def outcomes(
    core: RouterCore,
    requests: int,
    *,
    at_once: int = 8,
    timeout_s: float = 5.0,
    before_each: Callable[[int], Awaitable[None]] | None = None,
) -> list[MoeServeError | None]:
    """How each of many requests ended, `at_once` callers sending one after the other."""
    ends: list[MoeServeError | None] = []
    numbers = iter(range(requests))

    async def caller() -> None:
        for number in numbers:
            if before_each is not None:
                await before_each(number)
            request = a_request(4, seed=number)
            try:
                check(request, await core.forward(request, timeout_s))
                ends.append(None)
            except MoeServeError as error:
                ends.append(error)

    await asyncio.gather(*(caller() for _ in range(at_once)))
    return ends


def calls_of(world: FakeWorld, cause: Cause) -> int:
    """Calls sent so. One that goes to two ranks is one: its pairs are sent once more."""
    sent = [call for shard in world.shards for call in shard.calls]
    return len({call.call_id for call in sent if call.cause is cause})


def attempts_per_call(world: FakeWorld) -> float:
    return 1.0 + calls_of(world, Cause.RETRY) / calls_of(world, Cause.FIRST)


def assert_nothing_held(core: RouterCore) -> None:
    counters = core.report(0).counters
    held = ("open_requests", "open_rows", "waiting_requests")
    assert [counters[name] for name in held] == [0.0, 0.0, 0.0]
    assert (core.role.open_calls, core.role.open_sub_calls) == (0, 0)
    assert not core.role.waiting
    assert core.role.quiesced_epoch == core.role.applied_epoch


# ------------------------------------------------------------------------------- R20


@pytest.mark.asyncio
async def test_a_storm_adds_a_fifth_at_most_and_ends_with_its_cause() -> None:
    world = a_world(6)
    core = a_core(world, rules=RouterRules(retry_patience_s=0.02))
    await core.start()
    for shard in world.shards[::2]:
        shard.change_reply = cannot_compute
    ends = await outcomes(core, 300)
    assert attempts_per_call(world) <= 1.2
    failed = [error for error in ends if error is not None]
    assert failed, "half of the shards fail: the budget is spent"
    assert {type(error) for error in failed} == {Unavailable}
    # Not more than a shard in ten, and one at least, is ejected.
    ejected = [why for _, _, why in core.report(0).suspects]
    assert len(ejected) == 1
    for shard in world.shards:
        shard.change_reply = None
        shard.calls.clear()
    assert await outcomes(core, 100) == [None] * 100
    assert attempts_per_call(world) == 1.0
    assert_nothing_held(core)
    await core.stop()


@pytest.mark.asyncio
async def test_where_all_are_busy_callers_are_told_to_wait_and_nobody_is_ejected() -> None:
    world = a_world()
    core = a_core(world, rules=RouterRules(retry_patience_s=0.02))
    await core.start()
    for shard in world.shards:
        shard.refuse = True
    with pytest.raises(ResourceExhausted, match="layer 1, expert") as told:
        await core.forward(a_request(1), 5.0)
    assert told.value.retry_after_s == 0.05
    await outcomes(core, 100)
    assert attempts_per_call(world) <= 1.2
    assert core.report(0).suspects == ()
    for shard in world.shards:
        shard.refuse = False
    assert await outcomes(core, 50) == [None] * 50
    assert_nothing_held(core)
    await core.stop()


@pytest.mark.asyncio
async def test_a_shard_without_memory_is_busy_and_a_message_too_large_is_the_callers() -> None:
    world = a_world()
    core = a_core(world, rules=RouterRules(faults_to_eject=1))

    def no_memory(_reply: SubReply) -> SubReply:
        raise ResourceExhausted("no memory for 4 rows; send fewer at once")

    world.shards[1].change_reply = no_memory
    assert await outcomes(core, 8, at_once=1) == [None] * 8
    assert core.report(0).suspects == ()
    assert core.report(0).counters["refused_pairs"] > 0
    await core.stop()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("detail", "suspects"), [("broken: too many", [1]), ("stalled: 9 s", [1]), ("busy: full", [])]
)
async def test_a_refusal_counts_as_a_fault_only_where_the_shard_is_at_fault(
    detail: str, suspects: list[int]
) -> None:
    world = a_world()
    core = a_core(world, rules=RouterRules(faults_to_eject=2))
    world.shards[1].refuse = True
    world.shards[1].change_reply = lambda reply: replace(reply, detail=detail)
    assert await outcomes(core, 8, at_once=1) == [None] * 8
    assert [rank for rank, _, _ in core.report(0).suspects] == suspects
    await core.stop()


# ------------------------------------------------------------------------------- R4


@pytest.mark.asyncio
async def test_a_shard_that_fails_each_third_call_costs_no_request() -> None:
    world = a_world()
    core = a_core(world)
    await core.start()

    turns = iter(range(10**6))

    def sometimes(reply: SubReply) -> SubReply:
        if next(turns) % 3 == 0:
            raise Unavailable("compute failed: RuntimeError")
        return reply

    world.shards[1].change_reply = sometimes
    assert await outcomes(core, 200) == [None] * 200
    assert core.report(0).suspects == (), "never five in a row"
    await core.stop()


# ------------------------------------------------------------------------------- R5


async def warmed_up(world: FakeWorld, **changes: object) -> RouterCore:
    core = a_core(world, **changes)
    await core.start()
    assert await outcomes(core, 100) == [None] * 100
    return core


@pytest.mark.asyncio
@pytest.mark.parametrize("timeout_s", [1.0, 30.0])
async def test_a_shard_that_hangs_leaves_rotation_and_no_request_fails(timeout_s: float) -> None:
    world = a_world()
    core = await warmed_up(world, rules=RouterRules(hedge_share=0.0))
    world.shards[1].hold = asyncio.Event()
    began_s = time.monotonic()
    assert await outcomes(core, 60, at_once=8, timeout_s=timeout_s) == [None] * 60
    assert time.monotonic() - began_s < 25.0
    assert [rank for rank, _, _ in core.report(0).suspects] == [1]
    assert_nothing_held(core)
    await core.stop()


@pytest.mark.asyncio
async def test_one_request_over_a_hung_shard_has_time_for_a_second_attempt() -> None:
    world = a_world()
    core = a_core(world, rules=RouterRules(hedge_share=0.0))
    world.shards[1].hold = asyncio.Event()
    request = a_request(30)
    began_s = time.monotonic()
    check(request, await core.forward(request, 2.0))
    assert time.monotonic() - began_s > 0.9
    await core.stop()


@pytest.mark.asyncio
async def test_told_of_a_suspect_the_router_sends_it_nothing_more() -> None:
    world = a_world()
    core = a_core(world)
    table = world.table()
    core.install_table(table, ["a:1"], (1,))
    assert await outcomes(core, 20) == [None] * 20
    assert world.shards[1].calls == []
    assert core.report(0).suspects == (), "the controller knows"
    # A table from a shard says nothing of suspects, and an old one from the controller is old news.
    older = table
    core.install_table(world.table())
    core.install_table(older, ["a:1"], ())
    assert await outcomes(core, 20) == [None] * 20
    assert world.shards[1].calls == []
    core.install_table(core.role.table, ["a:1"], ())  # type: ignore[arg-type]
    assert await outcomes(core, 20) == [None] * 20
    assert world.shards[1].calls != []
    await core.stop()


# ------------------------------------------------------------------------------- holds


def only_expert(expert: int, **changes: object) -> ForwardInput:
    one = np.ones((2, 1))
    return a_request(
        2,
        1,
        topk_ids=np.full((2, 1), expert, np.int32),
        gates=one.astype(np.float32),
        valid=one.astype(np.uint8),
        **changes,
    )


@pytest.mark.asyncio
async def test_calls_to_a_paused_only_replica_wait_until_it_is_back() -> None:
    world = a_world(copies=1)
    core = a_core(world)
    await core.start()
    paused = world.shards[1]
    paused.hold = asyncio.Event()
    request = only_expert(1)
    running = [asyncio.create_task(core.forward(request, 5.0)) for _ in range(4)]
    await until(lambda: len(paused.calls) == 4)
    paused.connected = False
    world.channels[1].disconnect()
    await asyncio.sleep(0.15)  # three attempts used to be over after 40 ms
    assert not any(task.done() for task in running)
    late = asyncio.create_task(core.forward(request, 5.0))
    check(other := only_expert(2), await core.forward(other, 1.0))
    paused.hold = None
    paused.connected = True
    for task in (*running, late):
        check(request, await task)
    assert_nothing_held(core)
    await core.stop()


@pytest.mark.asyncio
async def test_calls_to_a_lost_only_replica_go_to_its_next_life() -> None:
    world = a_world(copies=1)
    core = a_core(world)
    shard = world.shards[1]
    shard.connected = False
    running = asyncio.create_task(core.forward(only_expert(1), 5.0))
    await until(lambda: core.role.waiting)
    shard.incarnation, shard.connected = 2, True
    core.install_table(world.table())
    check(only_expert(1), await running)
    await core.stop()


@pytest.mark.asyncio
async def test_who_waits_in_vain_is_told_of_what_before_the_deadline() -> None:
    world = a_world(copies=1)
    core = a_core(world)
    world.shards[1].connected = False
    began_s = time.monotonic()
    with pytest.raises(Unavailable, match=r"layer 1: no rank with expert 1 could be reached .*r-7"):
        await core.forward(only_expert(1, request_id="r-7"), 1.0)
    assert time.monotonic() - began_s > 0.8
    assert_nothing_held(core)
    await core.stop()


# ------------------------------------------------------------------------------- R7, hedges


async def paced(core: RouterCore, seconds: float) -> None:
    """A new request each 4 ms."""

    async def one(seed: int) -> None:
        request = a_request(4, seed=seed)
        check(request, await core.forward(request, 5.0))

    async with asyncio.TaskGroup() as tasks:
        for seed in range(int(seconds / 0.004)):
            tasks.create_task(one(seed))
            await asyncio.sleep(0.004)


@pytest.mark.asyncio
async def test_a_straggler_is_left_alone_within_seconds() -> None:
    world = a_world(4)
    for shard in world.shards:
        shard.delay_s = 0.004
    core = a_core(world)
    await core.start()
    await paced(core, 0.5)
    straggler = world.shards[1]
    straggler.delay_s = 0.4
    await paced(core, 1.5)
    assert [(rank, why[:12]) for rank, _, why in core.report(0).suspects] == [(1, "ejected: far")]
    counters = core.report(0).counters
    assert calls_of(world, Cause.HEDGE) <= 0.05 * calls_of(world, Cause.FIRST)
    for shard in world.shards:
        shard.calls.clear()
    await paced(core, 0.5)
    # A trial may go there; the rest does not wait for it any more.
    assert len(straggler.calls) < 0.05 * sum(len(shard.calls) for shard in world.shards)
    assert counters["failed"] == 0
    assert_nothing_held(core)
    await core.stop()


@pytest.mark.asyncio
async def test_hedging_is_on_by_default_bounded_counted_once_and_on_another_node() -> None:
    world = a_world(4)
    core = a_core(world)
    await core.start()
    lag = np.random.default_rng(2)
    for shard in world.shards:
        shard.delay_s = 0.003
    await paced(core, 0.5)
    requests_before = core.report(0).counters["requests"]

    async def now_and_then(number: int) -> None:
        for shard in world.shards:
            shard.delay_s = 0.15 if lag.random() < 0.01 else 0.003

    ends = await outcomes(core, 400, at_once=2, before_each=now_and_then)
    assert ends == [None] * 400
    sent = [(shard.rank, call) for shard in world.shards for call in shard.calls]
    rank_of = {call.call_id: rank for rank, call in sent if call.cause is Cause.FIRST}
    hedges = [(rank, call) for rank, call in sent if call.cause is Cause.HEDGE]
    assert hedges
    assert len(hedges) <= 2 * 0.05 * len(rank_of), "a hedge may be sent to two ranks"
    assert len({call.call_id for _, call in hedges}) <= 0.05 * len(rank_of)
    assert all(rank != rank_of[call.call_id] for rank, call in hedges)
    report = core.report(0)
    counters = report.counters
    assert counters["hedged_pairs"] == sum(len(call.pair_row) for _, call in hedges)
    assert counters["requests"] == requests_before + 400
    # Demand is what was asked for, whoever computed it how often.
    assert counters["demand_pairs"] == counters["requests"] * 4 * 3
    assert counters["sent_pairs"] == (
        counters["demand_pairs"] + counters["retried_pairs"] + counters["hedged_pairs"]
    )
    assert_nothing_held(core)
    await core.stop()


@pytest.mark.asyncio
async def test_nothing_is_hedged_within_one_node() -> None:
    world = a_world()
    core = on_one_node(world)
    await core.start()
    assert await outcomes(core, 100) == [None] * 100
    world.shards[1].delay_s = 0.05
    assert await outcomes(core, 20) == [None] * 20
    assert core.report(0).counters["hedged_pairs"] == 0
    await core.stop()


def on_one_node(world: FakeWorld) -> RouterCore:
    core = a_core(world)
    table = world.table()
    ranks = tuple(msgspec.structs.replace(entry, node="n") for entry in table.ranks)
    core.install_table(msgspec.structs.replace(table, ranks=ranks))
    return core


# ------------------------------------------------------------------------------- R25


@pytest.mark.asyncio
async def test_demand_is_the_true_count_under_padding_retries_hedges_and_repeats() -> None:
    world = a_world(4)
    core = a_core(world, rules=RouterRules(hedge_after_s=0.002, hedge_share=0.2))
    await core.start()
    rng = np.random.default_rng(4)

    def sometimes(reply: SubReply) -> SubReply:
        if rng.random() < 0.03:
            raise Unavailable("compute failed: RuntimeError")
        return reply

    for shard in world.shards:
        shard.change_reply = sometimes
        shard.delay_s = 0.003
    true = np.zeros(6, np.int64)
    for seed in range(60):
        valid = (rng.random((4, 3)) < 0.8).astype(np.uint8)
        request = a_request(4, seed=seed, valid=valid, attempt=int(seed % 5 == 4))
        if request.attempt == 0:
            np.add.at(true, request.topk_ids[valid != 0], 1)
        check(request, await core.forward(request, 5.0))
    counters = core.report(0).counters
    assert counters["retried_pairs"] > 0
    assert counters["hedged_pairs"] > 0
    told: dict[tuple[int, int], int] = {}
    for _ in range(2):  # a report that comes twice is known by its number
        for report in core.report(0).reports:
            for key, pairs in zip(report.key.tolist(), report.pairs.tolist(), strict=True):
                told[report.seq, key] = pairs
    first = (1 * 2 + 1) * 6
    by_expert = np.zeros(6, np.int64)
    for (_, key), pairs in told.items():
        by_expert[key - first] += pairs
    assert by_expert.tolist() == true.tolist()
    await core.stop()


# ------------------------------------------------------------------------------- R21


@pytest.mark.asyncio
async def test_short_deadlines_start_nothing_late_and_give_everything_back() -> None:
    world = a_world()
    core = a_core(world)
    await core.start()
    rng = np.random.default_rng(6)
    for shard in world.shards:
        shard.delay_s = 0.004

    async def one(seed: int) -> MoeServeError | None:
        try:
            await core.forward(a_request(2, seed=seed), float(rng.uniform(0.001, 0.02)))
        except MoeServeError as error:
            return error
        return None

    ends = await asyncio.gather(*(one(seed) for seed in range(300)))
    assert {type(end) for end in ends if end is not None} <= {DeadlineExceeded, Unavailable}
    assert any(isinstance(end, DeadlineExceeded) for end in ends)
    assert all(call.timeout_s <= 0.02 for shard in world.shards for call in shard.calls)
    assert core.report(0).suspects == (), "short deadlines are no fault of a shard"
    await until(lambda: core.report(0).counters["open_requests"] == 0, 1.0)
    assert_nothing_held(core)
    await core.stop()


# ------------------------------------------------------------------------------- request ids


@pytest.mark.asyncio
async def test_an_error_names_the_request_it_ended() -> None:
    world = a_world(copies=1)
    core = a_core(world)
    world.shards[0].hold = asyncio.Event()
    with pytest.raises(DeadlineExceeded, match=r"\[request abc-1\]"):
        await core.forward(a_request(request_id="abc-1"), 0.02)
    world.shards[0].hold = None
    world.shards[0].invalid = "pair_slot[3]: must be below 8"
    with pytest.raises(MoeServeError, match=r"pair_slot.*\[request abc-2\]"):
        await core.forward(a_request(request_id="abc-2"), 1.0)
    with pytest.raises(MoeServeError) as plain:
        await core.forward(a_request(), 1.0)
    assert "request" not in plain.value.message
    await core.stop()
