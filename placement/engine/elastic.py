"""Ranks that operators add, remove and replace while the service runs.

Responsible for what is refused and why, and for letting a rank go once it is empty. Plans nothing:
a rank that is to go is drained as any other (`needs`), and its next life is filled by `restore`.
Called by the engine.

A rank keeps its number for ever. One that was removed stays in the state, REMOVED, so that no
number ever names another place, and may be added again: same place, higher incarnation.
"""

from __future__ import annotations

from collections.abc import Sequence

from placement.engine.admin import (
    answer,
    changed_topology,
    known_or_refuse,
    live_or_refuse,
    missing_for,
)
from placement.engine.floor import floor_now, reachable
from placement.engine.ranks import RANKS_MAX, rank_gone, steps_on
from placement.engine.state import EngineState, RankState, RankStatus, SlotUse
from placement.engine.supervise import cancel_run
from placement.engine.tables import may_publish, publish
from placement.engine.turn import Turn
from placement.layout import EMPTY
from placement.messages.effects import EndRank, ReplaceRank
from placement.messages.events import (
    DrainCause,
    RankAddAsked,
    RankRemoveAsked,
    RankReplaceAsked,
)
from placement.topology import MoeSpec

_LEAVES = (DrainCause.REMOVE, DrainCause.REPLACE)


def carry_over(state: EngineState, spec: MoeSpec, earlier: Sequence[RankState]) -> None:
    """Before the first event: ranks of an earlier run of the service that its file does not tell
    of. Those that were added are expected again, those that were removed stay so."""
    for rank in earlier:
        removed = rank.status is RankStatus.REMOVED or DrainCause.REMOVE in rank.drained_by
        if rank.group >= 0 and rank.rank == len(state.ranks):
            added = _expected(
                spec, rank.rank, rank.profile, rank.num_slots, rank.group, rank.only_node
            )
            added.asked_key = rank.asked_key
            state.ranks.append(added)
        if removed and rank.rank < len(state.ranks):
            _mark_removed(state.ranks[rank.rank])


def rank_add_asked(turn: Turn, event: RankAddAsked) -> None:
    """One more rank is expected, and its shard made; or a removed one comes back to its place."""
    ranks = turn.state.ranks
    if _asked_before(turn, event):
        return
    problem = _why_not_add(turn, event)
    if problem:
        turn.record("rank_added", "refused", problem)
        answer(turn, event.request_id, "refused", problem)
        return
    if event.rank < 0:
        number = len(ranks)
        ranks.append(
            _expected(
                turn.spec, number, event.profile, event.num_slots, event.group, event.only_node
            )
        )
    else:
        number = event.rank
        back = ranks[number]
        back.status, back.drained_by = RankStatus.EXPECTED, ()
        back.num_slots = event.num_slots
        back.budget_bytes = event.num_slots * turn.spec.slot_bytes
    ranks[number].asked_key = event.key
    turn.changed()
    turn.state.retry_at_s.clear()
    turn.commands.append(ReplaceRank(rank=number, lost_incarnation=ranks[number].incarnation))
    said = f"rank {number} is being started"
    turn.record("rank_added", "noted", said, numbers={"rank": float(number)})
    answer(turn, event.request_id, "ok", said, rank=number)


def _asked_before(turn: Turn, event: RankAddAsked) -> bool:
    """Whether an earlier request had this one's key; answers then."""
    known = next((r for r in turn.state.ranks if event.key and r.asked_key == event.key), None)
    if known is None:
        return False
    if event.rank not in (-1, known.rank):
        said = f"key {event.key!r} is the key of another request, for rank {known.rank}"
    elif known.status is RankStatus.REMOVED:
        said = f"rank {known.rank} was added by a request with key {event.key!r} and has left since"
    else:
        said = f"rank {known.rank} was added by this request before; it is {known.status}"
        answer(turn, event.request_id, "ok", said, rank=known.rank)
        return True
    answer(turn, event.request_id, "refused", f"{said}; choose another key")
    return True


