"""A rolling replacement: one part after another, the service serving on, stopped at the first
failure.

The loop is here and not in the controller, for the controller is one of the parts that are
replaced. Each step is a request that may be sent again (it names the life that is to go), so
nothing is lost when this program or the controller ends in between: at most one part is away, and
what was asked for it is in the journal.

Responsible for the order, for when a part counts as back, and for saying what is left where it
stops. Must never decide whether a rank can be spared: the controller refuses then. Called by the
command `roll`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import TypeVar

from moe_serve.cli.admin import Admin
from moe_serve.cli.exits import CannotReach
from moe_serve.documents.replicas import LISTED
from moe_serve.errors import DeadlineExceeded, FailedPrecondition, MoeServeError, Unavailable
from moe_serve.rpc import placement_pb2 as pb

_T = TypeVar("_T")
LOOK_S = 0.25
"""Between two looks at the placement."""
REFUSED_S = 5.0
"""A part that does not start is tried again by the controller; after so long the roll gives up."""
SETTLED_S = 3.0
"""A rank whose share has gone elsewhere has it again once nothing has moved for so long."""
READY_S = 6.0
"""A router must have served for so long before the next one goes: front ends set a router that
failed aside for 5 s, and try to connect again each 2 s."""
NO_ANSWER = (Unavailable, CannotReach, DeadlineExceeded)
"""What a request meets whose answer is lost, or that nobody heard."""
SERVING = ("up", "draining")
"""States of a rank whose shard serves."""
QUIET = ("steady", "paused")
"""States of a service in which nothing moves."""


class PartGroup(StrEnum):
    """Parts that are replaced together, in this order."""

    RANKS = "ranks"
    ROUTERS = "routers"
    CONTROLLER = "controller"


@dataclass(frozen=True, slots=True)
class Clock:
    """Where time comes from: monotonic seconds, and a wait."""

    now_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def until_answered(request: Callable[[], _T], wait_s: float, clock: Clock) -> _T:
    """Send a request until the controller answers it: it may be between two lives. It must be one
    that may be sent again. Raises what the last one met where `wait_s` seconds did not do."""
    ends_s = clock.now_s() + wait_s
    while True:
        try:
            return request()
        except NO_ANSWER:
            if clock.now_s() >= ends_s:
                raise
            clock.sleep(LOOK_S)


@dataclass(slots=True)
class Roll:
    """One run. say: told a line at each step. wait_s: the longest that one part may take, its
    emptying and filling included. tell: told how many parts are new, of how many. `replaced`: parts
    that are new, in order."""

    admin: Admin
    say: Callable[[str], None]
    wait_s: float
    accept_lower_floor: bool = False
    accept_gap: bool = False
    accept_problems: bool = False
    clock: Clock = field(default_factory=Clock)
    tell: Callable[[int, int], None] = lambda done, total: None
    replaced: list[str] = field(default_factory=list)
    _router_back_s: float = float("-inf")

    def run(self, groups: Collection[PartGroup] = tuple(PartGroup)) -> None:
        """Replace every part of the groups. Raises FailedPrecondition at the first that fails, with
        what is left as it was; before the first where something is wrong already."""
        first = self.admin.placement()
        if first.missing:
            raise FailedPrecondition(
                f"nothing is replaced while {len(first.missing)} experts are missing; wait until "
                "they are repaired"
            )
        if first.problems and not self.accept_problems:
            raise FailedPrecondition(
                f"nothing is replaced while something is wrong: {first.problems[0]}. Mend it "
                "first, or go on with --accept-problems where it is of the past"
            )
        todo = _parts(first, groups)
        for number, (name, replace) in enumerate(todo):
            self.tell(number, len(todo))
            self.say(f"replacing {name} ({number + 1} of {len(todo)})")
            try:
                done = replace(self)
            except MoeServeError as error:
                rest = [other for other, _ in todo[number + 1 :]]
                raise FailedPrecondition(self._stopped(name, error, rest)) from error
            if done:
                self.replaced.append(name)

    def _stopped(self, name: str, error: MoeServeError, rest: Sequence[str]) -> str:
        done = ", ".join(self.replaced) or "nothing"
        left = ", ".join(rest) or "nothing"
        return (
            f"the roll stopped at {name}: {error.message}. Replaced so far: {done}; untouched: "
            f"{left}. What serves goes on serving; mend the cause and roll again"
        )

    # ------------------------------------------------------------------------------- parts

    def rank(self, number: int) -> bool:
        """Replace the shard of a rank, and wait until it holds its share again. False where
        somebody has removed it meanwhile: there is nothing to replace."""
        name = f"rank {number}"

        def is_there(seen: pb.GetPlacementResponse) -> bool:
            return seen.ranks[number].state in (*SERVING, "removed")

        # It may have died since the roll began, or the controller may have come back just now.
        before = self._wait(f"{name} is up", name, is_there).ranks[number]
        if self._has_left(before):
            return False
        held = _held(before)
        self._ask(
            lambda: self.admin.replace_rank(number, before.incarnation, self.accept_lower_floor)
        )

        def is_back(seen: pb.GetPlacementResponse) -> bool:
            now = seen.ranks[number]
            return now.state == "removed" or (
                now.incarnation > before.incarnation and now.state in SERVING
            )

        if self._has_left(self._wait(f"{name} has a new shard", name, is_back).ranks[number]):
            return False
        quiet_since_s: list[float] = []

        def holds_share(seen: pb.GetPlacementResponse) -> bool:
            if not is_back(seen) or seen.missing:
                return False
            if seen.state not in QUIET:
                quiet_since_s.clear()
            elif not quiet_since_s:
                quiet_since_s.append(self.clock.now_s())
            settled = bool(quiet_since_s) and self.clock.now_s() >= quiet_since_s[0] + SETTLED_S
            now = seen.ranks[number]
            return _held(now) >= held or settled or now.state == "removed"

        after = self._wait(f"{name} holds its share", name, holds_share).ranks[number]
        if self._has_left(after):
            return False
        self.say(f"{name} is back and holds {_held(after)} experts; it held {held}")
        return True

    def _has_left(self, rank: pb.Rank) -> bool:
        if rank.state == "removed":
            self.say(f"rank {rank.rank} was removed meanwhile; there is nothing to replace")
        return bool(rank.state == "removed")

    def router(self, name: str) -> bool:
        """Replace a router, and wait until the new one uses a table."""
        self.clock.sleep(max(0.0, self._router_back_s + READY_S - self.clock.now_s()))
        before = next(r for r in self._look().routers if r.router == name)
        self._ask(lambda: self.admin.replace_router(name, before.incarnation, self.accept_gap))

        def is_back(seen: pb.GetPlacementResponse) -> bool:
            now = next((r for r in seen.routers if r.router == name), pb.Router())
            newer = now.incarnation > before.incarnation
            return newer and now.state == "up" and now.applied_epoch >= 0

        now = self._wait(f"{name} serves again", name, is_back)
        address = next(r.address for r in now.routers if r.router == name)
        self.say(f"{name} serves again at {address}; it was at {before.address}")
        self._router_back_s = self.clock.now_s()
        return True

    def controller(self) -> bool:
        """Have the controller started again, and wait until it has every part back."""
        before = self._look()
        self._ask(lambda: self.admin.restart_controller(before.term))

        def is_back(seen: pb.GetPlacementResponse) -> bool:
            whole = all(r.state in (*SERVING, "removed") for r in seen.ranks)
            routers = all(r.state == "up" and r.applied_epoch >= 0 for r in seen.routers)
            return seen.term > before.term and whole and routers and not seen.missing

        term = self._wait("the controller has every part back", "controller", is_back).term
        self.say(f"the controller is back in term {term}; it was {before.term}")
        return True

    # ------------------------------------------------------------------------------- asking

    def _look(self) -> pb.GetPlacementResponse:
        return self._ask(self.admin.placement)

    def _ask(self, request: Callable[[], _T]) -> _T:
        with self.admin.within(self.wait_s):
            return until_answered(request, self.wait_s, self.clock)

    def _wait(
        self, what: str, place: str, holds: Callable[[pb.GetPlacementResponse], bool]
    ) -> pb.GetPlacementResponse:
        """The first placement for which it holds. Raises FailedPrecondition where the controller
        says for a while that the part does not start, or when the time is over."""
        with self.admin.within(self.wait_s):
            return self._watch(what, place, holds)

    def _watch(
        self, what: str, place: str, holds: Callable[[pb.GetPlacementResponse], bool]
    ) -> pb.GetPlacementResponse:
        ends_s = self.clock.now_s() + self.wait_s
        refused_since_s = 0.0
        while True:
            seen = self._look()
            if holds(seen):
                return seen
            now_s = self.clock.now_s()
            refusal = next((p for p in seen.problems if p.startswith(f"{place} does not ")), "")
            refused_since_s = (refused_since_s or now_s) if refusal else 0.0
            if refusal and now_s >= refused_since_s + REFUSED_S:
                raise FailedPrecondition(refusal)
            if now_s >= ends_s:
                raise FailedPrecondition(f"not within {self.wait_s:g} s: {what}")
            self.clock.sleep(LOOK_S)


def _held(rank: pb.Rank) -> int:
    """Experts it serves."""
    return sum(slot.state == LISTED for slot in rank.slots)


def _parts(
    seen: pb.GetPlacementResponse, groups: Collection[PartGroup]
) -> list[tuple[str, Callable[[Roll], bool]]]:
    """Names and replacements of the parts there are, in order."""
    found: list[tuple[str, Callable[[Roll], bool]]] = []
    if PartGroup.RANKS in groups:
        numbers = [rank.rank for rank in seen.ranks if rank.state != "removed"]
        found += [(f"rank {n}", partial(Roll.rank, number=n)) for n in numbers]
    if PartGroup.ROUTERS in groups:
        names = [router.router for router in seen.routers]
        found += [(name, partial(Roll.router, name=name)) for name in names]
    if PartGroup.CONTROLLER in groups:
        found.append(("controller", Roll.controller))
    return found
