"""What a shard has executed: hotness by (phase, layer, expert), and a ledger of every contribution.

Responsible for counting each executed pair once and keeping reports until they are acknowledged.
Must never count probes, refused rows or padding. Called by the shard's core, from the thread that
computed and from the one that answers `report`.

Worked example: 3 pairs of expert 5 in layer 1 of 2 x 8 experts in phase 0 (prefill) are counted
under key (0 * 2 + 1) * 8 + 5 = 13.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_serve.ports import Cause, RowStatus, SubCall
from moe_serve.shard.kernels import add_work
from placement.load import HotnessReport
from placement.topology import NUM_PHASES

REPORTS_MAX = 64
"""Reports kept for a controller that does not acknowledge; beyond, counts gather in the one being
counted and none is lost."""


class Counts:
    """Totals since start, by name. Safe to call from several threads."""

    def __init__(self) -> None:
        self._totals: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, by: int = 1) -> None:
        """Count."""
        with self._lock:
            self._totals[name] += by

    def add_rows(self, row_status: npt.NDArray[np.uint8]) -> None:
        """Count the rows of an answered sub-call, uint8 [R], by what became of them."""
        stale, refused = 0, 0
        if row_status.any():
            stale = int(np.count_nonzero(row_status == RowStatus.STALE))
            refused = int(np.count_nonzero(row_status == RowStatus.REFUSED))
        with self._lock:
            self._totals["rows_served"] += len(row_status) - stale - refused
            self._totals["rows_stale"] += stale
            self._totals["rows_refused"] += refused

    def all(self) -> dict[str, float]:
        """Everything counted so far; a name is there from the first time on."""
        with self._lock:
            return {name: float(total) for name, total in self._totals.items()}


class Hotness:
    """Executed pairs and seconds of one shard. Safe to call from several threads."""

    def __init__(self, source: str, rank: int, incarnation: int, num_keys: int) -> None:
        self._source, self._rank, self._incarnation = source, rank, incarnation
        self._num_keys = num_keys
        self._pairs = np.zeros(NUM_PHASES * num_keys, np.int64)
        self._seconds = np.zeros(NUM_PHASES * num_keys, np.float64)
        self._reports: deque[HotnessReport] = deque()
        self._next_seq = 0
        self._lock = threading.Lock()
        self.total_pairs = 0
        """Pairs executed since start."""
        self.total_s = 0.0
        """Seconds of compute since start."""

    def add(
        self,
        phase: int,
        key: npt.NDArray[np.int32],
        pairs: npt.NDArray[np.int64],
        seconds: npt.NDArray[np.float64],
    ) -> None:
        """Count in one phase: key int32 [n] in [0, layers * experts), each of them `pairs` pairs
        and `seconds` of compute."""
        with self._lock:
            add_work(self._pairs, self._seconds, phase * self._num_keys, key, pairs, seconds)
            self.total_pairs += int(pairs.sum())
            self.total_s += float(seconds.sum())

    def reports(self, acked_seq: int, at_s: float) -> tuple[HotnessReport, ...]:
        """Reports after `acked_seq`, the newest made now where something was executed; those up to
        it are forgotten."""
        with self._lock:
            while self._reports and self._reports[0].seq <= acked_seq:
                self._reports.popleft()
            if len(self._reports) < REPORTS_MAX and self._pairs.any():
                self._seal(at_s)
            return tuple(self._reports)

    def _seal(self, at_s: float) -> None:
        key = np.flatnonzero(self._pairs)
        self._reports.append(
            HotnessReport(
                source=self._source,
                incarnation=self._incarnation,
                seq=self._next_seq,
                rank=self._rank,
                at_s=at_s,
                key=key.astype(np.int32),
                pairs=self._pairs[key],
                seconds=self._seconds[key],
            )
        )
        self._next_seq += 1
        self._pairs[key] = 0
        self._seconds[key] = 0.0


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """Pairs of one sub-call that were executed and answered: (request_key, layer, row_id[i],
    pair_k[i]) names contribution i."""

    router: str
    call_id: int
    sub_id: int
    request_key: int
    layer: int
    cause: Cause
    row_id: npt.NDArray[np.int32]
    pair_k: npt.NDArray[np.int32]


class Ledger:
    """Executed contributions, for an outside check that none was lost or doubled. Off where
    `rows_max` is 0.

    Holds at most `rows_max` pairs; further ones are counted in `dropped_pairs` only, so a check
    knows that it cannot vouch.
    """

    def __init__(self, rows_max: int) -> None:
        self._rows_max = rows_max
        self._entries: list[LedgerEntry] = []
        self._held = 0
        self._lock = threading.Lock()
        self.dropped_pairs = 0

    @property
    def on(self) -> bool:
        """Whether anything is recorded."""
        return self._rows_max > 0

    def entry(
        self, call: SubCall, served_pairs: npt.NDArray[np.bool_] | None
    ) -> LedgerEntry | None:
        """What `add` takes of a sub-call, None where the ledger is off; `served_pairs` bool [P],
        None = all. Records nothing: making it may fail for want of memory."""
        if not self.on:
            return None
        pair_row, pair_k = call.pair_row, call.pair_k
        if served_pairs is not None:
            pair_row, pair_k = pair_row[served_pairs], pair_k[served_pairs]
        return LedgerEntry(
            router=call.router,
            call_id=call.call_id,
            sub_id=call.sub_id,
            request_key=call.request_key,
            layer=call.layer,
            cause=call.cause,
            row_id=call.row_id[pair_row],
            pair_k=pair_k.copy(),
        )

    def add(self, entry: LedgerEntry | None) -> None:
        """Record a sub-call's executed pairs; None records nothing."""
        if entry is None:
            return
        num_pairs = len(entry.pair_k)
        with self._lock:
            if self._held + num_pairs > self._rows_max:
                self.dropped_pairs += num_pairs
                return
            self._held += num_pairs
            self._entries.append(entry)

    def take(self) -> tuple[LedgerEntry, ...]:
        """All entries since the last take."""
        with self._lock:
            entries, self._entries, self._held = tuple(self._entries), [], 0
            return entries
