"""Where the time of answered requests went, by stage and phase, and by the rank that was asked.

Every second of a request is in exactly one stage, so that the stages add up to what the caller
waited. Of sub-calls that ran side by side only the one that the request waited for longest counts
among its stages; by rank all count.

Worked example: a request waits 1 ms for a permit and is split in 1 ms. Its sub-calls to ranks 0 and
1 come back after 4 and 10 ms, rank 1 says: 3 ms waiting, 5 ms computing, and 1 ms later the output
is there, 13 ms after the request came. queue 1, split 1, wire 2, wait 3, compute 5, combine 1,
other 0; rank 1 came last, 6 ms late.

Responsible for these sums. Must never hold anything of a payload, nor be asked before a request is
answered. Called by `dispatch`, once an answered request.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from moe_serve.router.flight import ANSWER, Stamps
from moe_serve.stage_counts import STAGE_BOUNDS_S, STAGES, StageCounts
from placement.topology import NUM_PHASES

WAITING_MAX: Final = 4096
"""Numbers that wait to be counted: together they cost half of what they cost one by one, and so
many hold the loop up for less than a millisecond."""
_STAGES: Final = len(STAGES)
_BUCKETS: Final = len(STAGE_BOUNDS_S) + 1
_BOUNDS_S: Final = np.array(STAGE_BOUNDS_S)
_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]


class Stages:
    """Totals of one router life."""

    def __init__(self) -> None:
        self._requests: list[float] = []
        """phase, came, had its permit, split in, ended, length of its answers: of each request that
        waits to be counted, one after another."""
        self._answers: list[float] = []
        """Of their sub-calls, as in `Stamps`."""
        self._buckets = np.zeros(NUM_PHASES * _STAGES * _BUCKETS, np.int64)
        self._seconds = np.zeros(NUM_PHASES * _STAGES)
        self._counts = np.zeros((3, 0), np.int64)
        """By rank: sub-calls, pairs, last."""
        self._spent_s = np.zeros((4, 0))
        """By rank: late, wire, wait, compute."""

    def answered(self, phase: int, stamps: Stamps, ended_s: float) -> None:
        """A request of this phase was answered at `ended_s`."""
        answers = stamps.answers
        self._requests.extend(
            (phase, stamps.began_s, stamps.permit_s, stamps.split_s, ended_s, len(answers))
        )
        self._answers += answers
        if len(self._requests) + len(self._answers) >= WAITING_MAX:
            self._count()

    def counts(self) -> StageCounts:
        """Totals since start."""
        self._count()
        sub_calls, pairs, last = self._counts.copy()
        late_s, wire_s, wait_s, compute_s = self._spent_s.copy()
        return StageCounts(
            requests=self._buckets.reshape(NUM_PHASES, _STAGES, _BUCKETS).copy(),
            seconds=self._seconds.reshape(NUM_PHASES, _STAGES).copy(),
            sub_calls=sub_calls,
            pairs=pairs,
            last=last,
            late_s=late_s,
            wire_s=wire_s,
            wait_s=wait_s,
            compute_s=compute_s,
        )

    def _count(self) -> None:
        if not self._requests:
            return
        requests = np.array(self._requests, np.float64).reshape(-1, 6)
        phase, began_s, permit_s, split_s, ended_s, length = requests.T
        parts = np.zeros((len(phase), _STAGES))
        parts[:, 0], parts[:, 1] = permit_s - began_s, split_s
        if self._answers:
            parts[:, 1:6] += self._asked(length.astype(np.int64) // len(ANSWER), ended_s)
        parts[:, 6] = np.maximum(0.0, ended_s - began_s - parts.sum(axis=1))
        at = phase.astype(np.int64)[:, None] * _STAGES + np.arange(_STAGES)
        buckets = at * _BUCKETS + np.searchsorted(_BOUNDS_S, parts)
        self._buckets += np.bincount(buckets.ravel(), minlength=len(self._buckets))
        self._seconds += np.bincount(at.ravel(), parts.ravel(), len(self._seconds))
        self._requests.clear()
        self._answers.clear()

    def _asked(self, num: _Ints, ended_s: _Floats) -> _Floats:
        """Count the sub-calls by rank; `num` of each request, which ended at `ended_s`. Returns
        float64 [requests, 5]: split again, wire, wait, compute and combine of the last of each."""
        answers = np.array(self._answers, np.float64).reshape(-1, len(ANSWER))
        rank, pairs = answers[:, :2].astype(np.int64).T
        split_s, sent_s, came_s, queue_s, compute_s, rest_s = answers[:, 2:].T
        # What a shard says of itself is never more than we waited for it.
        took_s = came_s - sent_s
        there_s = np.minimum(queue_s + compute_s + rest_s, took_s)
        compute_s = np.minimum(compute_s, there_s)
        spent_s = np.stack([split_s, took_s - there_s, there_s - compute_s, compute_s])
        self._hold(int(rank.max()) + 1)
        num_ranks = self._counts.shape[1]
        self._counts[0] += np.bincount(rank, minlength=num_ranks)
        self._counts[1] += np.bincount(rank, pairs, num_ranks).astype(np.int64)
        for row in (1, 2, 3):
            self._spent_s[row] += np.bincount(rank, spent_s[row], num_ranks)
        last = np.cumsum(num) - 1
        came_last = last[num > 1]
        self._counts[2] += np.bincount(rank[came_last], minlength=num_ranks)
        # A second try was sent late, and is not to blame for what went before it.
        late_s = came_s[came_last] - np.maximum(came_s[came_last - 1], sent_s[came_last])
        self._spent_s[0] += np.bincount(rank[came_last], late_s, num_ranks)
        found = np.zeros((len(num), 5))
        asked = num > 0
        found[asked, :4] = spent_s[:, last[asked]].T
        found[asked, 4] = ended_s[asked] - came_s[last[asked]]
        return found

    def _hold(self, num_ranks: int) -> None:
        more = max(0, num_ranks - self._counts.shape[1])
        self._counts = np.pad(self._counts, ((0, 0), (0, more)))
        self._spent_s = np.pad(self._spent_s, ((0, 0), (0, more)))
