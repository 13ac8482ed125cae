"""Ranks come, are suspected, come back, and are lost; what a rank says it holds is compared with
what is known.

Responsible for the rule "inventories win for what is resident, the journal for what was intended".
Plans nothing. Called by the engine.
"""

from __future__ import annotations

from placement.engine.floor import must_not_wait
from placement.engine.needs import drop_outstanding
from placement.engine.restore import all_lost, rank_returned, remember_listed
from placement.engine.state import (
    NEVER_S,
    RankState,
    RankStatus,
    SlotState,
    SlotUse,
    StepRun,
)
from placement.engine.steps import copy_deadline_s, fire, offer
from placement.engine.supervise import cancel_run, recall_needed
from placement.engine.turn import Turn
from placement.layout import EMPTY
from placement.messages.effects import ReplaceRank
from placement.messages.events import DrainCause, RankJoined, ResidentSlot
from placement.migration import AddState, RemoveState, StepEvent, is_terminal
from placement.planner.plan import StepKind

RANKS_MAX = 4096
"""Ranks one service may have: a bound on every array over ranks."""
_ENDS_WITH_A_LIFE = frozenset({DrainCause.NODE, DrainCause.REPLACE})
"""The next life is made on another node, and is the new one that was wanted."""


def rank_joined(turn: Turn, event: RankJoined) -> None:
    """A shard answered. The same incarnation: compare inventories. Another: the earlier one is lost
    first."""
    state = turn.state
    problem = _why_not(turn, event)
    if problem:
        turn.record("rank_refused", "refused", f"rank {event.rank}: {problem}")
        return
    if event.rank == len(state.ranks):
        state.ranks.append(
            RankState(
                rank=event.rank,
                node=event.node,
                failure_domain=event.failure_domain,
                profile=event.profile,
                num_slots=event.num_slots,
                budget_bytes=event.num_slots * turn.spec.slot_bytes,
                group=event.group,
                only_node=event.only_node,
            )
        )
        turn.changed()
    rank = turn.rank(event.rank)
    incarnation = event.address.incarnation
    if rank.holds and rank.incarnation not in (-1, incarnation):
        rank_lost(
            turn, event.rank, rank.incarnation, "replaced by a new incarnation", replace=False
        )
    known, returns = rank.holds, rank.incarnation >= 0
    rank.node, rank.failure_domain, rank.profile = event.node, event.failure_domain, event.profile
    rank.address, rank.incarnation = event.address, incarnation
    rank.suspected_at_s = NEVER_S
    rank.status = RankStatus.LIVE
    if known:
        _reconcile(turn, rank, event)
    else:
        _take_size(turn, rank, event.num_slots, returns=returns)
        if rank.draining:
            rank.owed_keys = []  # its shard is replaced, and that was all
    turn.changed()
    rank_returned(turn)
    adopted, orphans = _adopt(turn, rank, event.resident)
    state.retry_at_s.clear()
    turn.record(
        "rank_joined",
        "noted",
        f"rank {rank.rank} incarnation {incarnation} joined",
        numbers={
            "rank": float(rank.rank),
            "slots": float(rank.num_slots),
            "adopted": float(adopted),
            "orphans": float(orphans),
        },
    )


def _take_size(turn: Turn, rank: RankState, num_slots: int, *, returns: bool) -> None:
    """A new life starts with the slots of the service file. A budget that was set since then is the
    rank's, not the lost shard's: it is wanted again."""
    slots, budget_bytes = rank.num_slots, rank.budget_bytes
    if rank.wanted_slots >= 0:
        slots, budget_bytes = rank.wanted_slots, rank.wanted_bytes
    rank.num_slots = num_slots
    rank.budget_bytes = num_slots * turn.spec.slot_bytes
    rank.slots = [SlotState() for _ in range(num_slots)]
    rank.wanted_slots = rank.wanted_bytes = -1
    if returns and slots != num_slots:
        rank.wanted_slots, rank.wanted_bytes = slots, budget_bytes
        turn.record("budget", "noted", f"rank {rank.rank}: {num_slots} -> {slots} slots, as before")


