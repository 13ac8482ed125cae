"""Where a router says that the time of its requests went: by stage, phase and rank."""

from __future__ import annotations

import asyncio
import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.errors import InvalidArgument, MoeServeError
from moe_serve.ports import DType, RouterReport, RowStatus, SubCall, SubReply
from moe_serve.router.checks import ForwardInput
from moe_serve.router.dispatch import RouterCore
from moe_serve.router.flight import ANSWER, Flight, Stamps
from moe_serve.router.lanes import OnDisconnect
from moe_serve.router.stages import WAITING_MAX, Stages
from moe_serve.stage_counts import STAGE_BOUNDS_S, STAGES, StageCounts
from placement.messages.codec import decode_as, encode
from placement.roles.assignment import Part
from placement.roles.calls import Cause
from placement.roles.router_records import Dispatch, RouterRules
from placement.routing import RankAddress, RoutingTable
from placement.topology import NUM_PHASES, Phase
from tests.fake_shards import HIDDEN, FakeShard, FakeWorld, marker_spec, router_settings, until
from tests.fakes.sub_calls import sub_reply

T = 2.0**-10
"""About a millisecond; sums of it have no rounding."""


class Clock:
    """Seconds that pass when a test says so, and `step` at every look."""

    def __init__(self, step: Callable[[], float] = lambda: 0.0) -> None:
        self.now_s = 64.0
        self.looks: list[float] = []
        self._step = step

    def __call__(self) -> float:
        self.now_s += self._step()
        self.looks.append(self.now_s)
        return self.now_s


class Held:
    """`ports.ShardChannel` to a fake shard; each sub-call waits until the test answers it."""

    connected = True

    def __init__(self, desk: Desk, address: RankAddress) -> None:
        self.address = address
        self._desk = desk

    async def forward(self, call: SubCall) -> SubReply:
        answer: asyncio.Future[SubReply] = asyncio.get_running_loop().create_future()
        self._desk.sent.append((self.address.rank, call, answer))
        return await answer

    async def fetch_table(self) -> RoutingTable | None:
        return None

    async def close(self) -> None:
        return


class Desk:
    """A router over fake shards whose every answer, and every second, the test gives."""

    def __init__(self, *, copies: int = 1, step: Callable[[], float] = lambda: 0.0) -> None:
        self.world = FakeWorld(marker_spec())
        self.world.place(copies=copies)
        self.clock = Clock(step)
        self.sent: list[tuple[int, SubCall, asyncio.Future[SubReply]]] = []
        self.core: RouterCore

    def open(self, **changes: object) -> Desk:
        def channel(address: RankAddress, _on_disconnect: OnDisconnect) -> Held:
            return Held(self, address)

        settings = router_settings(self.world.spec, **changes)
        self.core = RouterCore(settings, channel, clock=self.clock)
        self.core.install_table(self.world.table())
        return self

    def ask(self, request: ForwardInput, timeout_s: float = 60.0) -> asyncio.Task[object]:
        return asyncio.create_task(self.core.forward(request, timeout_s))

    async def taken(self, rank: int = -1) -> tuple[FakeShard, SubCall, asyncio.Future[SubReply]]:
        """The oldest sub-call sent to a rank (-1 = any)."""
        await until(lambda: any(rank in (-1, to) for to, _, _ in self.sent), within_s=30.0)
        found = next(one for one in self.sent if rank in (-1, one[0]))
        self.sent.remove(found)
        return self.world.shards[found[0]], found[1], found[2]

    async def reply(self, rank: int = -1, **seconds: float) -> int:
        """Answer the oldest one; returns its rank."""
        shard, call, answer = await self.taken(rank)
        told = {"queue_s": 0.0, "rest_s": 0.0, "compute_s": 0.0} | seconds
        answer.set_result(replace(shard.answer(call), **told))
        return shard.rank

    def counts(self) -> StageCounts:
        found = self.core.report(-1).stages
        assert found is not None
        return found


