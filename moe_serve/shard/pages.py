"""Memory that the operating system really gets back: anonymous private mappings, page by page.

Responsible for mapping, discarding and unmapping. Must never know what a slot is. Called by the
slot pool and by backends that keep a derived form of the weights.

`malloc` is not used for weights: shards run with a high `MALLOC_TRIM_THRESHOLD_` (message buffers
are reused, not unmapped), under which freed weights would stay resident.
"""

from __future__ import annotations

import errno
import mmap

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = mmap.PAGESIZE


def page_rounded(num_bytes: int) -> int:
    """`num_bytes` rounded up to whole pages: 1 -> 4096, 4096 -> 4096, 0 -> 0 (with pages of 4096
    bytes).
    """
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def process_resident_bytes() -> int:
    """Bytes of this process that are in memory, shared ones included."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * PAGE_BYTES


class Pages:
    """One mapping of at least `num_bytes` zero bytes, not resident until written.

    `array` is its content, writable `uint8 [page_rounded(num_bytes)]`.

    Raises:
        MemoryError: the system has no memory or address space for it.
    """

    def __init__(self, num_bytes: int) -> None:
        assert num_bytes > 0, "an empty mapping holds nothing"
        # Private, not Python's default of shared: MADV_DONTNEED on shared anonymous memory keeps
        # the pages and their content.
        try:
            self._map = mmap.mmap(
                -1, page_rounded(num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            raise MemoryError(f"the system maps no {num_bytes} bytes more") from error
        try:
            # A huge page under one held slot would make its free neighbours resident as well.
            self._map.madvise(mmap.MADV_NOHUGEPAGE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # The kernel was built without huge pages: there is nothing to forbid.
        self.array: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)

    def discard(self, offset: int, num_bytes: int) -> None:
        """Give the pages of a range back at once; it reads as zeros afterwards. Both figures are
        multiples of a page.
        """
        assert offset % PAGE_BYTES == 0, "a discarded range begins on a page"
        assert num_bytes % PAGE_BYTES == 0, "a discarded range ends on a page"
        self._map.madvise(mmap.MADV_DONTNEED, offset, num_bytes)

    def free(self) -> None:
        """Discard everything and drop the mapping.

        Address space is unmapped when the last array that views it is gone; the memory itself goes
        back now, so that a view somebody kept costs nothing and shows zeros, never another expert's
        bytes.
        """
        self.discard(0, len(self._map))
        self.array = np.empty(0, np.uint8)
        del self._map