def _why_not(turn: Turn, event: RankJoined) -> str:
    if not 0 <= event.rank <= len(turn.state.ranks) or event.rank >= RANKS_MAX:
        return f"the next new rank is {len(turn.state.ranks)}, at most {RANKS_MAX}"
    if event.profile not in {p.name for p in turn.profiles}:
        return f"device profile {event.profile!r} is not declared"
    if event.num_slots < 0:
        return f"num_slots {event.num_slots} must be >= 0"
    known = turn.state.ranks[event.rank : event.rank + 1]
    if known and known[0].incarnation > event.address.incarnation:
        return f"incarnation {event.address.incarnation} is older than the one already seen"
    if known and known[0].status is RankStatus.REMOVED:
        return "it was removed; an operator may add it again"
    return ""


def steps_on(turn: Turn, rank: int) -> list[StepRun]:
    """Steps that put something into a slot of the rank, or take it out, and have not ended."""
    run = turn.state.run
    steps = [*turn.state.parked.values(), *(run.steps.values() if run is not None else ())]
    return [s for s in steps if s.step.slot.rank == rank and not is_terminal(s.step.kind, s.state)]


def _reconcile(turn: Turn, rank: RankState, event: RankJoined) -> None:
    """Bring what is known of a rank in line with its inventory, then let its open steps go on."""
    rank.set_num_slots(event.num_slots)
    resident = {r.slot: r for r in event.resident}
    # An add that has not begun has no slot yet: the one that it waits for is still the removal's.
    steps = {
        s.step.slot.index: s
        for s in steps_on(turn, rank.rank)
        if s.step.kind is StepKind.REMOVE or s.state != AddState.PLANNED
    }
    gone = False
    for index, slot in enumerate(rank.slots):
        found = resident.get(index)
        step = steps.get(index)
        if step is not None:
            _resume(turn, step, found)
        elif slot.use is not SlotUse.EMPTY and not _holds(turn, slot, found):
            turn.record(
                "replica_gone",
                "noted",
                f"rank {rank.rank} slot {index} no longer holds key {slot.key} tag {slot.tag}",
            )
            rank.slots[index] = SlotState()
            turn.state.table_dirty = True
            gone = True
    if gone:
        turn.changed()
        if must_not_wait(turn):
            cancel_run(turn, f"rank {rank.rank} lost replicas")


def _holds(turn: Turn, slot: SlotState, found: ResidentSlot | None) -> bool:
    return (
        found is not None
        and turn.spec.key(found.layer, found.expert) == slot.key
        and found.tag == slot.tag
        and found.verified
    )


def _resume(turn: Turn, step: StepRun, found: ResidentSlot | None) -> None:
    """One open step on a rank that has just told what it holds."""
    mine = (
        found is not None
        and (found.layer, found.expert) == (step.step.layer, step.step.expert)
        and (step.tag in (-1, found.tag))
    )
    if step.step.kind is StepKind.ADD:
        if (
            step.state in (AddState.RESERVED, AddState.COPYING)
            and mine
            and found is not None
            and found.verified
        ):
            step.tag = found.tag
            offer(turn, step, StepEvent.RESERVED)
            fire(turn, step, StepEvent.VERIFIED)
        elif step.state == AddState.VERIFIED and not (
            mine and found is not None and found.verified
        ):
            fire(turn, step, StepEvent.FAILED, "no longer resident")
        else:
            if step.state in (AddState.RESERVED, AddState.COPYING):
                # Before it fires: the copy that is asked for again is given this time.
                step.deadline_s = copy_deadline_s(turn, step)
            fire(turn, step, StepEvent.RESUMED)
    elif not mine:
        fire(turn, step, StepEvent.RANK_LOST, "no longer resident")
    elif step.state != RemoveState.PLANNED:
        fire(turn, step, StepEvent.RESUMED)
        if step.state in (RemoveState.UNLISTED, RemoveState.ACKED):
            step.deadline_s = turn.at_s + turn.config.drain_wait_s


def _adopt(turn: Turn, rank: RankState, resident: tuple[ResidentSlot, ...]) -> tuple[int, int]:
    """Take up residents nobody here knew: verified ones are listed with the next table, others are
    orphans. So is all but the first verified one of an expert; a copy of it that is not verified
    takes no replica's place."""
    held = {s.key for s in rank.slots if s.use is not SlotUse.EMPTY}
    adopted = orphans = 0
    for found in sorted(resident, key=lambda r: r.slot):
        if not 0 <= found.slot < len(rank.slots) or rank.slots[found.slot].use is not SlotUse.EMPTY:
            continue
        key = turn.spec.key(found.layer, found.expert)
        good = (
            found.verified
            and found.tag >= 0
            and 0 <= found.layer < turn.spec.num_layers
            and 0 <= found.expert < turn.spec.num_experts
            and key not in held
        )
        if not 0 <= key < turn.spec.num_keys:
            key = EMPTY
        use = SlotUse.VERIFIED if good else SlotUse.ORPHAN
        rank.slots[found.slot] = SlotState(use=use, key=key, tag=found.tag)
        if good:
            held.add(key)
        adopted += good
        orphans += not good
    if adopted:
        turn.state.table_dirty = True
    return adopted, orphans