def a_request(experts: Sequence[int] = (0,), **changes: object) -> ForwardInput:
    """One row for these experts; rank = expert % 3 where each has one replica."""
    made = ForwardInput(
        layer=1,
        phase=Phase.DECODE,
        dtype=DType.FLOAT32,
        hidden=np.ones((1, HIDDEN), np.float32),
        topk_ids=np.array([experts], np.int32),
        gates=np.ones((1, len(experts)), np.float32),
        valid=np.ones((1, len(experts)), np.uint8),
        request_id="",
        attempt=0,
    )
    return replace(made, **changes)


def seconds_of(counts: StageCounts, phase: Phase = Phase.DECODE) -> dict[str, float]:
    """Stage -> seconds, without those that took none."""
    found = dict(zip(STAGES, counts.seconds[phase].tolist(), strict=True))
    return {stage: seconds for stage, seconds in found.items() if seconds}


def check_buckets(counts: StageCounts, phase: Phase, *requests: dict[str, float]) -> None:
    """Each stage of each request is in the bucket of its seconds, and nowhere else."""
    want = np.zeros(counts.requests.shape[1:], np.int64)
    for stages in requests:
        for i, stage in enumerate(STAGES):
            want[i, bisect_left(STAGE_BOUNDS_S, stages.get(stage, 0.0))] += 1
    np.testing.assert_array_equal(counts.requests[phase], want)


@pytest.mark.asyncio
async def test_every_second_is_in_its_stage() -> None:
    desk = Desk().open(max_open_requests=1)
    first = desk.ask(a_request(phase=Phase.PREFILL))
    await until(lambda: bool(desk.sent), within_s=30.0)
    second = desk.ask(a_request())
    await until(lambda: desk.core.report(-1).counters["waiting_requests"] == 1, within_s=30.0)
    desk.clock.now_s += 8 * T
    await desk.reply(queue_s=T, rest_s=2 * T, compute_s=T)
    await first
    await until(lambda: bool(desk.sent), within_s=30.0)
    desk.clock.now_s += 20 * T
    await desk.reply(queue_s=3 * T, rest_s=4 * T, compute_s=8 * T)
    await second
    counts = desk.counts()
    prefill = {"wire": 4 * T, "wait": 3 * T, "compute": T}
    decode = {"queue": 8 * T, "wire": 5 * T, "wait": 7 * T, "compute": 8 * T}
    assert seconds_of(counts, Phase.PREFILL) == prefill
    assert seconds_of(counts) == decode
    check_buckets(counts, Phase.PREFILL, prefill)
    check_buckets(counts, Phase.DECODE, decode)
    by_rank = (counts.sub_calls, counts.pairs, counts.last, counts.late_s)
    assert [array.tolist() for array in by_rank] == [[2], [2], [0], [0.0]]
    assert counts.wire_s.tolist() == [9 * T]
    assert counts.wait_s.tolist() == [10 * T]
    assert counts.compute_s.tolist() == [9 * T]
    await desk.core.stop()


@pytest.mark.asyncio
async def test_of_several_sub_calls_the_last_one_counts_and_by_rank_all() -> None:
    desk = Desk().open()
    request = desk.ask(a_request((0, 3, 2)))
    await until(lambda: len(desk.sent) == 2, within_s=30.0)
    desk.clock.now_s += 4 * T
    await desk.reply(rank=2, compute_s=4 * T)
    await until(lambda: len(desk.sent) == 1 and not request.done(), within_s=30.0)
    await asyncio.sleep(0)
    desk.clock.now_s += 6 * T
    await desk.reply(rank=0, queue_s=T, compute_s=2 * T)
    await request
    counts = desk.counts()
    assert seconds_of(counts) == {"wire": 7 * T, "wait": T, "compute": 2 * T}
    assert counts.sub_calls.tolist() == [1, 0, 1]
    assert counts.pairs.tolist() == [2, 0, 1]
    assert counts.last.tolist() == [1, 0, 0]
    assert counts.late_s.tolist() == [6 * T, 0.0, 0.0]
    assert counts.wire_s.tolist() == [7 * T, 0.0, 0.0]
    assert counts.compute_s.tolist() == [2 * T, 0.0, 4 * T]
    await desk.core.stop()