def _expected(
    spec: MoeSpec, number: int, profile: str, num_slots: int, group: int, only_node: str
) -> RankState:
    node = only_node or f"rank-{number}"
    return RankState(
        rank=number,
        node=node,
        failure_domain=node,
        profile=profile,
        num_slots=num_slots,
        budget_bytes=num_slots * spec.slot_bytes,
        group=group,
        only_node=only_node,
    )


def _why_not_add(turn: Turn, event: RankAddAsked) -> str:
    ranks = turn.state.ranks
    if event.num_slots < 0 or event.group < 0:
        return f"num_slots {event.num_slots} and group {event.group} must be >= 0"
    if event.profile not in {p.name for p in turn.profiles}:
        return f"device profile {event.profile!r} is not declared"
    if event.rank < 0:
        full = len(ranks) >= RANKS_MAX
        said = f"there are {RANKS_MAX} ranks, the most that are served; bring a removed one back"
        return said if full else ""
    if event.rank >= len(ranks):
        return f"rank {event.rank} was never there; the next new rank is {len(ranks)}"
    known = ranks[event.rank]
    if known.status is not RankStatus.REMOVED:
        how = "; undrain it to keep it" if DrainCause.REMOVE in known.drained_by else ""
        return f"rank {event.rank} is {known.status} and was not removed{how}"
    return ""


def rank_remove_asked(turn: Turn, event: RankRemoveAsked) -> None:
    """A rank is to leave. One that holds nothing any more leaves at once."""
    if not known_or_refuse(turn, event.request_id, event.rank):
        return
    rank = turn.rank(event.rank)
    if rank.status is RankStatus.REMOVED or DrainCause.REMOVE in rank.drained_by:
        answer(turn, event.request_id, "ok", f"rank {event.rank} leaves, or has left")
        return
    if rank.status is RankStatus.RESTORED:
        live_or_refuse(turn, event.request_id, event.rank)
        return
    if not _spared(turn, event.request_id, rank, event.accept_lower_floor, "rank_removed"):
        return
    _begin(turn, rank, DrainCause.REMOVE)
    said = f"rank {event.rank} is to leave: it is emptied, then its shard is ended"
    turn.record("rank_removed", "noted", said, numbers={"rank": float(event.rank)})
    answer(turn, event.request_id, "ok", said, rank=event.rank)


def rank_replace_asked(turn: Turn, event: RankReplaceAsked) -> None:
    """A rank's shard is to be replaced by a new life, which is filled as this one was."""
    if not known_or_refuse(turn, event.request_id, event.rank):
        return
    rank = turn.rank(event.rank)
    if _replaced_before(turn, event):
        return
    if not live_or_refuse(turn, event.request_id, event.rank):
        return
    if DrainCause.REMOVE in rank.drained_by:
        answer(turn, event.request_id, "refused", f"rank {event.rank} is leaving the service")
        return
    said = f"the shard of rank {event.rank} is replaced: it is emptied, then ended"
    if DrainCause.REPLACE not in rank.drained_by:
        if not _spared(turn, event.request_id, rank, event.accept_lower_floor, "rank_replaced"):
            return
        rank.owed_keys = [s.key if s.use is SlotUse.LISTED else EMPTY for s in rank.slots]
        _begin(turn, rank, DrainCause.REPLACE)
        turn.record("rank_replaced", "noted", said, numbers={"rank": float(event.rank)})
    answer(turn, event.request_id, "ok", said, rank=event.rank)


def _replaced_before(turn: Turn, event: RankReplaceAsked) -> bool:
    """Whether the life that the request names has gone already, is going, or never was; answers
    then."""
    rank, life = turn.rank(event.rank), event.incarnation
    if life < 0:
        return False
    code, said = "ok", ""
    if rank.incarnation > life:
        said = f"rank {event.rank} has a newer shard already"
    elif rank.incarnation < life:
        code = "refused"
        newest = f"its newest is {rank.incarnation}" if rank.incarnation >= 0 else "it had none yet"
        said = f"rank {event.rank} has no shard {life}; {newest}, look at the placement again"
    elif rank.status is RankStatus.LOST and rank.wants_shard:
        said = f"that shard of rank {event.rank} has ended already; a new one is being started"
    elif rank.status is RankStatus.RESTORED and DrainCause.REPLACE in rank.drained_by:
        said = f"the shard of rank {event.rank} is replaced: it is emptied, then ended"
    if said:
        answer(turn, event.request_id, code, said, rank=event.rank)
    return bool(said)


