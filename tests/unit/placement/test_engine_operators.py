"""Several operators at once, each doing what comes to mind, while shards die and the controller is
restarted: no request is left without an answer, and all ends at rest, with every rank that was not
removed in use and no expert missing."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from placement.engine.state import RankStatus
from placement.messages import events as ev
from placement.messages.effects import (
    AbortAdd,
    ComputeTarget,
    CopyExpert,
    EndRank,
    ReleaseSlot,
    ReplaceRank,
    ReserveSlot,
    SetRankSlots,
    VerifyExpert,
)
from placement.topology import Topology
from tests.builders import PROFILE
from tests.engine_driver import restart, two_ranks

SLOTS = 6
RANKS_MAX = 7
ACTS = 40
HELD = (ReleaseSlot, CopyExpert, VerifyExpert, SetRankSlots, ComputeTarget, ReserveSlot, AbortAdd)
DRAINS = (ev.DrainCause.OPERATOR, ev.DrainCause.NODE)


class Fleet:
    """Makes and ends shards as it is told, when a test lets it."""

    def __init__(self, seed: int) -> None:
        self.dice = Random(seed)
        self.driver = two_ranks(slots=SLOTS, num_ranks=3, floor=self.dice.choice((1, 2)))
        self.wanted: set[int] = set()
        self.asked = 0
        self._seen = 0
        self._lives = 100

    @property
    def ranks(self):
        return self.driver.engine.state.ranks

    def follow(self) -> None:
        """Hear what the engine wants of shards' lives."""
        driver, new = self.driver, self.driver.commands[self._seen :]
        self._seen = len(driver.commands)
        for command in new:
            if isinstance(command, EndRank):
                driver.shards.pop(command.rank, None)
                self.wanted.discard(command.rank)
            elif isinstance(command, ReplaceRank):
                shard = driver.shards.get(command.rank)
                if shard is None or shard.incarnation <= command.lost_incarnation:
                    driver.shards.pop(command.rank, None)
                    self.wanted.add(command.rank)

    def make(self) -> None:
        """Every shard that is wanted comes to life."""
        self._grow()
        for rank in sorted(self.wanted):
            self._lives += 1
            self.driver.join(rank, self._lives)
        self.wanted.clear()
        self.follow()

    def ask(self, kind: type, **fields: object) -> str:
        """Code of the answer."""
        self.asked += 1
        number = 10_000 + self.asked
        self.driver.feed(kind(at_s=0.0, request_id=number, **fields))
        self.follow()
        return self.driver.answers[number].code

    def undrain(self, rank: int, cause: ev.DrainCause) -> None:
        """As the controller does it: one that was lost while it drained gets a new shard."""
        if self.ask(ev.UndrainAsked, rank=rank, cause=cause) != "ok":
            return
        state = self.ranks[rank]
        if not state.holds and not state.draining:
            self.wanted.add(rank)

    def restart(self) -> None:
        """Another controller takes over what lives, and makes or ends the rest."""
        driver = self.driver
        self._grow()
        restart(driver, driver.engine.snapshot(), ())
        for rank in self.ranks:
            if rank.status is RankStatus.REMOVED:
                driver.shards.pop(rank.rank, None)
            elif rank.status is RankStatus.RESTORED and rank.rank not in driver.shards:
                gone = {"rank": rank.rank, "incarnation": rank.incarnation, "reason": "not found"}
                driver.feed(ev.RankLost(at_s=0.0, **gone))
        self.follow()
        self.wanted = {r.rank for r in self.ranks if r.rank not in driver.shards and r.wants_shard}

    def pass_time(self, seconds: float) -> None:
        self._grow()
        self.driver.close_window({self.dice.randrange(4): 5000.0})
        self.driver.wait(seconds)
        self.follow()

    def _grow(self) -> None:
        """The driver's own picture of the fleet has every rank there is."""
        known = self.driver.topology
        last = known.ranks[-1]
        more = [
            msgspec.structs.replace(last, rank=n, node=f"n{n}", failure_domain=f"n{n}")
            for n in range(known.num_ranks, len(self.ranks))
        ]
        self.driver.topology = Topology(
            ranks=(*known.ranks, *more),
            profiles=known.profiles,
            cross_node_bytes_per_s=known.cross_node_bytes_per_s,
        )


def act(fleet: Fleet) -> None:
    """One thing that comes to somebody's mind, or happens."""
    dice, driver = fleet.dice, fleet.driver
    count = len(fleet.ranks)
    rank = dice.randrange(-1, count + 1)  # slips of the finger among them
    lower = dice.random() < 0.5
    what = dice.randrange(14)
    if what <= 1:
        added = {"profile": PROFILE.name, "num_slots": SLOTS}
        if what or count >= RANKS_MAX:
            fleet.ask(ev.RankAddAsked, rank=max(0, rank), **added)
        else:
            fleet.ask(ev.RankAddAsked, key=dice.choice(("", "a", "b")), **added)
    elif what == 2:
        fleet.ask(ev.RankRemoveAsked, rank=rank, accept_lower_floor=lower)
    elif what <= 4:
        life = fleet.ranks[rank].incarnation if lower and 0 <= rank < count else -1
        fleet.ask(ev.RankReplaceAsked, rank=rank, incarnation=life, accept_lower_floor=lower)
    elif what == 5:
        fleet.undrain(rank, dice.choice(DRAINS))
    elif what == 6:
        fleet.ask(ev.DrainAsked, rank=rank, cause=dice.choice(DRAINS))
    elif what == 7:
        fleet.ask(ev.BudgetAsked, rank=rank, budget_bytes=1000 * dice.randrange(9))
    elif what == 8 and driver.shards:
        driver.lose(dice.choice(sorted(driver.shards)))
        fleet.follow()
    elif what == 9:
        fleet.make()
    elif what <= 11:
        fleet.pass_time(dice.choice((0.1, 1.0, 6.0)))
    elif what == 12:
        driver.let_go()
        driver.hold = {dice.choice(HELD)}
        fleet.follow()
    else:
        fleet.restart()


@pytest.mark.parametrize("seed", range(16))
def test_whatever_operators_ask_at_once_all_ends_at_rest(seed: int) -> None:
    fleet = Fleet(seed)
    for _ in range(ACTS):
        act(fleet)
    fleet.driver.let_go()
    fleet.follow()
    for _ in range(25):
        fleet.make()
        for rank in fleet.ranks:
            if rank.draining and rank.status is not RankStatus.REMOVED:
                for cause in DRAINS:
                    fleet.undrain(rank.rank, cause)
        fleet.pass_time(4.0)
    fleet.make()
    state = {r.rank: r.status for r in fleet.ranks if r.status is not RankStatus.REMOVED}
    assert set(state.values()) <= {RankStatus.LIVE}
    assert set(fleet.driver.shards) == set(state)
    if sum(max(0, r.num_slots - 1) for r in fleet.ranks if r.holds) >= 4:
        assert fleet.driver.table.missing() == ()
    fleet.driver.check_agreement()
