"""What a router knows of each rank: how much work waits there, and whether to leave it alone for a
while.

Backlog of a rank, in seconds = what it last reported + what this router sent since, minus the time
since: work drains at one second a second. Reports are ordered by their sequence number; an older
one changes nothing. Seconds become pairs, the unit of the splitter, by the seconds a pair of work
took in replies (a moving mean). *Work* is told in `assignment`: where reading experts takes longer
than computing pairs, it counts as the pairs that would take as long.

A rank is *avoided* while it is suspect (its connection is broken) or ejected. Ejection counts only
faults of the shard in a row: lost connections, silence and malformed answers. STALE and REFUSED are
no faults, and neither is a bad request.

Responsible for these figures. Must never decide where a pair goes. Called by
`placement.roles.router`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_MEAN_WEIGHT = 0.2
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
    faults_in_row: int = 0
    ejections: int = 0
    ejected_until_s: float = 0.0
    suspect: str = ""
    """Why the connection is not to be used, "" where it is fine."""


class RankBook:
    """States of all ranks of the newest table. Times in seconds of the caller's clock."""

    def __init__(
        self, *, faults_to_eject: int, eject_s: float, eject_max_s: float, eject_share: float
    ) -> None:
        self._faults_to_eject = faults_to_eject
        self._eject_s = eject_s
        self._eject_max_s = eject_max_s
        self._eject_share = eject_share
        self._ranks: dict[int, RankState] = {}

    def follow(self, incarnations: dict[int, int]) -> None:
        """Know exactly these ranks; a new incarnation starts without a past."""
        self._ranks = {
            rank: known
            if (known := self._ranks.get(rank)) is not None and known.incarnation == incarnation
            else RankState(incarnation)
            for rank, incarnation in incarnations.items()
        }

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
        state.faults_in_row = 0
        state.suspect = ""
        if seq > state.backlog_seq:
            state.backlog_seq = seq
            state.backlog_s = backlog_s if 0.0 <= backlog_s < float("inf") else 0.0
            state.backlog_at_s = at_s

    def computed(self, rank: int, incarnation: int, work_pairs: float, compute_s: float) -> None:
        """Learn the seconds a pair of work takes on the rank."""
        state = self._state(rank, incarnation)
        if state is None or work_pairs <= 0 or not 0.0 <= compute_s < float("inf"):
            return
        pair_s = compute_s / work_pairs
        known = state.pair_s
        state.pair_s = pair_s if known == 0.0 else known + _MEAN_WEIGHT * (pair_s - known)

    def fault(self, rank: int, incarnation: int, at_s: float) -> None:
        """The shard itself failed a sub-call: after enough in a row it is ejected, longer each
        time.
        """
        state = self._state(rank, incarnation)
        if state is None:
            return
        state.faults_in_row += 1
        if state.faults_in_row < self._faults_to_eject or at_s < state.ejected_until_s:
            return
        ejected = sum(other.ejected_until_s > at_s for other in self._ranks.values())
        if ejected + 1 > max(1.0, self._eject_share * len(self._ranks)):
            return
        state.ejections += 1
        state.faults_in_row = 0
        state.ejected_until_s = at_s + min(self._eject_max_s, self._eject_s * state.ejections)

    def connection(self, rank: int, incarnation: int, fault: str) -> None:
        """The connection broke (`fault` says how) or is fine ("")."""
        state = self._state(rank, incarnation)
        if state is not None:
            state.suspect = fault

    def avoided(self, at_s: float) -> frozenset[int]:
        """Ranks to leave alone now where another replica exists."""
        return frozenset(
            rank
            for rank, state in self._ranks.items()
            if state.suspect or state.ejected_until_s > at_s
        )

    def suspects(self, at_s: float) -> tuple[tuple[int, int, str], ...]:
        """(rank, incarnation, why) of every avoided rank, by rank."""
        found = []
        for rank, state in sorted(self._ranks.items()):
            if state.suspect:
                found.append((rank, state.incarnation, state.suspect))
            elif state.ejected_until_s > at_s:
                found.append((rank, state.incarnation, "ejected after failures in a row"))
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

    def _pair_s(self, state: RankState) -> float:
        if state.pair_s > 0.0:
            return state.pair_s
        known = [other.pair_s for other in self._ranks.values() if other.pair_s > 0.0]
        return sum(known) / len(known) if known else 0.0

    def _state(self, rank: int, incarnation: int) -> RankState | None:
        state = self._ranks.get(rank)
        return state if state is not None and state.incarnation == incarnation else None
