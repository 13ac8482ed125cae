"""A token bucket: how long a sender must wait to stay under a rate.

Responsible for arithmetic only. Reads no clock: times are given. Called by the copy client and the
copy server.
"""

from __future__ import annotations


class TokenBucket:
    """`rate_per_s` tokens a second, at most `burst` saved up; rate 0 means no limit.

    Unlike a bare sleep of size / rate after each piece, tokens saved while the caller was delayed
    are not lost, so the rate asked for is the rate got.

    Worked example: rate 100, burst 10, full at 0 s. take(10, 0.0) -> 0 s; take(5, 0.0) -> 0.05 s;
    take(5, 0.1) -> 0 s.

    Raises ValueError for a negative rate or a burst that is not positive.
    """

    def __init__(self, rate_per_s: float, burst: float, at_s: float = 0.0) -> None:
        if rate_per_s < 0:
            raise ValueError(f"rate_per_s: must be at least 0 (got {rate_per_s})")
        if burst <= 0:
            raise ValueError(f"burst: must be above 0 (got {burst})")
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._tokens = burst
        self._at_s = at_s

    def take(self, tokens: float, at_s: float) -> float:
        """Take tokens at a time; returns the seconds to wait before acting. May go into debt, which
        later takers wait for."""
        if self._rate_per_s == 0:
            return 0.0
        elapsed_s = max(0.0, at_s - self._at_s)
        self._at_s = max(self._at_s, at_s)
        self._tokens = min(self._burst, self._tokens + elapsed_s * self._rate_per_s) - tokens
        return max(0.0, -self._tokens / self._rate_per_s)
