"""Operators: pause, resume, drain, undrain, budgets, plans to look at and to apply.

Responsible for what is refused and why, with the numbers an operator needs to ask again. Starts no
plan: it changes what is wanted, and the engine does what is needed. Every request is answered once,
with a record.
"""

from __future__ import annotations

from types import MappingProxyType

import msgspec

from placement.engine.floor import floor_now
from placement.engine.needs import what_changed
from placement.engine.state import NEVER_S, PlanAsk, RankState, RankStatus
from placement.engine.supervise import cancel_run
from placement.engine.turn import Turn
from placement.messages.effects import Answer, SetRankSlots
from placement.messages.events import (
    ApplyAsked,
    BudgetApplied,
    BudgetAsked,
    DrainAsked,
    DrainCause,
    PauseAsked,
    PlanAsked,
    ResumeAsked,
    UndrainAsked,
)
from placement.planner import missing_slots, missing_uniform
from placement.topology import Topology

ASKS_MAX = 8
"""Plans that may be asked for at once; more are told `busy`."""
SLOTS_PER_EXPERT_MAX = 4
"""Slots a rank may be given for each expert of all layers. One is of use, and staging; a slip of
the finger must not make a shard build a ledger that it cannot hold."""
MAY_BE_UNDONE = "automatic plans run, and may move things away from it again: pause them to keep it"
"""Of a placement that an operator gave: no policy chose it."""
_WHY_EMPTY = MappingProxyType(
    {
        DrainCause.NODE: "its node is being drained; it may hold replicas again once that is over",
        DrainCause.OPERATOR: "an operator drained it; undrain it",
        DrainCause.REMOVE: "it was removed; add it again",
        DrainCause.REPLACE: "its shard is being replaced; wait until that is done, or undrain it",
    }
)


def answer(
    turn: Turn,
    request_id: int,
    code: str,
    message: str,
    *,
    plan_id: str = "",
    missing_bytes: int = 0,
    rank: int = -1,
) -> None:
    """Answer an operator."""
    turn.commands.append(
        Answer(
            request_id=request_id,
            code=code,
            message=message,
            plan_id=plan_id,
            missing_bytes=missing_bytes,
            rank=rank,
        )
    )


def pause_asked(turn: Turn, event: PauseAsked) -> None:
    """Stop automatic plans; what runs goes on, repairs too."""
    turn.state.paused = True
    turn.record("paused", "noted", event.reason)
    answer(turn, event.request_id, "ok", "automatic plans are paused; repairs go on")


def resume_asked(turn: Turn, event: ResumeAsked) -> None:
    """Let automatic plans run again."""
    turn.state.paused = False
    turn.record("resumed", "noted")
    answer(turn, event.request_id, "ok", "automatic plans run again")


def known_or_refuse(turn: Turn, request_id: int, rank: int) -> bool:
    """Whether there is such a rank; answers where there is none."""
    num_ranks = len(turn.state.ranks)
    if 0 <= rank < num_ranks:
        return True
    answer(turn, request_id, "not_found", f"rank {rank} must lie in [0, {num_ranks})")
    return False


def live_or_refuse(turn: Turn, request_id: int, rank: int) -> bool:
    """Whether the rank is there and has joined; answers where it is not."""
    if not known_or_refuse(turn, request_id, rank):
        return False
    known = turn.rank(rank)
    if known.status is RankStatus.LIVE:
        return True
    if known.status is RankStatus.REMOVED:
        said = f"rank {rank} was removed; add it again first"
    elif known.status is RankStatus.LOST and not known.wants_shard:
        said = f"rank {rank} was lost while drained; undrain it for a new shard"
    else:
        said = f"rank {rank} is {known.status}; wait until it has joined"
    answer(turn, request_id, "refused", said)
    return False


def changed_topology(topology: Topology, rank: int, **fields: object) -> Topology:
    """The topology with other fields of one rank."""
    ranks = list(topology.ranks)
    ranks[rank] = msgspec.structs.replace(ranks[rank], **fields)
    return msgspec.structs.replace(topology, ranks=tuple(ranks))


def missing_for(turn: Turn, topology: Topology, floor: int) -> int:
    """Slots that the ranks lack to hold every expert in so many failure domains."""
    if turn.config.uniform:
        return missing_uniform(
            topology, turn.spec, floor=floor, staging_slots=turn.config.staging_slots
        )
    return missing_slots(
        topology,
        num_keys=turn.spec.num_keys,
        floor=floor,
        staging_slots=turn.config.staging_slots,
    )


