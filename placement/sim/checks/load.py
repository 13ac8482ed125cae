"""I9, load that is true: demand is counted once.

Responsible for this one.
"""

from __future__ import annotations

from collections import Counter

from placement.messages.history import (
    Began,
    DemandUnsure,
    RequestBegun,
    RequestOpened,
    WindowFolded,
)
from placement.sim.checks.base import InvariantBroken, Rules


class LoadOnce:
    """I9: what windows say of an expert is the valid pairs of accepted first attempts, each once:
    no retries, hedges, refused requests or invalid pairs. Where a router or controller died, what
    it had not passed on may be missing, or come twice. Windows of a controller that was replaced do
    not count."""

    def __init__(self) -> None:
        self._open: dict[int, RequestOpened] = {}
        self._accepted: Counter[int] = Counter()
        self._folded: Counter[int] = Counter()
        self._lost: Counter[int] = Counter()
        self._twice: Counter[int] = Counter()
        self._term = -1

    def rules(self) -> Rules:
        """See `Checker`."""
        return {
            Began: self._began,
            RequestOpened: self._opened,
            RequestBegun: self._begun,
            DemandUnsure: self._unsure,
            WindowFolded: self._window,
        }

    def _began(self, fact: Began) -> None:
        self._term = max(self._term, fact.term)

    def _opened(self, fact: RequestOpened) -> None:
        self._open[fact.request] = fact

    def _begun(self, fact: RequestBegun) -> None:
        opened = self._open.pop(fact.request)
        if opened.counts:
            self._accepted.update(opened.keys)

    def _unsure(self, fact: DemandUnsure) -> None:
        for key, pairs in fact.lost:
            self._lost[key] += pairs
        for key, pairs in fact.twice:
            self._twice[key] += pairs

    def _window(self, fact: WindowFolded) -> None:
        if fact.term < self._term:
            return
        for key, pairs in fact.demand:
            self._folded[key] += pairs
            most = self._accepted[key] + self._twice[key]
            if self._folded[key] > most:
                raise InvariantBroken(
                    f"I9: window {fact.index} brings key {key} to {self._folded[key]} pairs, at "
                    f"most {most} were accepted"
                )

    def finish(self) -> None:
        """See `Checker`."""
        for key, accepted in sorted(self._accepted.items()):
            if self._folded[key] < accepted - self._lost[key]:
                raise InvariantBroken(
                    f"I9: {accepted} pairs of key {key} were accepted, windows say "
                    f"{self._folded[key]}, and only {self._lost[key]} may be lost"
                )
