"""Faults that tests order from a shard, as data: in its settings, or later by `Shard.order_faults`.

Responsible for naming them and for when each is due. Production settings hold none, and then no
backend is wrapped and every hook is one comparison. Called by commands and copy jobs; `assembly`
makes the object.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_serve.shard.compute.base import ComputeBackend, ExpertSpec, SlotWork

FAIL_POINTS = frozenset(
    {
        "reserve",
        "copy",
        "verify",
        "release",
        "corrupt",
        "oom-reserve",
        "oom-copy",
        "oom-verify",
        "oom-compute",
    }
)
"""The first four answer the command with StepFailed(io); `corrupt` flips one bit of each copy in
its slot, before it is loaded; the `oom-` ones raise MemoryError where the slot's memory is taken,
where the backend loads it, where its bytes are read back, and in each forward."""


@dataclass(frozen=True, slots=True)
class FaultPoints:
    """What is ordered. Raises ValueError for an unknown name or a figure out of range."""

    delay_copy_s: float = 0.0
    """Each copy waits so long before its first byte."""
    stop_copy_at: float = 1.0
    """Share of its bytes, 0 to 1, after which a copy stands still until it is aborted or its
    deadline has passed; 1 = never."""
    delay_compute_s: float = 0.0
    """Each forward, probes included, takes so much longer."""
    hang_compute_s: float = 0.0
    """Each forward hangs so long, or until `Faults.release`."""
    fail: frozenset[str] = frozenset()
    """Names of FAIL_POINTS."""
    oom_times: int = 0
    """How often each `oom-` point raises before memory is back; 0 = always."""

    def __post_init__(self) -> None:
        unknown = self.fail - FAIL_POINTS
        if unknown:
            raise ValueError(f"fail: {sorted(unknown)} are none of {sorted(FAIL_POINTS)}")
        if not 0.0 <= self.stop_copy_at <= 1.0:
            raise ValueError(f"stop_copy_at: must be from 0 to 1 (got {self.stop_copy_at})")


NO_FAULTS = FaultPoints()


class Faults:
    """The faults of one shard; `points` may be replaced at any time."""

    def __init__(self, points: FaultPoints = NO_FAULTS) -> None:
        self.points = points
        self._raised: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._released = threading.Event()

    def fails(self, point: str) -> bool:
        """Whether this point is ordered."""
        return point in self.points.fail

    def out_of_memory(self, point: str) -> None:
        """Raises MemoryError where that is due at an `oom-` point."""
        points = self.points
        if point not in points.fail:
            return
        with self._lock:
            self._raised[point] += 1
            due = not points.oom_times or self._raised[point] <= points.oom_times
        if due:
            raise MemoryError(f"ordered by the fault point {point}")

    def before_forward(self) -> None:
        """Delay, hang or raise MemoryError, as ordered."""
        points = self.points
        wait_s = max(points.delay_compute_s, points.hang_compute_s)
        if wait_s > 0.0:
            self._released.wait(wait_s)
        self.out_of_memory("oom-compute")

    def release(self) -> None:
        """End every wait, now and later."""
        self._released.set()


class FaultyBackend:
    """A backend with the hooks of compute and load in front. See `ComputeBackend`."""

    def __init__(self, backend: ComputeBackend, faults: Faults) -> None:
        self._backend = backend
        self._faults = faults

    @property
    def name(self) -> str:
        """That of the backend behind."""
        return self._backend.name

    @property
    def simulated(self) -> bool:
        """That of the backend behind."""
        return self._backend.simulated

    @property
    def loaded_bytes(self) -> int:
        """That of the backend behind."""
        return self._backend.loaded_bytes

    def derived_bytes(self, spec: ExpertSpec) -> int:
        """That of the backend behind."""
        return self._backend.derived_bytes(spec)

    def slot_bytes(self, spec: ExpertSpec) -> int:
        """That of the backend behind."""
        return self._backend.slot_bytes(spec)

    def load_slot(self, slot: int, canonical_buffer: NDArray[np.uint8]) -> None:
        """Load, unless there is to be no memory for it."""
        self._faults.out_of_memory("oom-copy")
        self._backend.load_slot(slot, canonical_buffer)

    def unload_slot(self, slot: int) -> None:
        """Unload."""
        self._backend.unload_slot(slot)

    def canonical_bytes(self, slot: int) -> NDArray[np.uint8]:
        """Read back, unless there is to be no memory for it."""
        self._faults.out_of_memory("oom-verify")
        return self._backend.canonical_bytes(slot)

    def forward(
        self,
        rows: NDArray[np.float32],
        pair_row: NDArray[np.int32],
        pair_slot: NDArray[np.int32],
        pair_gate: NDArray[np.float32],
        out: NDArray[np.float32],
    ) -> SlotWork:
        """Compute, after what is ordered."""
        self._faults.before_forward()
        return self._backend.forward(rows, pair_row, pair_slot, pair_gate, out)

    def warm_up(self) -> None:
        """Warm up; no fault is ordered of it."""
        self._backend.warm_up()
