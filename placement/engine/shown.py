"""What a plan may see of the state: a layout without what is on its way, ranks as they are to be.

Responsible for that view alone. Decides nothing. Used by turn and by whoever fills slots.
"""

from __future__ import annotations

import numpy as np

from placement.engine.state import EngineState, RankState, SlotState, SlotUse, StepRun
from placement.layout import ABSENT, EMPTY, IntArray
from placement.migration import AddState
from placement.topology import DeviceProfile, RankSpec, Topology


def shown_key(slot: SlotState) -> int:
    """Key a layout shows for the slot: what is listed or will be. A slot that only its shard can
    give back is ABSENT; everything else counts as EMPTY.

    Nothing is planned while a plan has slots of its own that are neither listed, verified nor
    empty.
    """
    if slot.use in (SlotUse.LISTED, SlotUse.VERIFIED):
        return slot.key
    return ABSENT if slot.use in (SlotUse.PARKED, SlotUse.ORPHAN) else EMPTY


def shown_slots(state: EngineState) -> IntArray:
    """Matrix of `shown_key`, as wide as the widest rank; ranks that hold nothing any more are
    ABSENT."""
    width = max((r.num_slots for r in state.ranks), default=0)
    slots = np.full((len(state.ranks), width), ABSENT, dtype=np.int32)
    for rank in state.ranks:
        if rank.holds:
            slots[rank.rank, : rank.num_slots] = [shown_key(s) for s in rank.slots]
    return slots


def planning_topology(
    state: EngineState, profiles: tuple[DeviceProfile, ...], cross_node_bytes_per_s: float
) -> Topology:
    """Ranks as the next plan must see them: wanted budgets instead of present ones, draining ranks
    marked, no more to be filled than what unanswered steps leave."""
    most = fill_max(state)
    return Topology(
        ranks=tuple(
            RankSpec(
                rank=r.rank,
                node=r.node,
                failure_domain=r.failure_domain,
                num_slots=slot_limit(r),
                profile=r.profile,
                alive=r.holds,
                draining=r.draining,
                fill_max=most.get(r.rank, -1),
            )
            for r in state.ranks
        ),
        profiles=profiles,
        cross_node_bytes_per_s=cross_node_bytes_per_s,
    )


def slot_limit(rank: RankState) -> int:
    """Slots of the rank that a plan may use: of the present and the wanted number the smaller."""
    return rank.num_slots if rank.wanted_slots < 0 else min(rank.num_slots, rank.wanted_slots)


def fill_max(state: EngineState) -> dict[int, int]:
    """Slots that may be filled, of ranks with steps that wait for an answer: all but the slots of
    these; where the shard lets even the first wait pass, no more than there are."""
    waiting: dict[int, list[StepRun]] = {}
    for step in state.parked.values():
        if step.state != AddState.VERIFIED:
            waiting.setdefault(step.step.slot.rank, []).append(step)
    most: dict[int, int] = {}
    for number, steps in waiting.items():
        rank = state.ranks[number]
        limit = slot_limit(rank)
        most[number] = limit - sum(s.step.slot.index < limit for s in steps)
        if any(s.stuck for s in steps):
            most[number] = min(most[number], sum(shown_key(s) >= 0 for s in rank.slots))
    return most