@pytest.mark.asyncio
async def test_what_went_before_a_second_try_is_in_other_and_not_its_fault() -> None:
    desk = Desk(copies=2).open()
    request = desk.ask(a_request((0, 1, 2)))
    await until(lambda: sum(len(call.pair_k) for _, call, _ in desk.sent) == 3, within_s=30.0)
    assert len(desk.sent) > 1
    refused, call, answer = await desk.taken()
    others = len(desk.sent)
    while desk.sent:
        await desk.reply()
        await asyncio.sleep(0)
    desk.clock.now_s += 16 * T
    refused.refuse = True
    answer.set_result(refused.answer(call))
    refused.refuse = False
    await until(lambda: bool(desk.sent), within_s=30.0)
    desk.clock.now_s += 4 * T
    again = await desk.reply(queue_s=T, compute_s=2 * T)
    await request
    counts = desk.counts()
    assert seconds_of(counts) == {"wire": T, "wait": T, "compute": 2 * T, "other": 16 * T}
    check_buckets(counts, Phase.DECODE, seconds_of(counts))
    assert again != refused.rank
    assert counts.sub_calls.sum() == others + 1, "one served nothing"
    assert counts.pairs.sum() == 3
    assert counts.last.tolist() == [int(rank == again) for rank in range(len(counts.last))]
    assert counts.late_s[again] == counts.late_s.sum() == 4 * T, "it was sent no earlier"
    await desk.core.stop()


@pytest.mark.asyncio
async def test_the_first_split_and_that_of_a_second_try_are_splits() -> None:
    desk = Desk(copies=2, step=lambda: T).open()
    request = desk.ask(a_request())
    refused, call, answer = await desk.taken()
    refused.refuse = True
    answer.set_result(refused.answer(call))
    refused.refuse = False
    await desk.reply()
    await request
    assert seconds_of(desk.counts())["split"] == 2 * T, "one look at the clock after another, twice"
    await desk.core.stop()


@pytest.mark.asyncio
async def test_requests_that_fail_count_nowhere() -> None:
    desk = Desk().open(rules=RouterRules(max_attempts=1))
    for end in ("invalid", "refused", "cancelled"):
        request = desk.ask(a_request((0, 1)))
        await until(lambda: len(desk.sent) == 2, within_s=30.0)
        desk.clock.now_s += T
        await desk.reply(rank=0, compute_s=T)
        shard, call, answer = await desk.taken(1)
        if end == "invalid":
            answer.set_exception(InvalidArgument("a shard takes it for malformed"))
        elif end == "refused":
            shard.refuse = True
            answer.set_result(shard.answer(call))
        else:
            request.cancel()
        with pytest.raises((MoeServeError, asyncio.CancelledError)):
            await request
    counts = desk.counts()
    assert not counts.requests.any()
    assert not counts.seconds.any()
    assert len(counts.sub_calls) == 0
    await desk.core.stop()


@pytest.mark.asyncio
async def test_a_request_that_asks_nobody_counts_with_zeros() -> None:
    desk = Desk().open()
    await desk.core.forward(a_request(valid=np.zeros((1, 1), np.uint8)), 5.0)
    counts = desk.counts()
    check_buckets(counts, Phase.DECODE, {})
    assert not counts.seconds.any()
    assert len(counts.sub_calls) == 0
    await desk.core.stop()


@pytest.mark.asyncio
@pytest.mark.parametrize(("experts", "copies"), [((0,), 1), ((0, 1, 2), 1), ((3, 4), 2)])
async def test_stages_add_up_to_what_the_caller_waited(
    experts: tuple[int, ...], copies: int
) -> None:
    """Every look at the clock takes time here, so that no two moments are one."""
    steps = itertools.cycle((3 * T, T, 7 * T, 2 * T))
    desk = Desk(copies=copies, step=lambda: next(steps)).open()

    async def timed() -> float:
        looked = len(desk.clock.looks)
        await desk.core.forward(a_request(experts), 60.0)
        return desk.clock.looks[-1] - desk.clock.looks[looked]

    request = asyncio.create_task(timed())
    while not request.done():
        if desk.sent:
            await desk.reply(queue_s=T / 4, rest_s=T / 4, compute_s=T / 4)
        await asyncio.sleep(0)
    counts = desk.counts()
    assert counts.seconds.sum() == request.result()
    assert all(seconds > 0 for seconds in counts.seconds[Phase.DECODE])
    assert (counts.requests[Phase.DECODE].sum(axis=1) == 1).all()
    assert counts.seconds[Phase.PREFILL].sum() == 0
    await desk.core.stop()


