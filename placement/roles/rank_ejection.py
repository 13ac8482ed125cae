"""Shards that are left alone for a while because they fail or are far slower than the others.

*Faults* are the shard's own: lost connections, silence, malformed answers, its word that it cannot
compute. What a caller did wrong, a stale table and "busy" are none. After `faults` of them in a row
a shard is ejected for `eject_s`, and `eject_s` longer each further time, up to `eject_max_s`.

A *straggler* answers, but takes several times as long as the other shards do. Compared are medians
of the seconds a sub-call took, without the time it waited in the shard's queue, and allowing for
shards that get more work a call or whose device is declared slower. What was given up counts with
what it had taken. The time in the queue is left to the splitter, which knows each rank's backlog.

At most `share` of the shards are ejected at once, but one always may be. An ejected shard that
holds the last replica of an expert still serves it: what is avoided is left to `assignment`.

The way back leads through the compute path: now and then one batch is planned as if the shard were
not ejected, a *trial*. After a few good answers in a row it is back, however long it was to stay
away. When its time is over without, it is back on probation: its first fault ejects it again.

Responsible for these two judgements. Must never choose where a pair goes. Called by `rank_state`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

_KEPT = 32
"""Newest sub-calls of a shard whose median is compared."""
_CHECK_S = 0.5
"""Time between two comparisons."""
_DAY_S = 86_400.0
_NOBODY: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class EjectionRules:
    """When a shard is ejected. Durations in seconds."""

    faults: int = 5
    eject_s: float = 30.0
    eject_max_s: float = 300.0
    share: float = 0.1
    slow_factor: float = 5.0
    """A straggler's median is above that of the others times this ..."""
    slow_least_s: float = 0.02
    """... and above it by this much: below it nobody gains."""
    slow_samples: int = 10
    """Sub-calls of a shard before it is compared."""
    trial_every_s: float = 3.0
    trials_good: int = 3
    """Good answers in a row that bring it back."""


@dataclass(slots=True)
class _Shard:
    incarnation: int
    faults_in_row: int = 0
    ejections: int = 0
    until_s: float = 0.0
    slow: bool = False
    """Ejected for being slow, not for faults."""
    probation: bool = False
    good: int = 0
    trial_at_s: float = 0.0
    took_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    fresh: int = 0
    """Of them, those since the last comparison."""
    work: float = 0.0
    """Work a sub-call, moving mean."""


