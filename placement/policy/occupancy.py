"""A layout under work: slots that can be filled and emptied, with the counts every policy asks for.

Responsible for the book-keeping of a proposal: who is where, how full each rank is, whether a
replica may go. Must never decide. Called by policies; one proposal, one occupancy.

Slots are stable: a key that stays on its rank is in its live slot in the result, so the result
differs from the live layout only where a write or an eviction is meant. Replicas on ranks that
are lost or draining are not carried over.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from placement.layout import ABSENT, EMPTY, ExpertLayout
from placement.policy.base import PolicyInput
from placement.policy.feasibility import capacities, domains, uniform_slots

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]


class Occupancy:
    """Mutable slots of all usable ranks.

    capacity: int64 [ranks], slots that may be filled (staging left out). filled: int64 [ranks],
    slots that are. domain: int64 [ranks], number of the failure domain, -1 = the rank may hold
    nothing. floor: domains each expert keeps. pools: the layers that share slots, one number a
    layer: all the same where slots are a pool a rank shares over its layers, all different in a
    uniform layout, where every layer has as many slots of its own on every rank.
    """

    def __init__(self, request: PolicyInput, floor: int, *, keep_live: bool = True) -> None:
        topology, live = request.topology, request.layout
        self.num_experts = live.num_experts
        self.num_layers = live.num_layers
        self.num_ranks = topology.num_ranks
        self.floor = floor
        self.capacity = capacities(topology, request.staging_slots)
        self.domain = domains(topology, request.staging_slots)
        self.pools: IntArray = np.zeros(self.num_layers, dtype=np.int64)
        self._own: IntArray | None = None
        if request.uniform:
            own = uniform_slots(request)
            self.pools = np.arange(self.num_layers, dtype=np.int64)
            self.capacity = np.where(self.domain >= 0, own * self.num_layers, 0)
            self._own = np.where(self.domain >= 0, own, 0)
            self._filled_of: IntArray = np.zeros((self.num_layers, self.num_ranks), dtype=np.int64)
        self.filled: IntArray = np.zeros(self.num_ranks, dtype=np.int64)
        self._live = live
        self._num_slots = [s.num_slots if s.alive else 0 for s in topology.ranks]
        self._max_slots = topology.max_slots
        width = max(topology.max_slots, live.slots.shape[1])
        self._slots = np.full((self.num_ranks, width), EMPTY, dtype=np.int32)
        self._hosted: BoolArray = np.zeros((live.num_keys, self.num_ranks), dtype=np.bool_)
        self._in_domain = np.zeros((live.num_keys, int(self.domain.max(initial=0)) + 1), np.int64)
        self._count: IntArray = np.zeros(live.num_keys, dtype=np.int64)
        if keep_live:
            self._carry_over()

    def _carry_over(self) -> None:
        """Take the live replicas on usable ranks in, the first of duplicates on a rank."""
        live, width = self._live.slots, self._live.slots.shape[1]
        rank, index = np.nonzero((live >= 0) & (self.domain >= 0)[:, None])
        key = live[rank, index].astype(np.int64)
        first = np.unique(key * self.num_ranks + rank, return_index=True)[1]
        rank, index, key = rank[first], index[first], key[first]
        assert width <= self._slots.shape[1], "the slot matrix is as wide as the live one"
        self._slots[rank, index] = key
        self._hosted[key, rank] = True
        np.add.at(self._in_domain, (key, self.domain[rank]), 1)
        self._count[:] = self._hosted.sum(axis=1)
        self.filled[:] = self._hosted.sum(axis=0)
        if self._own is not None:
            np.add.at(self._filled_of, (key // self.num_experts, rank), 1)

    def hosts_of_layer(self, layer: int) -> BoolArray:
        """Which ranks hold which expert of a layer: bool [experts, ranks], a view."""
        low = layer * self.num_experts
        return self._hosted[low : low + self.num_experts]

    def holds(self, key: int, rank: int) -> bool:
        """Whether the rank holds the key."""
        return bool(self._hosted[key, rank])

    def count(self, key: int) -> int:
        """Replicas of the key."""
        return int(self._count[key])

    def spread(self, key: int) -> int:
        """Failure domains that hold the key."""
        return int((self._in_domain[key] > 0).sum())

    def in_domain(self, key: int, rank: int) -> int:
        """Replicas of the key in the rank's failure domain."""
        return int(self._in_domain[key, self.domain[rank]])

    def keys_on(self, rank: int) -> list[int]:
        """Keys on the rank, ascending."""
        return [int(key) for key in np.nonzero(self._hosted[:, rank])[0]]

    def free(self) -> IntArray:
        """Slots of each rank that may still be filled: int64 [ranks]; negative where a rank must
        give some up.
        """
        return self.capacity - self.filled

    def free_of(self, layer: int) -> IntArray:
        """Slots of each rank that the layer may still fill: int64 [ranks]; as `free`."""
        if self._own is None:
            return self.free()
        free: IntArray = self._own - self._filled_of[layer]
        return free

    @property
    def uniform(self) -> bool:
        """Whether every layer has slots of its own."""
        return self._own is not None

    def shares_slots(self, first: int, second: int) -> bool:
        """Whether a slot of one layer may be given to the other."""
        return bool(self.pools[first] == self.pools[second])

    def below_floor(self) -> list[int]:
        """Keys in fewer failure domains than the floor, ascending."""
        return [int(k) for k in np.nonzero((self._in_domain > 0).sum(axis=1) < self.floor)[0]]

    def removable_on(self, rank: int) -> IntArray:
        """Keys whose replica on the rank may go, ascending.

        Not the last replica, and the key keeps the floor, or what it has of it.
        """
        keys = np.nonzero(self._hosted[:, rank])[0]
        spread = (self._in_domain[keys] > 0).sum(axis=1)
        after = spread - (self._in_domain[keys, self.domain[rank]] == 1)
        free_to_go: IntArray = keys[
            (self._count[keys] > 1) & (after >= np.minimum(self.floor, spread))
        ]
        return free_to_go

    def add(self, key: int, rank: int, index: int | None = None) -> int:
        """Put a key into a slot of the rank: the one named, else its live one, else the lowest
        empty. Returns the index.
        """
        assert not self._hosted[key, rank], f"key {key} is on rank {rank} already"
        assert self.domain[rank] >= 0, f"rank {rank} may hold nothing"
        row = self._slots[rank]
        if index is None:
            home = np.nonzero(
                (self._live.slots[rank] == key) & (row[: self._live.slots.shape[1]] == EMPTY)
            )[0]
            index = int(home[0]) if len(home) else int(np.nonzero(row == EMPTY)[0][0])
        assert row[index] == EMPTY, f"slot {index} of rank {rank} is not empty"
        row[index] = key
        self._book(key, rank, 1)
        return index

    def drop(self, key: int, rank: int) -> int:
        """Take a key off the rank. Returns the index of its slot."""
        assert self._hosted[key, rank], f"key {key} is not on rank {rank}"
        index = int(np.nonzero(self._slots[rank] == key)[0][0])
        self._slots[rank, index] = EMPTY
        self._book(key, rank, -1)
        return index

    def to_layout(self) -> ExpertLayout:
        """The layout, in the topology's shape, every key that stayed in its live slot."""
        slots = np.full((self.num_ranks, self._max_slots), ABSENT, dtype=np.int32)
        for rank, width in enumerate(self._num_slots):
            slots[rank, :width] = self._settled(rank, width)
        return ExpertLayout(slots, self.num_layers, self.num_experts)

    def _settled(self, rank: int, width: int) -> npt.NDArray[np.int32]:
        live = self._live.slots[rank][:width]
        here = self._slots[rank]
        row = np.full(width, EMPTY, dtype=np.int32)
        same = (here[: len(live)] == live) & (live >= 0)
        row[: len(live)][same] = live[same]
        waiting: list[tuple[int, int]] = []
        others = here >= 0
        others[: len(live)] &= ~same
        for place in np.nonzero(others)[0].tolist():
            key = int(here[place])
            home = np.nonzero(live == key)[0]
            if len(home):
                row[home[0]] = key
            else:
                waiting.append((place, key))
        for place, key in waiting:
            fits = place < width and row[place] == EMPTY
            row[place if fits else int(np.nonzero(row == EMPTY)[0][0])] = key
        return row

    def _book(self, key: int, rank: int, change: int) -> None:
        self._hosted[key, rank] = change > 0
        self._in_domain[key, self.domain[rank]] += change
        self._count[key] += change
        self.filled[rank] += change
        if self._own is not None:
            self._filled_of[key // self.num_experts, rank] += change
