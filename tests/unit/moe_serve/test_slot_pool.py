"""Slots, their memory and the byte budget."""

from __future__ import annotations

import errno
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.errors import ResourceExhausted
from moe_serve.shard.pages import PAGE_BYTES, Pages, page_rounded
from moe_serve.shard.slot_pool import BudgetExceeded, SlotPool

MIB = 1 << 20


def _pool(budget_slots: int = 8, num_slots: int = 8, slab_slots: int = 4) -> SlotPool:
    """Slots of one page and a derived page: 2 pages each."""
    return SlotPool(num_slots, PAGE_BYTES, PAGE_BYTES, budget_slots * 2 * PAGE_BYTES, slab_slots)


def _resident_bytes(address: int, num_bytes: int) -> int:
    """Bytes of a page-aligned range that are in memory: the present bit of each page."""
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        pagemap.seek(address // PAGE_BYTES * 8)
        entries = np.frombuffer(pagemap.read(num_bytes // PAGE_BYTES * 8), np.uint64)
    return int((entries >> np.uint64(63)).sum()) * PAGE_BYTES


def _is_mapped(address: int) -> bool:
    # Line by line: one large string could itself be mapped where the slab was.
    with Path("/proc/self/maps").open() as lines:
        for line in lines:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if begin <= address < end:
                return True
    return False


def test_a_held_slot_has_a_zero_writable_page_aligned_buffer() -> None:
    pool = SlotPool(2, 100, 0, 2 * PAGE_BYTES, 2)
    pool.acquire(0)
    pool.acquire(1)
    for slot in (0, 1):
        buffer = pool.buffer(slot)
        assert (buffer.shape, buffer.dtype) == ((100,), np.uint8)
        assert buffer.ctypes.data % PAGE_BYTES == 0
        assert not buffer.any()
        buffer[:] = slot + 1
    assert pool.buffer(0).tolist() == [1] * 100
    assert pool.buffer(1).tolist() == [2] * 100


def test_figures() -> None:
    pool = SlotPool(8, MIB, 2 * MIB, 24 * MIB, 4)
    assert (pool.resident_bytes, pool.reserved_bytes, pool.fragmentation) == (0, 0, 0.0)
    for slot in (6, 1, 3):
        pool.acquire(slot)
    assert pool.slot_bytes == 3 * MIB
    assert pool.resident_bytes == 9 * MIB
    assert pool.reserved_bytes == 4 * MIB
    assert pool.fragmentation == 0.25
    assert pool.held_slots == (1, 3, 6)
    assert [pool.holds(slot) for slot in (0, 1)] == [False, True]


def test_acquire_over_budget_is_refused_with_the_bytes_missing_and_changes_nothing() -> None:
    pool = _pool(budget_slots=2)
    pool.acquire(0)
    pool.budget_bytes = 4 * PAGE_BYTES - 1
    with pytest.raises(BudgetExceeded, match="1 bytes missing") as refused:
        pool.acquire(1)
    assert refused.value.missing_bytes == 1
    assert isinstance(refused.value, ResourceExhausted)
    assert pool.held_slots == (0,)
    pool.budget_bytes += 1
    pool.acquire(1)
    assert pool.resident_bytes == pool.budget_bytes


def test_a_budget_below_what_is_resident_is_refused_with_the_bytes_missing() -> None:
    pool = _pool()
    for slot in range(3):
        pool.acquire(slot)
    for missing_bytes in (1, PAGE_BYTES):
        with pytest.raises(BudgetExceeded) as refused:
            pool.budget_bytes = 6 * PAGE_BYTES - missing_bytes
        assert refused.value.missing_bytes == missing_bytes
    assert pool.budget_bytes == 16 * PAGE_BYTES
    pool.budget_bytes = 6 * PAGE_BYTES
    with pytest.raises(BudgetExceeded):
        pool.acquire(3)
    pool.release(1)
    pool.acquire(3)


def test_a_reused_slot_never_shows_old_bytes() -> None:
    pool = _pool(slab_slots=2)
    pool.acquire(0)
    pool.acquire(1)
    pool.buffer(0)[:] = 0xAA
    pool.buffer(1)[:] = 0xBB
    kept_view = pool.buffer(1)
    pool.release(1)
    assert not kept_view.any()
    pool.acquire(5)
    assert not pool.buffer(5).any()
    assert (pool.buffer(0) == 0xAA).all()


def test_a_kept_view_of_a_freed_slab_shows_zeros_and_reaches_no_new_slot() -> None:
    pool = _pool(slab_slots=1)
    pool.acquire(0)
    kept_view = pool.buffer(0)
    kept_view[:] = 0xAA
    pool.release(0)
    assert not kept_view.any()
    pool.acquire(1)
    kept_view[:] = 0xCC
    assert not pool.buffer(1).any()


def test_released_memory_is_really_returned() -> None:
    pool = SlotPool(8, MIB, 0, 8 * MIB, 4)
    for slot in range(8):
        pool.acquire(slot)
        pool.buffer(slot)[:] = 1
    addresses = [pool.buffer(slot).ctypes.data for slot in range(8)]

    def resident() -> int:
        return sum(_resident_bytes(address, MIB) for address in addresses)

    assert resident() == 8 * MIB == pool.resident_bytes
    pool.release(1)  # its slab stays
    assert resident() == 7 * MIB == pool.resident_bytes
    assert pool.reserved_bytes == 8 * MIB
    kept_view = pool.buffer(7)
    for slot in (4, 5, 6, 7):
        pool.release(slot)
    assert resident() == 3 * MIB == pool.resident_bytes
    assert _is_mapped(addresses[7])  # for the sake of the view, but not resident
    del kept_view
    assert not _is_mapped(addresses[7])
    assert pool.reserved_bytes == 4 * MIB
    for slot in (0, 2, 3):
        pool.release(slot)
    assert (resident(), pool.reserved_bytes, pool.resident_bytes) == (0, 0, 0)
    assert not any(_is_mapped(address) for address in addresses)


def test_a_slot_that_is_held_but_not_filled_is_not_resident_yet() -> None:
    pool = SlotPool(8, MIB, 0, 8 * MIB, 8)
    pool.acquire(0)
    pool.acquire(1)
    pool.buffer(0)[0] = 1
    assert sum(_resident_bytes(pool.buffer(slot).ctypes.data, MIB) for slot in (0, 1)) == PAGE_BYTES


def test_low_slabs_are_filled_first_so_that_high_ones_empty() -> None:
    pool = _pool(budget_slots=12, num_slots=12)
    for slot in range(12):
        pool.acquire(slot)
    for slot in (0, 5, 9, 10, 11):
        pool.release(slot)
    assert pool.reserved_bytes == 12 * PAGE_BYTES
    assert pool.fragmentation == pytest.approx(5 / 12)
    pool.acquire(11)
    pool.release(8)
    assert pool.reserved_bytes == 8 * PAGE_BYTES
    assert pool.fragmentation == pytest.approx(1 / 8)


def test_num_slots_grows_while_slots_are_in_use_and_never_shrinks() -> None:
    pool = _pool(num_slots=2)
    pool.acquire(1)
    pool.buffer(1)[:] = 7
    with pytest.raises(AssertionError):
        pool.acquire(2)
    pool.grow(5)
    pool.acquire(4)
    assert pool.num_slots == 5
    assert (pool.buffer(1) == 7).all()
    with pytest.raises(ValueError, match="num_slots"):
        pool.grow(4)


def test_misuse_is_an_assertion() -> None:
    pool = _pool()
    pool.acquire(0)
    with pytest.raises(AssertionError, match="held already"):
        pool.acquire(0)
    for call in (pool.release, pool.buffer):
        with pytest.raises(AssertionError, match="not held"):
            call(1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_slots", -1),
        ("canonical_bytes", 0),
        ("derived_bytes", -1),
        ("budget_bytes", -1),
        ("slab_slots", 0),
    ],
)
def test_sizes_are_checked_by_name(field: str, value: int) -> None:
    sizes = {
        "num_slots": 1,
        "canonical_bytes": 1,
        "derived_bytes": 0,
        "budget_bytes": 0,
        "slab_slots": 1,
    }
    with pytest.raises(ValueError, match=f"{field}: must be at least"):
        SlotPool(**{**sizes, field: value})


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="budget_bytes"):
        _pool().budget_bytes = -1


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 255)), max_size=60), st.integers(1, 4))
def test_slots_keep_their_bytes_and_the_budget_holds(
    toggles: list[tuple[int, int]], slab_slots: int
) -> None:
    """Acquire free slots and release held ones in any order: contents are those of a dict."""
    pool = _pool(budget_slots=6, num_slots=10, slab_slots=slab_slots)
    expected: dict[int, int] = {}
    for slot, byte in toggles:
        if slot in expected:
            pool.release(slot)
            del expected[slot]
        elif len(expected) == 6:
            with pytest.raises(BudgetExceeded):
                pool.acquire(slot)
        else:
            pool.acquire(slot)
            assert not pool.buffer(slot).any()
            pool.buffer(slot)[:] = byte
            expected[slot] = byte
        assert pool.resident_bytes == len(expected) * pool.slot_bytes <= pool.budget_bytes
        assert pool.held_slots == tuple(sorted(expected))
        assert all((pool.buffer(s) == b).all() for s, b in expected.items())
    assert (pool.reserved_bytes == 0) == (not expected)


