"""An order in which memory allows the moves, or the moves that must be left out.

Responsible for waves and dependencies, found by playing the moves slot by slot. Never prices.
Called by `make_plan`.

A wave is what one published table changes: its adds fill slots that are empty when it begins; once
all are verified, one table lists them and no longer lists the wave's removals; the slots these free
belong to the next wave.

Why this ends: with at least one empty slot a rank before and after, somewhere a removal is always
free. Suppose every rank with adds to come is full. Each must lose more replicas than it gains (it
ends with empty slots), while a removal is held back only by an add of the same expert still to
come, one for one: fewer adds than removals, so one is free. Without staging slots cycles of last
replicas exist; then the latest move is left out and the rest is played again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from placement.layout import EMPTY, ExpertLayout, SlotId
from placement.planner.drafts import Draft
from placement.planner.plan import StepKind
from placement.topology import Topology


@dataclass(slots=True)
class OrderedStep:
    """A step with its place: index into drafts, slot, wave, ids of steps that must have ended
    before."""

    step_id: int
    kind: StepKind
    draft: int
    key: int
    slot: SlotId
    wave: int
    after: tuple[int, ...]


@dataclass(slots=True)
class Ordered:
    """Steps in a feasible order; the source rank found for each add's draft; drafts left out, with
    the reason."""

    steps: list[OrderedStep]
    sources: dict[int, int]
    left_out: dict[int, str]


@dataclass(slots=True)
class _Removal:
    draft: int
    slot: SlotId
    key: int
    needs_add: bool


@dataclass(slots=True)
class _Play:
    """What lies where while the moves are played."""

    occupied: list[list[int]]
    listed: dict[int, set[SlotId]]
    need: dict[int, int]
    steps: list[OrderedStep] = field(default_factory=list)
    sources: dict[int, int] = field(default_factory=dict)
    added: dict[int, int] = field(default_factory=dict)
    """Draft -> step id of its add."""
    adds_of: dict[int, list[int]] = field(default_factory=dict)
    """Key -> step ids of its adds so far."""
    original: dict[int, set[SlotId]] = field(default_factory=dict)
    freed_by: dict[SlotId, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WaveLimits:
    """Copies at once into a rank and out of a rank, slots a rank may use, empty slots it must end
    with, floor."""

    adds_per_rank: int
    copies_from_rank: int
    slot_limit: list[int]
    staging_slots: int
    floor: int
    evict_first: bool = False


def order_moves(
    current: ExpertLayout,
    target: ExpertLayout,
    drafts: list[Draft],
    topology: Topology,
    limits: WaveLimits,
) -> Ordered:
    """Play the drafts into waves; leave out, from the last on, those that cannot be played."""
    left_out: dict[int, str] = {}
    while True:
        play = _start(current, target, limits)
        stuck = _run(play, drafts, left_out, topology, limits)
        if stuck is None:
            stuck = _staging_broken(play, drafts, left_out, current, limits)
        if stuck is None:
            return Ordered(play.steps, play.sources, left_out)
        draft, reason = stuck
        left_out[draft] = reason


def _start(current: ExpertLayout, target: ExpertLayout, limits: WaveLimits) -> _Play:
    listed: dict[int, set[SlotId]] = {}
    occupied = current.slots.tolist()
    for rank, row in enumerate(occupied):
        for index, key in enumerate(row):
            if key >= 0:
                listed.setdefault(key, set()).add(SlotId(rank, index))
    wanted = target.replica_counts.reshape(-1)
    need = {
        key: max(1, min(len(slots), int(wanted[key]), limits.floor))
        for key, slots in listed.items()
    }
    return _Play(occupied, listed, need, original={k: set(v) for k, v in listed.items()})


def _run(
    play: _Play,
    drafts: list[Draft],
    left_out: dict[int, str],
    topology: Topology,
    limits: WaveLimits,
) -> tuple[int, str] | None:
    """Play all waves. None when everything was played, else the draft to leave out and why."""
    active = [i for i in range(len(drafts)) if i not in left_out]
    removals: list[_Removal] = []
    for i in active:
        own = drafts[i].own_removal
        if own is not None:
            removals.append(_Removal(i, own, drafts[i].key, drafts[i].target >= 0))
        removals.extend(_Removal(i, slot, key, False) for slot, key in drafts[i].room)
    adds = [i for i in active if drafts[i].target >= 0]
    # An add whose removal frees a slot that another add needs goes before one that frees nothing.
    crowded = {drafts[i].target for i in adds}
    adds.sort(
        key=lambda i: (
            not drafts[i].urgent,
            not (drafts[i].own_removal and drafts[i].source in crowded),
        )
    )
    wave = 0
    while adds or removals:
        first_evicts = limits.evict_first and wave == 0
        done = [] if first_evicts else _play_adds(play, adds, drafts, topology, limits, wave)
        gone = _play_removals(play, removals, wave)
        if not done and not gone and not first_evicts:
            return _stuck(adds, drafts)
        if done or gone:
            wave += 1
        else:
            limits = WaveLimits(
                limits.adds_per_rank,
                limits.copies_from_rank,
                limits.slot_limit,
                limits.staging_slots,
                limits.floor,
            )
        finished = set(done)
        adds = [i for i in adds if i not in finished]
        freed = {id(r) for r in gone}
        removals = [r for r in removals if id(r) not in freed]
    return None


def _play_adds(
    play: _Play,
    adds: list[int],
    drafts: list[Draft],
    topology: Topology,
    limits: WaveLimits,
    wave: int,
) -> list[int]:
    done: list[int] = []
    into: dict[int, int] = {}
    out_of: dict[int, int] = {}
    empty: dict[int, list[int]] = {}
    for i in adds:
        draft = drafts[i]
        rank = draft.target
        if into.get(rank, 0) >= limits.adds_per_rank:
            continue
        if rank not in empty:
            row = play.occupied[rank]
            empty[rank] = [x for x in range(limits.slot_limit[rank] - 1, -1, -1) if row[x] == EMPTY]
        if not empty[rank]:
            continue
        source = _source(play, draft, topology, out_of, limits.copies_from_rank)
        if source is None:
            continue
        index = empty[rank].pop()
        slot = SlotId(rank, index)
        play.occupied[rank][index] = draft.key
        into[rank] = into.get(rank, 0) + 1
        if source >= 0:
            out_of[source] = out_of.get(source, 0) + 1
        freed = play.freed_by.get(slot)
        step = OrderedStep(
            len(play.steps),
            StepKind.ADD,
            i,
            draft.key,
            slot,
            wave,
            () if freed is None else (freed,),
        )
        play.steps.append(step)
        play.sources[i] = source
        play.added[i] = step.step_id
        play.adds_of.setdefault(draft.key, []).append(step.step_id)
        done.append(i)
    for i in done:
        step = play.steps[play.added[i]]
        play.listed.setdefault(step.key, set()).add(step.slot)
    return done


def _source(
    play: _Play, draft: Draft, topology: Topology, out_of: dict[int, int], most: int
) -> int | None:
    """Nearest listed replica whose rank has a copy to spare; -1 (checkpoint) where none exists;
    None = wait a wave."""
    hosts = sorted({slot.rank for slot in play.listed.get(draft.key, ())})
    if not hosts:
        return -1
    node = topology.ranks[draft.target].node
    free = [r for r in hosts if out_of.get(r, 0) < most]
    return min(
        free,
        key=lambda r: (r != draft.target, topology.ranks[r].node != node, out_of.get(r, 0), r),
        default=None,
    )


def _play_removals(play: _Play, removals: list[_Removal], wave: int) -> list[_Removal]:
    gone: list[_Removal] = []
    for removal in removals:
        if removal.needs_add and removal.draft not in play.added:
            continue
        rest = play.listed[removal.key] - {removal.slot}
        # A paired removal follows its add; unpaired ones are those the target does without.
        assert len(rest) >= play.need[removal.key], f"{removal.slot} is needed by the floor"
        after: tuple[int, ...] = (play.added[removal.draft],) if removal.needs_add else ()
        if len(rest & play.original[removal.key]) < play.need[removal.key]:
            after = tuple(sorted(set(after) | set(play.adds_of.get(removal.key, ()))))
        play.listed[removal.key] = rest
        step = OrderedStep(
            len(play.steps), StepKind.REMOVE, removal.draft, removal.key, removal.slot, wave, after
        )
        play.steps.append(step)
        play.freed_by[removal.slot] = step.step_id
        gone.append(removal)
    # A slot is free only for the next wave: release comes after this wave's table is acknowledged.
    for removal in gone:
        play.occupied[removal.slot.rank][removal.slot.index] = EMPTY
    return gone


def _stuck(adds: list[int], drafts: list[Draft]) -> tuple[int, str]:
    """The latest add to leave out: whatever is left waits, in the end, for an add without room."""
    assert adds, "a removal without an add is never held back"
    ranks = sorted({drafts[i].target for i in adds})
    return max(adds), f"ranks {ranks} have no empty slot and cannot free one first"


def _staging_broken(
    play: _Play,
    drafts: list[Draft],
    left_out: dict[int, str],
    current: ExpertLayout,
    limits: WaveLimits,
) -> tuple[int, str] | None:
    """The last add onto a rank that would end with too few empty slots, and worse off than it
    began."""
    for rank, row in enumerate(play.occupied):
        limit = limits.slot_limit[rank]
        empty = sum(1 for key in row[:limit] if key == EMPTY)
        before = sum(1 for i in current.empty_slots(rank) if i < limit)
        if empty >= min(limits.staging_slots, before):
            continue
        onto = [i for i, d in enumerate(drafts) if d.target == rank and i not in left_out]
        assert onto, f"rank {rank} lost an empty slot without an add"
        return max(
            onto
        ), f"rank {rank} would end with {empty} empty slots, staging needs {limits.staging_slots}"
    return None
