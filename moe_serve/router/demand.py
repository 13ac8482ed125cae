"""Demand as this router counted it: valid pairs by (phase, layer, expert), kept until the
controller has acknowledged them.

Counted once a request, before dispatch, and only for attempt 0: retries, hedges and padding are no
demand. Counts of one sub-window make one report with a sequence number of its own, so the receiver
can drop repeats and keep the time resolution.

What waits for a permit is told beside it, as it stands when asked: not demand yet, but of the next
window, and known to nobody else.

Responsible for losing and doubling nothing. Must never wait for the controller: where reports pile
up, the open sub-window simply grows. Called by `dispatch`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from moe_serve.router.checks import ForwardInput
from placement.load import DemandReport
from placement.split import count_ids
from placement.topology import Phase

REPORTS_KEPT_MAX = 256
"""Sealed reports that wait for an acknowledgement; beyond it only the time resolution suffers."""
QUEUED_PAIRS_MAX = 1 << 20
"""Pairs of waiting requests that are counted when asked, oldest first: about a millisecond of the
loop. What stands behind them is no matter of the next window."""


class DemandLog:
    """Demand of one router life. `keys`: (phase, layer, expert) as (phase * layers + layer) *
    experts + expert.
    """

    def __init__(
        self,
        source: str,
        incarnation: int,
        *,
        num_phases: int,
        num_layers: int,
        num_experts: int,
        sub_window_s: float,
    ) -> None:
        self._source = source
        self._incarnation = incarnation
        self._sub_window_s = sub_window_s
        self._open = np.zeros((num_phases, num_layers, num_experts), np.int64)
        self._calls = [0] * num_phases
        self._opened_at_s: float | None = None
        self._sealed: deque[DemandReport] = deque()
        self._next_seq = 1
        self._waiting: dict[int, ForwardInput] = {}
        self._next_wait = 0
        self.total_pairs = 0

    def count(self, phase: int, layer: int, pairs: npt.NDArray[np.int64], at_s: float) -> None:
        """Add pairs, int64 [experts], of one request of a layer."""
        if self._opened_at_s is not None and at_s - self._opened_at_s >= self._sub_window_s:
            self._seal(at_s)
        if self._opened_at_s is None:
            self._opened_at_s = at_s
        self._open[phase, layer] += pairs
        self._calls[phase] += 1
        self.total_pairs += int(pairs.sum())

    def reports(self, acked_seq: int, at_s: float) -> tuple[DemandReport, ...]:
        """All reports after `acked_seq`, oldest first, what was counted until now included; earlier
        ones are forgotten.
        """
        while self._sealed and self._sealed[0].seq <= acked_seq:
            self._sealed.popleft()
        self._seal(at_s)
        return tuple(self._sealed)

    @contextmanager
    def waits(self, request: ForwardInput) -> Iterator[None]:
        """While the block runs the request counts as queued. Retries by callers never do."""
        number, self._next_wait = self._next_wait, self._next_wait + 1
        if request.attempt == 0:
            self._waiting[number] = request
        try:
            yield
        finally:
            self._waiting.pop(number, None)

    def queued(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """(key int32 [n], pairs int64 [n]) of the requests that wait now."""
        counts = np.zeros(self._open.shape, np.int64) if self._waiting else self._open[:0]
        room = QUEUED_PAIRS_MAX
        for request in self._waiting.values():
            room -= request.topk_ids.size
            if room < 0:
                break
            here = count_ids(request.topk_ids, request.valid, counts.shape[2])
            counts[request.phase, request.layer] += here
        flat = counts.reshape(-1)
        key = np.flatnonzero(flat).astype(np.int32)
        return key, flat[key]

    def _seal(self, at_s: float) -> None:
        if self._opened_at_s is None or len(self._sealed) >= REPORTS_KEPT_MAX:
            return
        flat = self._open.reshape(-1)
        key = np.flatnonzero(flat).astype(np.int32)
        self._sealed.append(
            DemandReport(
                source=self._source,
                incarnation=self._incarnation,
                seq=self._next_seq,
                at_s=at_s,
                key=key,
                pairs=flat[key],
                calls=(self._calls[Phase.PREFILL], self._calls[Phase.DECODE]),
            )
        )
        self._next_seq += 1
        flat[:] = 0
        self._calls = [0] * len(self._calls)
        self._opened_at_s = None