def rank_lost(
    turn: Turn, rank_id: int, incarnation: int, reason: str, *, replace: bool = True
) -> None:
    """That incarnation is gone with all it held: end its steps, recall what relied on it, publish,
    replace."""
    if not 0 <= rank_id < len(turn.state.ranks):
        return
    rank = turn.rank(rank_id)
    if rank.status is RankStatus.LOST or (rank.incarnation not in (-1, incarnation)):
        return
    held = rank.holds
    if held:
        remember_listed(turn, rank)
    lost_slots = frozenset((rank_id, i) for i in range(len(rank.slots)))
    rank.incarnation = incarnation
    steps = _end_life(turn, rank, RankStatus.LOST)
    turn.record(
        "rank_lost",
        "noted",
        f"rank {rank_id} incarnation {incarnation}: {reason}",
        numbers={"rank": float(rank_id), "missing_experts": float(len(turn.layout().missing()))},
    )
    drop_outstanding(turn, f"rank {rank_id} was lost")
    cancel_run(turn, f"rank {rank_id} was lost")
    for step in steps:
        fire(turn, step, StepEvent.RANK_LOST, f"rank {rank_id} was lost")
    recall_needed(turn, lost_slots)
    if held:
        turn.state.table_dirty = True
        if turn.state.published and not turn.layout().replica_counts.any():
            all_lost(turn)
    turn.state.retry_at_s.clear()
    if replace and rank.wants_shard:
        turn.commands.append(ReplaceRank(rank=rank_id, lost_incarnation=incarnation))


def _end_life(turn: Turn, rank: RankState, status: RankStatus) -> list[StepRun]:
    """Nothing is held there any more. Returns the steps that were open on it."""
    steps = steps_on(turn, rank.rank)
    rank.status = status
    rank.slots = []
    rank.address = None
    rank.suspected_at_s = rank.resize_sent_at_s = NEVER_S
    rank.drained_by = tuple(c for c in rank.drained_by if c not in _ENDS_WITH_A_LIFE)
    turn.changed()
    return steps


def rank_gone(turn: Turn, rank: RankState, status: RankStatus, why: str) -> None:
    """An empty rank is let go: nothing relied on it, so nothing is recalled or repaired."""
    for step in _end_life(turn, rank, status):
        fire(turn, step, StepEvent.RANK_LOST, f"rank {rank.rank} {why}")
    turn.state.table_dirty = True


def rank_suspected(turn: Turn, rank_id: int, reason: str) -> None:
    """Routers avoid it already; it is lost if it stays silent."""
    if 0 <= rank_id < len(turn.state.ranks):
        rank = turn.rank(rank_id)
        if rank.holds and rank.suspected_at_s == NEVER_S:
            rank.suspected_at_s = turn.at_s
            turn.record("rank_suspected", "noted", f"rank {rank_id}: {reason}")


def rank_cleared(turn: Turn, rank_id: int) -> None:
    """It answered again."""
    if 0 <= rank_id < len(turn.state.ranks) and turn.rank(rank_id).suspected_at_s != NEVER_S:
        turn.rank(rank_id).suspected_at_s = NEVER_S
        turn.record("rank_cleared", "noted", f"rank {rank_id} answers again")


def drop_silent_ranks(turn: Turn, grace_s: float) -> None:
    """Suspected ranks silent for too long are lost; so are ranks not heard of since a restart,
    after the grace."""
    for rank in turn.state.ranks:
        if turn.at_s >= rank.suspected_at_s + turn.config.rank_silence_s:
            rank_lost(
                turn, rank.rank, rank.incarnation, f"no answer for {turn.config.rank_silence_s} s"
            )
        elif rank.status is RankStatus.RESTORED and turn.at_s >= turn.state.started_at_s + grace_s:
            rank_lost(
                turn, rank.rank, rank.incarnation, f"not heard of {grace_s} s after the restart"
            )
