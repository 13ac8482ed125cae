"""I6, memory within its budget, and I7, release last.

Responsible for these two. Knows slots and acknowledgements only by what parts noted of them.
"""

from __future__ import annotations

from placement.messages.history import (
    Began,
    CommandSent,
    Died,
    MemoryUsed,
    PlanStarted,
    RouterHeard,
    RouterTold,
    SlotFreed,
    StateWritten,
    TableInstalled,
    TablePublished,
    WaitsShortened,
)
from placement.sim.checks.base import InvariantBroken, Rules

Place = tuple[str, int, int]
"""(life of a rank, slot, tag)."""
Order = tuple[int, int]
"""(term, epoch)."""


class Memory:
    """I6: what is resident, reserved and really held never exceeds the budget, nothing is held
    outside the books, and a fill is freed once."""

    def __init__(self) -> None:
        self._freed: set[Place] = set()

    def rules(self) -> Rules:
        """See `Checker`."""
        return {MemoryUsed: self._used, SlotFreed: self._free}

    def _used(self, fact: MemoryUsed) -> None:
        booked = fact.resident_bytes + fact.reserved_bytes
        if max(booked, fact.held_bytes) > fact.budget_bytes:
            raise InvariantBroken(
                f"I6: {fact.who} has {booked} bytes in its books and holds {fact.held_bytes} of "
                f"{fact.budget_bytes}"
            )
        if fact.held_bytes > booked:
            raise InvariantBroken(
                f"I6: {fact.who} holds {fact.held_bytes} bytes, its books say {booked}"
            )

    def _free(self, fact: SlotFreed) -> None:
        fill = (fact.who, fact.slot, fact.slot_tag)
        if fill in self._freed:
            raise InvariantBroken(f"I6: {fill} (life, slot, tag) is freed twice")
        self._freed.add(fill)

    def finish(self) -> None:
        """See `Checker`."""


NO_TABLE = -1
"""Term that a router tells before it has its first table."""


