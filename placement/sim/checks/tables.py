"""I1, the order of tables, and I2, what a table may list.

Responsible for these two. Knows slots only by what shards noted of them.
"""

from __future__ import annotations

from collections.abc import Callable

from placement.messages.history import (
    Began,
    Died,
    RankGivenUp,
    SlotFreed,
    SlotProved,
    TableInstalled,
    TablePublished,
)
from placement.sim.checks.base import InvariantBroken, Rules

Replica = tuple[str, int, int]
"""(life of a rank, slot, tag)."""


class TableOrder:
    """I1: epochs of a term strictly grow and begin above every epoch that a part kept as its
    controller began; one (term, epoch) is one table; and nobody goes back to an older one. (A
    controller that was replaced and does not know it may still count on for those who do not know
    it either: for them an epoch goes down with the new term.)

    settle_s: how long before its beginning a controller may have asked the parts; what they have
    taken since, of an older term, it need not know."""

    def __init__(self, *, settle_s: float = 0.0) -> None:
        self._settle_s = settle_s
        self._kept_at: dict[str, list[tuple[float, int]]] = {}
        """Life -> (when, epoch) of the tables it kept, where `settle_s` matters."""
        self._newest: dict[int, int] = {}
        self._kept: dict[str, tuple[int, int]] = {}
        self._published: set[tuple[int, int]] = set()
        self._least: dict[int, int] = {}

    def rules(self) -> Rules:
        """See `Checker`."""
        return {
            Began: self._began,
            Died: self._died,
            TablePublished: self._publish,
            TableInstalled: self._installed,
        }

    def _began(self, fact: Began) -> None:
        if fact.place == "controller":
            self._least[fact.term] = max(map(self._known(fact), self._kept), default=-1)

    def _known(self, began: Began) -> Callable[[str], int]:
        """The epoch that a part kept when the controller asked it."""
        until_s = began.at_s - self._settle_s

        def epoch(who: str) -> int:
            kept = [epoch for at_s, epoch in self._kept_at[who] if at_s <= until_s]
            return kept[-1] if kept else -1

        return epoch

    def _died(self, fact: Died) -> None:
        self._kept.pop(fact.who, None)

    def _publish(self, fact: TablePublished) -> None:
        newest = self._newest.get(fact.term, self._least.get(fact.term, -1))
        if fact.epoch <= newest:
            raise InvariantBroken(f"I1: {fact.who} publishes epoch {fact.epoch} after {newest}")
        self._newest[fact.term] = fact.epoch
        self._published.add((fact.term, fact.epoch))

    def _installed(self, fact: TableInstalled) -> None:
        order = fact.term, fact.epoch
        if order not in self._published:
            raise InvariantBroken(f"I1: {fact.who} keeps table {order}, which nobody published")
        known = self._kept.get(fact.who, (-1, -1))
        if order <= known:
            raise InvariantBroken(f"I1: {fact.who} went from table {known} to {order}")
        self._kept[fact.who] = order
        self._kept_at.setdefault(fact.who, []).append((fact.at_s, fact.epoch))

    def finish(self) -> None:
        """See `Checker`."""


class Coverage:
    """I2: what a table lists is resident and proved at that moment, once a rank; the first lists
    every expert, and none that was listed leaves the table while a replica of it lives that the
    controller has not given up. Tables of a controller that was replaced do not count: every part
    refuses them."""

    def __init__(self) -> None:
        self._term = -1
        self._held: dict[str, dict[int, tuple[int, int]]] = {}
        self._gone: set[str] = set()
        self._listed: dict[int, set[Replica]] = {}
        self._first = True

    def rules(self) -> Rules:
        """See `Checker`."""
        return {
            Began: self._began,
            Died: self._died,
            RankGivenUp: self._given_up,
            SlotProved: self._proved,
            SlotFreed: self._freed,
            TablePublished: self._published,
        }

    def _began(self, fact: Began) -> None:
        self._term = max(self._term, fact.term)

    def _died(self, fact: Died) -> None:
        self._gone.add(fact.who)

    def _given_up(self, fact: RankGivenUp) -> None:
        self._gone.add(f"rank{fact.rank}/{fact.incarnation}")

    def _proved(self, fact: SlotProved) -> None:
        if not fact.intact or (fact.held_key, fact.held_version) != (fact.key, fact.version):
            raise InvariantBroken(
                f"I2: {fact.who} slot {fact.slot} is proved for key {fact.key} {fact.version}, but "
                f"holds key {fact.held_key} {fact.held_version}, intact: {fact.intact}"
            )
        self._held.setdefault(fact.who, {})[fact.slot] = (fact.slot_tag, fact.key)

    def _freed(self, fact: SlotFreed) -> None:
        self._held.get(fact.who, {}).pop(fact.slot, None)

    def _published(self, fact: TablePublished) -> None:
        if fact.term < self._term:
            return
        life = {rank: f"rank{rank}/{incarnation}" for rank, incarnation in fact.lives}
        listed: dict[int, set[Replica]] = {}
        for key, rank, slot, tag in fact.listed:
            who = life[rank]
            if self._held.get(who, {}).get(slot) != (tag, key):
                raise InvariantBroken(
                    f"I2: epoch {fact.epoch} lists key {key} in slot {slot} tag {tag} of {who}, "
                    "which does not hold it, proved"
                )
            listed.setdefault(key, set()).add((who, slot, tag))
        ranks = {(key, rank) for key, rank, _, _ in fact.listed}
        if len(ranks) != len(fact.listed):
            raise InvariantBroken(f"I2: epoch {fact.epoch} lists an expert twice on a rank")
        if self._first and len(listed) != fact.num_keys:
            raise InvariantBroken(f"I2: the first table lists {len(listed)} of {fact.num_keys}")
        self._first = False
        for key in self._listed.keys() - listed.keys():
            self._lost(fact, key)
        self._listed = listed

    def _lost(self, fact: TablePublished, key: int) -> None:
        alive = [
            (who, slot)
            for who, slot, tag in sorted(self._listed[key])
            if who not in self._gone and self._held.get(who, {}).get(slot) == (tag, key)
        ]
        if alive:
            raise InvariantBroken(f"I2: key {key} left epoch {fact.epoch} though {alive} live")

    def finish(self) -> None:
        """See `Checker`."""
