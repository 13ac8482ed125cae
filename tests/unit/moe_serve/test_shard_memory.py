"""Memory of a shard under pressure: out of memory hurts no request and no placement, budgets change
while serving, what is freed is really free and never seen again."""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from moe_serve.errors import ResourceExhausted
from moe_serve.ports import RowStatus
from moe_serve.shard import pages
from moe_serve.shard.assembly import Shard
from moe_serve.shard.batch_run import COMPUTE_FAILURES_MAX
from moe_serve.shard.compute import torch_backend as torch_backend_module
from moe_serve.shard.compute.base import ComputeBackend, ExpertSpec
from moe_serve.shard.compute.device_slabs import DeviceSlabs
from moe_serve.shard.compute.numpy_backend import NumpyBackend
from moe_serve.shard.compute.torch_backend import TorchBackend
from moe_serve.shard.compute.torch_memory import memory_errors
from moe_serve.shard.core import PROBES_WITHOUT_MEMORY_MAX
from moe_serve.shard.faults import FaultPoints
from moe_serve.shard.pages import PAGE_BYTES, Pages, process_resident_bytes
from moe_serve.shard.served_model import ServedModel
from moe_serve.shard.slot_pool import SlotPool
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

WHERE: dict[str, Any] = {"rank": 0, "incarnation": 1}
MIB = 1 << 20


class DrawnSource(MarkerSource):
    """Experts of drawn weights, small enough that nothing overflows in 16 bits."""

    def canonical(self, layer: int, expert: int) -> Any:
        spec = self._model.expert
        drawn = np.random.default_rng(100 * layer + expert).normal(size=spec.elements) * 0.1
        if spec.dtype == "float32":
            return drawn.astype(np.float32).view(np.uint8)
        return torch.from_numpy(drawn).to(torch.bfloat16).view(torch.uint8).numpy()