class ReleaseLast:
    """I7: a slot is freed only when no table lists it and nothing reads it; and its release is
    asked for only when every router that is waited for uses a table without it and has nothing
    older in flight, or the wait for that is over.

    drain_wait_s: the longest of each of the two waits. A router of which the controller
    has heard nothing for `silence_s`, or that has not said for so long that it uses the newest
    table, is waited for no more; nor is one that has no table yet, and uses nothing. slack_s: by so
    much the controller's waits may begin before the facts that begin them are noted.
    """

    def __init__(self, *, silence_s: float, drain_wait_s: float, slack_s: float = 1e-9) -> None:
        self._slack_s = slack_s
        self._silence_s = silence_s
        self._longest_s = drain_wait_s
        self._shortened: list[tuple[float, float]] = []
        """(when, to what) waits were shortened."""
        self._term = -1
        self._listed: frozenset[Place] = frozenset()
        self._unlisted: dict[Place, tuple[Order, float]] = {}
        self._told: dict[str, tuple[Order, Order]] = {}
        """Router -> what it uses, and below which it has nothing in flight. Not those without a
        table."""
        self._without: set[str] = set()
        self._heard_at_s: dict[str, float] = {}
        self._behind_since_s: dict[str, float] = {}
        self._wait_s: dict[str, float] = {}
        self._plan: dict[int, str] = {}
        self._newest: Order = (-1, -1)

    def rules(self) -> Rules:
        """See `Checker`."""
        return {
            Began: self._began,
            Died: self._died,
            TablePublished: self._published,
            RouterTold: self._router_told,
            RouterHeard: self._router_heard,
            TableInstalled: self._installed,
            PlanStarted: self._plan_started,
            WaitsShortened: self._waits_shortened,
            StateWritten: self._written,
            CommandSent: self._sent,
            SlotFreed: self._freed,
        }

    def _began(self, fact: Began) -> None:
        self._term = max(self._term, fact.term)

    def _died(self, fact: Died) -> None:
        self._told.pop(fact.who, None)
        self._behind_since_s.pop(fact.who, None)
        self._without.discard(fact.who)

    def _published(self, fact: TablePublished) -> None:
        if fact.term < self._term:
            return
        life = dict(fact.lives)
        listed = frozenset(
            (f"rank{rank}/{life[rank]}", slot, tag) for _, rank, slot, tag in fact.listed
        )
        for place in self._listed - listed:
            self._unlisted[place] = ((fact.term, fact.epoch), fact.at_s)
        self._listed = listed
        for router in self._told:
            self._behind_since_s.setdefault(router, fact.at_s)
        self._newest = (fact.term, fact.epoch)

    def _router_told(self, fact: RouterTold) -> None:
        if fact.term == NO_TABLE:
            self._without.add(fact.who)
            return
        self._told[fact.who] = ((fact.term, fact.applied), (fact.term, fact.quiesced))
        if (fact.term, fact.applied) >= self._newest:
            self._behind_since_s.pop(fact.who, None)

    def _router_heard(self, fact: RouterHeard) -> None:
        if fact.term >= self._term:
            self._heard_at_s[fact.life] = fact.at_s

    def _installed(self, fact: TableInstalled) -> None:
        """A router uses the table from now on, and says so as it takes it."""
        if fact.who in self._without:
            self._without.remove(fact.who)
            self._told[fact.who] = ((fact.term, fact.epoch), (fact.term, fact.epoch))
        elif fact.who in self._told:
            applied, quiesced = self._told[fact.who]
            self._told[fact.who] = (max(applied, (fact.term, fact.epoch)), quiesced)

    def _plan_started(self, fact: PlanStarted) -> None:
        self._wait_s[fact.plan_id] = min(fact.drain_wait_s, self._longest_s)

    def _waits_shortened(self, fact: WaitsShortened) -> None:
        self._shortened.append((fact.at_s, fact.wait_s))

    def _written(self, fact: StateWritten) -> None:
        self._plan.setdefault(fact.step_id, fact.plan_id)

    def _sent(self, fact: CommandSent) -> None:
        if fact.command != "ReleaseSlot" or fact.term < self._term:
            return
        place = (f"rank{fact.rank}/{fact.incarnation}", fact.slot, fact.slot_tag)
        self._not_listed(place)
        order, at_s = self._unlisted.get(place, ((-1, -1), -1e18))
        awaited = [
            router
            for router in self._told
            if fact.at_s
            < min(self._behind_since_s.get(router, 1e18), self._heard_at_s.get(router, -1e18))
            + self._silence_s
            - self._slack_s
        ]
        unaware = sorted(r for r in awaited if self._told[r][0] < order)
        busy = sorted(r for r in awaited if self._told[r][1] < order)
        wait_s = self._wait_s.get(self._plan.get(fact.step_id, ""), 0.0)
        waited_s = fact.at_s - at_s
        for when_s, short_s in self._shortened:
            if at_s <= when_s <= fact.at_s - short_s + self._slack_s:
                wait_s = 0.0  # it was waiting as waits were shortened, and that one is over too
        if waited_s < wait_s * (bool(unaware) + bool(busy)) - self._slack_s:
            raise InvariantBroken(
                f"I7: the release of {place} (life, slot, tag) is asked for {waited_s:.3f} s after "
                f"epoch {order[1]}, while routers {unaware or busy} may use it"
            )

    def _freed(self, fact: SlotFreed) -> None:
        place = (fact.who, fact.slot, fact.slot_tag)
        self._not_listed(place)
        if fact.readers:
            raise InvariantBroken(
                f"I7: {place} (life, slot, tag) is freed while {fact.readers} read it"
            )

    def _not_listed(self, place: Place) -> None:
        if place in self._listed:
            raise InvariantBroken(f"I7: {place} (life, slot, tag) is freed while it is listed")

    def finish(self) -> None:
        """See `Checker`."""
