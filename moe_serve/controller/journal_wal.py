"""The write-ahead log beside a journal after a crash: torn at its end, or damaged before it?

SQLite reads such a log up to the first frame that is not what was written, and forgets what follows
without a word. That is right for a torn end: only the last transaction was not on disk yet when the
machine stopped. Where a later transaction follows the bad frame, the bad one was on disk once:
commits are lost, and the journal is damaged.

Responsible for telling the two apart, from bytes. Must never change them, nor open the database.
Called by journal_store before it does.

Format: a header of 32 bytes, then frames of 24 bytes and a page each. A frame's checksum goes on
from the one of the frame before. Frames of an earlier use of the file carry another salt.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

HEADER_BYTES = 32
FRAME_BYTES = 24
"""Of a frame's own header; its page follows."""
_MAGIC = 0x377F0682
"""Its last bit tells the byte order of what is summed."""
_MASK = 0xFFFFFFFF
_PAGE_BYTES_MAX = 65_536


def lost_commits(wal: bytes) -> bool:
    """Whether transactions that were committed follow bytes that are not what was written."""
    if len(wal) <= HEADER_BYTES:
        return False
    log = _Log.of(wal)
    if log is None:
        # The header is on disk before any frame is written.
        return any(wal[:HEADER_BYTES]) and any(wal[HEADER_BYTES:])
    good, sums = 0, log.first
    while good < log.num_frames and log.current(good) and log.sums(good, sums) == log.stored(good):
        sums, good = log.stored(good), good + 1
    if good == log.num_frames:
        return False
    # A flipped salt: all else of the frame goes on from the one before, as no old frame does.
    if not log.current(good) and log.sums(good, sums) == log.stored(good):
        return True
    ends = sum(log.current(n) and log.commits(n) for n in range(good, log.num_frames))
    return ends >= 2  # the end of the torn transaction may have been written before its middle


@dataclass(frozen=True, slots=True)
class _Log:
    """A log whose header holds."""

    wal: bytes
    order: str
    page_bytes: int
    salts: bytes
    first: tuple[int, int]
    """Checksum of the header."""
    weights: _Weights

    @classmethod
    def of(cls, wal: bytes) -> _Log | None:
        """None where the header is not what was written."""
        magic, _version, page_bytes = struct.unpack_from(">III", wal)
        if magic & ~1 != _MAGIC or not 512 <= page_bytes <= _PAGE_BYTES_MAX or page_bytes % 8:
            return None
        order = ">" if magic & 1 else "<"
        stored = struct.unpack_from(">II", wal, 24)
        if _Weights.of(24).sums(wal[:24], order, (0, 0)) != stored:
            return None
        weights = _Weights.of(8 + page_bytes)
        return cls(wal, order, page_bytes, wal[16:24], (stored[0], stored[1]), weights)

    @property
    def num_frames(self) -> int:
        """Whole frames."""
        return (len(self.wal) - HEADER_BYTES) // (FRAME_BYTES + self.page_bytes)

    def current(self, frame: int) -> bool:
        """Whether a frame is of this use of the file."""
        at = self._at(frame)
        return self.wal[at + 8 : at + 16] == self.salts

    def commits(self, frame: int) -> bool:
        """Whether a frame says that a transaction ends with it."""
        return bool(struct.unpack_from(">I", self.wal, self._at(frame) + 4)[0])

    def stored(self, frame: int) -> tuple[int, int]:
        """The checksum a frame holds."""
        one, two = struct.unpack_from(">II", self.wal, self._at(frame) + 16)
        return one, two

    def sums(self, frame: int, before: tuple[int, int]) -> tuple[int, int]:
        """The checksum a frame should hold after one that holds `before`."""
        at = self._at(frame)
        page = at + FRAME_BYTES
        data = self.wal[at : at + 8] + self.wal[page : page + self.page_bytes]
        return self.weights.sums(data, self.order, before)

    def _at(self, frame: int) -> int:
        return HEADER_BYTES + frame * (FRAME_BYTES + self.page_bytes)


@dataclass(frozen=True, slots=True)
class _Weights:
    """What each word counts in the two sums of some bytes.

    Two words a, b at a time, mod 2^32: one += a + two; two += b + one. A word therefore counts with
    a weight that only depends on how many follow. words: uint32 [2, number of words]; before: what
    the two sums from before count, for each new sum.
    """

    words: npt.NDArray[np.uint32]
    before: tuple[tuple[int, int], tuple[int, int]]

    @classmethod
    def of(cls, num_bytes: int) -> _Weights:
        """Weights for this many bytes, a multiple of 8."""
        pairs = num_bytes // 8
        words = np.zeros((2, 2 * pairs), np.uint32)
        a, b, one, two = (1, 1), (0, 1), (1, 0), (0, 1)  # (in the first sum, in the second)
        for pair in reversed(range(pairs)):
            words[:, 2 * pair], words[:, 2 * pair + 1] = a, b
            a, b, one, two = _step(a), _step(b), _step(one), _step(two)
        return cls(words, ((one[0], two[0]), (one[1], two[1])))

    def sums(self, data: bytes, order: str, before: tuple[int, int]) -> tuple[int, int]:
        """The two sums of `data` that go on from `before`."""
        words = np.frombuffer(data, f"{order}u4").astype(np.uint32)
        own = (self.words * words).sum(axis=1, dtype=np.uint32).tolist()
        one, two = (
            (int(mine) + w[0] * before[0] + w[1] * before[1]) & _MASK
            for mine, w in zip(own, self.before, strict=True)
        )
        return one, two


def _step(sums: tuple[int, int]) -> tuple[int, int]:
    one, two = sums
    return (one + two) & _MASK, (one + 2 * two) & _MASK