@pytest.mark.asyncio
async def test_the_report_with_stages_travels() -> None:
    desk = Desk().open()
    request = desk.ask(a_request((2,)))
    await until(lambda: bool(desk.sent), within_s=30.0)
    desk.clock.now_s += T
    await desk.reply(compute_s=T)
    await request
    report = desk.core.report(-1)
    arrived = decode_as(encode(report), RouterReport).stages
    assert report.stages is not None
    assert arrived is not None
    for name in StageCounts.__slots__:
        sent, came = getattr(report.stages, name), getattr(arrived, name)
        assert came.dtype == sent.dtype, name
        np.testing.assert_array_equal(came, sent, name)
    await desk.core.stop()


@pytest.mark.asyncio
async def test_only_pairs_that_were_served_count_and_only_until_nothing_is_waited_for() -> None:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    flight = Flight(1, a_request(), 9.0, Stamps(0.0), done)
    flight.answered(sub_call_to(0, 5), reply_of(5, stale=2), 0.0, 1.0, 2.0)
    flight.answered(sub_call_to(2, 1), reply_of(1, stale=1), 0.0, 1.0, 2.5)
    flight.finish()
    flight.answered(sub_call_to(1, 1), reply_of(1), 0.0, 1.0, 3.0)
    assert flight.stamps.answers == numbers(rank=0, pairs=3, sent_s=1.0, came_s=2.0)


# -- the sums themselves -------------------------------------------------------------------------


def numbers(**some: float) -> list[float]:
    """Of one answered sub-call; what is not named is 0."""
    assert set(some) <= set(ANSWER)
    return [some.get(name, 0.0) for name in ANSWER]


def sub_call_to(rank: int, num_pairs: int) -> Dispatch:
    """A dispatch of as many rows of one pair each."""
    rows = np.arange(num_pairs, dtype=np.int32)
    zeros = np.zeros(num_pairs, np.int32)
    part = Part(rank, float(num_pairs), rows, rows, zeros, zeros, zeros, zeros.astype(np.int64))
    return Dispatch(1, 1, 1, 0, Cause.FIRST, 0, 1, 1, 1, 9.0, part)


def reply_of(num_pairs: int, *, stale: int = 0, **seconds: float) -> SubReply:
    told = {"queue_s": 0.0, "rest_s": 0.0, "compute_s": 0.0} | seconds
    statuses = [RowStatus.STALE] * stale + [RowStatus.SERVED] * (num_pairs - stale)
    partial = np.zeros((num_pairs - stale, 4), np.float32)
    return sub_reply(partial, statuses, **told)


def test_a_shard_cannot_have_had_it_longer_than_we_waited() -> None:
    stages = Stages()
    stamps = Stamps(0.0)
    told = {"queue_s": 4 * T, "rest_s": 4 * T, "compute_s": 2 * T}
    stamps.answers += numbers(pairs=1, came_s=5 * T, **told)
    stages.answered(Phase.DECODE, stamps, 5 * T)
    assert seconds_of(stages.counts()) == {"wait": 3 * T, "compute": 2 * T}


def test_a_bound_belongs_to_its_bucket_and_beyond_the_last_is_one_more() -> None:
    stages = Stages()
    for i, queue_s in enumerate((0.0, STAGE_BOUNDS_S[0], STAGE_BOUNDS_S[5], STAGE_BOUNDS_S[-1])):
        stages.answered(i % NUM_PHASES, Stamps(0.0, permit_s=queue_s), queue_s)
    late_s = STAGE_BOUNDS_S[-1] * 1.001
    stages.answered(Phase.PREFILL, Stamps(0.0, permit_s=late_s), late_s)
    queue = stages.counts().requests[:, STAGES.index("queue")].sum(axis=0)
    assert np.flatnonzero(queue).tolist() == [0, 5, 17, 18]
    assert queue[0] == 2


