"""Repairs: every expert on the floor of failure domains, every rank within its capacity. Before
any thought of balance.

Responsible for making an occupancy valid with few writes. Must never improve balance beyond
choosing among valid repairs. Called by all policies.

The rule. A rank that is over its capacity gives up its least useful surplus replicas, then experts
that must find another rank. An expert below the floor goes to the best rank of a domain that lacks
it: one with a free slot, else over the least useful surplus replica, else in the place of an expert
that can move to a rank where there is room. Should even that fail, everything is placed anew by a
rule that cannot (`from_nothing`).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from placement.policy.occupancy import Occupancy


class Judge(Protocol):
    """What a policy thinks of single changes while repairs are made. Smaller is better."""

    def cheapest(self, rank: int, layer: int) -> tuple[float, int] | None:
        """(harm, key) of the surplus replica on the rank that does least harm by going, among the
        layers that share slots with `layer`.
        """
        ...

    def strain(self, key: int, rank: int) -> float:
        """Load of the rank in the key's layer if it takes the key as well."""
        ...

    def changed(self, key: int) -> None:
        """The hosts of the key changed."""
        ...


def repair(occupancy: Occupancy, judge: Judge, order: list[int]) -> None:
    """Make the occupancy valid; its floor must be reachable (`feasibility.reachable_floor`).

    order: all keys, in the order in which those that need a place get one (heaviest first packs
    best).
    """
    pools = sorted(set(occupancy.pools.tolist()))
    leaders = [int(np.argmax(occupancy.pools == pool)) for pool in pools]
    for layer in leaders:
        for rank in range(occupancy.num_ranks):
            _shrink(occupancy, judge, rank, layer)
    needy = set(occupancy.below_floor())
    placed = True
    for key in order:
        while placed and key in needy:
            placed = _place(occupancy, judge, key)
            if occupancy.spread(key) >= occupancy.floor:
                needy.discard(key)
    if not placed:
        for rank in range(occupancy.num_ranks):
            for key in occupancy.keys_on(rank):
                occupancy.drop(key, rank)
        for layer in leaders:
            from_nothing(occupancy, layer)
        for key in order:
            judge.changed(key)


class EvenJudge:
    """Judge for policies that do not level: replicas of an expert share its pairs equally.

    load: float64 [keys], pairs a second.
    """

    def __init__(self, occupancy: Occupancy, load: npt.NDArray[np.float64]) -> None:
        self._occupancy = occupancy
        self._load = load

    def cheapest(self, rank: int, layer: int) -> tuple[float, int] | None:
        """Least pairs that each other replica has to take, then lowest key."""
        keys = _with_slots_of(self._occupancy, layer, self._occupancy.removable_on(rank).tolist())
        return min(((self._harm(key), key) for key in keys), default=None)

    def strain(self, key: int, rank: int) -> float:
        """Pairs of the key's layer on the rank, with a share of the key's own."""
        layer = key // self._occupancy.num_experts
        hosted = self._occupancy.hosts_of_layer(layer)
        low = layer * self._occupancy.num_experts
        share = self._load[low : low + len(hosted)] / np.maximum(hosted.sum(axis=1), 1)
        own = float(self._load[key]) / (self._occupancy.count(key) + 1)
        return float(share[hosted[:, rank]].sum()) + own

    def changed(self, key: int) -> None:
        """Nothing is remembered."""

    def _harm(self, key: int) -> float:
        count = self._occupancy.count(key)
        return float(self._load[key]) / (count * (count - 1))