class Rig:
    """A shard that computes, without a wire."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.tags: dict[int, int] = {}
        self.experts: dict[int, int] = {}
        shard.core.start()

    def add(self, slot: int, expert: int, **where: Any) -> int:
        self.experts[slot] = expert
        self.tags[slot] = add(self.shard, slot, expert, **where)
        return self.tags[slot]

    def reserve(self, slot: int, expert: int, step_id: int = 1) -> Any:
        command = ReserveSlot(
            step_id=step_id, slot=slot, layer=0, expert=expert, weights_version="v1", **WHERE
        )
        return self.shard.execute(1, command)

    def copy(self, slot: int, tag: int, expert: int, step_id: int = 1, **changed: Any) -> Any:
        fields: dict[str, Any] = {"source": CHECKPOINT, "timeout_s": 5.0, "layer": 0} | changed
        command = CopyExpert(
            step_id=step_id, slot=slot, slot_tag=tag, expert=expert, **fields, **WHERE
        )
        return self.shard.execute(1, command)

    def verify(self, slot: int, tag: int, step_id: int = 1) -> Any:
        return self.shard.execute(
            1, VerifyExpert(step_id=step_id, slot=slot, slot_tag=tag, **WHERE)
        )

    def abort(self, slot: int, tag: int, step_id: int = 1) -> Any:
        return self.shard.execute(1, AbortAdd(step_id=step_id, slot=slot, slot_tag=tag, **WHERE))

    def set_slots(self, num_slots: int) -> Any:
        budget = num_slots * self.shard.pool.slot_bytes
        return self.shard.execute(
            1, SetRankSlots(num_slots=num_slots, budget_bytes=budget, **WHERE)
        )

    def begin(self, x: Any, slots: list[int], **fields: Any) -> Callable[[], Any]:
        """Submit rows, each with a pair in each slot; a function that gives the answer."""
        done = threading.Event()
        answers: list[Any] = []

        def reply(answer: Any) -> None:
            answers.append(answer)
            done.set()

        pairs = [(r, s, self.tags[s], 0.5, self.experts[s]) for r in range(len(x)) for s in slots]
        self.shard.core.submit(sub_call(x, pairs, **fields), x.nbytes, reply)

        def get() -> Any:
            assert done.wait(10), "no answer"
            return answers[0]

        return get

    def call(self, x: Any, slots: list[int], **fields: Any) -> Any:
        return self.begin(x, slots, **fields)()


@pytest.fixture
def make() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def made(**settings: Any) -> Rig:
        rigs.append(Rig(marker_shard(**settings)))
        return rigs[-1]

    yield made
    for rig in rigs:
        rig.shard.stop()


def ones(rows: int, hidden: int = 8) -> Any:
    return np.ones((rows, hidden), np.float32)


def until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, "condition never held"
        time.sleep(0.002)


# ---------------------------------------------------------------------------------- out of memory


def test_no_memory_at_reserved_takes_nothing_and_the_step_may_be_asked_again(make: Any) -> None:
    rig = make(faults=FaultPoints(fail=frozenset({"oom-reserve"}), oom_times=1))
    failed = rig.reserve(0, 2)
    assert isinstance(failed, StepFailed)
    assert failed.code == "over_budget"
    assert "no memory for a slot of 4096 bytes" in failed.detail
    report = rig.shard.report(-1)
    assert (report.resident_bytes, report.reserved_bytes) == (0, 0)
    assert rig.shard.pool.held_slots == ()
    again = rig.reserve(0, 2)
    assert isinstance(again, SlotReserved)
    assert isinstance(rig.copy(0, again.slot_tag, 2), ExpertCopied)
    assert isinstance(rig.verify(0, again.slot_tag), ExpertVerified)


def test_a_system_that_maps_no_more_is_out_of_memory_not_broken(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make()

    def full(*_arguments: Any, **_named: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(pages.mmap, "mmap", full)
    with pytest.raises(MemoryError, match="maps no"):
        Pages(4096)
    failed = rig.reserve(0, 2)
    assert isinstance(failed, StepFailed)
    assert failed.code == "over_budget"
    monkeypatch.undo()
    assert isinstance(rig.reserve(0, 2), SlotReserved)


@pytest.mark.parametrize("refused_by", ["role", "budget"])
def test_a_reservation_that_is_refused_holds_no_memory(make: Any, refused_by: str) -> None:
    rig = make(budget_bytes=2 * PAGE_BYTES)
    rig.add(0, 0)
    rig.add(1, 1)
    if refused_by == "role":
        release(rig.shard, 1, rig.tags[1], expert=1)
        rig.abort(2, -1, step_id=77)  # comes before its reservation
        failed = rig.reserve(2, 2, step_id=77)
        assert failed.code == "no_slot"
    else:
        failed = rig.reserve(2, 2)
        assert failed.code == "over_budget"
        assert "4096 bytes of the rank's budget missing" in failed.detail
    assert rig.shard.pool.resident_bytes == rig.shard.report(-1).resident_bytes
    assert not rig.shard.pool.holds(2)


@pytest.mark.parametrize("point", ["oom-copy", "oom-verify"])
def test_no_memory_in_a_copy_or_its_proof_aborts_the_step_and_hurts_no_request(
    make: Any, point: str
) -> None:
    rig = make()
    rig.add(0, 0)
    rig.shard.order_faults(FaultPoints(fail=frozenset({point})))
    answers: list[Any] = []
    stop = threading.Event()

    def traffic() -> None:
        while not stop.is_set():
            answers.append(rig.call(ones(2), [0]))

    thread = threading.Thread(target=traffic, daemon=True)
    thread.start()
    tag = rig.reserve(1, 3).slot_tag
    failed = rig.copy(1, tag, 3)
    if point == "oom-verify":
        assert isinstance(failed, ExpertCopied)
        failed = rig.verify(1, tag)
    assert isinstance(failed, StepFailed)
    assert failed.code == "over_budget"
    assert "no memory" in failed.detail
    assert isinstance(rig.abort(1, tag), AddAborted)
    stop.set()
    thread.join(5)
    assert rig.shard.pool.held_slots == (0,)
    rig.shard.order_faults(FaultPoints())
    rig.add(1, 3, step_id=9)
    assert rig.call(ones(1), [1]).row_status.tolist() == [RowStatus.SERVED]
    assert len(answers) > 0
    assert all(answer.row_status.tolist() == [RowStatus.SERVED] * 2 for answer in answers)
    assert rig.shard.probe() >= 0.0


def test_no_memory_in_compute_splits_the_batch_and_breaks_nothing(make: Any) -> None:
    backend = MarkerBackend(marker_model().expert)
    rig = make(backend=backend)
    rig.add(0, 0)
    began, free = threading.Event(), threading.Event()

    def hold(_pairs: int) -> None:
        began.set()
        free.wait(5)

    backend.on_forward = hold
    first = rig.begin(ones(1), [0])
    assert began.wait(5)
    waiting = [rig.begin(ones(n), [0], call_id=n) for n in (1, 2, 3, 4)]

    def scarce(pairs: int) -> None:
        if pairs > 3:
            raise MemoryError

    backend.on_forward = scarce
    backend.forwards.clear()
    free.set()
    first()
    answers = [get() for get in waiting]
    assert [len(a.partial) for a in answers[:3]] == [1, 2, 3]
    assert isinstance(answers[3], ResourceExhausted)
    assert "no memory for 4 rows" in answers[3].message
    assert backend.forwards == [10, 3, 7, 3, 4], "halves, down to what fits"
    for _ in range(COMPUTE_FAILURES_MAX + 1):
        assert isinstance(rig.call(ones(4), [0]), ResourceExhausted)
    assert not rig.shard.core.broken
    assert rig.call(ones(1), [0]).row_status.tolist() == [RowStatus.SERVED]
    assert rig.shard.core.hotness.total_pairs == 1 + 1 + 2 + 3 + 1, "what failed is not counted"


def test_no_memory_while_a_batch_is_admitted_is_answered_and_pins_nothing(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make()
    rig.add(0, 0)

    def short(*_arguments: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(rig.shard.core, "_admit", short)
    assert isinstance(rig.call(ones(2), [0]), ResourceExhausted)
    monkeypatch.undo()
    assert rig.call(ones(2), [0]).row_status.tolist() == [RowStatus.SERVED] * 2
    assert rig.shard.core.slots.ledger.slots[0].batch_pins == 0
    assert isinstance(release(rig.shard, 0, rig.tags[0]), SlotReleased)


def test_a_probe_without_memory_is_alive_until_that_lasts(make: Any) -> None:
    rig = make()
    rig.add(0, 0)
    rig.shard.order_faults(FaultPoints(fail=frozenset({"oom-compute"})))
    for _ in range(PROBES_WITHOUT_MEMORY_MAX - 1):
        assert rig.shard.probe() >= 0.0
    with pytest.raises(ResourceExhausted, match="no memory for one row"):
        rig.shard.probe()
    rig.shard.order_faults(FaultPoints())
    assert rig.shard.probe() >= 0.0
    assert rig.shard.core.counters()["memory_errors"] == PROBES_WITHOUT_MEMORY_MAX


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"
        ),
        RuntimeError("CUDA error: out of memory"),
    ],
)
def test_every_way_of_torch_to_say_out_of_memory_is_one(error: RuntimeError) -> None:
    with pytest.raises(MemoryError), memory_errors():
        raise error


def test_a_device_that_fails_is_not_out_of_memory() -> None:
    with pytest.raises(RuntimeError, match="illegal"), memory_errors():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_out_of_memory_of_torch_never_breaks_a_shard(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device says so in a forward, and then while a slot is loaded: nothing of it is left."""
    model = marker_model()
    backend = TorchBackend(model.expert)
    rig = make(model=model, source=DrawnSource(model), backend=backend)
    rig.add(0, 0)
    want = rig.call(ones(3), [0]).partial.copy()

    def full(*_arguments: Any, **_named: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch_backend_module, "loop_parts", full)
    for _ in range(COMPUTE_FAILURES_MAX + 1):
        assert isinstance(rig.call(ones(3), [0]), ResourceExhausted)
    monkeypatch.undo()
    before = backend.loaded_bytes
    for where in ("_fill", "_new_slab"):
        monkeypatch.setattr(DeviceSlabs, where, full)
        tag = rig.reserve(1, 3, step_id=len(where)).slot_tag
        failed = rig.copy(1, tag, 3, step_id=len(where))
        assert isinstance(failed, StepFailed)
        assert failed.code == "over_budget"
        assert backend.loaded_bytes == before, "a slab without its bytes was given back"
        monkeypatch.undo()
        assert isinstance(rig.abort(1, tag, step_id=len(where)), AddAborted)
    rig.add(1, 3, step_id=99)
    assert not rig.shard.core.broken
    np.testing.assert_array_equal(rig.call(ones(3), [0]).partial, want)