SECONDS = st.floats(0.0, 20.0)


@dataclass(frozen=True)
class Story:
    """A request as it may be: durations of what follows each other, and its answers."""

    queue_s: float
    split_s: float
    gaps: tuple[float, ...]
    answers: tuple[tuple[int, float, float, float, float, float], ...]
    """(rank, split again, on its way, queue, rest, compute)"""
    combine_s: float


stories = st.builds(
    Story,
    SECONDS,
    SECONDS,
    st.tuples(SECONDS, SECONDS, SECONDS),
    st.lists(
        st.tuples(st.integers(0, 5), SECONDS, SECONDS, SECONDS, SECONDS, SECONDS), max_size=3
    ).map(tuple),
    SECONDS,
)


def stamped(story: Story) -> tuple[Stamps, float]:
    """(stamps, end): first tries side by side where they have no split of their own."""
    stamps = Stamps(0.0, permit_s=story.queue_s, split_s=story.split_s)
    now_s = story.queue_s + story.split_s
    for gap_s, (rank, split_s, took_s, queue_s, rest_s, compute_s) in zip(
        story.gaps, story.answers, strict=False
    ):
        sent_s = now_s + gap_s + split_s
        now_s = sent_s + took_s
        when = {"split_s": split_s, "sent_s": sent_s, "came_s": now_s}
        told = {"queue_s": queue_s, "rest_s": rest_s, "compute_s": compute_s}
        stamps.answers += numbers(rank=rank, pairs=2, **when, **told)
    return stamps, now_s + story.combine_s


@given(st.lists(stories, min_size=1, max_size=6), st.sampled_from(Phase))
def test_the_sums_of_the_stages_are_all_the_time_there_was(told: list[Story], phase: Phase) -> None:
    stages = Stages()
    total_s = 0.0
    for story in told:
        stamps, ended_s = stamped(story)
        stages.answered(phase, stamps, ended_s)
        total_s += ended_s
    counts = stages.counts()
    assert (counts.seconds >= 0.0).all()
    assert counts.seconds.sum() == pytest.approx(total_s)
    assert counts.seconds[1 - phase].sum() == 0
    assert (counts.requests[phase].sum(axis=1) == len(told)).all()
    answers = list(itertools.chain(*(story.answers for story in told)))
    assert counts.sub_calls.sum() == len(answers)
    assert counts.pairs.sum() == 2 * len(answers)
    assert counts.last.sum() == sum(len(story.answers) > 1 for story in told)
    by_rank = counts.wire_s.sum() + counts.wait_s.sum() + counts.compute_s.sum()
    assert by_rank == pytest.approx(sum(one[2] for one in answers))
    assert len(counts.sub_calls) == max((one[0] + 1 for one in answers), default=0)


@pytest.mark.parametrize("num", [1, 30, WAITING_MAX // 6 + 1])
@pytest.mark.parametrize("asked", [0, 1, 3])
def test_when_they_are_counted_makes_no_difference(num: int, asked: int) -> None:
    """What waits is counted when there is much of it, and when a report is made."""
    stages = Stages()
    for i in range(num):
        stamps = Stamps(0.0, permit_s=T)
        for rank in range(asked):
            when = {"sent_s": T, "came_s": (2 + rank) * T}
            stamps.answers += numbers(rank=rank, pairs=3, compute_s=T, **when)
        stages.answered(i % NUM_PHASES, stamps, 9 * T)
        if num == 30 and i % 7 == 3:
            stages.counts()
    counts = stages.counts()
    assert counts.seconds.sum() == num * 9 * T
    assert counts.requests.sum() == num * len(STAGES)
    assert counts.pairs.tolist() == [3 * num] * asked
    assert counts.last.sum() == (num if asked > 1 else 0)
    assert not any(stages.counts().requests.sum() != counts.requests.sum() for _ in range(2))
