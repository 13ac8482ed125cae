"""Computes one admitted batch and answers its sub-calls.

Responsible for the forward, for what it counts, and for what becomes of a batch that fails: one
that does not fit into memory is split, one that fails otherwise is answered UNAVAILABLE. Must never
look at the queue, pin, or take a lock. Called by the shard's core, by one thread at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_serve.errors import MoeServeError, ResourceExhausted, Unavailable
from moe_serve.ports import SubReply
from moe_serve.shard.batch import Admitted, merge, partial_rows, work_by_phase
from moe_serve.shard.compute.base import ComputeBackend, SlotWork
from moe_serve.shard.executed import Counts, Hotness, Ledger
from moe_serve.shard.replies import Replies
from moe_serve.shard.stall import Stall
from moe_serve.shard.work_queue import BacklogEstimate, Work

COMPUTE_FAILURES_MAX = 3
"""Batches in a row that may fail before the shard calls itself broken and refuses everything. Too
little memory is no such failure."""

NAMED_MAX = 8
"""Requests that a log line names."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tally:
    """Where a batch is written down."""

    counts: Counts
    hotness: Hotness
    ledger: Ledger
    estimate: BacklogEstimate
    stall: Stall


class BatchRun:
    """Runs batches on `backend`. `clock` gives monotonic seconds."""

    def __init__(
        self,
        backend: ComputeBackend,
        hidden_size: int,
        tally: Tally,
        replies: Replies,
        *,
        rank: int,
        clock: Callable[[], float],
    ) -> None:
        self.backend = backend
        self._hidden_size = hidden_size
        self._tally = tally
        self._replies = replies
        self._rank = rank
        self._clock = clock
        self._failures_in_a_row = 0

    @property
    def broken(self) -> bool:
        """Whether too many batches failed in a row."""
        return self._failures_in_a_row >= COMPUTE_FAILURES_MAX

    def set_broken(self) -> None:
        """A bug ended the thread that computed: nothing is computed any more."""
        self._failures_in_a_row = COMPUTE_FAILURES_MAX

    def answers(
        self, admitted: Sequence[Admitted], now_s: float, keys: npt.NDArray[np.int32]
    ) -> list[SubReply | MoeServeError]:
        """Replies of a batch taken at `now_s`, in its order. `keys` int32 [slots] are the keys of
        the slots. A batch that does not fit into memory is computed in halves; a single sub-call
        that does not fit is answered ResourceExhausted."""
        try:
            answers: list[SubReply | MoeServeError] = [*self._once(admitted, now_s, keys)]
        except MemoryError:
            self._tally.counts.add("memory_errors")
            half = len(admitted) // 2
            if half:
                first = self.answers(admitted[:half], now_s, keys)
                return first + self.answers(admitted[half:], now_s, keys)
            return [no_memory(admitted[0].work)]
        except Exception as error:
            # A fault of ours or of the device. Others may be served, so one batch does not end the
            # shard; several in a row do.
            self._failures_in_a_row += 1
            self._tally.counts.add("compute_failures")
            names = sorted({one.work.call.request_id or "unnamed" for one in admitted})
            named = names[:NAMED_MAX]
            _log.exception(
                "rank %d: a batch failed, of requests %s",
                self._rank,
                named,
                extra={"request_id": named[0], "request_ids": named},
            )
            return [Unavailable(f"compute failed: {type(error).__name__}")] * len(admitted)
        finally:
            self._tally.stall.ended()
        self._failures_in_a_row = 0
        return answers

    def _once(
        self, admitted: Sequence[Admitted], now_s: float, keys: npt.NDArray[np.int32]
    ) -> list[SubReply]:
        tally = self._tally
        batch = merge(admitted, self._hidden_size)
        num_pairs = len(batch.pair_row)
        out = np.empty(batch.rows.shape, np.float32)
        began_s = self._clock()
        work: SlotWork | None = None
        if num_pairs:
            tally.stall.began(tally.estimate.expected_s(num_pairs), began_s)
            tally.estimate.began(num_pairs, began_s)
            work = self.backend.forward(
                batch.rows, batch.pair_row, batch.pair_slot, batch.pair_gate, out
            )
        else:
            out.fill(0.0)
        ended_s = self._clock()
        if not tally.stall.late_s(ended_s):
            # What hung and went on says nothing of what its like cost.
            tally.estimate.ended(num_pairs, ended_s - began_s, ended_s)
        pair_s = (ended_s - began_s) / max(1, num_pairs)
        entries = [tally.ledger.entry(o.work.call, o.pairs) for o in admitted if o.num_rows]
        replies = []
        for i, one in enumerate(admitted):
            partial = partial_rows(one.work.call, out, batch.begin[i], batch.begin[i + 1])
            replies.append(self._replies.of(one, partial, now_s, one.num_pairs * pair_s))
        # Everything large is allocated by now. Where memory was too short for it, the batch is
        # computed again, so nothing of it may have been counted.
        if work is not None:
            for phase, part in work_by_phase(batch, work):
                tally.hotness.add(phase, keys[part.slots], part.pairs, part.seconds)
        for entry in entries:
            tally.ledger.add(entry)
        for one in admitted:
            tally.counts.add_rows(one.row_status)
        tally.counts.add("batches")
        return replies


def no_memory(work: Work) -> ResourceExhausted:
    """The answer to a sub-call that does not fit into memory."""
    num_rows = len(work.call.rows)
    return ResourceExhausted(f"no memory for {num_rows} rows; send fewer at once, or wait")