# ---------------------------------------------------------------------- copies that do not go on


def test_a_copy_that_stands_still_shows_it_and_is_aborted_with_its_bytes(make: Any) -> None:
    rig = make(faults=FaultPoints(stop_copy_at=0.5))
    tag = rig.reserve(0, 2).slot_tag
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.append(rig.copy(0, tag, 2, timeout_s=60.0)), daemon=True
    )
    thread.start()
    until(lambda: bool(rig.shard.report(-1).copies) and _done(rig) > 0)
    (first,) = rig.shard.report(-1).copies
    time.sleep(0.05)
    (second,) = rig.shard.report(-1).copies
    assert first.done_bytes == second.done_bytes == 192, "half of 384"
    assert second.seconds > first.seconds
    assert (second.step_id, second.slot, second.expert, second.total_bytes) == (1, 0, 2, 384)
    assert second.source == "checkpoint"
    assert isinstance(rig.abort(0, tag), AddAborted)
    thread.join(5)
    assert isinstance(answers[0], StepFailed)
    assert rig.shard.pool.resident_bytes == 0
    assert rig.shard.report(-1).copies == ()


def _done(rig: Rig) -> int:
    return sum(copy.done_bytes for copy in rig.shard.report(-1).copies)


def test_a_copy_that_stands_still_fails_at_its_deadline(make: Any) -> None:
    rig = make(faults=FaultPoints(stop_copy_at=0.5))
    tag = rig.reserve(0, 2).slot_tag
    began_s = time.monotonic()
    failed = rig.copy(0, tag, 2, timeout_s=0.2)
    assert isinstance(failed, StepFailed)
    assert failed.code == "timeout"
    assert time.monotonic() - began_s >= 0.2
    assert isinstance(rig.abort(0, tag), AddAborted)


