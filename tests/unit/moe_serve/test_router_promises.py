"""What one request is promised from its arrival to its answer: one deadline, the name of the newest
table, sums in float32, and nothing left behind."""

import asyncio
import time

import ml_dtypes
import msgspec
import numpy as np
import pytest

from moe_serve.errors import DeadlineExceeded
from moe_serve.ports import DType, SubCall, SubReply
from moe_serve.router.checks import ForwardInput
from moe_serve.router.combine import combine_rows
from moe_serve.router.dispatch import RouterCore
from placement.roles.calls import Contribution
from placement.roles.router_records import RouterRules
from placement.topology import Phase
from tests.fake_shards import (
    HIDDEN,
    FakeShardChannel,
    FakeWorld,
    from_float,
    marker_spec,
    router_settings,
    to_float,
    until,
)

DTYPES = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)


def a_request(rows: int = 4) -> ForwardInput:
    return ForwardInput(
        layer=1,
        phase=Phase.DECODE,
        dtype=DType.FLOAT32,
        hidden=np.ones((rows, HIDDEN), np.float32),
        topk_ids=np.tile(np.arange(3, dtype=np.int32), (rows, 1)),
        gates=np.ones((rows, 3), np.float32),
        valid=np.ones((rows, 3), np.uint8),
        request_id="",
        attempt=0,
    )


