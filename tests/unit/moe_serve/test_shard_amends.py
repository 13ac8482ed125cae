"""A shard after something went wrong, in part or for a while: what was right stays right, what is
over is forgiven, what was held is given back."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from moe_serve.errors import DeadlineExceeded, InvalidArgument, Unavailable
from moe_serve.ports import RowStatus
from moe_serve.shard.batch_run import COMPUTE_FAILURES_MAX
from moe_serve.shard.copy_reading import CopyReading
from moe_serve.shard.copy_server import CopyServer
from moe_serve.shard.core import PROBES_WITHOUT_MEMORY_MAX
from moe_serve.shard.faults import FaultPoints
from moe_serve.shard.work_queue import QueueLimits, Work, WorkQueue
from moe_serve.wire.token_bucket import TokenBucket
from moe_serve.wire.wire_messages import CopyChunk, CopyOpen, CopyOpened, CopyRead
from placement.messages.effects import CopySource, SetRankSlots
from placement.messages.events import BudgetApplied, SlotReleased, StepFailed
from tests.fakes.marker_experts import add, release
from tests.fakes.sub_calls import sub_call
from tests.unit.moe_serve.test_shard_commands import WHERE, copy, reserve
from tests.unit.moe_serve.test_shard_core import HIDDEN, Answer, Rig

PAGE = 4096
ABSENT = 4711
"""A tag that no fill of these tests has."""


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.stop()


# -- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("alone", [True, False])
def test_rows_that_are_served_beside_refused_ones_keep_their_own_pairs_and_gates(
    rig: Rig, alone: bool
) -> None:
    rng = np.random.default_rng(7)
    sums, calls = [], []
    for number in range(4):
        rows = 6
        x = np.ones((rows, HIDDEN), np.float32)
        stale = set(rng.permutation(rows)[:number].tolist())
        gates = rng.integers(1, 9, (rows, 3))
        pairs = [
            (row, slot, ABSENT if row in stale and slot == 1 else rig.tags[slot], gate, slot)
            for row in range(rows)
            for slot, gate in enumerate(gates[row].tolist())
        ]
        calls.append(sub_call(x, pairs, call_id=number))
        sums.append([gates[row] @ [1, 2, 3] for row in range(rows) if row not in stale])
    if alone:
        answers = [rig.submit(call).get() for call in calls]
    else:
        rig.block()
        rig.submit(rig.call(1, [0], call_id=99))
        assert rig.began.wait(5)
        waiting = [rig.submit(call) for call in calls]
        rig.free.set()
        answers = [one.get() for one in waiting]
    for want, got in zip(sums, answers, strict=True):
        assert np.count_nonzero(got.row_status == RowStatus.SERVED) == len(want)
        assert got.partial[:, 0].tolist() == want


def test_every_row_is_counted_once_by_what_became_of_it(rig: Rig) -> None:
    rig.submit(rig.call(3, [0, 1])).get()
    rig.submit(rig.call(2, [0, 5])).get()
    rig.core.slots.drain()
    rig.submit(rig.call(4, [0])).get()
    counted = rig.core.counters()
    assert [counted[f"rows_{what}"] for what in ("served", "stale", "refused")] == [3, 2, 4]


def test_a_shard_that_drains_takes_no_new_work_and_ends_what_it_has(rig: Rig) -> None:
    rig.block()
    begun = rig.submit(rig.call(1, [0]))
    assert rig.began.wait(5)
    waiting = rig.submit(rig.call(1, [0], call_id=2))
    rig.core.slots.drain()
    refused = rig.submit(rig.call(1, [0], call_id=3)).get()
    assert refused.row_status.tolist() == [RowStatus.REFUSED]
    assert refused.detail == "draining"
    rig.free.set()
    for answer in (begun, waiting):
        assert answer.get().row_status.tolist() == [RowStatus.SERVED]


# -- failures that are over ----------------------------------------------------------------------


def test_failures_that_are_not_in_a_row_never_break_a_shard(rig: Rig) -> None:
    fails = False

    def now_and_then(_pairs: int) -> None:
        if fails:
            raise RuntimeError("device was away")

    rig.backend.on_forward = now_and_then
    for number in range(4 * COMPUTE_FAILURES_MAX):
        fails = number % COMPUTE_FAILURES_MAX != 0
        got = rig.submit(rig.call(1, [0], call_id=number)).get()
        assert isinstance(got, Unavailable) == fails
        assert not rig.core.broken


def test_probes_without_memory_that_are_not_in_a_row_never_fail(rig: Rig) -> None:
    short = FaultPoints(fail=frozenset({"oom-compute"}))
    for number in range(4 * PROBES_WITHOUT_MEMORY_MAX):
        fails = number % PROBES_WITHOUT_MEMORY_MAX != 0
        rig.shard.order_faults(short if fails else FaultPoints())
        assert rig.shard.probe() >= 0.0


def test_a_queue_that_was_emptied_has_all_its_room_again() -> None:
    x = np.ones((2, HIDDEN), np.float32)
    call = sub_call(x, [(0, 0, 1, 1.0, 0)])
    queue = WorkQueue(QueueLimits(bytes_max=3 * x.nbytes))
    for _ in range(5):
        taken = 0
        while queue.has_room(call, x.nbytes):
            queue.put(Work(call, Answer(), 0.0, 1.0, x.nbytes))
            taken += 1
        assert taken == 3
        assert len(queue.drain()) == 3
        assert (queue.rows, queue.pairs, queue.num_bytes, queue.sub_calls) == (0, 0, 0, 0)
        # Whoever comes into an empty queue has room; the next must have it as well.
        queue.put(Work(call, Answer(), 0.0, 1.0, x.nbytes))
        queue.drain()


# -- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [6, 4, 2, 0, 5, 9])
def test_a_budget_that_was_applied_is_that_of_the_memory_too(rig: Rig, slots: int) -> None:
    for slot, tag in rig.tags.items():
        release(rig.shard, slot, tag, expert=slot, layer=int(slot == 3))
    for wanted in (slots, 3, slots):
        command = SetRankSlots(num_slots=wanted, budget_bytes=wanted * PAGE, **WHERE)
        assert isinstance(rig.shard.execute(1, command), BudgetApplied)
        pool, ledger = rig.shard.pool, rig.core.slots.ledger
        assert pool.budget_bytes == ledger.budget_bytes == wanted * PAGE
        assert rig.shard.report(-1).budget_bytes == wanted * PAGE


def test_a_copy_between_own_slots_that_fails_holds_its_source_no_longer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def advance(self: CopyReading, num_bytes: int) -> None:
        if num_bytes:
            raise DeadlineExceeded("too slow")

    monkeypatch.setattr(CopyReading, "advance", advance)
    tag = rig.shard.execute(1, reserve(50, 5, expert=0)).slot_tag  # type: ignore[union-attr]
    source = CopySource(rank=0, slot=0, slot_tag=rig.tags[0])
    failed = rig.shard.execute(1, copy(tag, 50, 5, expert=0, source=source))
    assert isinstance(failed, StepFailed)
    assert not rig.core.slots.ledger.slots[0].pinned
    assert isinstance(release(rig.shard, 0, rig.tags[0], expert=0), SlotReleased)


# -- copies out of it ----------------------------------------------------------------------------


def opened(rig: Rig, server: CopyServer, slot: int) -> int:
    answers: list[Any] = []
    server.open(CopyOpen(1, 1, slot, rig.tags[slot], 0, slot, 60.0), answers.append)
    assert isinstance(answers[0], CopyOpened)
    return int(answers[0].copy_id)


def test_whoever_serves_copies_holds_nothing_once_it_has_stopped(rig: Rig) -> None:
    server = CopyServer(rig.core, rig.shard.pool, TokenBucket(0.0, 1.0))
    server.start()
    for slot in (0, 1, 1):
        opened(rig, server, slot)
    assert [rig.core.slots.ledger.slots[slot].copy_pins for slot in (0, 1)] == [1, 2]
    server.stop()
    server.stop()
    assert not any(slot.pinned for slot in rig.core.slots.ledger.slots)
    assert server.num_open == 0


@pytest.mark.parametrize(
    ("offset", "num_bytes", "good"),
    [(0, 384, True), (383, 1, True), (384, 1, False), (383, 2, False), (1, 384, False)],
)
def test_no_byte_beyond_the_expert_is_given_out(
    rig: Rig, offset: int, num_bytes: int, good: bool
) -> None:
    """Behind an expert lie others: slots share a slab."""
    server = CopyServer(rig.core, rig.shard.pool, TokenBucket(0.0, 1.0))
    server.start()
    answer = Answer()
    try:
        server.read(CopyRead(2, opened(rig, server, 0), offset, num_bytes), answer)
        got = answer.get()
    finally:
        server.stop()
    assert isinstance(got, CopyChunk if good else InvalidArgument)
    assert not good or len(got.data) == num_bytes


def test_what_was_freed_serves_another_expert_under_its_own_key(rig: Rig) -> None:
    """What is executed after a refill counts for the new expert, in reports and in the fence."""
    release(rig.shard, 1, rig.tags[1], expert=1)
    rig.tags[1] = add(rig.shard, 1, 5, step_id=80)
    rig.shard.report(-1)
    before = rig.core.hotness.total_pairs
    x = np.ones((2, HIDDEN), np.float32)
    call = sub_call(x, [(row, 1, rig.tags[1], 1.0, 5) for row in range(2)])
    assert rig.submit(call).get().partial[:, 0].tolist() == [6.0, 6.0]
    assert rig.core.hotness.total_pairs == before + 2
    keys = [report.key.tolist() for report in rig.shard.report(-1).reports]
    assert keys[-1] == [5]