def test_a_copy_whose_read_hangs_is_given_up_and_the_slot_serves_another_expert(make: Any) -> None:
    model = marker_model()
    free = threading.Event()
    hang = {5}

    def read(_layer: int, expert: int) -> None:
        if expert in hang:
            free.wait(20)

    rig = make(model=model, source=MarkerSource(model, read))
    rig.add(1, 1)  # keeps the slab, so that the next fill lies where this one does
    tag = rig.reserve(0, 5).slot_tag
    where = rig.shard.pool.buffer(0).ctypes.data
    copying = threading.Thread(target=lambda: rig.copy(0, tag, 5, timeout_s=60.0), daemon=True)
    copying.start()
    until(lambda: bool(rig.shard.report(-1).copies))
    began_s = time.monotonic()
    assert isinstance(rig.abort(0, tag), AddAborted)
    assert time.monotonic() - began_s < 15.0
    copying.join(5)
    assert rig.shard.pool.held_slots == (1,)
    assert rig.shard.report(-1).counters["hung_reads"] == 1
    rig.add(0, 3, step_id=2)
    assert rig.shard.pool.buffer(0).ctypes.data == where
    free.set()  # the old thread comes back, and finds that the slot is not its own
    until(lambda: rig.shard.report(-1).counters["hung_reads"] == 0)
    assert rig.call(ones(1), [0]).partial[0, 0] == pytest.approx(0.5 * 4)
    assert (
        rig.shard.core.backend.canonical_bytes(0).tobytes()
        == MarkerSource(model).canonical(0, 3).tobytes()
    )


def test_a_checkpoint_that_answers_nobody_is_not_asked_for_ever(make: Any) -> None:
    model = marker_model()
    free = threading.Event()
    rig = make(model=model, source=MarkerSource(model, lambda _a, _b: free.wait(20) and None))
    rig.shard._commands._pin_wait_s = 0.1
    threads = []
    for slot in range(4):
        tag = rig.reserve(slot, slot, step_id=slot).slot_tag
        threads.append(
            threading.Thread(
                target=rig.copy, args=(slot, tag, slot, slot), kwargs={"timeout_s": 60.0}
            )
        )
        threads[-1].start()
        until(lambda: bool(rig.shard.report(-1).copies))
        assert isinstance(rig.abort(slot, tag, step_id=slot), AddAborted)
    tag = rig.reserve(5, 5, step_id=50).slot_tag
    refused = rig.copy(5, tag, 5, step_id=50)
    assert isinstance(refused, StepFailed)
    assert refused.code == "io"
    assert "4 reads of the checkpoint hang" in refused.detail
    free.set()
    for thread in threads:
        thread.join(5)
    until(lambda: rig.shard.report(-1).counters["hung_reads"] == 0)
    assert isinstance(rig.copy(5, tag, 5, step_id=50), ExpertCopied)


