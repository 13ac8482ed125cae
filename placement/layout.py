"""Who is where: the one source of truth about replicas, `ExpertLayout`.

Responsible for the slot matrix, its derived inverse, validation and diff. Never decides and never
scores. Used by policies (which propose one), the planner (which diffs two), the engine (which keeps
the live one) and every view.

Worked example, one layer of four experts on two ranks of three slots (one of them staging):

>>> from placement.layout import ExpertLayout
>>> layout = ExpertLayout.from_rows([[0, 1, -1], [2, 3, 0]], num_layers=1, num_experts=4)
>>> layout.replica_counts.tolist()
[[2, 1, 1, 1]]
>>> layout.ranks_of(0, 0)
(0, 1)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from placement.topology import Topology

EMPTY = -1
"""A slot that exists and holds nothing."""
ABSENT = -2
"""A place in the matrix that is no slot: the rank has fewer slots than the widest rank, or is
lost."""

IntArray = npt.NDArray[np.int32]


class SlotId(NamedTuple):
    """Place on a rank for one physical expert."""

    rank: int
    index: int  # type: ignore[assignment]  # shadows tuple.index on purpose: the glossary name


class LayoutError(ValueError):
    """A layout breaks a rule. `problems` lists every broken rule, each naming layer, expert, rank
    or slot."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems[:8]) + (" ..." if len(self.problems) > 8 else ""))


class SlotChange(NamedTuple):
    """One slot whose content differs between two layouts. Keys are `layer * num_experts + expert`,
    EMPTY or ABSENT."""

    slot: SlotId
    before: int
    after: int


