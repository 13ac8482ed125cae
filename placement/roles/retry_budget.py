"""How much is sent twice: retries and hedges as a share of the calls.

The theory. A retry costs as much as a call. Where much fails, retries of all of it would double or
treble the load on what is left, and so keep it failing after the cause has gone. So retries are a
share of the calls of the last seconds: whatever fails, and however fast, at most so much more is
sent, and a fault that ends leaves nothing behind. The share is over time, not over what is open: a
refusal that comes at once leaves nothing open, yet its retry is work.

By Little's law all that is on its way to a shard that dies fits into the share if calls take less
than `share` x `window_s`: 2 s of the 10 here. A few are always allowed, so that a router with
little to do can retry at all.

Worked example, share 0.2, least 3: of 10 calls in the window 3 may be retried, of 100 calls 20.

Responsible for counting. Must never choose which call is sent again. Called by
`placement.roles.router_retries` and `placement.roles.router_hedges`. Pure: the time is an argument.
"""

from __future__ import annotations

_BUCKETS = 10
"""Parts of the window: what is a window old is forgotten a tenth at a time."""


class ShareBudget:
    """Extras of the last `window_s`: at most `share` of its calls or `least`, whichever is more.

    Times of the caller's clock in seconds; one that goes back counts as the newest seen.
    """

    def __init__(self, *, share: float, least: int, window_s: float) -> None:
        self._share = share
        self._least = least
        self._bucket_s = window_s / _BUCKETS
        self._called = [0] * _BUCKETS
        self._spent = [0] * _BUCKETS
        self._calls = 0
        self._extras = 0
        self._bucket: int | None = None

    def called(self, count: int, at_s: float) -> None:
        """So many calls were made for the first time."""
        self._called[self._now(at_s)] += count
        self._calls += count

    def room(self, at_s: float) -> int:
        """Extras that may be made now."""
        self._now(at_s)
        # A hair more than the product, which may fall short of a whole number by rounding.
        allowed = max(self._least, int(self._share * self._calls + 1e-9))
        return max(0, allowed - self._extras)

    def spend(self, at_s: float) -> None:
        """One extra is made."""
        self._spent[self._now(at_s)] += 1
        self._extras += 1

    def _now(self, at_s: float) -> int:
        """Place of the bucket of this time; forgets those that have left the window."""
        bucket = int(at_s // self._bucket_s)
        if self._bucket is None:
            self._bucket = bucket
        for gone in range(self._bucket + 1, min(bucket, self._bucket + _BUCKETS) + 1):
            place = gone % _BUCKETS
            self._calls -= self._called[place]
            self._extras -= self._spent[place]
            self._called[place] = self._spent[place] = 0
        self._bucket = max(bucket, self._bucket)
        return self._bucket % _BUCKETS


class RetryBudget:
    """Retries: a share of the calls over time, and a share of the open calls at once.

    `share` of both; `least_at_once` and `least` are always allowed, at once and in `window_s`.
    """

    def __init__(self, *, share: float, least_at_once: int, least: int, window_s: float) -> None:
        self._share = share
        self._least_at_once = least_at_once
        self._over_time = ShareBudget(share=share, least=least, window_s=window_s)
        self._on_their_way: set[int] = set()

    def called(self, count: int, at_s: float) -> None:
        """So many calls were made for the first time."""
        self._over_time.called(count, at_s)

    def grant(self, call_id: int, open_calls: int, at_s: float, *, free: bool = False) -> bool:
        """Whether the call may be retried now; then it counts until `ended`. `free`: it counts at
        once only, because what made it fail is known to have changed."""
        if len(self._on_their_way) >= max(self._least_at_once, int(self._share * open_calls)):
            return False
        if not free:
            if self._over_time.room(at_s) == 0:
                return False
            self._over_time.spend(at_s)
        self._on_their_way.add(call_id)
        return True

    def dry(self, at_s: float) -> bool:
        """Whether the share over time is used up: no end of a call makes room, only time does."""
        return self._over_time.room(at_s) == 0

    def ended(self, call_id: int) -> None:
        """The call has closed. Others are ignored."""
        self._on_their_way.discard(call_id)