class Clock:
    """Monotonic seconds that a test may let leap."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def world() -> FakeWorld:
    made = FakeWorld(marker_spec())
    made.place()
    return made


def sent(world: FakeWorld) -> list:
    return [call for shard in world.shards for call in shard.calls]


# -- one deadline --------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_time_spent_in_the_queue_is_time_of_the_request(world: FakeWorld) -> None:
    """A request that waits for its permit passes on what is left, not what it came with."""
    clock, hold = Clock(), asyncio.Event()
    settings = router_settings(
        world.spec, max_open_requests=1, rules=RouterRules(max_attempts=1, hedge_share=0.0)
    )
    core = RouterCore(settings, world.open_channel, clock=clock)
    core.install_table(world.table())
    for shard in world.shards:
        shard.hold = hold
    first = asyncio.create_task(core.forward(a_request(), 300.0))
    await until(lambda: bool(sent(world)))
    begun = len(sent(world))
    second = asyncio.create_task(core.forward(a_request(), 300.0))
    third = asyncio.create_task(core.forward(a_request(), 150.0))
    await until(lambda: core.report(0).counters["waiting_requests"] == 2.0)
    clock.ahead_s = 200.0
    hold.set()
    await asyncio.gather(first, second)
    with pytest.raises(DeadlineExceeded):
        await third
    short = {call.request_key for call in sent(world) if call.timeout_s <= 100.0}
    long = {call.request_key for call in sent(world) if call.timeout_s > 100.0}
    assert (len(long), len(short)) == (1, 1), "the third was never sent"
    assert begun
    await core.stop()


# -- the table's name ----------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_an_answer_names_the_newest_table_that_had_a_part_in_it() -> None:
    """Expert 0 has another slot since: its row is refused, and served under the next table."""
    world = FakeWorld(marker_spec())
    world.place(copies=1)
    core = RouterCore(router_settings(world.spec), world.open_channel)
    core.install_table(world.table())
    old = next(slot for slot, held in world.shards[0].slots.items() if held[1:] == (1, 0))
    world.shards[0].fill(old, 0, 5)
    world.shards[0].fill(40, 1, 0)
    newer = world.shards[0].table = world.table()
    got = await core.forward(a_request(), 30.0)
    assert core.report(0).counters["stale_pairs"] > 0
    assert (got.term, got.epoch) == newer.order
    await core.stop()


@pytest.mark.asyncio
@pytest.mark.parametrize("valid", [0, 1])
async def test_an_answer_names_the_weights_of_its_table(world: FakeWorld, valid: int) -> None:
    core = RouterCore(router_settings(world.spec), world.open_channel)
    core.install_table(msgspec.structs.replace(world.table(), weights_version="v2"))
    request = a_request()
    request.valid[:] = valid
    got = await core.forward(request, 5.0)
    assert (got.weights_version, got.epoch) == ("v2", 1)
    await core.stop()


# -- sums ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_row_gets_the_partial_sum_that_was_taken_for_it(dtype: DType) -> None:
    """Rows of a reply that others served are passed over: row_id[i] is served by take[i]."""
    rng = np.random.default_rng(5)
    want = np.zeros((9, HIDDEN))
    parts = []
    for number in range(6):
        partial = from_float(rng.integers(-8, 9, (7, HIDDEN)).astype(np.float32), dtype)
        row_id = np.sort(rng.permutation(9)[: number + 1]).astype(np.int32)
        take = np.sort(rng.permutation(7)[: number + 1]).astype(np.int32)
        np.add.at(want, row_id, to_float(partial, dtype)[take])
        parts.append(Contribution(number, number, number, row_id, take, partial))
    got = combine_rows(9, HIDDEN, dtype, parts)
    assert np.array_equal(to_float(got, dtype), want), "small whole numbers are exact"


@pytest.mark.parametrize("dtype", DTYPES)
def test_partial_sums_are_added_in_float32_and_rounded_once(dtype: DType) -> None:
    rng = np.random.default_rng(6)
    partials = [
        from_float(rng.standard_normal((64, HIDDEN)).astype(np.float32), dtype) for _ in range(8)
    ]
    rows = np.arange(64, dtype=np.int32)
    total = np.zeros((64, HIDDEN), np.float32)
    for one in partials:
        total += to_float(one, dtype).astype(np.float32)
    got = combine_rows(
        64, HIDDEN, dtype, [Contribution(i, i, i, rows, rows, p) for i, p in enumerate(partials)]
    )
    want = total.astype(ml_dtypes.bfloat16).view(np.uint16) if dtype is DType.BFLOAT16 else None
    assert np.array_equal(got, total.astype(dtype.numpy) if want is None else want)


# -- nothing left behind -------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["cancel", "deadline", "finished"])
async def test_when_a_request_has_ended_nothing_of_it_runs(
    world: FakeWorld, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sub-calls are over by then, and those that nobody waits for are cancelled, not sat out:
    their memory is the caller's again."""
    ends: list[str] = []
    forward = FakeShardChannel.forward

    async def watched(self: FakeShardChannel, call: SubCall) -> SubReply:
        try:
            return await forward(self, call)
        except BaseException as error:
            ends.append(type(error).__name__)
            raise

    monkeypatch.setattr(FakeShardChannel, "forward", watched)
    rules = RouterRules(max_attempts=1, hedge_share=0.0)  # each sub-call has all the time
    core = RouterCore(router_settings(world.spec, rules=rules), world.open_channel)
    core.install_table(world.table())
    await asyncio.sleep(0.01)  # channels of the table are open
    before = asyncio.all_tasks()
    if how != "finished":
        for shard in world.shards:
            shard.hold = asyncio.Event()
    task = asyncio.create_task(core.forward(a_request(), 0.2 if how == "deadline" else 3000.0))
    if how == "cancel":
        await until(lambda: bool(sent(world)))
        task.cancel()
    await asyncio.wait({task})
    assert task.cancelled() == (how == "cancel")
    if how == "cancel":
        assert ends == ["CancelledError"] * len(sent(world)) != []
    else:
        assert isinstance(task.exception(), DeadlineExceeded) == (how == "deadline")
    left = [one for one in asyncio.all_tasks() - before - {task} if not one.done()]
    assert left == []
    assert (core.role.open_sub_calls, core.role.open_calls, core.open_requests) == (0, 0, 0)
    assert core.role.quiesced_epoch == 1
    await core.stop()
