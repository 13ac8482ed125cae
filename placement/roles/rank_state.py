"""What a router knows of each rank: how much work waits there, and whether to leave it alone for a
while.

Backlog of a rank, in seconds = what it last reported + what this router sent since, minus the time
since: work drains at one second a second. Reports are ordered by their sequence number; an older
one changes nothing. Seconds become pairs, the unit of the splitter, by the seconds a pair of work
took in replies (a moving mean). *Work* is told in `assignment`: where reading experts takes longer
than computing pairs, it counts as the pairs that would take as long. A rank that refused because it
is busy counts as busy for at least a moment, whatever it reports.

A rank is *unreachable* while its connection is broken or the controller suspects it, and *ejected*
as `rank_ejection` says. Both are avoided where another replica exists.

Responsible for these figures. Must never decide where a pair goes. Called by
`placement.roles.router`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from placement.roles.rank_ejection import EjectionRules, Ejections

_MEAN_WEIGHT = 0.2
_BUSY_S = 0.05
"""Backlog of a rank that has just refused work as too much."""
_NOBODY: frozenset[int] = frozenset()
_PAIRS_MAX = float(1 << 40)
"""Bound of a backlog in pairs, so that no figure a shard sends leaves the splitter's range."""


@dataclass(slots=True)
class RankState:
    """Figures of one shard incarnation."""

    incarnation: int
    backlog_s: float = 0.0
    backlog_seq: int = -1
    backlog_at_s: float = 0.0
    pair_s: float = 0.0
    """Seconds a pair of work, mean over replies; 0 = not known yet."""
    suspect: str = ""
    """Why the connection is not to be used, "" where it is fine."""


