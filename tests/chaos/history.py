"""What the processes of a real service noted of themselves, read and checked by the simulation's
checkers.

All processes run on one machine, so their monotonic clock is one clock: a fact that another follows
from has the lower time. What a process noted before an effect of it could leave is in its file when
it is killed; what it noted last may be missing, and with it only what nobody else has seen.

What real concurrency leaves open is closed with a bound in seconds, each a constant below:
- I1: a controller asks the parts before it begins; tables of an older term that a part took within
  ASKED_S before that are none it must have known.
- I7, I12: waits begin with the engine's step and are noted after the journal's commit, so they may
  look shorter by up to COMMIT_S.
- I8: a controller that was killed may have committed one last time unnoted: then what its successor
  found counts, and how many steps that were is printed.
- I9: demand within UNSURE_S of the end of a router or controller may be lost, or come twice.
- I10: an answer may be LATE_S late, for a busy machine has no real time.

Not checked here: that inputs replay to the same effects (the journal's inputs are no facts; that is
`moe-serve replay`), that requests which name what does not exist are refused (routers note only
what their checks let in), and the sum itself (whoever sends the requests compares it).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from moe_serve.controller.polls import HUNG_ROUTER_S
from placement.config import RebalanceConfig
from placement.messages import history as h
from placement.messages.history import AnyFact, Fact, from_lines
from placement.roles.calls import Cause
from placement.sim.checks import (
    Checker,
    Coverage,
    ExactlyOnce,
    Fence,
    InvariantBroken,
    Isolation,
    JournalFirst,
    LoadOnce,
    Memory,
    Progress,
    ReleaseLast,
    TableOrder,
    Termination,
    check_facts,
)

ASKED_S = 5.0
COMMIT_S = 1.0
UNSURE_S = 5.0
LATE_S = 2.0
STILL_S = 10.0
"""A plan may stand still, and a window be late, so much longer than two windows."""
SETTLE_S = 0.5
"""Facts that are in memory are in the file after this time."""
CUT_OFF = "cut-off"
"""Kind of fault: a router, by its place, that the controller does not reach."""
READER = "reader"
"""Who a fact is of that was concluded from others."""

NEEDED: tuple[type[Fact], ...] = (
    h.Began,
    h.Recovered,
    h.TablePublished,
    h.TableInstalled,
    h.RouterTold,
    h.RouterHeard,
    h.PlanStarted,
    h.StateWritten,
    h.CommandSent,
    h.CommandTaken,
    h.SlotProved,
    h.SlotFreed,
    h.MemoryUsed,
    h.RequestOpened,
    h.RequestBegun,
    h.RequestEnded,
    h.RowsServed,
    h.WindowFolded,
)
"""Kinds without which a history shows nothing."""


@dataclass
class Deeds:
    """What a test did to processes. Times: monotonic seconds of this machine."""

    killed: dict[int, float] = field(default_factory=dict)
    """Process -> when it was killed."""
    paused: list[tuple[int, float, float]] = field(default_factory=list)
    """(process, from, to) it stood still."""
    faults: list[tuple[str, str, float, float]] = field(default_factory=list)
    """(kind, target, from, to) of anything else that was broken on purpose."""

    def kill(self, pid: int) -> None:
        """The process is killed, or dies at a fail point: to be called right before."""
        self.killed[pid] = time.monotonic()


def read_history(folder: Path) -> list[AnyFact]:
    """Facts of all processes up to now, by time. Raises msgspec.ValidationError for a line that is
    none."""
    now_s = time.monotonic()
    time.sleep(SETTLE_S)
    lines: list[bytes] = []
    for path in sorted(folder.glob("*.jsonl")):
        # The last piece is a line that is being written, or was as its process was killed.
        lines += path.read_bytes().split(b"\n")[:-1]
    # Files are read one after another: what was noted meanwhile would lack what it follows from.
    return [fact for fact in from_lines(lines) if fact.at_s <= now_s]


def check_history(
    facts: Sequence[Fact],
    deeds: Deeds | None = None,
    *,
    need: Iterable[type[Fact]] = NEEDED,
    router_silence_s: float = RebalanceConfig().router_silence_s,
    late_s: float = LATE_S,
    commit_s: float = COMMIT_S,
) -> list[str]:
    """Promises that the facts break, in words, at most one a promise; none where all hold and no
    needed kind of fact is missing. Prints how many of which kind were looked at."""
    deeds = deeds or Deeds()
    lives = _Lives(facts, deeds)
    story = _complete(facts, lives, deeds)
    once, journal = ExactlyOnce(), JournalFirst(killed=lives.unclean)
    window_s = _window_s(facts)
    checkers: list[Checker] = [
        TableOrder(settle_s=ASKED_S),
        Coverage(),
        Fence(),
        once,
        Memory(),
        ReleaseLast(silence_s=router_silence_s, drain_wait_s=1e9, slack_s=commit_s),
        journal,
        LoadOnce(),
        Termination(late_s=late_s),
        Isolation(),
        Progress(window_s=window_s, slack_s=STILL_S),
    ]
    broken = [*_gaps(facts), *lives.unexplained()]
    for checker in checkers:
        try:
            check_facts(story, [checker])
        except InvariantBroken as error:
            broken.append(str(error))
    _tell(facts, once.contributions, journal.unnoted)
    kinds = {type(fact) for fact in facts}
    broken += [f"nothing shown: no {kind.__name__}" for kind in need if kind not in kinds]
    if not once.contributions and h.RequestEnded in need:
        broken.append("nothing shown: no contribution")
    return broken


def _tell(facts: Sequence[Fact], contributions: int, unnoted: int) -> None:
    kinds = Counter(type(fact).__name__ for fact in facts)
    pairs: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    for fact in facts:
        if isinstance(fact, h.RowsServed):
            pairs[Cause(fact.cause).name.lower()] += len(fact.k)
        elif isinstance(fact, h.RequestEnded):
            outcomes[fact.outcome] += 1
    print(
        f"history: {len(facts)} facts of {len({fact.who for fact in facts})} lives; "
        f"{contributions} contributions added once each, of pairs served {dict(pairs)}; requests "
        f"{dict(outcomes)}; {unnoted} steps went on unnoted at a kill; "
        f"{dict(sorted(kinds.items()))}"
    )


def _gaps(facts: Sequence[Fact]) -> list[str]:
    """Facts of a life are counted from 0 without a gap, and their times do not fall."""
    counts: dict[str, int] = {}
    times: dict[str, float] = {}
    broken = []
    for fact in sorted(facts, key=lambda fact: (fact.who, fact.seq)):
        due = counts.get(fact.who, 0)
        if fact.seq != due:
            broken.append(f"history: fact {due} of {fact.who} is missing, {fact.seq} follows")
        if fact.at_s < times.get(fact.who, fact.at_s):
            broken.append(f"history: fact {fact.seq} of {fact.who} is older than the one before")
        counts[fact.who], times[fact.who] = fact.seq + 1, fact.at_s
    return broken[:3]


class _Lives:
    """Who lived when. `died_s`: end of each life that has ended, as far as it is known."""

    def __init__(self, facts: Sequence[Fact], deeds: Deeds) -> None:
        self._deeds = deeds
        self.began = {fact.who: fact for fact in facts if isinstance(fact, h.Began)}
        self.noted = {fact.who: fact.at_s for fact in facts if isinstance(fact, h.Died)}
        """Lives that said themselves that they end."""
        self.last_s = {fact.who: fact.at_s for fact in facts}
        self.last_seq = {fact.who: fact.seq for fact in facts}
        self.end_s = max((fact.at_s for fact in facts), default=0.0)
        self._given_up = {
            f"rank{fact.rank}/{fact.incarnation}"
            for fact in facts
            if isinstance(fact, h.RankGivenUp)
        }
        self._joined = {
            fact.who
            for fact in facts
            if not isinstance(fact, h.Began | h.MemoryUsed | h.RouterTold | h.RouterHolds)
        }
        """Lives that did something. A part whose creator did not hear that it lives is ended by its
        creator before it does, and made again."""
        self.succeeded = self._succeeded()
        self.died_s: dict[str, float] = {}
        for who, began in self.began.items():
            if who in self.noted:
                continue
            if began.pid in deeds.killed:
                self.died_s[who] = max(deeds.killed[began.pid], self.last_s[who])
            elif who in self.succeeded:
                self.died_s[who] = self.last_s[who]

    def _succeeded(self) -> dict[str, str]:
        """Life -> the next one of its place."""
        found: dict[str, str] = {}
        newest: dict[str, str] = {}
        for who, began in sorted(self.began.items(), key=lambda item: item[1].at_s):
            if began.place in newest:
                found[newest[began.place]] = who
            newest[began.place] = who
        return found

    @property
    def unclean(self) -> frozenset[str]:
        """Lives that ended without saying so."""
        return frozenset(self.died_s)

    def unexplained(self) -> list[str]:
        """Lives that ended though nobody ended them, and no controller had a reason to: I11. It has
        one where it has not heard of a router for too long."""
        touched = self._deeds.killed.keys() | {pid for pid, _, _ in self._deeds.paused}
        hung = {
            place
            for kind, place, from_s, to_s in self._deeds.faults
            if kind == CUT_OFF and to_s - from_s > HUNG_ROUTER_S
        }
        return [
            f"I11: {who} (process {self.began[who].pid}) ended, was succeeded by "
            f"{self.succeeded[who]}, and nobody had ended it"
            for who in sorted(self.died_s)
            if self.began[who].pid not in touched
            and who not in self._given_up
            and who.partition("/")[0] not in hung
            and who in self._joined
        ]


def _complete(facts: Sequence[Fact], lives: _Lives, deeds: Deeds) -> list[Fact]:
    """The facts, and what those could not note whom it befell."""
    more: list[Fact] = []
    for who, at_s in lives.died_s.items():
        cause = "fault" if lives.began[who].pid in deeds.killed else "replaced"
        more.append(h.Died(who=who, seq=lives.last_seq[who] + 1, at_s=at_s, cause=cause))
    for pid, from_s, to_s in deeds.paused:
        for who, began in lives.began.items():
            if began.pid == pid and from_s <= lives.died_s.get(who, lives.end_s):
                more.append(h.Paused(who=who, seq=-1, at_s=from_s))
                more.append(h.Resumed(who=who, seq=-1, at_s=to_s))
    for kind, target, from_s, to_s in deeds.faults:
        more.append(h.FaultBegan(who=READER, seq=-1, at_s=from_s, kind=kind, target=target))
        more.append(h.FaultEnded(who=READER, seq=-1, at_s=to_s, kind=kind, target=target))
    more += _unsure(facts, lives)
    more += _still_open(facts, lives)
    return sorted([*facts, *more], key=lambda fact: (fact.at_s, fact.who, fact.seq))


def _still_open(facts: Sequence[Fact], lives: _Lives) -> list[Fact]:
    """Requests whose time is not over as the history ends: they count as given up."""
    opened: dict[tuple[str, int], h.RequestOpened] = {}
    for fact in facts:
        if isinstance(fact, h.RequestOpened):
            opened[fact.who, fact.request] = fact
        elif isinstance(fact, h.RequestEnded):
            opened.pop((fact.who, fact.request), None)
    return [
        h.RequestEnded(
            who=who, seq=1 << 60, at_s=lives.end_s, request=key, outcome="open", detail=""
        )
        for (who, key), fact in opened.items()
        if fact.deadline_at_s + LATE_S > lives.end_s and who not in lives.died_s | lives.noted
    ]


def _unsure(facts: Sequence[Fact], lives: _Lives) -> list[Fact]:
    """Demand around the ends of controllers and routers, and of the history."""
    demand = _Demand(facts)
    folds = [(f.at_s, f.term) for f in facts if isinstance(f, h.WindowFolded)]
    heard: dict[str, float] = {f.life: f.at_s for f in facts if isinstance(f, h.RouterHeard)}
    more: list[Fact] = []
    for began in sorted(lives.began.values(), key=lambda began: began.at_s):
        if began.place == "controller" and began.term > 1:
            last_s = max((at_s for at_s, term in folds if term < began.term), default=0.0)
            pairs = demand.between(last_s - UNSURE_S, began.at_s + UNSURE_S)
            more.append(_unsure_fact(began.at_s, lost=pairs, twice=pairs))
        elif began.who not in heard and not began.place.startswith(("rank", "controller")):
            # A router that no controller knows.
            more.append(_unsure_fact(began.at_s, lost=demand.between(0.0, 1e18, began.who)))
    for who, end_s in (lives.died_s | lives.noted).items():
        lost = demand.between(heard.get(who, 0.0) - UNSURE_S, 1e18, who)
        more.append(_unsure_fact(end_s, lost=lost))
    last_s = max((at_s for at_s, _ in folds), default=0.0)
    more.append(_unsure_fact(lives.end_s, lost=demand.between(last_s - UNSURE_S, 1e18)))
    return more


def _unsure_fact(at_s: float, **pairs: Counter[int]) -> h.DemandUnsure:
    given: dict[str, Any] = {name: tuple(sorted(counts.items())) for name, counts in pairs.items()}
    return h.DemandUnsure(who=READER, seq=-1, at_s=at_s, **given)


class _Demand:
    """First attempts that were begun."""

    def __init__(self, facts: Sequence[Fact]) -> None:
        opened = {f.request: f for f in facts if isinstance(f, h.RequestOpened)}
        self._begun = [
            (f.at_s, f.who, opened[f.request].keys)
            for f in facts
            if isinstance(f, h.RequestBegun) and opened[f.request].counts
        ]

    def between(self, from_s: float, to_s: float, who: str = "") -> Counter[int]:
        """Pairs by key of those begun in that time, by that router or by any."""
        pairs: Counter[int] = Counter()
        for at_s, router, keys in self._begun:
            if from_s <= at_s <= to_s and who in ("", router):
                pairs.update(keys)
        return pairs


def _window_s(facts: Sequence[Fact]) -> float:
    """Usual time between two windows."""
    at_s: dict[str, list[float]] = {}
    for fact in facts:
        if isinstance(fact, h.WindowFolded):
            at_s.setdefault(fact.who, []).append(fact.at_s)
    gaps = sorted(b - a for times in at_s.values() for a, b in pairwise(times))
    return gaps[len(gaps) // 2] if gaps else 1.0