def drain_asked(turn: Turn, event: DrainAsked) -> None:
    """Move everything off a rank; refused where the others cannot hold every expert. Where they
    cannot keep the floor, the answer says so: a machine must be let go for its upkeep."""
    if not live_or_refuse(turn, event.request_id, event.rank):
        return
    rank = turn.rank(event.rank)
    if rank.draining:
        _note_cause(turn, event)
        return
    short = missing_for(turn, changed_topology(turn.topology(), event.rank, draining=True), 1)
    if short:
        missing = short * turn.spec.slot_bytes
        message = f"the other ranks lack {short} slots ({missing} bytes) to hold every expert"
        turn.record("drain", "refused", f"rank {event.rank}: {message}")
        answer(turn, event.request_id, "refused", message, missing_bytes=missing)
        return
    floor = floor_now(turn)
    rank.drained_by = (event.cause,)
    turn.changed()
    left = floor_now(turn)
    cost = f"; until it is back, {left} of {floor} failure domains for every expert"
    words = cost if left < floor else ""
    cancel_run(turn, f"rank {event.rank} is drained")
    turn.state.retry_at_s.pop("drain", None)
    turn.record("drain", "noted", f"rank {event.rank} is to be emptied ({event.cause}){words}")
    answer(turn, event.request_id, "ok", f"rank {event.rank} is being emptied{words}")


def _note_cause(turn: Turn, event: DrainAsked) -> None:
    """One more cause to empty a rank that is being emptied: what runs for it goes on."""
    rank = turn.rank(event.rank)
    turn.state.retry_at_s.pop("drain", None)
    if event.cause not in rank.drained_by:
        rank.drained_by = tuple(sorted((*rank.drained_by, event.cause)))
        turn.record("drain", "noted", f"rank {event.rank} is to be emptied ({event.cause}) too")
    answer(turn, event.request_id, "ok", f"rank {event.rank} is being emptied")


def undrain_asked(turn: Turn, event: UndrainAsked) -> None:
    """End one cause of a drain. Refused where another keeps the rank empty."""
    if not 0 <= event.rank < len(turn.state.ranks):
        answer(
            turn,
            event.request_id,
            "not_found",
            f"rank {event.rank} must lie in [0, {len(turn.state.ranks)})",
        )
        return
    rank = turn.rank(event.rank)
    ends = _ended_by(rank, event.cause)
    stood = ends.intersection(rank.drained_by)
    rank.drained_by = tuple(cause for cause in rank.drained_by if cause not in ends)
    if DrainCause.REPLACE in stood:
        rank.owed_keys = []  # it keeps what it has
    if rank.draining:
        message = f"rank {event.rank} stays empty: {_WHY_EMPTY[rank.drained_by[0]]}"
        turn.record("undrain", "noted", message)
        answer(turn, event.request_id, "ok" if stood else "refused", message)
        return
    turn.changed()
    turn.record("undrain", "noted", f"rank {event.rank} may hold replicas again")
    answer(turn, event.request_id, "ok", f"rank {event.rank} may hold replicas again")


def _ended_by(rank: RankState, cause: DrainCause) -> frozenset[DrainCause]:
    """Causes of a drain that end with this one. What people asked for they take back by one word;
    a rank that has left is past that."""
    if cause is not DrainCause.OPERATOR or rank.status is RankStatus.REMOVED:
        return frozenset({cause})
    return frozenset({cause, DrainCause.REMOVE, DrainCause.REPLACE})