def _spared(turn: Turn, request_id: int, rank: RankState, lower: bool, rule: str) -> bool:
    """Whether the others can do without the rank; answers where they cannot. lower: in fewer
    failure domains will do."""
    without = changed_topology(turn.topology(), rank.rank, draining=True)
    short = missing_for(turn, without, 1)
    missing_bytes = short * turn.spec.slot_bytes
    if short:
        said = (
            f"the other ranks lack {short} slots ({missing_bytes} bytes) to hold every expert "
            f"without rank {rank.rank}; add a rank first"
        )
    elif (left := reachable(turn, without)) < (floor := floor_now(turn)) and not lower:
        said = (
            f"without rank {rank.rank} every expert lies in {left} failure domain(s) instead of "
            f"{floor}; add a rank first, or accept a lower floor"
        )
    else:
        return True
    turn.record(rule, "refused", f"rank {rank.rank}: {said}")
    answer(turn, request_id, "refused", said, missing_bytes=missing_bytes)
    return False


def _begin(turn: Turn, rank: RankState, cause: DrainCause) -> None:
    was_drained = rank.draining
    rank.drained_by = tuple(sorted((*rank.drained_by, cause)))
    turn.changed()
    turn.state.retry_at_s.pop("drain", None)
    if rank.holds and not was_drained:
        cancel_run(turn, f"rank {rank.rank} is to be emptied")


def let_empty_ranks_go(turn: Turn) -> bool:
    """End the lives of ranks that are to leave or to be replaced and hold nothing any more. Whether
    one went."""
    went = False
    for rank in turn.state.ranks:
        if rank.status is RankStatus.REMOVED or not any(c in _LEAVES for c in rank.drained_by):
            continue
        if rank.status is RankStatus.RESTORED or not _empty(turn, rank):
            continue
        _let_go(turn, rank)
        went = True
    return went


def _empty(turn: Turn, rank: RankState) -> bool:
    """Whether nothing is listed or under way there. What only its silent shard could give back ends
    with the shard."""
    placed = any(s.use in (SlotUse.LISTED, SlotUse.VERIFIED) for s in rank.slots)
    return not placed and all(step.stuck for step in steps_on(turn, rank.rank))


def _let_go(turn: Turn, rank: RankState) -> None:
    incarnation, removed = rank.incarnation, DrainCause.REMOVE in rank.drained_by
    why = "left the service" if removed else "its shard is replaced"
    rank_gone(turn, rank, RankStatus.REMOVED if removed else RankStatus.LOST, why)
    numbers = {"rank": float(rank.rank)}
    if removed:
        _mark_removed(rank)
        turn.record("rank_removed", "done", f"rank {rank.rank} {why}", numbers=numbers)
    else:
        turn.record("rank_replaced", "noted", f"rank {rank.rank} is empty: {why}", numbers=numbers)
    if turn.state.published and may_publish(turn):
        publish(turn, [])  # routers let go of it before it goes
    turn.commands.append(
        EndRank(rank=rank.rank, incarnation=incarnation)
        if removed
        else ReplaceRank(rank=rank.rank, lost_incarnation=incarnation, emptied=True)
    )


def _mark_removed(rank: RankState) -> None:
    rank.status = RankStatus.REMOVED
    rank.drained_by = (DrainCause.REMOVE,)
    rank.wanted_slots = rank.wanted_bytes = -1
    rank.num_slots = rank.budget_bytes = 0
    rank.lost_keys, rank.owed_keys = [], []
