"""What was asked for and what was added, so that somebody outside can prove that nothing was lost
or doubled.

Join: a *contribution* is (request_key, layer, row, k). It was wanted if its bit in the request's
entry is set; it was added once for each entry (call_id, sub_id, row) of a shard's executed ledger
that also stands here as combined. Both entries of a request are written when its output has been
made; a request that failed leaves none.

Responsible for keeping entries, bounded. Must never check them. Called by `dispatch`; off unless a
size is set.
"""

from __future__ import annotations

from collections import deque

import msgspec


class RequestEntry(msgspec.Struct, frozen=True, tag="request"):
    """A request whose output was returned. pair_valid: bitmap [rows, top_k], bit row * top_k + k,
    as in the public API.
    """

    request_key: int
    layer: int
    rows: int
    top_k: int
    pair_valid: bytes


class CombinedEntry(msgspec.Struct, frozen=True, tag="combined"):
    """Rows of one partial sum that were added. row_id: int32 little-endian."""

    request_key: int
    layer: int
    call_id: int
    sub_id: int
    rank: int
    row_id: bytes


Entry = RequestEntry | CombinedEntry


class LedgerPage(msgspec.Struct, frozen=True):
    """Entries taken out. `forgotten`: entries that never fitted; above 0 a join proves nothing."""

    router: str
    incarnation: int
    entries: tuple[Entry, ...]
    forgotten: int


class CombinedLedger:
    """Bounded queue of entries; the newest are forgotten when it is full, and counted."""

    def __init__(self, router: str, incarnation: int, max_entries: int) -> None:
        self._router = router
        self._incarnation = incarnation
        self._max_entries = max_entries
        self._entries: deque[Entry] = deque()
        self._forgotten = 0

    def add(self, entries: list[Entry]) -> None:
        """Keep the entries of one request, all or none."""
        if len(self._entries) + len(entries) > self._max_entries:
            self._forgotten += len(entries)
        else:
            self._entries.extend(entries)

    def take(self, max_entries: int) -> LedgerPage:
        """Remove and return up to `max_entries`, oldest first."""
        count = min(max_entries, len(self._entries))
        taken = tuple(self._entries.popleft() for _ in range(count))
        return LedgerPage(self._router, self._incarnation, taken, self._forgotten)
