"""Plans that need no policy: the layout of before a total loss or of before a shard was replaced,
and experts without a replica put wherever a slot is free.

Responsible for their steps. Starts no plan and drops no expert's last replica. Called by needs and
ranks.

*Restore.* When everything was lost, the layout that the newest table listed is known slot by slot.
Ranks that come back are filled as they were, and nothing is planned anew before they had the time
to. *Refill.* A shard that was replaced on request is filled as its last life was. *Rescue.* Where
the ranks that are left cannot hold every expert, no policy has a layout to propose. Then experts
without a replica take, hottest first, what slots there are: staging slots too, and those of surplus
replicas.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from placement.engine.shown import slot_limit
from placement.engine.state import NEVER_S, RankState, RankStatus, SlotUse
from placement.engine.tables import JOIN_GRACE_S
from placement.engine.turn import Turn
from placement.layout import EMPTY, SlotId
from placement.planner import prove
from placement.planner.plan import Move, MoveKind, Plan, PlannedStep, StepKind

FloatArray = npt.NDArray[np.float64]


# -- what was listed -----------------------------------------------------------------------------


def remember_listed(turn: Turn, rank: RankState) -> None:
    """Keep what the newest table lists on a rank that is lost now. Call it before its slots go.

    A rank that is lost while it is being filled as it was keeps what had not come yet.
    """
    before = rank.lost_keys if _restoring(turn) else []
    listed = [s.key if s.use is SlotUse.LISTED else EMPTY for s in rank.slots]
    width = max(len(before), len(listed))
    before, listed = (keys + [EMPTY] * (width - len(keys)) for keys in (before, listed))
    rank.lost_keys = [new if new >= 0 else old for new, old in zip(listed, before, strict=True)]
    rank.lost_at_s = turn.at_s


def all_lost(turn: Turn) -> None:
    """Nothing is listed or resident any more: what was lost lately is to come back as it was."""
    state = turn.state
    gone = [r for r in state.ranks if turn.at_s > r.lost_at_s + JOIN_GRACE_S]
    newest = {key for r in state.ranks if r not in gone for key in r.lost_keys}
    for rank in gone:  # the newest table did without them, as far as it could
        rank.lost_keys = [EMPTY if key in newest else key for key in rank.lost_keys]
    kept = sum(key >= 0 for rank in state.ranks for key in rank.lost_keys)
    if not kept:
        return
    someone = any(rank.status is RankStatus.LIVE for rank in state.ranks)
    state.restoring_until_s = turn.at_s + JOIN_GRACE_S if someone else NEVER_S
    turn.record(
        "all_lost",
        "noted",
        f"every replica is lost; the {kept} that were listed are put back as ranks return",
        numbers={"replicas": float(kept)},
    )


def rank_returned(turn: Turn) -> None:
    """A rank joined. After a total loss the others are waited for from the first on."""
    if turn.state.restoring_until_s == NEVER_S:
        turn.state.restoring_until_s = turn.at_s + JOIN_GRACE_S


def restored(turn: Turn, slot: SlotId) -> None:
    """An add put a replica back: it is not owed any more, whatever becomes of it."""
    keys = turn.rank(slot.rank).lost_keys
    if turn.rank(slot.rank).status is RankStatus.LIVE and slot.index < len(keys):
        keys[slot.index] = EMPTY


def awaits_ranks(turn: Turn) -> bool:
    """Whether ranks that held something before everything was lost may still come back."""
    return _restoring(turn) and any(
        r.status is RankStatus.LOST and not r.draining and any(k >= 0 for k in r.lost_keys)
        for r in turn.state.ranks
    )


def end_restoring(turn: Turn) -> None:
    """All that could be put back was: from now on plans are made as ever."""
    turn.state.restoring_until_s = -NEVER_S
    for rank in turn.state.ranks:
        rank.lost_keys = []


def restore_plan(turn: Turn) -> Plan | None:
    """Adds that put back what ranks held that have returned since everything was lost; None where
    nothing is owed. Where a rank has fewer slots than it had, only replicas go back that fit, those
    of experts that nobody else has or had first."""
    if not _restoring(turn):
        return None
    owed: dict[int, list[tuple[int, int]]] = {}
    holders = turn.layout().replica_counts.reshape(-1).copy()
    for rank in turn.state.ranks:
        for index, key in enumerate(rank.lost_keys):
            if key >= 0:
                holders[key] += 1
                owed.setdefault(rank.rank, []).append((index, key))
    return _put_back(turn, owed, holders, "as before everything was lost")


def refill_plan(turn: Turn) -> Plan | None:
    """Adds that give ranks whose shard was replaced what it held; None where nothing is owed. They
    are owed once: what does not come now is left to the balance. A rank whose budget was raised has
    its slots first."""
    owed: dict[int, list[tuple[int, int]]] = {}
    holders = turn.layout().replica_counts.reshape(-1).copy()
    for rank in turn.state.ranks:
        if rank.owed_keys and _takes(rank) and rank.wanted_slots <= rank.num_slots:
            owed[rank.rank] = [(i, key) for i, key in enumerate(rank.owed_keys) if key >= 0]
            rank.owed_keys = []
    return _put_back(turn, owed, holders, "as before its shard was replaced")


def _put_back(
    turn: Turn,
    owed: dict[int, list[tuple[int, int]]],
    holders: npt.NDArray[np.int64],
    reason: str,
) -> Plan | None:
    """Adds into the very slots, as far as they are free and the rank has room. owed: (slot, key) by
    rank. holders: int64 [keys], replicas there are and will be."""
    draft = _Draft()
    for number in sorted(owed):
        rank = turn.rank(number)
        if not _takes(rank):
            continue
        room = _room(turn, rank, turn.config.staging_slots)
        here = {s.key for s in rank.slots if s.use is not SlotUse.EMPTY}
        for index, key in sorted(owed[number], key=lambda o: (bool(holders[o[1]] > 1), o[0])):
            if room <= 0 or not _is_empty(rank, index) or key in here:
                continue
            draft.add(turn, SlotId(number, index), key, reason)
            here.add(key)
            room -= 1
    return draft.plan(turn)


def _restoring(turn: Turn) -> bool:
    return turn.at_s < turn.state.restoring_until_s


# -- rescue --------------------------------------------------------------------------------------


def rescue_plan(turn: Turn, load: FloatArray) -> Plan | None:
    """Adds of experts without a replica into empty slots, staging slots too, then into those of
    surplus replicas; None where there is nothing to do it with. load: float64 [keys], pairs a
    second."""
    spec, layout = turn.spec, turn.layout()
    missing = [spec.key(*expert) for expert in layout.missing()]
    missing.sort(key=lambda key: (-float(load[key]), key))
    draft = _Draft()
    ranks = [r for r in turn.state.ranks if _takes(r) and r.suspected_at_s == NEVER_S]
    room = {r.rank: _room(turn, r, 0) for r in ranks}
    free = {r.rank: [i for i in range(slot_limit(r) - 1, -1, -1) if _is_empty(r, i)] for r in ranks}
    counts = layout.replica_counts.reshape(-1).copy()
    given: set[SlotId] = set()
    for key in missing:
        open_ranks = [r for r in room if room[r] > 0 and free[r]]
        if open_ranks:
            rank = max(open_ranks, key=lambda r: (room[r], -r))
            slot, after = SlotId(rank, free[rank].pop()), -1
            room[rank] -= 1
        else:
            victim = _surplus(ranks, counts, load, given)
            if victim is None:
                break
            slot, counts[victim.key] = victim.slot, counts[victim.key] - 1
            given.add(slot)
            after = draft.remove(turn, slot, victim.key)
        draft.add(turn, slot, key, "no slot for every expert: it has no replica", after=after)
    return draft.plan(turn)


@dataclass(frozen=True, slots=True, order=True)
class _Victim:
    harm: float
    key: int
    slot: SlotId


def _surplus(
    ranks: Iterable[RankState],
    counts: npt.NDArray[np.int64],
    load: FloatArray,
    given: Collection[SlotId],
) -> _Victim | None:
    """The replica that does least harm by going: its expert keeps another. None where no expert has
    two. given: slots that others were put into, with `counts` without them."""
    return min(
        (
            _Victim(
                float(load[slot.key]) / float(counts[slot.key] * (counts[slot.key] - 1)),
                slot.key,
                SlotId(rank.rank, index),
            )
            for rank in ranks
            for index, slot in enumerate(rank.slots[: slot_limit(rank)])
            if slot.use is SlotUse.LISTED
            and counts[slot.key] > 1
            and SlotId(rank.rank, index) not in given
        ),
        default=None,
    )


# -- both ----------------------------------------------------------------------------------------


def _takes(rank: RankState) -> bool:
    return rank.status is RankStatus.LIVE and not rank.draining


def _room(turn: Turn, rank: RankState, staging_slots: int) -> int:
    """Replicas that the rank may take beside those that it holds."""
    most = turn.topology().ranks[rank.rank].room(staging_slots)
    return most - sum(s.use is not SlotUse.EMPTY for s in rank.slots)


def _is_empty(rank: RankState, index: int) -> bool:
    limit = slot_limit(rank)
    return index < limit and rank.slots[index].use is SlotUse.EMPTY


@dataclass(slots=True)
class _Draft:
    """A plan under work: adds in the first wave, those into a slot that it frees in the second."""

    moves: list[Move] = field(default_factory=list)
    steps: list[PlannedStep] = field(default_factory=list)

    def add(self, turn: Turn, slot: SlotId, key: int, reason: str, *, after: int = -1) -> None:
        """Put the key into the slot; `after`: id of the removal that frees it."""
        layer, expert = divmod(key, turn.spec.num_experts)
        move_id = len(self.moves)
        self.moves.append(
            Move(
                move_id=move_id,
                kind=MoveKind.REPLICATE,
                layer=layer,
                expert=expert,
                source_rank=-1,
                target_rank=slot.rank,
                copy_bytes=turn.spec.expert_bytes,
                cross_node=False,
                reason=reason,
                gain_s_per_s=0.0,
            )
        )
        self.steps.append(
            PlannedStep(
                step_id=len(self.steps),
                kind=StepKind.ADD,
                move_id=move_id,
                slot=slot,
                layer=layer,
                expert=expert,
                wave=0 if after < 0 else 1,
                after=() if after < 0 else (after,),
            )
        )

    def remove(self, turn: Turn, slot: SlotId, key: int) -> int:
        """Make room for the add that is put in next. The step's id."""
        layer, expert = divmod(key, turn.spec.num_experts)
        step_id = len(self.steps)
        self.steps.append(
            PlannedStep(
                step_id=step_id,
                kind=StepKind.REMOVE,
                move_id=len(self.moves),
                slot=slot,
                layer=layer,
                expert=expert,
                wave=0,
            )
        )
        return step_id

    def plan(self, turn: Turn) -> Plan | None:
        """The whole, proved; None where it is empty."""
        if not self.moves:
            return None
        limit = [slot_limit(r) if r.holds else 0 for r in turn.state.ranks]
        steps = sorted(self.steps, key=lambda s: s.wave)
        prove(turn.layout(), steps, slot_limit=limit, staging_slots=0)
        return Plan(
            moves=tuple(self.moves),
            steps=tuple(steps),
            copy_bytes=len(self.moves) * turn.spec.expert_bytes,
            cross_node_bytes=0,
            cost_s=0.0,
            gain_s_per_s=0.0,
            balancedness_before=1.0,
            balancedness_after=1.0,
        )