def from_nothing(occupancy: Occupancy, layer: int = 0) -> None:
    """Fill the empty slots of the layers that share slots with `layer`, all of them in a pool of
    a rank, with each expert in `floor` domains, by a rule that cannot fail when room suffices.

    Domains are filled in order of capacity, largest first, in one round over the keys, wrapped
    around: no key meets a domain twice as long as no domain takes more than every key once
    (McNaughton's rule). Inside a domain the emptiest rank of lowest id takes the key.
    """
    layers = np.nonzero(occupancy.pools == occupancy.pools[layer])[0]
    keys = [
        int(member) * occupancy.num_experts + expert
        for member in layers
        for expert in range(occupancy.num_experts)
    ]
    room = {
        domain: [r for r in range(occupancy.num_ranks) if occupancy.domain[r] == domain]
        for domain in range(int(occupancy.domain.max()) + 1)
    }
    free = occupancy.free_of(layer)
    held = {d: int(free[ranks].sum()) for d, ranks in room.items()}
    wanted, at = occupancy.floor * len(keys), 0
    for domain in sorted(room, key=lambda d: (-held[d], d)):
        for _ in range(min(held[domain], len(keys), wanted)):
            left = occupancy.free_of(layer)
            rank = min(room[domain], key=lambda r: (-int(left[r]), r))
            occupancy.add(keys[at % len(keys)], rank)
            at += 1
            wanted -= 1
    assert wanted == 0, f"{wanted} places short of floor {occupancy.floor}"


def _with_slots_of(occupancy: Occupancy, layer: int, keys: list[int]) -> list[int]:
    """Those keys whose layer shares slots with the layer named."""
    return [k for k in keys if occupancy.shares_slots(k // occupancy.num_experts, layer)]


def _shrink(occupancy: Occupancy, judge: Judge, rank: int, layer: int) -> None:
    while occupancy.free_of(layer)[rank] < 0:
        surplus = judge.cheapest(rank, layer)
        if surplus is not None:
            key = surplus[1]
        else:
            # The lightest expert of the rank has to find another place.
            keys = _with_slots_of(occupancy, layer, occupancy.keys_on(rank))
            key = min(keys, key=lambda k: (judge.strain(k, rank), k))
        occupancy.drop(key, rank)
        judge.changed(key)


def _place(occupancy: Occupancy, judge: Judge, key: int) -> bool:
    """One more failure domain for the key."""
    layer = key // occupancy.num_experts
    ranks = [
        r
        for r in range(occupancy.num_ranks)
        if occupancy.domain[r] >= 0 and occupancy.in_domain(key, r) == 0
    ]
    free = occupancy.free_of(layer)
    open_ranks = [r for r in ranks if free[r] > 0]
    if open_ranks:
        target = min(open_ranks, key=lambda r: (judge.strain(key, r), -int(free[r]), r))
    else:
        victim = _victim(judge, ranks, layer)
        if victim is not None:
            lost, target = victim
            occupancy.drop(lost, target)
            judge.changed(lost)
        else:
            left = _displace(occupancy, judge, ranks, layer)
            if left is None:
                return False
            target = left
    occupancy.add(key, target)
    judge.changed(key)
    return True


def _victim(judge: Judge, ranks: list[int], layer: int) -> tuple[int, int] | None:
    surplus = [
        (*found, rank) for rank in ranks if (found := judge.cheapest(rank, layer)) is not None
    ]
    return min(surplus)[1:] if surplus else None


def _displace(occupancy: Occupancy, judge: Judge, ranks: list[int], layer: int) -> int | None:
    """Move one expert off one of `ranks` to a rank with room; returns the rank it left.

    Further hops are not tried: where one does not suffice, domains interlock, and placing anew
    costs little more.
    """
    free = occupancy.free_of(layer)
    for target in range(occupancy.num_ranks):
        surplus = judge.cheapest(target, layer) if occupancy.domain[target] >= 0 else None
        if target in ranks or (free[target] <= 0 and surplus is None):
            continue
        for source in ranks:
            key = _movable(occupancy, source, target, layer)
            if key is None:
                continue
            if free[target] <= 0 and surplus is not None:
                occupancy.drop(surplus[1], target)
                judge.changed(surplus[1])
            occupancy.drop(key, source)
            occupancy.add(key, target)
            judge.changed(key)
            return source
    return None


def _movable(occupancy: Occupancy, source: int, target: int, layer: int) -> int | None:
    """Lowest key that may go from one rank to another of another domain without losing a domain."""
    for key in _with_slots_of(occupancy, layer, occupancy.keys_on(source)):
        arrives = occupancy.in_domain(key, target) == 0
        stays = occupancy.in_domain(key, source) > 1
        if not occupancy.holds(key, target) and (arrives or stays):
            return key
    return None
