"""Placement commands: fenced by term, idempotent, within the budget, never freeing what is
pinned."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from moe_serve.errors import DeadlineExceeded, StaleTerm
from moe_serve.ports import RowStatus
from moe_serve.shard.assembly import Shard
from moe_serve.shard.compute.numpy_backend import NumpyBackend
from moe_serve.shard.faults import FaultPoints
from moe_serve.weights.errors import NonFiniteTensor
from placement.messages.effects import (
    AbortAdd,
    CopyExpert,
    CopySource,
    ReserveSlot,
    SetRankSlots,
    VerifyExpert,
)
from placement.messages.events import (
    AddAborted,
    BudgetApplied,
    ExpertCopied,
    ExpertVerified,
    ResidentSlot,
    SlotReleased,
    SlotReserved,
    StepFailed,
)
from tests.fakes.marker_experts import (
    CHECKPOINT,
    MarkerBackend,
    MarkerSource,
    add,
    marker_model,
    marker_shard,
    release,
)
from tests.fakes.sub_calls import sub_call

PAGE = 4096
WHERE = {"rank": 0, "incarnation": 1}


def reserve(step_id: int = 1, slot: int = 0, **changed: Any) -> ReserveSlot:
    values = {"layer": 0, "expert": 2, "weights_version": "v1", **WHERE} | changed
    return ReserveSlot(step_id=step_id, slot=slot, **values)


def copy(tag: int, step_id: int = 1, slot: int = 0, **changed: Any) -> CopyExpert:
    values = {"layer": 0, "expert": 2, "source": CHECKPOINT, "timeout_s": 5.0, **WHERE} | changed
    return CopyExpert(step_id=step_id, slot=slot, slot_tag=tag, **values)


def verify(tag: int, step_id: int = 1, slot: int = 0) -> VerifyExpert:
    return VerifyExpert(step_id=step_id, slot=slot, slot_tag=tag, **WHERE)


def abort(tag: int, step_id: int = 1, slot: int = 0) -> AbortAdd:
    return AbortAdd(step_id=step_id, slot=slot, slot_tag=tag, **WHERE)


class Made:
    """Builds shards and stops them."""

    def __init__(self) -> None:
        self.shards: list[Shard] = []

    def __call__(self, **settings: Any) -> Shard:
        shard = marker_shard(**settings)
        shard.core.start()
        self.shards.append(shard)
        return shard


@pytest.fixture
def make() -> Iterator[Made]:
    made = Made()
    yield made
    for shard in made.shards:
        shard.stop()


def assert_set(event: threading.Event) -> None:
    assert event.wait(5)


def in_thread(work: Any) -> tuple[threading.Thread, list[Any]]:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(work()), daemon=True)
    thread.start()
    return thread, answers


def test_an_add_goes_from_reserved_to_verified_and_only_then_is_served(make: Made) -> None:
    shard = make()
    reserved = shard.execute(1, reserve())
    assert isinstance(reserved, SlotReserved)
    tag = reserved.slot_tag
    assert (reserved.step_id, tag) == (1, 1)
    assert shard.report(-1).reserved_bytes == PAGE
    copied = shard.execute(1, copy(tag))
    assert isinstance(copied, ExpertCopied)
    assert copied.copy_bytes == 384
    assert status(shard, tag) == RowStatus.STALE, "copied is not verified"
    assert isinstance(shard.execute(1, verify(tag)), ExpertVerified)
    assert status(shard, tag) == RowStatus.SERVED
    report = shard.report(-1)
    assert (report.resident_bytes, report.reserved_bytes) == (PAGE, 0)
    assert shard.core.slots.ledger.resident() == (
        ResidentSlot(slot=0, tag=1, layer=0, expert=2, verified=True),
    )


def status(shard: Shard, tag: int, slot: int = 0, expert: int = 2) -> int:
    done = threading.Event()
    answers: list[Any] = []

    def reply(answer: Any) -> None:
        answers.append(answer)
        done.set()

    x = np.ones((1, 8), np.float32)
    shard.core.submit(sub_call(x, [(0, slot, tag, 1.0, expert)]), x.nbytes, reply)
    assert done.wait(5)
    return int(answers[0].row_status[0])


def test_every_command_twice_has_one_effect_and_the_same_answer(make: Made) -> None:
    model = marker_model()
    source = MarkerSource(model)
    shard = make(model=model, source=source)
    tag = add(shard, 0, 2, step_id=1)
    assert shard.execute(1, reserve()).slot_tag == tag  # type: ignore[union-attr]
    assert isinstance(shard.execute(1, copy(tag)), ExpertCopied)
    assert isinstance(shard.execute(1, verify(tag)), ExpertVerified)
    assert source.reads == 1
    assert isinstance(release(shard, 0, tag, expert=2), SlotReleased)
    assert isinstance(release(shard, 0, tag, expert=2), SlotReleased)
    assert shard.pool.resident_bytes == 0
    second = add(shard, 0, 3, step_id=2)
    assert second == tag + 1, "tags are never used again"
    assert isinstance(release(shard, 0, tag, expert=2), SlotReleased)
    assert status(shard, second, expert=3) == RowStatus.SERVED, "a late release frees no other fill"
    assert isinstance(shard.execute(1, abort(tag)), AddAborted)
    assert status(shard, second, expert=3) == RowStatus.SERVED


def test_a_second_copy_of_a_fill_waits_for_the_first(make: Made) -> None:
    model = marker_model()
    free = threading.Event()
    source = MarkerSource(model, lambda _layer, _expert: assert_set(free))
    shard = make(model=model, source=source)
    tag = shard.execute(1, reserve()).slot_tag  # type: ignore[union-attr]
    first = in_thread(lambda: shard.execute(1, copy(tag)))
    second = in_thread(lambda: shard.execute(1, copy(tag)))
    free.set()
    for thread, answers in (first, second):
        thread.join(5)
        assert isinstance(answers[0], ExpertCopied)
    assert source.reads == 1


def test_a_lower_term_is_refused_without_effect(make: Made) -> None:
    shard = make()
    shard.execute(5, reserve())
    for command in (reserve(2, 1), copy(1), verify(1), abort(1), abort(-1)):
        with pytest.raises(StaleTerm) as caught:
            shard.execute(4, command)
        assert caught.value.term == 5
    with pytest.raises(StaleTerm):
        release(shard, 0, 1, term=4)
    with pytest.raises(StaleTerm):
        shard.execute(4, SetRankSlots(num_slots=1, budget_bytes=PAGE, **WHERE))
    assert shard.pool.held_slots == (0,)
    assert shard.report(-1).highest_term == 5


def test_what_waited_while_a_higher_term_took_stock_changes_nothing(make: Made) -> None:
    began, free = threading.Event(), threading.Event()

    def probe(_pairs: int) -> None:
        began.set()
        free.wait(5)

    model = marker_model()
    shard = make(model=model, backend=MarkerBackend(model.expert, probe))
    tag = shard.execute(1, reserve()).slot_tag  # type: ignore[union-attr]
    shard.execute(1, copy(tag))
    verifying = in_thread(lambda: shard.execute(1, verify(tag)))
    assert_set(began)
    refused: list[StaleTerm] = []

    def give_back() -> None:
        try:
            shard.execute(1, abort(tag))
        except StaleTerm as error:
            refused.append(error)

    aborting = threading.Thread(target=give_back, daemon=True)
    aborting.start()
    time.sleep(0.05)  # until it waits for the proof
    told = shard.core.slots.inventory(2)
    free.set()
    verifying[0].join(5)
    aborting.join(5)
    assert [error.term for error in refused] == [2]
    assert [(held.slot, held.tag) for held in told] == [(0, tag)]
    assert shard.pool.holds(0)


def test_commands_for_another_incarnation_are_refused(make: Made) -> None:
    shard = make()
    answer = shard.execute(1, reserve(incarnation=2))
    assert isinstance(answer, StepFailed)
    assert answer.code == "io"
    assert shard.pool.held_slots == ()


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"slot": 6}, "over_budget"),
        ({"slot": -1}, "over_budget"),
        ({"layer": 2}, "no_slot"),
        ({"expert": 8}, "no_slot"),
        ({"expert": -1}, "no_slot"),
        ({"weights_version": "v2"}, "io"),
    ],
)
def test_what_cannot_be_reserved_is_refused(make: Made, changed: dict[str, Any], code: str) -> None:
    shard = make()
    values = {"slot": 0} | changed
    answer = shard.execute(1, reserve(1, **values))
    assert isinstance(answer, StepFailed)
    assert answer.code == code
    assert shard.pool.resident_bytes == 0


def test_a_taken_slot_is_refused_to_another_step(make: Made) -> None:
    shard = make()
    shard.execute(1, reserve(1))
    answer = shard.execute(1, reserve(2))
    assert isinstance(answer, StepFailed)
    assert answer.code == "no_slot"


def test_the_budget_is_never_exceeded(make: Made) -> None:
    shard = make(budget_bytes=2 * PAGE + PAGE // 2)
    for slot in range(2):
        add(shard, slot, slot, step_id=slot)
    answer = shard.execute(1, reserve(9, 2))
    assert isinstance(answer, StepFailed)
    assert answer.code == "over_budget"
    report = shard.report(-1)
    assert report.resident_bytes + report.reserved_bytes <= report.budget_bytes
    assert shard.pool.held_slots == (0, 1)
    release(shard, 0, 1)
    assert isinstance(shard.execute(1, reserve(9, 2)), SlotReserved)


def test_bytes_count_before_the_first_one_is_copied(make: Made) -> None:
    shard = make(budget_bytes=PAGE)
    assert isinstance(shard.execute(1, reserve(1, 0)), SlotReserved)
    answer = shard.execute(1, reserve(2, 1))
    assert isinstance(answer, StepFailed)
    assert answer.code == "over_budget"


def test_a_release_waits_for_the_pins_of_a_batch(make: Made) -> None:
    model = marker_model()
    began, free = threading.Event(), threading.Event()
    backend = MarkerBackend(model.expert)
    shard = make(model=model, backend=backend)
    tag = add(shard, 0, 2)

    def block(_pairs: int) -> None:
        began.set()
        free.wait(5)

    backend.on_forward = block
    running = in_thread(lambda: status(shard, tag))
    assert began.wait(5)
    releasing = in_thread(lambda: release(shard, 0, tag, expert=2))
    time.sleep(0.05)
    assert releasing[1] == [], "the slot is pinned"
    assert shard.pool.holds(0)
    free.set()
    releasing[0].join(5)
    running[0].join(5)
    assert isinstance(releasing[1][0], SlotReleased)
    assert running[1] == [RowStatus.SERVED], "what was begun is served"
    assert not shard.pool.holds(0)


@pytest.mark.parametrize("then", ["again", "recalled"])
def test_a_release_that_waits_too_long_fails_and_is_sent_again_or_recalled(
    make: Made, then: str
) -> None:
    shard = make()
    shard._commands._pin_wait_s = 0.05
    tag = add(shard, 0, 2)
    pinned = np.array([0], np.int32)
    with shard.core.lock:
        shard.core.slots.ledger.pin(pinned)
    answer = release(shard, 0, tag, expert=2)
    assert isinstance(answer, StepFailed)
    assert answer.code == "timeout"
    assert status(shard, tag) == RowStatus.STALE, "what leaves gets no new pins"
    assert shard.pool.holds(0)
    if then == "recalled":
        recall = VerifyExpert(step_id=5000, slot=0, slot_tag=tag, **WHERE)
        assert isinstance(shard.execute(1, recall), ExpertVerified)
        assert status(shard, tag) == RowStatus.SERVED
        shard.core.unpin(pinned)
        assert status(shard, tag) == RowStatus.SERVED
    else:
        shard.core.unpin(pinned)
        assert not shard.pool.holds(0), "freed with the last pin"
        assert isinstance(release(shard, 0, tag, expert=2), SlotReleased)


@pytest.mark.parametrize("named_by", ["tag", "step"])
def test_an_abort_frees_in_every_state(make: Made, named_by: str) -> None:
    shard = make()
    for step, reached in enumerate(("reserved", "copied", "verified"), start=1):
        tag = shard.execute(1, reserve(step)).slot_tag  # type: ignore[union-attr]
        if reached != "reserved":
            shard.execute(1, copy(tag, step))
        if reached == "verified":
            shard.execute(1, verify(tag, step))
        command = abort(tag if named_by == "tag" else -1, step)
        assert isinstance(shard.execute(1, command), AddAborted)
        assert shard.pool.resident_bytes == 0, reached
        assert shard.report(-1).reserved_bytes == 0
        assert isinstance(shard.execute(1, command), AddAborted)
        late = shard.execute(1, reserve(step))
        assert isinstance(late, StepFailed), "a reservation that comes after its abort"


def test_an_abort_stops_a_running_copy(make: Made) -> None:
    shard = make(faults=FaultPoints(delay_copy_s=30.0))
    tag = shard.execute(1, reserve()).slot_tag  # type: ignore[union-attr]
    copying = in_thread(lambda: shard.execute(1, copy(tag, timeout_s=60.0)))
    time.sleep(0.05)
    assert isinstance(shard.execute(1, abort(tag)), AddAborted)
    copying[0].join(5)
    assert isinstance(copying[1][0], StepFailed)
    assert shard.pool.resident_bytes == 0


def test_a_copy_that_gets_no_thread_fails_and_its_slot_comes_back(
    make: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = make()
    tag = shard.execute(1, reserve()).slot_tag  # type: ignore[union-attr]

    def none(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none)
        answer = shard.execute(1, copy(tag))
    assert isinstance(answer, StepFailed)
    assert answer.code == "io"
    assert shard.report(-1).copies == ()
    assert isinstance(shard.execute(1, abort(tag)), AddAborted)
    assert shard.pool.resident_bytes == 0


def test_a_slot_is_not_freed_under_a_copy_that_writes_and_does_not_stop(make: Made) -> None:
    model = marker_model()
    began, free = threading.Event(), threading.Event()

    def write() -> None:
        began.set()
        free.wait(5)

    shard = make(model=model, source=MarkerSource(model, on_write=write))
    shard._commands._pin_wait_s = 0.05
    tag = shard.execute(1, reserve()).slot_tag  # type: ignore[union-attr]
    copying = in_thread(lambda: shard.execute(1, copy(tag)))
    assert began.wait(5)
    answer = shard.execute(1, abort(tag))
    assert isinstance(answer, StepFailed)
    assert answer.code == "timeout"
    assert shard.pool.holds(0)
    free.set()
    copying[0].join(5)
    assert isinstance(copying[1][0], StepFailed)
    assert isinstance(shard.execute(1, abort(tag)), AddAborted)
    assert not shard.pool.holds(0)


@pytest.mark.parametrize("end", ["abort", "release"])
def test_a_slot_is_not_freed_while_it_is_being_verified(make: Made, end: str) -> None:
    model = marker_model()
    began, free = threading.Event(), threading.Event()
    backend = MarkerBackend(model.expert)
    shard = make(model=model, backend=backend)
    tag = shard.execute(1, reserve()).slot_tag  # type: ignore[union-attr]
    shard.execute(1, copy(tag))

    def block(_pairs: int) -> None:
        began.set()
        assert_set(free)

    backend.on_forward = block
    verifying = in_thread(lambda: shard.execute(1, verify(tag)))
    assert began.wait(5)
    ending = in_thread(
        lambda: shard.execute(1, abort(tag)) if end == "abort" else release(shard, 0, tag, expert=2)
    )
    time.sleep(0.05)
    assert ending[1] == []
    assert shard.pool.holds(0)
    free.set()
    for thread, _answers in (verifying, ending):
        thread.join(5)
    assert isinstance(verifying[1][0], ExpertVerified)
    assert isinstance(ending[1][0], AddAborted if end == "abort" else SlotReleased)
    assert backend.buffers == {}, "the backend has let go of the bytes"
    assert not shard.pool.holds(0)


def test_damaged_bytes_are_never_verified(make: Made) -> None:
    shard = make(faults=FaultPoints(fail=frozenset({"corrupt"})))
    tag = shard.execute(1, reserve()).slot_tag  # type: ignore[union-attr]
    assert isinstance(shard.execute(1, copy(tag)), ExpertCopied)
    answer = shard.execute(1, verify(tag))
    assert isinstance(answer, StepFailed)
    assert answer.code == "digest"
    assert "expert 2" in answer.detail
    assert status(shard, tag) == RowStatus.STALE


def test_a_copy_of_another_expert_is_never_verified(make: Made) -> None:
    shard = make()
    tag = shard.execute(1, reserve()).slot_tag  # type: ignore[union-attr]
    shard.execute(1, copy(tag, expert=5))
    assert shard.execute(1, verify(tag)).code == "digest"  # type: ignore[union-attr]


def test_verify_before_copy_is_refused(make: Made) -> None:
    shard = make()
    tag = shard.execute(1, reserve()).slot_tag  # type: ignore[union-attr]
    assert shard.execute(1, verify(tag)).code == "no_slot"  # type: ignore[union-attr]
    assert shard.execute(1, copy(tag + 1)).code == "no_slot"  # type: ignore[union-attr]
    assert shard.execute(1, verify(tag, slot=77)).code == "no_slot"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NonFiniteTensor("tensor x"), "digest"),
        (OSError(5, "Input/output error"), "io"),
        (MemoryError(), "over_budget"),
    ],
)
def test_a_source_that_fails_is_named(make: Made, error: Exception, code: str) -> None:
    model = marker_model()

    def fail(_layer: int, _expert: int) -> None:
        raise error

    shard = make(model=model, source=MarkerSource(model, fail))
    tag = shard.execute(1, reserve()).slot_tag  # type: ignore[union-attr]
    answer = shard.execute(1, copy(tag))
    assert isinstance(answer, StepFailed)
    assert answer.code == code
    assert isinstance(shard.execute(1, abort(tag)), AddAborted)
    assert shard.pool.resident_bytes == 0


def test_a_copy_past_its_deadline_fails(make: Made) -> None:
    model = marker_model()
    shard = make(model=model, source=MarkerSource(model, lambda _a, _b: time.sleep(0.1)))
    tag = shard.execute(1, reserve()).slot_tag  # type: ignore[union-attr]
    answer = shard.execute(1, copy(tag, timeout_s=0.05))
    assert isinstance(answer, StepFailed)
    assert answer.code == "timeout"


def test_a_copy_from_an_own_slot_is_made_in_memory(make: Made) -> None:
    model = marker_model()
    source = MarkerSource(model)
    shard = make(model=model, source=source)
    tag = add(shard, 0, 2)
    second = add(shard, 1, 2, source=CopySource(rank=0, slot=0, slot_tag=tag))
    assert source.reads == 1
    assert status(shard, second, slot=1) == RowStatus.SERVED
    third = shard.execute(1, reserve(7, 2)).slot_tag  # type: ignore[union-attr]
    stale = CopySource(rank=0, slot=0, slot_tag=tag + 40)
    answer = shard.execute(1, copy(third, 7, 2, source=stale))
    assert isinstance(answer, StepFailed)
    assert answer.code == "source_lost"


@pytest.mark.parametrize("point", ["reserve", "copy", "verify", "release"])
def test_fault_points_answer_io(make: Made, point: str) -> None:
    shard = make(faults=FaultPoints(fail=frozenset({point})))
    answers = [shard.execute(1, reserve())]
    answers += [shard.execute(1, copy(1)), shard.execute(1, verify(1)), release(shard, 0, 1)]
    failed = [a for a in answers if isinstance(a, StepFailed) and a.code == "io"]
    assert len(failed) == 1
    with pytest.raises(ValueError, match="none of"):
        FaultPoints(fail=frozenset({"nonsense"}))


def test_slots_and_budget_change_together_or_not_at_all(make: Made) -> None:
    shard = make(budget_bytes=6 * PAGE)
    for slot in (0, 4):
        add(shard, slot, slot)
    for slots, budget, code in ((3, 6 * PAGE, "no_slot"), (6, PAGE, "over_budget")):
        refused = shard.execute(1, SetRankSlots(num_slots=slots, budget_bytes=budget, **WHERE))
        assert isinstance(refused, StepFailed)
        assert refused.code == code
        assert (shard.core.slots.ledger.num_slots, shard.pool.budget_bytes) == (6, 6 * PAGE)
    assert shard.core.slots.ledger.holder(4)[:2] == (0, 4)
    release(shard, 4, shard.core.slots.ledger.holder(4)[2], expert=4)
    smaller = SetRankSlots(num_slots=2, budget_bytes=2 * PAGE, **WHERE)
    answer = shard.execute(1, smaller)
    assert isinstance(answer, BudgetApplied)
    assert answer.num_slots == 2
    assert shard.execute(1, reserve(9, 2)).code == "over_budget"  # type: ignore[union-attr]
    shard.execute(1, SetRankSlots(num_slots=9, budget_bytes=9 * PAGE, **WHERE))
    tag = add(shard, 8, 2, step_id=10)
    assert status(shard, tag, slot=8) == RowStatus.SERVED


def test_a_proof_whose_row_hangs_ends_and_its_slot_stays_until_the_row_does(make: Made) -> None:
    backend = MarkerBackend(marker_model().expert)
    shard = make(backend=backend)
    shard._commands._row_wait_s = shard._commands._pin_wait_s = 0.05
    tag = shard.execute(1, reserve()).slot_tag  # type: ignore[union-attr]
    shard.execute(1, copy(tag))
    began, free = threading.Event(), threading.Event()

    def hang(_pairs: int) -> None:
        began.set()
        free.wait(10)

    backend.on_forward = hang
    with pytest.raises(DeadlineExceeded, match="probe row"):
        shard.execute(1, verify(tag))
    assert began.is_set()
    again = shard.execute(1, verify(tag))
    assert isinstance(again, StepFailed)
    assert again.code == "timeout"
    held = shard.execute(1, abort(tag))
    assert isinstance(held, StepFailed)
    assert shard.report(-1).resident_bytes + shard.report(-1).reserved_bytes == PAGE
    free.set()
    end_s = time.monotonic() + 5
    while not isinstance(shard.execute(1, abort(tag)), AddAborted):
        assert time.monotonic() < end_s
    assert shard.report(-1).resident_bytes + shard.report(-1).reserved_bytes == 0


def test_a_proof_whose_row_never_begins_takes_it_back(make: Made) -> None:
    backend = MarkerBackend(marker_model().expert)
    shard = make(backend=backend)
    shard._commands._row_wait_s = shard._commands._pin_wait_s = 0.05
    tag = shard.execute(1, reserve()).slot_tag  # type: ignore[union-attr]
    shard.execute(1, copy(tag))
    began, free = threading.Event(), threading.Event()

    def hang() -> None:
        began.set()
        free.wait(10)

    shard.core.on_compute_thread(hang)
    assert_set(began)
    with pytest.raises(DeadlineExceeded):
        shard.execute(1, verify(tag))
    assert isinstance(shard.execute(1, abort(tag)), AddAborted), "nobody will read the slot"
    free.set()
    assert shard.core.probe().result(5) >= 0.0
    assert backend.forwards == [0], "only the probe's"


def test_the_probe_row_catches_a_backend_that_computes_something_else(make: Made) -> None:
    """Right bytes in a wrong layout pass the digest and fail the probe row."""
    model = marker_model()

    class Transposed(NumpyBackend):
        def forward(self, *arguments: Any) -> Any:
            work = super().forward(*arguments)
            arguments[4][:] *= 1.5
            return work

    class Source(MarkerSource):
        def canonical(self, layer: int, expert: int) -> Any:
            drawn = np.random.default_rng(expert).normal(size=model.expert.elements)
            return drawn.astype(np.float32).view(np.uint8)

    for backend, kind in ((NumpyBackend, ExpertVerified), (Transposed, StepFailed)):
        shard = make(model=model, source=Source(model), backend=backend(model.expert))
        tag = shard.execute(1, reserve()).slot_tag  # type: ignore[union-attr]
        shard.execute(1, copy(tag))
        answer = shard.execute(1, verify(tag))
        assert isinstance(answer, kind), answer