@dataclass(frozen=True, eq=False)
class ExpertLayout:
    """`slots[rank, index]` = key of the physical expert there (`layer * num_experts + expert`),
    EMPTY or ABSENT.

    Shape [num_ranks, max_slots], int32, read-only. Everything else is derived from it.
    """

    slots: IntArray
    num_layers: int
    num_experts: int

    def __post_init__(self) -> None:
        slots = np.array(self.slots, dtype=np.int32, order="C", copy=True)
        if slots.ndim != 2:
            raise LayoutError([f"slots has {slots.ndim} dimensions, want 2 [ranks, slots]"])
        if self.num_layers < 1 or self.num_experts < 1:
            raise LayoutError(
                [f"num_layers {self.num_layers} and num_experts {self.num_experts} must be >= 1"]
            )
        if slots.size and (int(slots.min()) < ABSENT or int(slots.max()) >= self.num_keys):
            raise LayoutError(
                [f"slots must lie in [-2, {self.num_keys}), got {slots.min()}..{slots.max()}"]
            )
        slots.setflags(write=False)
        object.__setattr__(self, "slots", slots)

    @classmethod
    def from_rows(
        cls, rows: Sequence[Sequence[int]], *, num_layers: int, num_experts: int
    ) -> ExpertLayout:
        """Layout from one list of keys a rank; shorter rows are filled with ABSENT."""
        width = max((len(row) for row in rows), default=0)
        slots = np.full((len(rows), width), ABSENT, dtype=np.int32)
        for rank, row in enumerate(rows):
            slots[rank, : len(row)] = row
        return cls(slots, num_layers, num_experts)

    @classmethod
    def empty(cls, topology: Topology, *, num_layers: int, num_experts: int) -> ExpertLayout:
        """Layout of nothing: every slot of every live rank EMPTY."""
        slots = np.full((topology.num_ranks, topology.max_slots), ABSENT, dtype=np.int32)
        for spec in topology.ranks:
            if spec.alive:
                slots[spec.rank, : spec.num_slots] = EMPTY
        return cls(slots, num_layers, num_experts)

    @property
    def num_ranks(self) -> int:
        """First dimension of `slots`."""
        return int(self.slots.shape[0])

    @property
    def num_keys(self) -> int:
        """num_layers * num_experts."""
        return self.num_layers * self.num_experts

    @cached_property
    def hosts(self) -> npt.NDArray[np.int32]:
        """Replicas of each (key, rank): int32 [num_keys, num_ranks]. More than 1 in a cell is a
        duplicate."""
        hosts = np.zeros((self.num_keys, self.num_ranks), dtype=np.int32)
        rank, index = np.nonzero(self.slots >= 0)
        np.add.at(hosts, (self.slots[rank, index], rank), 1)
        hosts.setflags(write=False)
        return hosts

    @cached_property
    def replica_counts(self) -> npt.NDArray[np.int64]:
        """Physical experts of each logical expert: int64 [num_layers, num_experts]."""
        flat: npt.NDArray[np.int64] = self.hosts.sum(axis=1, dtype=np.int64)
        counts = flat.reshape(self.num_layers, self.num_experts)
        counts.setflags(write=False)
        return counts

    def ranks_of(self, layer: int, expert: int) -> tuple[int, ...]:
        """Ranks that hold the expert, ascending."""
        return tuple(int(r) for r in np.nonzero(self.hosts[layer * self.num_experts + expert])[0])

    def slots_of(self, layer: int, expert: int) -> tuple[SlotId, ...]:
        """Slots that hold the expert, by rank and index."""
        found = np.flatnonzero(self.slots.ravel() == layer * self.num_experts + expert)
        return tuple(SlotId(*divmod(place, self.slots.shape[1])) for place in found.tolist())

    def empty_slots(self, rank: int) -> tuple[int, ...]:
        """Indices of the rank's empty slots, ascending."""
        return tuple(int(i) for i in np.nonzero(self.slots[rank] == EMPTY)[0])

    def layer_slots(self, layer: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(expert, rank) of every filled slot of a layer, in order of (rank, index): two int64
        [replicas]."""
        low = layer * self.num_experts
        rank, index = np.nonzero((self.slots >= low) & (self.slots < low + self.num_experts))
        expert = self.slots[rank, index].astype(np.int64) - low
        return expert, rank.astype(np.int64)

    def physical_to_logical(self, num_ranks: int | None = None) -> npt.NDArray[np.int64]:
        """View `[num_layers, num_physical]` of a uniform layout: rank-major, the same number of
        slots a layer and rank.

        Raises LayoutError where the layout is not uniform (staging slots are ignored).
        """
        used = range(self.num_ranks if num_ranks is None else num_ranks)
        columns: list[npt.NDArray[np.int64]] = []
        widths: set[int] = set()
        for layer in range(self.num_layers):
            low, row = layer * self.num_experts, []
            for rank in used:
                filled = self.slots[rank]
                own = (
                    filled[(filled >= low) & (filled < low + self.num_experts)].astype(np.int64)
                    - low
                )
                widths.add(len(own))
                row.append(own)
            columns.append(np.concatenate(row) if row else np.zeros(0, np.int64))
        if len(widths) > 1:
            raise LayoutError(
                [
                    f"layout is not uniform: {min(widths)} to {max(widths)} filled slots a layer "
                    "and rank; physical_to_logical exists only for uniform layouts"
                ]
            )
        return np.stack(columns)

    def with_slots(self, changes: Iterable[tuple[SlotId, int]]) -> ExpertLayout:
        """The same layout with several slots replaced, in order."""
        slots = self.slots.copy()
        for slot, key in changes:
            slots[slot.rank, slot.index] = key
        return ExpertLayout(slots, self.num_layers, self.num_experts)

    def diff(self, target: ExpertLayout) -> tuple[SlotChange, ...]:
        """Slots that differ, by rank and index. Both layouts must have the same shape and model."""
        if self.slots.shape != target.slots.shape or self.num_keys != target.num_keys:
            raise LayoutError(
                [f"cannot diff layouts of shapes {self.slots.shape} and {target.slots.shape}"]
            )
        rank, index = np.nonzero(self.slots != target.slots)
        return tuple(
            SlotChange(SlotId(int(r), int(i)), int(self.slots[r, i]), int(target.slots[r, i]))
            for r, i in zip(rank, index, strict=True)
        )

    def same_as(self, other: ExpertLayout) -> bool:
        """Whether both say the same of every slot."""
        return (
            self.num_layers == other.num_layers
            and self.num_experts == other.num_experts
            and np.array_equal(self.slots, other.slots)
        )

    def missing(self) -> tuple[tuple[int, int], ...]:
        """(layer, expert) of every expert without a replica, ascending."""
        layer, expert = np.nonzero(self.replica_counts == 0)
        return tuple((int(a), int(b)) for a, b in zip(layer, expert, strict=True))

    def problems(
        self, topology: Topology, *, floor: int = 1, staging_slots: int = 0, partial: bool = False
    ) -> list[str]:
        """Every broken rule, as sentences.

        Rules: shape and absent places match the topology; no expert twice on a rank; every expert
        has at least `floor` replicas in different failure domains (1 replica where `partial`: 0
        allowed); at least `staging_slots` empty slots on every live rank.
        """
        found: list[str] = []
        if self.num_ranks != topology.num_ranks or self.slots.shape[1] != topology.max_slots:
            return [
                f"layout has shape {self.slots.shape}, topology wants "
                f"({topology.num_ranks}, {topology.max_slots})"
            ]
        for spec in topology.ranks:
            row = self.slots[spec.rank]
            want = spec.num_slots if spec.alive else 0
            if (row[:want] == ABSENT).any() or (row[want:] != ABSENT).any():
                found.append(
                    f"rank {spec.rank}: slots do not match the {want} the topology gives it"
                )
            empty = int((row == EMPTY).sum())
            if spec.alive and empty < min(staging_slots, want):
                found.append(
                    f"rank {spec.rank}: {empty} empty slots, staging needs {staging_slots}"
                )
        duplicate_key, duplicate_rank = np.nonzero(self.hosts > 1)
        for key, rank in zip(duplicate_key, duplicate_rank, strict=True):
            layer, expert = divmod(int(key), self.num_experts)
            count = int(self.hosts[key, rank])
            found.append(f"layer {layer} expert {expert}: {count} replicas on rank {int(rank)}")
        if not partial:
            found.extend(self._floor_problems(topology, floor))
        return found

    def _floor_problems(self, topology: Topology, floor: int) -> list[str]:
        domains = sorted({r.failure_domain for r in topology.ranks if r.alive})
        membership: npt.NDArray[Any] = np.zeros((topology.num_ranks, len(domains)), dtype=np.int32)
        for spec in topology.ranks:
            if spec.alive:
                membership[spec.rank, domains.index(spec.failure_domain)] = 1
        spread = ((self.hosts > 0).astype(np.int32) @ membership > 0).sum(axis=1)
        want = min(floor, len(domains))
        return [
            f"layer {int(k) // self.num_experts} expert {int(k) % self.num_experts}: replicas in "
            f"{int(spread[k])} failure domains, the floor is {want}"
            for k in np.nonzero(spread < want)[0]
        ]

    def validate(
        self, topology: Topology, *, floor: int = 1, staging_slots: int = 0, partial: bool = False
    ) -> None:
        """Raise LayoutError listing every rule of `problems` that is broken."""
        found = self.problems(topology, floor=floor, staging_slots=staging_slots, partial=partial)
        if found:
            raise LayoutError(found)
