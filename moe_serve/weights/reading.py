"""How whoever reads weights may stop, and what a reader tells while it reads.

Responsible for the interface only. Called by `checkpoint` and `host_cache`, which read in chunks;
implemented by the shard's copy job.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Final, Protocol

READ_CHUNK_BYTES: Final = 4 * 1024 * 1024
"""Bytes between two looks at whether to stop; 10 ms at 400 MB/s."""


class Reading(Protocol):
    """One expert being read into memory of the caller."""

    def blocking(self) -> AbstractContextManager[None]:
        """A part that may hang in the system, because a disk or a server does not answer. It
        touches no memory of the caller. Raises on leaving where the caller gave up meanwhile: then
        its memory must not be touched any more."""

    def advance(self, num_bytes: int) -> None:
        """So many bytes more of the canonical expert are there, or what makes them. Raises where
        reading is to stop."""


class Uninterrupted:
    """A `Reading` that never stops."""

    def blocking(self) -> AbstractContextManager[None]:
        """Nothing to do."""
        return nullcontext()

    def advance(self, num_bytes: int) -> None:
        """Nobody asks."""


UNINTERRUPTED: Final = Uninterrupted()