class RankBook:
    """States of all ranks of the newest table. Times in seconds of the caller's clock."""

    def __init__(
        self,
        *,
        faults_to_eject: int,
        eject_s: float,
        eject_max_s: float,
        eject_share: float,
        slowness: tuple[float, ...] = (),
    ) -> None:
        rules = EjectionRules(faults_to_eject, eject_s, eject_max_s, eject_share)
        self.ejections = Ejections(rules, slowness)
        self.version = 0
        """Grows whenever a rank becomes reachable again, or may have."""
        self._ranks: dict[int, RankState] = {}
        self._told: frozenset[int] = _NOBODY
        self._unreachable: frozenset[int] = _NOBODY

    def follow(self, incarnations: dict[int, int]) -> None:
        """Know exactly these ranks; a new incarnation starts without a past."""
        self._ranks = {
            rank: known
            if (known := self._ranks.get(rank)) is not None and known.incarnation == incarnation
            else RankState(incarnation)
            for rank, incarnation in incarnations.items()
        }
        self.ejections.follow(incarnations)
        self._mark()

    def told(self, ranks: Iterable[int]) -> None:
        """The controller suspects exactly these."""
        self._told = frozenset(ranks)
        self._mark()

    def sent(self, rank: int, work_pairs: float, at_s: float) -> None:
        """A sub-call of so much work leaves for the rank."""
        state = self._ranks.get(rank)
        if state is not None:
            # Aged first: work sent now must not be paid for by time that passed before it.
            state.backlog_s = self.backlog_s(rank, at_s) + work_pairs * self._pair_s(state)
            state.backlog_at_s = at_s

    def answered(
        self, rank: int, incarnation: int, seq: int, backlog_s: float, at_s: float
    ) -> None:
        """A reply came with the rank's own figure. Figures that are no finite number >= 0 count as
        0.
        """
        state = self._state(rank, incarnation)
        if state is None:
            return
        if state.suspect:
            state.suspect = ""
            self._mark()
        if seq > state.backlog_seq:
            state.backlog_seq = seq
            state.backlog_s = backlog_s if 0.0 <= backlog_s < float("inf") else 0.0
            state.backlog_at_s = at_s

    def served(
        self, rank: int, incarnation: int, took_s: float, work_pairs: float, at_s: float
    ) -> None:
        """It served a sub-call, in `took_s` without the time in its queue: its faults are
        forgiven."""
        if self._state(rank, incarnation) is not None:
            self.ejections.served(rank, took_s, work_pairs, at_s)

    def unanswered(
        self, rank: int, incarnation: int, took_s: float, work_pairs: float, at_s: float
    ) -> None:
        """It had not answered for longer than is usual when the wait ended."""
        if self._state(rank, incarnation) is not None:
            self.ejections.unanswered(rank, took_s, work_pairs, at_s)

    def busy(self, rank: int, incarnation: int, at_s: float) -> None:
        """It refused a sub-call for now: that is no fault, but others are to be asked first."""
        state = self._state(rank, incarnation)
        if state is not None and self.backlog_s(rank, at_s) < _BUSY_S:
            state.backlog_s, state.backlog_at_s = _BUSY_S, at_s

    def computed(self, rank: int, incarnation: int, work_pairs: float, compute_s: float) -> None:
        """Learn the seconds a pair of work takes on the rank."""
        state = self._state(rank, incarnation)
        if state is None or work_pairs <= 0 or not 0.0 <= compute_s < float("inf"):
            return
        pair_s = compute_s / work_pairs
        known = state.pair_s
        state.pair_s = pair_s if known == 0.0 else known + _MEAN_WEIGHT * (pair_s - known)

    def fault(self, rank: int, incarnation: int, at_s: float) -> None:
        """The shard itself failed a sub-call."""
        if self._state(rank, incarnation) is not None:
            self.ejections.fault(rank, at_s)

    def connection(self, rank: int, incarnation: int, fault: str) -> None:
        """The connection broke (`fault` says how) or is fine ("")."""
        state = self._state(rank, incarnation)
        if state is not None and state.suspect != fault:
            state.suspect = fault
            self._mark()

    @property
    def unreachable(self) -> frozenset[int]:
        """Ranks whose connection is broken, or that the controller suspects."""
        return self._unreachable

    def avoided(self, at_s: float) -> frozenset[int]:
        """Ranks to leave alone now where another replica exists."""
        return self._unreachable | self.ejections.out(at_s)

    def suspects(self, at_s: float) -> tuple[tuple[int, int, str], ...]:
        """(rank, incarnation, why) of every rank this router avoids by its own judgement, by rank.
        What the controller suspects is no news to it."""
        out = self.ejections.out(at_s)
        found = []
        for rank, state in sorted(self._ranks.items()):
            if state.suspect:
                found.append((rank, state.incarnation, state.suspect))
            elif rank in out:
                found.append((rank, state.incarnation, self.ejections.why(rank)))
        return tuple(found)

    def backlog_s(self, rank: int, at_s: float) -> float:
        """Seconds of work that wait at a rank."""
        state = self._ranks.get(rank)
        if state is None:
            return 0.0
        return max(0.0, state.backlog_s - max(0.0, at_s - state.backlog_at_s))

    def backlog_pairs(self, num_ranks: int, at_s: float) -> npt.NDArray[np.int64]:
        """int64 [ranks]: work that waits, in pairs of the mean rank. Zeros until some reply said
        how long a pair takes.
        """
        pairs = np.zeros(num_ranks, np.int64)
        known = [state.pair_s for state in self._ranks.values() if state.pair_s > 0.0]
        if not known:
            return pairs
        pair_s = sum(known) / len(known)
        for rank in self._ranks:
            pairs[rank] = round(min(_PAIRS_MAX, self.backlog_s(rank, at_s) / pair_s))
        return pairs

    def _mark(self) -> None:
        broken = {rank for rank, state in self._ranks.items() if state.suspect}
        self._unreachable = frozenset(broken | (self._told & self._ranks.keys()))
        self.version += 1

    def _pair_s(self, state: RankState) -> float:
        if state.pair_s > 0.0:
            return state.pair_s
        known = [other.pair_s for other in self._ranks.values() if other.pair_s > 0.0]
        return sum(known) / len(known) if known else 0.0

    def _state(self, rank: int, incarnation: int) -> RankState | None:
        state = self._ranks.get(rank)
        return state if state is not None and state.incarnation == incarnation else None
