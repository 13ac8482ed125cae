"""Where work on rows runs: what is little in the thread that asks, the rest in a thread beside it.

Responsible for that choice alone. Must never be handed work that touches the role. Called by
`dispatch`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

SPLIT_BYTES_PER_PAIR = 32
"""Work of the splitter for one pair, in bytes touched."""
_T = TypeVar("_T")


class Offload:
    """Two threads beside the loop. bytes_max: most bytes touched by work that the loop does
    itself."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="router-rows")

    async def run(self, size_bytes: int, work: Callable[[], _T]) -> _T:
        """What `work` returns; it touches about `size_bytes`."""
        if size_bytes <= self._bytes_max:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def stop(self) -> None:
        """Take no more work; what runs ends by itself."""
        self._threads.shutdown(wait=False)