def test_a_shard_ends_though_a_read_of_it_hangs(make: Any) -> None:
    model = marker_model()
    free = threading.Event()
    rig = make(model=model, source=MarkerSource(model, lambda _a, _b: free.wait(20) and None))
    tag = rig.reserve(0, 2).slot_tag
    copying = threading.Thread(target=lambda: rig.copy(0, tag, 2, timeout_s=60.0), daemon=True)
    copying.start()
    until(lambda: bool(rig.shard.report(-1).copies))
    began_s = time.monotonic()
    rig.shard.stop()
    assert time.monotonic() - began_s < 15.0
    copying.join(5)
    assert not copying.is_alive()
    free.set()


# ------------------------------------------------------------------------------ budgets and slabs


def large_model(dtype: str = "bfloat16") -> ServedModel:
    """Experts of 192 KiB in bfloat16, with a derived form of 384 KiB: 576 KiB a slot."""
    return ServedModel(2, 16, 4, "v1", ExpertSpec(128, 256, dtype))  # type: ignore[arg-type]


def test_a_budget_falls_while_serving_and_copying_and_the_memory_is_really_back(
    make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model = large_model()
    slot_bytes = model.expert.held_bytes + NumpyBackend.derived_bytes(model.expert)
    rig = make(
        model=model,
        source=DrawnSource(model),
        backend=NumpyBackend(model.expert),
        num_slots=16,
        slab_slots=4,
        budget_bytes=16 * slot_bytes,
    )
    for slot in range(14):
        rig.add(slot, slot)
    answers: list[Any] = []
    stop = threading.Event()

    def traffic() -> None:
        while not stop.is_set():
            answers.append(rig.call(ones(4, 128), [0, 1, 2, 3]))

    thread = threading.Thread(target=traffic, daemon=True)
    thread.start()
    rig.shard.order_faults(FaultPoints(stop_copy_at=0.5))
    tag = rig.reserve(15, 15).slot_tag
    copying = threading.Thread(target=lambda: rig.copy(15, tag, 15, timeout_s=60.0), daemon=True)
    copying.start()
    until(lambda: bool(rig.shard.report(-1).copies))
    refused = rig.set_slots(4)
    assert isinstance(refused, StepFailed)
    assert refused.code == "no_slot", "held slots are never taken away by a budget"
    gc.collect()
    before = process_resident_bytes()
    began_s = time.monotonic()
    assert isinstance(rig.abort(15, tag), AddAborted)
    for slot in (13, 5, 9, 4, 12, 7, 11, 6, 8, 10):
        assert isinstance(release(rig.shard, slot, rig.tags[slot], expert=slot), SlotReleased)
    assert isinstance(rig.set_slots(4), BudgetApplied)
    took_s = time.monotonic() - began_s
    gc.collect()
    freed = before - process_resident_bytes()
    stop.set()
    thread.join(10)
    copying.join(10)
    memory = rig.shard.report(-1).memory
    print(f"given back after {took_s:.2f} s (bar 5)")
    assert memory.slab_bytes == 4 * model.expert.held_bytes, "high slabs are unmapped"
    assert memory.free_bytes == 0
    assert memory.loaded_bytes == 4 * NumpyBackend.derived_bytes(model.expert)
    assert freed >= 10 * slot_bytes * 0.9
    assert rig.reserve(4, 4, step_id=77).code == "over_budget"
    assert len(answers) > 0
    assert all((a.row_status == RowStatus.SERVED).all() for a in answers)
    with capsys.disabled():
        print(
            f"\n10 evictions and a budget while serving: {took_s * 1e3:.0f} ms (bar 5 s), "
            f"{freed / MIB:.1f} MiB of {10 * slot_bytes / MIB:.1f} MiB freed from the process"
        )


def test_a_refused_budget_names_the_missing_bytes(make: Any) -> None:
    rig = make(budget_bytes=6 * PAGE_BYTES)
    for slot in range(3):
        rig.add(slot, slot)
    refused = rig.shard.execute(
        1, SetRankSlots(num_slots=3, budget_bytes=2 * PAGE_BYTES + 1, **WHERE)
    )
    assert isinstance(refused, StepFailed)
    assert refused.code == "over_budget"
    assert f"{PAGE_BYTES - 1} bytes missing" in refused.detail
    assert rig.shard.pool.budget_bytes == 6 * PAGE_BYTES


def test_fragmentation_is_measured() -> None:
    pool = SlotPool(12, PAGE_BYTES, 0, 12 * PAGE_BYTES, 6)
    for slot in range(12):
        pool.acquire(slot)
    assert (pool.figures().free_bytes, pool.figures().largest_free_run_bytes) == (0, 0)
    places = {slot: pool._places[slot] for slot in range(12)}
    in_place = {place: slot for slot, place in places.items()}
    for place in (0, 2, 3, 5):
        pool.release(in_place[(0, place)])
    figures = pool.figures()
    assert figures.free_bytes == 4 * PAGE_BYTES
    assert figures.largest_free_run_bytes == 2 * PAGE_BYTES
    assert figures.slab_bytes == 12 * PAGE_BYTES
    assert figures.resident_bytes == 8 * PAGE_BYTES
    pool.release(in_place[(0, 4)])
    assert pool.figures().largest_free_run_bytes == 4 * PAGE_BYTES


def test_an_expert_that_moves_a_thousand_times_leaves_nothing_behind(
    make: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ServedModel(1, 4, 2, "v1", ExpertSpec(64, 64, "bfloat16"))
    backend = NumpyBackend(model.expert)
    rig = make(model=model, source=DrawnSource(model), backend=backend, num_slots=4)
    rig.add(0, 1)
    at = 0

    def move(step_id: int) -> None:
        nonlocal at
        to = 1 - at
        source = CopySource(rank=0, slot=at, slot_tag=rig.tags[at])
        rig.add(to, 1, source=source, step_id=step_id)
        gone = rig.shard.execute(1, _released(step_id + 500_000, at, rig.tags[at]))
        assert isinstance(gone, SlotReleased)
        at = to

    for i in range(100):
        move(i)
    gc.collect()
    before = _usage()
    for i in range(100, 1100):
        move(i)
    gc.collect()
    after = _usage()
    memory = rig.shard.report(-1).memory
    assert rig.shard.pool.resident_bytes == rig.shard.pool.slot_bytes
    assert memory.loaded_bytes == NumpyBackend.derived_bytes(model.expert)
    # What else this process does opens some as well.
    assert after["fds"] <= before["fds"] + 20
    assert after["threads"] <= before["threads"] + 5
    assert after["bytes"] <= before["bytes"] * 1.01 + MIB
    with capsys.disabled():
        print(
            f"\n1,000 moves: process {before['bytes'] / MIB:.1f} -> {after['bytes'] / MIB:.1f} MiB"
        )


def _released(step_id: int, slot: int, tag: int) -> Any:
    from placement.messages.effects import ReleaseSlot

    return ReleaseSlot(step_id=step_id, slot=slot, slot_tag=tag, layer=0, expert=1, **WHERE)


def _usage() -> dict[str, int]:
    return {
        "bytes": process_resident_bytes(),
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


def test_two_copies_whose_loading_is_slow_do_not_share_a_buffer(make: Any) -> None:
    """Layer 0 and layer 1 back to back, each copied out 100 ms late."""
    model = marker_model()

    class Slow(MarkerBackend):
        def load_slot(self, slot: int, canonical_buffer: Any) -> None:
            time.sleep(0.1)
            self.buffers[slot] = canonical_buffer

    rig = make(model=model, source=DrawnSource(model), backend=Slow(model.expert))
    tags = [
        rig.shard.execute(
            1,
            ReserveSlot(
                step_id=slot, slot=slot, layer=slot, expert=4, weights_version="v1", **WHERE
            ),
        ).slot_tag
        for slot in range(2)
    ]
    threads = [
        threading.Thread(
            target=rig.copy, args=(slot, tags[slot], 4, slot), kwargs={"layer": slot}, daemon=True
        )
        for slot in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    source = DrawnSource(model)
    for slot in range(2):
        want = source.canonical(slot, 4).tobytes()
        assert rig.shard.core.backend.canonical_bytes(slot).tobytes() == want


# ------------------------------------------------------------------- nothing of a request is left

POISON = np.float32(np.nan)


def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on memory that is not cleared comes full of what an earlier request left there."""
    real, real_like, real_torch = np.empty, np.empty_like, torch.empty

    def fill(array: Any) -> Any:
        if array.dtype.kind == "f":
            array.fill(POISON)
        elif array.dtype.kind in "iu":
            array.fill(np.iinfo(array.dtype).max // 3)
        return array

    def poisoned_torch(*arguments: Any, **named: Any) -> Any:
        made = real_torch(*arguments, **named)
        return made.fill_(float("nan")) if made.is_floating_point() else made.fill_(113)

    monkeypatch.setattr(np, "empty", lambda *a, **k: fill(real(*a, **k)))
    monkeypatch.setattr(np, "empty_like", lambda *a, **k: fill(real_like(*a, **k)))
    monkeypatch.setattr(torch, "empty", poisoned_torch)


BACKENDS: dict[str, Callable[[ExpertSpec], ComputeBackend]] = {
    "numpy": NumpyBackend,
    "torch": TorchBackend,
    "torch-grouped": lambda spec: TorchBackend(spec, path="grouped", slab_slots=4),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_short_batches_after_long_ones_show_nothing_of_another_request(
    make: Any, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str
) -> None:
    model = ServedModel(1, 8, 4, "v1", ExpertSpec(32, 16, dtype))  # type: ignore[arg-type]

    def new_rig() -> Rig:
        rig: Rig = make(
            model=model, source=DrawnSource(model), backend=BACKENDS[name](model.expert)
        )
        for slot in range(4):
            rig.add(slot, slot)
        return rig

    draw = np.random.default_rng(5)
    short = [draw.normal(size=(n, 32)).astype(np.float32) for n in (1, 3, 2)]
    clean = new_rig()
    want = [clean.call(x, [0, 2]).partial.copy() for x in short]
    poisoned_empty(monkeypatch)
    rig = new_rig()
    long = np.full((300, 32), 7.0, np.float32)
    for x, expected in zip(short, want, strict=True):
        rig.call(long, [0, 1, 2, 3])
        reply = rig.call(x, [0, 2])
        np.testing.assert_array_equal(reply.partial, expected)
    # A batch of which rows are refused, and one in which none has a pair that is computed.
    stale = rig.tags[3]
    rig.tags[3] = 999
    rig.call(long, [0, 1, 2])
    reply = rig.call(short[0], [3])
    assert reply.row_status.tolist() == [RowStatus.STALE]
    assert reply.partial.size == 0
    rig.tags[3] = stale
    none = sub_call(short[1], [])
    done = threading.Event()
    answers: list[Any] = []
    rig.shard.core.submit(none, 1, lambda answer: (answers.append(answer), done.set()))
    assert done.wait(5)
    assert not answers[0].partial.any(), "rows without a pair are zero"


def test_a_freed_slot_shows_nothing_whoever_still_looks(make: Any) -> None:
    model = large_model("float32")
    rig = make(
        model=model,
        source=DrawnSource(model),
        backend=NumpyBackend(model.expert),
        budget_bytes=64 * MIB,
    )
    rig.add(0, 1)
    rig.add(1, 2)  # keeps the slab mapped
    seen = rig.shard.pool.buffer(0)
    assert seen.any()
    release(rig.shard, 0, rig.tags[0], expert=1)
    assert not seen.any()
    tag = rig.reserve(0, 3, step_id=9).slot_tag
    assert not rig.shard.pool.buffer(0).any(), "a slot is empty before its first byte comes"
    rig.shard.pool.buffer(0)[:] = 0xAA  # as a copy that died half-way
    assert isinstance(rig.copy(0, tag, 3, step_id=9), ExpertCopied)
    assert isinstance(rig.verify(0, tag, step_id=9), ExpertVerified)