def test_pages_are_whole_private_and_discardable() -> None:
    assert [page_rounded(n) for n in (0, 1, PAGE_BYTES, PAGE_BYTES + 1)] == [
        0,
        PAGE_BYTES,
        PAGE_BYTES,
        2 * PAGE_BYTES,
    ]
    pages = Pages(2 * PAGE_BYTES)
    pages.array[:] = 9
    pages.discard(PAGE_BYTES, PAGE_BYTES)
    assert (pages.array[:PAGE_BYTES] == 9).all()
    assert not pages.array[PAGE_BYTES:].any()
    with pytest.raises(AssertionError):
        pages.discard(1, PAGE_BYTES)
    with pytest.raises(AssertionError):
        pages.discard(0, 1)
    kept_view = pages.array
    pages.free()
    assert not kept_view.any()
    assert pages.array.size == 0
    assert mmap.PAGESIZE == PAGE_BYTES


@pytest.mark.parametrize(
    ("failing", "number", "raises"),
    [
        ("map", errno.ENOMEM, MemoryError),
        ("map", errno.EPERM, PermissionError),
        ("madvise", errno.EINVAL, None),
        ("madvise", errno.EPERM, PermissionError),
    ],
)
def test_a_system_without_room_is_out_of_memory_one_without_huge_pages_is_well_and_others_fail(
    monkeypatch: pytest.MonkeyPatch, failing: str, number: int, raises: type[Exception] | None
) -> None:
    class Refusing(mmap.mmap):
        def __new__(cls, *given: Any, **named: Any) -> Refusing:
            if failing == "map":
                raise OSError(number, "no")
            return super().__new__(cls, *given, **named)

        def madvise(self, option: int, *where: int) -> None:
            if failing == "madvise" and option == mmap.MADV_NOHUGEPAGE:
                raise OSError(number, "no")
            super().madvise(option, *where)

    monkeypatch.setattr(mmap, "mmap", Refusing)
    if raises is not None:
        with pytest.raises(raises):
            Pages(PAGE_BYTES)
        return
    pages = Pages(PAGE_BYTES)
    pages.array[:] = 9
    pages.discard(0, PAGE_BYTES)
    assert not pages.array.any()
