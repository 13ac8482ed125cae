"""A router's own figures: counters since start, latency quantiles and loop lag since the last
report.

Responsible for bounded bookkeeping. Must never hold a payload or an id of a caller. Called by
`dispatch`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

LATENCIES_MAX = 4096
"""Newest request latencies kept between two reports."""


class Pulse:
    """Counters and quantiles of one router life."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._counters: Counter[str] = Counter()
        self._latencies_s: deque[float] = deque(maxlen=LATENCIES_MAX)
        self._lag_s = 0.0
        self._started_at_s = clock()
        self._clock = clock

    def add(self, name: str, amount: int = 1) -> None:
        """Count something."""
        self._counters[name] += amount

    def served(self, rows: int, latency_s: float) -> None:
        """A request was answered."""
        self._counters["requests"] += 1
        self._counters["tokens"] += rows
        self._latencies_s.append(latency_s)

    def lagged(self, lag_s: float) -> None:
        """The event loop woke up so much later than asked."""
        self._lag_s = max(self._lag_s, lag_s)

    def counters(self) -> dict[str, float]:
        """Totals since start."""
        names = ("requests", "tokens", "failed", "refused_requests", "disconnects")
        found = dict.fromkeys((*names, "malformed_replies", "tables_fetched"), 0.0)
        found |= {name: float(value) for name, value in self._counters.items()}
        found["uptime_s"] = self._clock() - self._started_at_s
        return found

    def take_quantiles(self) -> dict[str, float]:
        """dispatch_p50_s, dispatch_p99_s, worst loop_lag_s since the last call; starts anew."""
        ordered = sorted(self._latencies_s)
        found = {"loop_lag_s": self._lag_s}
        if ordered:
            found["dispatch_p50_s"] = ordered[len(ordered) // 2]
            found["dispatch_p99_s"] = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
        self._latencies_s.clear()
        self._lag_s = 0.0
        return found