def budget_asked(turn: Turn, event: BudgetAsked) -> None:
    """A higher budget at once; a lower one after evictions, refused where the floor could not be
    held."""
    if not live_or_refuse(turn, event.request_id, event.rank):
        return
    rank = turn.rank(event.rank)
    slots = event.budget_bytes // turn.spec.slot_bytes if event.budget_bytes >= 0 else -1
    if slots < 0:
        answer(turn, event.request_id, "refused", f"budget_bytes {event.budget_bytes} must be >= 0")
        return
    most = max(rank.num_slots, SLOTS_PER_EXPERT_MAX * turn.spec.num_keys)
    if slots > most:
        message = (
            f"budget_bytes {event.budget_bytes} is {slots} slots; rank {event.rank} may have "
            f"{most} ({most * turn.spec.slot_bytes} bytes)"
        )
        turn.record("budget_refused", "refused", message)
        answer(turn, event.request_id, "refused", message)
        return
    before = turn.topology()
    if slots < rank.num_slots:
        floor = max(1, floor_now(turn))
        short = missing_for(turn, changed_topology(before, event.rank, num_slots=slots), floor)
        if short:
            missing = short * turn.spec.slot_bytes
            message = (
                f"{slots} slots on rank {event.rank} leave the ranks {short} slots "
                f"({missing} bytes) short of every expert in {floor} failure domain(s) with "
                f"{turn.config.staging_slots} empty slot(s) a rank"
            )
            turn.record("budget_refused", "refused", message)
            answer(turn, event.request_id, "refused", message, missing_bytes=missing)
            return
    rank.wanted_slots, rank.wanted_bytes = slots, event.budget_bytes
    rank.resize_sent_at_s = NEVER_S
    turn.changed()
    cancel_run(
        turn,
        f"the budget of rank {event.rank} changes",
        drain_wait_s=turn.config.budget_drain_wait_s,
    )
    turn.state.retry_at_s.pop("budget", None)
    turn.record("budget", "noted", f"rank {event.rank}: {rank.num_slots} -> {slots} slots")
    if slots >= rank.num_slots:
        rank.resize_sent_at_s = turn.at_s
        turn.commands.append(
            SetRankSlots(
                rank=rank.rank,
                incarnation=rank.incarnation,
                num_slots=slots,
                budget_bytes=event.budget_bytes,
            )
        )
    answer(turn, event.request_id, "ok", f"rank {event.rank}: {rank.num_slots} -> {slots} slots")


def budget_applied(turn: Turn, event: BudgetApplied) -> None:
    """The shard has that many slots now."""
    if not 0 <= event.rank < len(turn.state.ranks):
        return
    rank = turn.rank(event.rank)
    if rank.status is not RankStatus.LIVE:
        return
    if event.num_slots != rank.wanted_slots:
        turn.record(
            "budget",
            "noted",
            f"rank {event.rank} applied {event.num_slots} slots, "
            f"{rank.wanted_slots} are wanted now",
        )
    rank.set_num_slots(event.num_slots)
    if event.num_slots == rank.wanted_slots:
        rank.budget_bytes = rank.wanted_bytes
        rank.wanted_slots = rank.wanted_bytes = -1
        turn.record("budget", "done", f"rank {event.rank} has {event.num_slots} slots")
    rank.resize_sent_at_s = NEVER_S
    turn.changed()


def plan_asked(turn: Turn, event: PlanAsked) -> None:
    """Compute a plan to look at, when its turn comes."""
    if len(turn.state.asks) >= ASKS_MAX:
        answer(turn, event.request_id, "busy", f"{ASKS_MAX} plans are asked for already; try later")
        return
    if not turn.state.published:
        answer(turn, event.request_id, "refused", "nothing is served yet; wait until it is ready")
        return
    turn.state.asks.append(
        PlanAsk(
            request_id=event.request_id,
            policy=event.policy,
            max_moves=event.max_moves,
            target=event.target,
        )
    )


def apply_asked(turn: Turn, event: ApplyAsked) -> None:
    """Run a computed plan, if no slot or expert that it touches has changed since."""
    stored = next((s for s in turn.state.stored if s.plan_id == event.plan_id), None)
    if stored is None:
        answer(
            turn,
            event.request_id,
            "not_found",
            f"no plan {event.plan_id!r}; compute one and apply it",
        )
        return
    run = turn.state.run
    if run is not None and run.plan_id == event.plan_id:
        answer(turn, event.request_id, "busy", f"plan {event.plan_id} is running")
        return
    changed = what_changed(turn, stored)
    if changed:
        why = "it was applied already" if stored.begun else changed
        turn.record("asked", "refused", f"plan {event.plan_id}: {why}", plan_id=event.plan_id)
        answer(
            turn,
            event.request_id,
            "refused",
            f"{why}; compute the plan again",
            plan_id=event.plan_id,
        )
        return
    if turn.state.apply_next is not None:
        answer(turn, event.request_id, "busy", f"plan {turn.state.apply_next.plan_id} starts next")
        return
    cancel_run(turn, f"plan {event.plan_id} is applied")
    turn.state.apply_next = stored
    said = f"{len(stored.plan.moves)} moves are started"
    if stored.given and not turn.state.paused:
        said = f"{said}; {MAY_BE_UNDONE}"
    answer(turn, event.request_id, "ok", said, plan_id=event.plan_id)
