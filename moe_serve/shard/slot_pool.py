"""The slots of one rank: where canonical expert bytes lie, and the byte budget they never exceed.

Responsible for memory only: which slots are held, their buffers, and giving memory back. Must never
know what a slot contains, and never lets a slot show bytes of its former expert. Called by the
shard's core (acquire at RESERVED, release at RELEASED).

A *slab* is one mapping with places for `slab_slots` slots. Slots are ids, 0..num_slots-1 over all
layers of the rank; a held slot lies in some place of the lowest slab that had one free when it was
acquired, so that high slabs empty out and are unmapped.

What the figures say, with slots of 1 MiB, a derived form of 2 MiB, slabs of 4 slots, and 3 slots
held in one slab:

| figure | value | meaning |
|---|---|---|
| `slot_bytes` | 3 MiB | cost of a held slot: canonical bytes in whole pages + derived bytes |
| `resident_bytes` | 9 MiB | held slots x `slot_bytes`; never above `budget_bytes` |
| `reserved_bytes` | 4 MiB | mapped slabs: address space, resident only where slots are held |
| `fragmentation` | 0.25 | share of mapped places that no slot holds |

A released place is discarded page by page at once, in a slab that stays as well: the budget needs
no allowance for slabs.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_serve.errors import ResourceExhausted
from moe_serve.shard.pages import Pages, page_rounded


class BudgetExceeded(ResourceExhausted):
    """The byte budget of the rank does not allow it; `missing_bytes` more would."""

    def __init__(self, *, missing_bytes: int, resident_bytes: int, budget_bytes: int) -> None:
        super().__init__(
            f"slot pool: {missing_bytes} bytes missing "
            f"({resident_bytes} resident, budget {budget_bytes}); "
            "release slots of this rank or raise its budget"
        )
        self.missing_bytes = missing_bytes
        self.resident_bytes = resident_bytes
        self.budget_bytes = budget_bytes


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """One look at a pool, in bytes. `free_bytes` are mapped places that no slot holds (address
    space, not resident); `largest_free_run_bytes` the longest run of neighbours among them in one
    slab."""

    resident_bytes: int
    slab_bytes: int
    free_bytes: int
    largest_free_run_bytes: int


@dataclass(slots=True)
class _Slab:
    pages: Pages
    free_places: list[int]


class SlotPool:
    """Byte-budgeted memory of a rank's slots. Safe to call from several threads.

    `canonical_bytes` are the bytes of an expert in canonical form, `derived_bytes` what the compute
    backend adds for each held slot (counted here, allocated by the backend), `slab_slots` the slots
    a slab has places for.

    Raises:
        ValueError: a size is not positive, or the budget is negative.
    """

    def __init__(
        self,
        num_slots: int,
        canonical_bytes: int,
        derived_bytes: int,
        budget_bytes: int,
        slab_slots: int = 8,
    ) -> None:
        for name, value, least in (
            ("num_slots", num_slots, 0),
            ("canonical_bytes", canonical_bytes, 1),
            ("derived_bytes", derived_bytes, 0),
            ("budget_bytes", budget_bytes, 0),
            ("slab_slots", slab_slots, 1),
        ):
            if value < least:
                raise ValueError(f"{name}: must be at least {least} (got {value})")
        self._num_slots = num_slots
        self._canonical_bytes = canonical_bytes
        self._stride_bytes = page_rounded(canonical_bytes)
        self._slot_bytes = self._stride_bytes + derived_bytes
        self._budget_bytes = budget_bytes
        self._slab_slots = slab_slots
        self._slabs: dict[int, _Slab] = {}
        self._places: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()

    @property
    def num_slots(self) -> int:
        """Slot ids run from 0 to num_slots - 1."""
        return self._num_slots

    @property
    def slot_bytes(self) -> int:
        """Bytes a held slot costs: canonical bytes in whole pages, and derived bytes."""
        return self._slot_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes of all held slots."""
        return len(self._places) * self._slot_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of mapped slabs: address space, see the module's table."""
        return len(self._slabs) * self._slab_slots * self._stride_bytes

    @property
    def fragmentation(self) -> float:
        """Share of mapped places that no slot holds, in [0, 1); 0 when nothing is mapped."""
        reserved_slots = len(self._slabs) * self._slab_slots
        return 1.0 - len(self._places) / reserved_slots if reserved_slots else 0.0

    @property
    def held_slots(self) -> tuple[int, ...]:
        """Held slot ids, ascending."""
        with self._lock:
            return tuple(sorted(self._places))

    @property
    def budget_bytes(self) -> int:
        """Byte budget of the rank; settable down to `resident_bytes`."""
        return self._budget_bytes

    @budget_bytes.setter
    def budget_bytes(self, budget_bytes: int) -> None:
        if budget_bytes < 0:
            raise ValueError(f"budget_bytes: must be at least 0 (got {budget_bytes})")
        with self._lock:
            if budget_bytes < self.resident_bytes:
                raise BudgetExceeded(
                    missing_bytes=self.resident_bytes - budget_bytes,
                    resident_bytes=self.resident_bytes,
                    budget_bytes=budget_bytes,
                )
            self._budget_bytes = budget_bytes

    def figures(self) -> PoolFigures:
        """What is held, mapped and free now."""
        with self._lock:
            runs = [_longest_run(slab.free_places) for slab in self._slabs.values()]
            free = sum(len(slab.free_places) for slab in self._slabs.values())
            return PoolFigures(
                resident_bytes=self.resident_bytes,
                slab_bytes=self.reserved_bytes,
                free_bytes=free * self._stride_bytes,
                largest_free_run_bytes=max(runs, default=0) * self._stride_bytes,
            )

    def grow(self, num_slots: int) -> None:
        """Raise the number of slot ids while slots are in use.

        Raises:
            ValueError: fewer than now; ids are never taken back, a lower budget limits how many can
                be held.
        """
        with self._lock:
            if num_slots < self._num_slots:
                raise ValueError(
                    f"num_slots: only grows, must be at least {self._num_slots} (got {num_slots})"
                )
            self._num_slots = num_slots

    def holds(self, slot: int) -> bool:
        """Whether the slot is held."""
        return slot in self._places

    def acquire(self, slot: int) -> None:
        """Hold a free slot; its buffer reads as zeros.

        Raises:
            BudgetExceeded: the slot would exceed the budget; nothing has changed.
            MemoryError: the system has no memory for another slab; nothing has changed.
        """
        assert 0 <= slot < self._num_slots, f"slot {slot} of {self._num_slots}"
        with self._lock:
            assert slot not in self._places, f"slot {slot} is held already"
            missing_bytes = self.resident_bytes + self._slot_bytes - self._budget_bytes
            if missing_bytes > 0:
                raise BudgetExceeded(
                    missing_bytes=missing_bytes,
                    resident_bytes=self.resident_bytes,
                    budget_bytes=self._budget_bytes,
                )
            slab_id = self._slab_with_room()
            self._places[slot] = (slab_id, self._slabs[slab_id].free_places.pop())

    def release(self, slot: int) -> None:
        """Free a held slot. Its memory goes back to the system now, and its slab too when that was
        the last slot in it.

        The backend has unloaded the slot before, and nothing reads the buffer any more; whoever
        still did would see zeros.
        """
        with self._lock:
            assert slot in self._places, f"slot {slot} is not held"
            slab_id, place = self._places.pop(slot)
            slab = self._slabs[slab_id]
            slab.pages.discard(place * self._stride_bytes, self._stride_bytes)
            slab.free_places.append(place)
            if len(slab.free_places) == self._slab_slots:
                del self._slabs[slab_id]  # unmapped with the last view of it

    def buffer(self, slot: int) -> NDArray[np.uint8]:
        """Canonical bytes of a held slot: a writable `uint8 [canonical_bytes]` view that begins on
        a page.
        """
        with self._lock:
            assert slot in self._places, f"slot {slot} is not held"
            slab_id, place = self._places[slot]
            begin = place * self._stride_bytes
            return self._slabs[slab_id].pages.array[begin : begin + self._canonical_bytes]

    def _slab_with_room(self) -> int:
        """Lowest slab with a free place; maps a new one when all are full."""
        for slab_id in sorted(self._slabs):
            if self._slabs[slab_id].free_places:
                return slab_id
        slab_id = next(i for i in range(len(self._slabs) + 1) if i not in self._slabs)
        self._slabs[slab_id] = _Slab(
            pages=Pages(self._slab_slots * self._stride_bytes),
            free_places=list(range(self._slab_slots)),
        )
        return slab_id


def _longest_run(places: list[int]) -> int:
    """Length of the longest run of neighbours: 3 for [5, 0, 4, 6]."""
    longest = run = 0
    before = -2
    for place in sorted(places):
        run = run + 1 if place == before + 1 else 1
        longest, before = max(longest, run), place
    return longest
