"""What a service file costs in memory, before anything starts: `moe-serve up --size`.

Responsible for arithmetic from checkpoint and fleet to bytes and slots. Starts nothing.

Worked example, the tiny model on four ranks of 41 slots: an expert is 98,304 bytes in float32, 128
experts need 128 of the 4 x 40 slots that are not staging, which leaves 32 for replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_serve.config import ServiceConfig
from moe_serve.config.schema import RankGroup
from placement.topology import MoeSpec


@dataclass(frozen=True, slots=True)
class RankSize:
    """One group of equal ranks."""

    count: int
    slots: int
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class SizeReport:
    """Bytes and slots of a service. `spare_slots` are for replicas beyond the first; negative =
    does not fit."""

    expert_bytes: int
    slot_bytes: int
    num_keys: int
    groups: tuple[RankSize, ...]
    staging_slots: int
    total_slots: int
    spare_slots: int
    floor: int
    floor_slots_missing: int
    """Slots short of `floor` replicas of every expert, staging left empty; 0 = reachable by
    count."""

    @property
    def fits(self) -> bool:
        """One replica of every expert and the staging slots fit."""
        return self.spare_slots >= 0

    @property
    def missing_bytes(self) -> int:
        """Bytes short of one replica of every expert."""
        return max(0, -self.spare_slots) * self.slot_bytes


def rank_slots(config: ServiceConfig, rank: int, slot_bytes: int) -> int:
    """Slots of a rank that the service file names."""
    return group_slots(config.fleet.group_of(rank), slot_bytes)


def group_slots(group: RankGroup, slot_bytes: int) -> int:
    """Slots of each rank of a group: as given, or what its budget holds."""
    return group.slots if group.slots is not None else (group.budget or 0) // slot_bytes


def size_report(config: ServiceConfig, spec: MoeSpec) -> SizeReport:
    """Price a service file for a model."""
    rebalance = config.core_rebalance()
    groups, total, ranks = [], 0, 0
    for group in config.fleet.ranks:
        slots = group.slots if group.slots is not None else (group.budget or 0) // spec.slot_bytes
        groups.append(RankSize(group.count, slots, slots * spec.slot_bytes))
        total += slots * group.count
        ranks += group.count
    usable = total - rebalance.staging_slots * ranks
    spare = usable - spec.num_keys
    return SizeReport(
        expert_bytes=spec.expert_bytes,
        slot_bytes=spec.slot_bytes,
        num_keys=spec.num_keys,
        groups=tuple(groups),
        staging_slots=rebalance.staging_slots,
        total_slots=total,
        spare_slots=spare,
        floor=rebalance.floor,
        floor_slots_missing=max(0, rebalance.floor * spec.num_keys - usable),
    )
