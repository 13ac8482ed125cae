"""Harm by people and by traffic: demand shifts and swells, budgets shrink, ranks leave and join.

Responsible for what is asked for, and for asking for it back. Called by `Harm`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from placement.engine.state import RankStatus
from placement.messages import events as ev
from placement.routing import RankAddress
from placement.sim.faults import FaultKind
from placement.sim.harm.targets import Does, Done, Targets
from placement.sim.shard import SimShard
from placement.sim.traffic import Traffic


@dataclass(slots=True)
class Flow:
    """How much traffic there is. `factor` on the usual rate."""

    factor: float = 1.0


class PeopleHarm:
    """See the module's text."""

    def __init__(
        self, who: Targets, traffic: Traffic, flow: Flow, *, elastic: bool = False
    ) -> None:
        """elastic: of three ranks that leave, one is drained and dies, one is removed and added
        again, and one has its shard replaced; else all are drained."""
        self._elastic = elastic
        self._left = 0
        self._who = who
        self._stage = who.stage
        self._fleet = who.fleet
        self._traffic = traffic
        self._flow = flow

    def does(self) -> Does:
        """What each kind does."""
        return {
            FaultKind.TRAFFIC_SHIFT: self._traffic_shift,
            FaultKind.OVERLOAD: self._overload,
            FaultKind.BUDGET: self._budget,
            FaultKind.RANK_LEAVES: self._rank_leaves,
            FaultKind.RANK_JOINS: self._rank_joins,
        }

    def _traffic_shift(self, _rank: int) -> Done:
        self._traffic.shift()
        return "traffic", None

    def _overload(self, _rank: int) -> Done:
        self._flow.factor = self._stage.dice.between(4.0, 8.0)

        def mend() -> None:
            self._flow.factor = 1.0

        return "traffic", mend

    def _budget(self, rank: int) -> Done:
        shard = self._who.shard(rank)
        if shard is None:
            return "nobody", None
        target, size = shard.rank, self._stage.spec.slot_bytes
        whole = self._stage.topology.ranks[target].num_slots
        fewer = max(0, whole - 1 - self._stage.dice.below(3))
        self._who.ask(lambda n: _budget_asked(n, target, fewer * size))
        return shard.place, lambda: self._who.ask(lambda n: _budget_asked(n, target, whole * size))

    def _rank_leaves(self, rank: int) -> Done:
        shard = self._who.shard(rank)
        if shard is None:
            return "nobody", None
        target = shard.rank
        self._left += self._elastic
        if self._left % 3 == 1:
            self._who.ask(lambda n: _remove_asked(n, target))
            return shard.place, lambda: self.bring_back(target)
        if self._left % 3 == 2:
            self._who.ask(lambda n: _replace_asked(n, target))
            return shard.place, None
        self._who.ask(lambda n: ev.DrainAsked(at_s=0.0, request_id=n, rank=target))
        shard.after(0.3, lambda: self._leave_when_empty(shard))
        return shard.place, lambda: self.undrain(target)

    def _leave_when_empty(self, shard: SimShard) -> None:
        boss = self._fleet.controller
        if boss is None or not boss.engine.state.ranks[shard.rank].draining:
            return
        if shard.slots.ledger.resident():
            shard.after(0.1, lambda: self._leave_when_empty(shard))
            return
        shard.slots.drain()
        shard.after(0.1, lambda: self._fleet.kill(shard, "left"))

    def bring_back(self, rank: int) -> None:
        """A rank that was removed is added again; one that is on its way out may stay."""
        boss = self._fleet.controller
        if boss is None or boss.engine.state.ranks[rank].status is not RankStatus.REMOVED:
            self.undrain(rank)
            return
        spec = self._stage.topology.ranks[rank]
        self._who.ask(
            lambda n: ev.RankAddAsked(
                at_s=0.0,
                request_id=n,
                rank=rank,
                profile=spec.profile,
                num_slots=spec.num_slots,
            )
        )

    def undrain(self, rank: int) -> None:
        """The rank may hold replicas again, and gets a shard where it has none."""
        self._who.ask(lambda n: ev.UndrainAsked(at_s=0.0, request_id=n, rank=rank))
        boss = self._fleet.controller
        if boss is not None:
            boss.after(0.01, partial(self._fleet.ensure_rank, boss, rank))

    def _rank_joins(self, _rank: int) -> Done:
        boss = self._fleet.controller
        if boss is None or boss.paused:
            return "nobody", None
        rank = len(boss.engine.state.ranks)
        if rank < len(self._stage.topology.ranks):
            boss.after(0.0, partial(self._fleet.add_rank, boss, rank))
            return f"rank{rank}", None
        # All are there: one comes that does not belong here.
        spec = self._stage.topology.ranks[0]
        address = RankAddress(rank=rank + 3, node="x", address="sim://stranger", incarnation=1)
        stranger = ev.RankJoined(
            at_s=0.0,
            rank=rank + 3,
            node="x",
            failure_domain="x",
            profile=spec.profile,
            num_slots=1,
            address=address,
        )
        boss.after(0.0, partial(boss.feed, stranger))
        return "a stranger", None


def _remove_asked(number: int, rank: int) -> ev.AnyEvent:
    return ev.RankRemoveAsked(at_s=0.0, request_id=number, rank=rank, accept_lower_floor=True)


def _replace_asked(number: int, rank: int) -> ev.AnyEvent:
    return ev.RankReplaceAsked(at_s=0.0, request_id=number, rank=rank, accept_lower_floor=True)


def _budget_asked(number: int, rank: int, budget_bytes: int) -> ev.AnyEvent:
    return ev.BudgetAsked(at_s=0.0, request_id=number, rank=rank, budget_bytes=budget_bytes)