class Ejections:
    """Who is ejected. `slowness` of a rank: how many times as long its device is declared to take
    as the fastest; the most of all for a rank without one, 1 where nothing is declared."""

    def __init__(self, rules: EjectionRules, slowness: tuple[float, ...] = ()) -> None:
        self._rules = rules
        self._slowness = slowness
        self._shards: dict[int, _Shard] = {}
        self._ejected: set[int] = set()
        self._check_at_s = 0.0
        self._usual_s: dict[int, float] = {}
        """What the others would take in each rank's place, as of the last comparison."""
        self.count = 0
        """Ejections so far."""

    def follow(self, incarnations: dict[int, int]) -> None:
        """Know exactly these shards; a new life starts without a past."""
        self._shards = {
            rank: known
            if (known := self._shards.get(rank)) is not None and known.incarnation == incarnation
            else _Shard(incarnation)
            for rank, incarnation in incarnations.items()
        }
        self._ejected = {rank for rank in self._ejected if self._shards_until(rank) > 0.0}

    def fault(self, rank: int, at_s: float) -> None:
        """The shard itself failed a sub-call."""
        shard = self._shards[rank]
        if self._is_out(rank, at_s):
            shard.good = 0
            return
        shard.faults_in_row += 1
        if shard.faults_in_row >= (1 if shard.probation else self._rules.faults):
            self._eject(rank, at_s, slow=False)

    def served(self, rank: int, took_s: float, work: float, at_s: float) -> None:
        """It served a sub-call of so much work; `took_s` is without the time in its queue, which is
        what the shard says: no number below 0 or above a day counts."""
        if not 0.0 <= took_s < _DAY_S:
            took_s = 0.0
        shard = self._shards[rank]
        if rank in self._ejected and self._is_out(rank, at_s):
            self._tried(rank, took_s, at_s)
            return
        shard.faults_in_row = 0
        shard.probation = False
        self._took(shard, took_s, work, at_s)

    def unanswered(self, rank: int, took_s: float, work: float, at_s: float) -> None:
        """It had not answered after so long, and nobody waits for it any more. Says something of it
        only if that is longer than it usually takes."""
        shard = self._shards[rank]
        if rank in self._ejected and self._is_out(rank, at_s):
            if shard.slow and took_s > self._limit_s(rank):
                shard.good = 0
            return
        self._took(shard, took_s, work, at_s)

    def out(self, at_s: float, *, trial: bool = False) -> frozenset[int]:
        """Ranks ejected now. `trial`: without those whose turn for a trial it is, each once in
        `trial_every_s`."""
        if not self._ejected:
            return _NOBODY
        found = {rank for rank in tuple(self._ejected) if self._is_out(rank, at_s)}
        if trial:
            for rank in tuple(found):
                shard = self._shards[rank]
                if at_s >= shard.trial_at_s:
                    shard.trial_at_s = at_s + self._rules.trial_every_s
                    found.discard(rank)
        return frozenset(found)

    def why(self, rank: int) -> str:
        """Why a rank is ejected, for people."""
        slow = self._shards[rank].slow
        return "ejected: far slower than others" if slow else "ejected after failures in a row"

    # ------------------------------------------------------------------------------- inside

    def _shards_until(self, rank: int) -> float:
        shard = self._shards.get(rank)
        return 0.0 if shard is None else shard.until_s

    def _is_out(self, rank: int, at_s: float) -> bool:
        """Whether it is ejected; one whose time is over is let in on probation."""
        if rank not in self._ejected:
            return False
        if at_s < self._shards[rank].until_s:
            return True
        self._let_in(rank)
        self._shards[rank].probation = not self._shards[rank].slow
        return False

    def _let_in(self, rank: int) -> None:
        shard = self._shards[rank]
        self._ejected.discard(rank)
        shard.faults_in_row = shard.good = shard.fresh = 0
        shard.probation = False
        shard.took_s.clear()

    def _eject(self, rank: int, at_s: float, *, slow: bool) -> None:
        out = self.out(at_s)
        if len(out) + 1 > max(1.0, self._rules.share * len(self._shards)):
            return
        rules, shard = self._rules, self._shards[rank]
        if at_s - shard.until_s > rules.eject_max_s:
            shard.ejections = 0  # good for so long that the past says nothing
        shard.ejections += 1
        shard.until_s = at_s + min(rules.eject_max_s, rules.eject_s * shard.ejections)
        shard.slow = slow
        shard.faults_in_row = shard.good = 0
        shard.trial_at_s = at_s + rules.trial_every_s
        self._ejected.add(rank)
        self.count += 1

    def _tried(self, rank: int, took_s: float, at_s: float) -> None:
        shard = self._shards[rank]
        shard.good = 0 if shard.slow and took_s > self._limit_s(rank) else shard.good + 1
        if shard.good >= self._rules.trials_good:
            shard.until_s = at_s
            self._let_in(rank)

    def _took(self, shard: _Shard, took_s: float, work: float, at_s: float) -> None:
        shard.took_s.append(took_s)
        shard.fresh += 1
        shard.work += 0.2 * (work - shard.work) if shard.work else work
        if at_s >= self._check_at_s:
            self._check_at_s = at_s + _CHECK_S
            self._compare(at_s)

    def _limit_s(self, rank: int) -> float:
        """Longest time of a sub-call that is not slow."""
        usual_s = self._usual_s.get(rank, 0.0)
        return max(usual_s * self._rules.slow_factor, usual_s + self._rules.slow_least_s)

    def _compare(self, at_s: float) -> None:
        """Eject who is far slower than the others, the slowest first."""
        known = {
            rank: _median(sorted(shard.took_s)) / self._declared(rank)
            for rank, shard in self._shards.items()
            if len(shard.took_s) >= self._rules.slow_samples and rank not in self._ejected
        }
        if len(known) < 2:
            return
        times = sorted(known.values())
        works = sorted(self._shards[rank].work for rank in known)
        slow = []
        for rank, took_s in known.items():
            shard, declared = self._shards[rank], self._declared(rank)
            work = _median_of_others(works, shard.work)
            more = max(1.0, shard.work / work) if work > 0 else 1.0
            self._usual_s[rank] = max(1e-6, _median_of_others(times, took_s) * declared * more)
            # One without news is not judged again by what it did before; others still are by it.
            fresh, shard.fresh = shard.fresh, 0
            if fresh and took_s * declared > self._limit_s(rank):
                slow.append((-took_s * declared / self._usual_s[rank], rank))
        for _, rank in sorted(slow):
            self._eject(rank, at_s, slow=True)

    def _declared(self, rank: int) -> float:
        if rank < len(self._slowness):
            return self._slowness[rank]
        # Added since the router began: of any kind that is declared, so the slowest.
        return max(self._slowness, default=1.0)


def _median(ordered: list[float]) -> float:
    """Lower median of an ascending list of at least one."""
    return ordered[(len(ordered) - 1) // 2]


def _median_of_others(ordered: list[float], own: float) -> float:
    """Lower median of an ascending list of at least two without one of its numbers."""
    middle = (len(ordered) - 2) // 2
    return ordered[middle if middle < bisect_left(ordered, own) else middle + 1]
