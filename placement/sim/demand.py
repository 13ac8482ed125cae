"""Demand as a simulated router counts and reports it: at least once, each report with its number.

Responsible for keeping a report until it was acknowledged. Called by the router of a world.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

import numpy as np

from placement.load import DemandReport
from placement.sim.traffic import Request
from placement.topology import MoeSpec, Phase


@dataclass(frozen=True, slots=True, eq=False)
class RouterReport:
    """Answer of a router to a poll."""

    term: int
    """Term that both epochs count in."""
    applied: int
    quiesced: int
    highest_term: int
    suspects: tuple[tuple[int, int, str], ...]
    reports: tuple[DemandReport, ...]


class DemandBook:
    """What one life of a router accepted."""

    def __init__(self, source: str, incarnation: int, spec: MoeSpec) -> None:
        self._source = source
        self._incarnation = incarnation
        self._spec = spec
        self._open: Counter[int] = Counter()
        self._kept: deque[tuple[int, Counter[int], float]] = deque()
        self._seq = 0

    def count(self, request: Request) -> None:
        """Count the valid pairs of a request, once."""
        spec = self._spec
        valid = request.ids[request.valid != 0]
        self._open.update((request.layer * spec.num_experts + valid).tolist())

    def reports(self, acked_seq: int, at_s: float) -> tuple[DemandReport, ...]:
        """All that is not acknowledged yet, oldest first; what was counted since is a new one."""
        while self._kept and self._kept[0][0] <= acked_seq:
            self._kept.popleft()
        if self._open:
            self._seq += 1
            self._kept.append((self._seq, self._open, at_s))
            self._open = Counter()
        return tuple(self._report(*kept) for kept in self._kept)

    def _report(self, seq: int, pairs: Counter[int], at_s: float) -> DemandReport:
        keys = sorted(pairs)
        return DemandReport(
            source=self._source,
            incarnation=self._incarnation,
            seq=seq,
            at_s=at_s,
            key=np.array(keys, dtype=np.int32) + Phase.PREFILL * self._spec.num_keys,
            pairs=np.array([pairs[key] for key in keys], dtype=np.int64),
        )

    def unreported(self) -> Counter[int]:
        """Pairs by key that no controller has acknowledged."""
        total = Counter(self._open)
        for _, pairs, _ in self._kept:
            total.update(pairs)
        return total
