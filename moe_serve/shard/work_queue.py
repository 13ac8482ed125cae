"""The shard's queue: bounded, and drained in natural batches.

Responsible for order and bounds, and for the estimate of queued seconds. Must never compute, reply
or read a clock. Called by the shard's core under its own lock.

Natural batching: while a batch is computed, what arrives waits; then all waiting sub-calls of the
layer whose oldest has waited longest are taken together. There is no timer, so an idle shard adds
no wait and a busy one reads each expert's weights once for all of them.

Worked example: waiting are a (layer 0), b (layer 1), c (layer 0). take(...) gives [a, c], the next
one [b].
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from moe_serve.errors import MoeServeError
from moe_serve.ports import SubCall, SubReply

ReplyTo = Callable[[SubReply | MoeServeError], None]


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A queued sub-call. Times are of the shard's monotonic clock; work is never begun after
    `deadline_s`."""

    call: SubCall
    reply: ReplyTo
    arrived_s: float
    deadline_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds of the queue and of a batch; a sub-call beyond the queue's is refused at once."""

    rows_max: int = 65_536
    """Rows that may wait."""
    bytes_max: int = 256 * 1024 * 1024
    """Bytes of waiting messages."""
    sub_calls_max: int = 4096
    """Sub-calls that may wait, however small."""
    batch_rows_max: int = 8192
    """Rows computed at once; a single larger sub-call is computed alone."""
    direct_rows_max: int = 128
    """Most waiting rows that the thread which received them computes itself; 0 = none."""
    direct_s_max: float = 0.001
    """Longest estimated time, in seconds, for which that thread may compute: so long it receives
    nothing."""


class WorkQueue:
    """Sub-calls by layer, in order of arrival."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        # Layers in the order in which their oldest sub-call arrived.
        self._layers: OrderedDict[int, deque[Work]] = OrderedDict()
        self.rows = 0
        self.pairs = 0
        self.num_bytes = 0
        self.sub_calls = 0

    def has_room(self, call: SubCall, num_bytes: int) -> bool:
        """Whether one more sub-call fits. An empty queue takes any."""
        if not self.sub_calls:
            return True
        limits = self._limits
        return (
            self.rows + len(call.rows) <= limits.rows_max
            and self.num_bytes + num_bytes <= limits.bytes_max
            and self.sub_calls < limits.sub_calls_max
        )

    def put(self, work: Work) -> None:
        """Add at the end of its layer."""
        self._layers.setdefault(work.call.layer, deque()).append(work)
        self._count(work, 1)

    def take(self) -> list[Work]:
        """Next batch: all waiting sub-calls of one layer up to the batch limit, oldest first; []
        when nothing waits."""
        if not self._layers:
            return []
        layer, waiting = next(iter(self._layers.items()))
        batch: list[Work] = []
        rows = 0
        while waiting:
            rows += len(waiting[0].call.rows)
            if batch and rows > self._limits.batch_rows_max:
                break
            work = waiting.popleft()
            self._count(work, -1)
            batch.append(work)
        del self._layers[layer]
        if waiting:
            self._requeue(layer, waiting)
        return batch

    def drain(self) -> list[Work]:
        """Take everything, for a shard that stops."""
        works = [work for waiting in self._layers.values() for work in waiting]
        self._layers.clear()
        self.rows = self.pairs = self.num_bytes = self.sub_calls = 0
        return sorted(works, key=lambda work: work.arrived_s)

    def _requeue(self, layer: int, waiting: deque[Work]) -> None:
        """Put a cut layer back where its oldest sub-call belongs: before layers that have waited
        less."""
        after = [
            (other, works)
            for other, works in self._layers.items()
            if works[0].arrived_s > waiting[0].arrived_s
        ]
        for other, _works in after:
            del self._layers[other]
        self._layers[layer] = waiting
        self._layers.update(after)

    def _count(self, work: Work, sign: int) -> None:
        self.rows += sign * len(work.call.rows)
        self.pairs += sign * len(work.call.pair_row)
        self.num_bytes += sign * work.num_bytes
        self.sub_calls += sign


class BacklogEstimate:
    """Seconds of queued work, from what batches have cost: an EWMA of seconds a pair.

    Worked example: 100 pairs took 10 ms, so a pair costs 0.1 ms. 50 pairs wait, and 3 ms ago a
    batch of 40 pairs began, of which 1 ms is left: 0.0001 * 50 + 0.001 = 6 ms.
    """

    _WEIGHT = 0.2
    """Weight of the newest batch."""
    _GROWTH = 1.1
    """Most by which one batch lengthens what batches of its size are taken to last."""

    def __init__(self) -> None:
        self._batch_s: dict[int, float] = {}
        self._seconds_a_pair = 0.0
        self._running_until_s = 0.0

    def began(self, pairs: int, at_s: float) -> None:
        """A batch of so many pairs is being computed."""
        self._running_until_s = at_s + pairs * self._seconds_a_pair

    def ended(self, pairs: int, seconds: float, at_s: float) -> None:
        """The batch is done."""
        self._running_until_s = at_s
        size = pairs.bit_length()
        # Shorter counts at once and longer slowly: on a shared processor a batch that was put off
        # for a while says nothing of what its like costs.
        self._batch_s[size] = min(seconds, self._GROWTH * self._batch_s.get(size, seconds))
        if pairs:
            cost = seconds / pairs
            old = self._seconds_a_pair
            self._seconds_a_pair = cost if old == 0.0 else old + self._WEIGHT * (cost - old)

    def batch_s(self, pairs: int) -> float:
        """Seconds that a batch of about so many pairs takes when nothing disturbs it; infinite
        where none was computed yet."""
        return self._batch_s.get(pairs.bit_length(), math.inf)

    def expected_s(self, pairs: int) -> float:
        """Seconds that a batch of so many pairs should take; 0 where nothing is known."""
        known_s = self._batch_s.get(pairs.bit_length(), 0.0)
        return max(known_s, pairs * self._seconds_a_pair)

    def seconds(self, waiting_pairs: int, at_s: float) -> float:
        """Estimated seconds until everything that waits now is done."""
        running_s = max(0.0, self._running_until_s - at_s)
        return waiting_pairs * self._seconds_a_pair + running_s
