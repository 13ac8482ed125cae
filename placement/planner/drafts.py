"""From the difference of two layouts to the moves a person would name: replicate, migrate, evict.

Responsible for pairing what must appear with what must go. Decides no order and prices nothing.
Called by `make_plan`.

Two layouts are equal to the planner where each rank holds the same *set* of experts: which slot of
a rank holds which is free, because the slot that one move frees is the next one's. So the
difference is a list of (expert, rank) to add and of (expert, slot) to remove. Worked example, ranks
0 and 1, one staging slot each:

    now   [a b . ]  [c d . ]        wanted   [a c .]  [b d .]

adds b@1, c@0; removes b@0, c@1: two migrates, b 0->1 and c 1->0. Had rank 1 only lost c and gained
b, while c stays elsewhere, the removal of c would belong to the replicate of b: it only makes room.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from placement.layout import ABSENT, EMPTY, ExpertLayout, SlotId
from placement.planner.plan import MoveKind
from placement.topology import Topology


@dataclass(slots=True)
class Draft:
    """One move before it has an order: at most one add, its own removal, and removals that only
    make room for it."""

    kind: MoveKind
    key: int
    source: int
    """Rank the expert leaves (migrate, evict) or is brought from (replicate, found when ordered);
    -1 unknown."""
    target: int
    """Rank that gains the expert, -1 for an evict."""
    urgent: bool = False
    """The expert has no replica now: serve it first."""
    own_removal: SlotId | None = None
    room: list[tuple[SlotId, int]] = field(default_factory=list)


@dataclass(slots=True)
class Difference:
    """(key, rank) to add and (key, slot) to remove, both in ascending order."""

    adds: list[tuple[int, int]]
    removes: list[tuple[int, SlotId]]


def difference(current: ExpertLayout, target: ExpertLayout, slot_limit: list[int]) -> Difference:
    """What must appear and what must go. A kept expert in a slot at or above its rank's limit must
    do both."""
    adds: list[tuple[int, int]] = []
    removes: list[tuple[int, SlotId]] = []
    for rank in range(current.num_ranks):
        have: dict[int, int] = {}
        for index, key in enumerate(current.slots[rank].tolist()):
            if key in (EMPTY, ABSENT):
                continue
            if key in have or index >= slot_limit[rank]:
                removes.append((key, SlotId(rank, index)))
            else:
                have[key] = index
        want = {int(k) for k in target.slots[rank] if k >= 0}
        adds.extend((key, rank) for key in want - have.keys())
        removes.extend((key, SlotId(rank, have[key])) for key in have.keys() - want)
    return Difference(sorted(adds), sorted(removes))


def draft_moves(
    current: ExpertLayout,
    diff: Difference,
    topology: Topology,
    *,
    slot_limit: list[int],
    staging_slots: int,
) -> list[Draft]:
    """Moves in ascending order of (urgent first, key, rank): migrates pair an add with a removal of
    the same expert.

    A removal is paired on its own rank first (a shrinking rank), then on the same node, then by
    lowest rank. Further removals on a rank without room belong to that rank's adds; what is left
    are evictions.
    """
    waiting: dict[int, list[SlotId]] = {}
    for key, slot in diff.removes:
        waiting.setdefault(key, []).append(slot)
    drafts: list[Draft] = []
    for key, rank in diff.adds:
        draft = Draft(MoveKind.REPLICATE, key, -1, rank)
        layer, expert = divmod(key, current.num_experts)
        draft.urgent = not current.ranks_of(layer, expert) if key not in waiting else False
        partner = _partner(waiting.get(key, []), rank, topology)
        if partner is not None:
            waiting[key].remove(partner)
            draft.kind, draft.source, draft.own_removal = MoveKind.MIGRATE, partner.rank, partner
        drafts.append(draft)
    left = sorted((slot, key) for key, slots in waiting.items() for slot in slots)
    left = _give_room(current, drafts, left, slot_limit, staging_slots)
    drafts.extend(Draft(MoveKind.EVICT, key, slot.rank, -1, own_removal=slot) for slot, key in left)
    drafts.sort(key=lambda d: (not d.urgent, d.kind is MoveKind.EVICT, d.key, d.target, d.source))
    return drafts


def _partner(slots: list[SlotId], rank: int, topology: Topology) -> SlotId | None:
    node = topology.ranks[rank].node
    return min(
        slots, key=lambda s: (s.rank != rank, topology.ranks[s.rank].node != node, s), default=None
    )


def _give_room(
    current: ExpertLayout,
    drafts: list[Draft],
    left: list[tuple[SlotId, int]],
    slot_limit: list[int],
    staging_slots: int,
) -> list[tuple[SlotId, int]]:
    """Attach to each rank's adds the removals without which they would not fit; return the
    others."""
    short: dict[int, int] = {}
    for draft in drafts:
        short[draft.target] = short.get(draft.target, 0) + 1
    for rank in short:
        empty = sum(1 for i in current.empty_slots(rank) if i < slot_limit[rank])
        short[rank] -= max(0, empty - staging_slots)
    for draft in drafts:
        if draft.own_removal is not None and draft.own_removal.rank in short:
            short[draft.own_removal.rank] -= 1
    others: list[tuple[SlotId, int]] = []
    for slot, key in left:
        if short.get(slot.rank, 0) <= 0:
            others.append((slot, key))
            continue
        short[slot.rank] -= 1
        here = [d for d in drafts if d.target == slot.rank]
        # Each add gets at most one more than the others, so that a trimmed add takes little with
        # it.
        min(here, key=lambda d: len(d.room)).room.append((slot, key))
    return others
