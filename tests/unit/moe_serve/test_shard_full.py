"""A rank whose every slot is full swaps experts under load: never above its budget, never a wrong
answer, also where memory runs out in between."""

import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_serve.ports import RowStatus
from moe_serve.shard.assembly import Shard
from moe_serve.shard.compute.base import ExpertSpec
from moe_serve.shard.compute.numpy_backend import NumpyBackend
from moe_serve.shard.faults import FaultPoints
from moe_serve.shard.pages import PAGE_BYTES
from moe_serve.shard.served_model import ServedModel
from placement.messages.effects import (
    AbortAdd,
    CopyExpert,
    CopySource,
    ReleaseSlot,
    ReserveSlot,
    VerifyExpert,
)
from placement.messages.events import (
    AddAborted,
    ExpertCopied,
    ExpertVerified,
    SlotReleased,
    SlotReserved,
    StepFailed,
)
from tests.fakes.marker_experts import CHECKPOINT, MarkerSource, marker_shard
from tests.fakes.sub_calls import sub_call

SLOTS = 6
WHERE: dict[str, Any] = {"rank": 0, "incarnation": 1}
MODEL = ServedModel(1, 8, 2, "v1", ExpertSpec(64, 96, "bfloat16"))


class DrawnSource(MarkerSource):
    """Expert e is drawn from e; in bfloat16."""

    def canonical(self, layer: int, expert: int) -> Any:
        drawn = np.random.default_rng(expert).normal(size=MODEL.expert.elements) * 0.1
        return (drawn.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


class Full:
    """Four experts and bytes for one more, for which there are two slots."""

    def __init__(self) -> None:
        slot_bytes = MODEL.expert.held_bytes + NumpyBackend.derived_bytes(MODEL.expert)
        self.shard: Shard = marker_shard(
            model=MODEL,
            source=DrawnSource(MODEL),
            backend=NumpyBackend(MODEL.expert),
            num_slots=SLOTS,
            slab_slots=2,
            budget_bytes=(SLOTS - 1) * slot_bytes,
        )
        self.shard.core.start()
        self.held: dict[int, tuple[int, int]] = {}
        """slot -> (expert, tag)"""
        self.step = 0
        self.refused: set[str] = set()

    def add(self, slot: int, expert: int, source: CopySource = CHECKPOINT) -> bool:
        """Reserve, copy, verify; where one fails the step is aborted and must leave nothing."""
        self.step += 1
        where = {"step_id": self.step, "slot": slot, **WHERE}
        answer = self.shard.execute(
            1, ReserveSlot(layer=0, expert=expert, weights_version="v1", **where)
        )
        tag = answer.slot_tag if isinstance(answer, SlotReserved) else -1
        if tag >= 0:
            where["slot_tag"] = tag
            command = CopyExpert(layer=0, expert=expert, source=source, timeout_s=5.0, **where)
            answer = self.shard.execute(1, command)
        if isinstance(answer, ExpertCopied):
            answer = self.shard.execute(1, VerifyExpert(**where))
        if isinstance(answer, ExpertVerified):
            self.held[slot] = (expert, tag)
            return True
        assert isinstance(answer, StepFailed)
        self.refused.add(answer.code)
        aborted = self.shard.execute(
            1, AbortAdd(step_id=self.step, slot=slot, slot_tag=tag, **WHERE)
        )
        assert isinstance(aborted, AddAborted)
        assert not self.shard.pool.holds(slot) or slot in self.held
        return False

    def remove(self, slot: int) -> None:
        self.step += 1
        expert, tag = self.held.pop(slot)
        command = ReleaseSlot(
            step_id=self.step, slot=slot, slot_tag=tag, layer=0, expert=expert, **WHERE
        )
        assert isinstance(self.shard.execute(1, command), SlotReleased)

    def really_held_bytes(self) -> int:
        """Pages of canonical forms that are in memory, and mapped derived forms."""
        slabs = [slab.pages.array for slab in tuple(self.shard.pool._slabs.values())]
        return sum(map(_resident_bytes, slabs)) + self.shard.core.backend.loaded_bytes


def _resident_bytes(array: Any) -> int:
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        pagemap.seek(array.ctypes.data // PAGE_BYTES * 8)
        entries = np.frombuffer(pagemap.read(array.nbytes // PAGE_BYTES * 8), np.uint64)
    return int((entries >> np.uint64(63)).sum()) * PAGE_BYTES


def swap(full: Full, draw: random.Random) -> None:
    """Move an expert into a free slot, at times without memory for it."""
    points = FaultPoints()
    if draw.random() < 0.3:
        out_of_memory = draw.choice(["oom-reserve", "oom-copy", "oom-verify"])
        points = FaultPoints(fail=frozenset({out_of_memory}))
    full.shard.order_faults(points)
    free = draw.choice(sorted(set(range(SLOTS)) - set(full.held)))
    slot = draw.choice(sorted(full.held))
    expert, tag = full.held[slot]
    own = CopySource(rank=0, slot=slot, slot_tag=tag)
    if full.add(free, expert, own if draw.random() < 0.7 else CHECKPOINT):
        full.shard.order_faults(FaultPoints())
        assert not full.add(draw.randrange(SLOTS), 7), "no byte is left"
        full.remove(slot)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_full_rank_swaps_under_load_within_its_budget(seed: int) -> None:
    full, draw = Full(), random.Random(seed)
    for slot in range(4):
        assert full.add(slot, slot)
    shard, budget = full.shard, full.shard.pool.budget_bytes
    x = np.random.default_rng(seed).normal(size=(3, 64)).astype(np.float32)
    want = {e: _answer(full, x, slot) for slot, (e, _tag) in full.held.items()}
    faults: list[str] = []
    peak = 0
    stop = threading.Event()

    def traffic() -> None:
        while not stop.is_set():
            for slot, (expert, tag) in tuple(full.held.items()):
                reply = _reply(shard, x, slot, tag, expert)
                served = reply.row_status == RowStatus.SERVED
                # It may have left meanwhile; what is served is of this expert and no other.
                if served.any() and not np.array_equal(reply.partial, want[expert]):
                    faults.append(f"wrong output of expert {expert}")

    def sample() -> None:
        nonlocal peak
        while not stop.is_set():
            report = shard.report(-1)
            if report.resident_bytes + report.reserved_bytes > budget:
                faults.append("the report is above the budget")
            peak = max(peak, full.really_held_bytes())
            time.sleep(0.001)

    threads = [threading.Thread(target=work, daemon=True) for work in (traffic, sample)]
    for thread in threads:
        thread.start()
    for round_ in range(40):
        swap(full, draw)
        assert len(full.held) == 4, f"round {round_}: never an expert fewer"
    stop.set()
    for thread in threads:
        thread.join(10)
    shard.order_faults(FaultPoints())
    assert faults == []
    assert full.refused == {"no_slot", "over_budget"}
    assert 0 < peak <= budget * 1.02
    assert sorted(e for e, _tag in full.held.values()) == [0, 1, 2, 3]
    assert not shard.core.broken
    shard.stop()


def _reply(shard: Shard, x: Any, slot: int, tag: int, expert: int) -> Any:
    done = threading.Event()
    answers: list[Any] = []

    def reply(answer: Any) -> None:
        answers.append(answer)
        done.set()

    pairs = [(row, slot, tag, 0.5, expert) for row in range(len(x))]
    shard.core.submit(sub_call(x, pairs), x.nbytes, reply)
    assert done.wait(10)
    return answers[0]


def _answer(full: Full, x: Any, slot: int) -> Any:
    expert, tag = full.held[slot]
    return _reply(full.shard, x, slot, tag, expert).partial.copy()
