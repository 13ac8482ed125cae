"""The table: when one may be published, what it lists, and who has acknowledged it.

Responsible for epochs and for coverage: no table before every expert is covered, none that loses a
live replica because a controller restarted, none that takes an expert's last listed replica away.
Called by supervise after every event.
"""

from __future__ import annotations

import numpy as np

from placement.engine.state import (
    NEVER_S,
    RankStatus,
    RouterState,
    SlotUse,
    StepRun,
)
from placement.engine.steps import fire
from placement.engine.turn import Turn
from placement.layout import ABSENT, EMPTY, ExpertLayout, SlotId
from placement.messages.effects import PublishTable
from placement.migration import AddState, RemoveState, StepEvent, is_terminal
from placement.planner.plan import StepKind
from placement.routing import RoutingTable, build_table

JOIN_GRACE_S = 30.0
"""How long ranks that were promised (expected, or known before a restart) are waited for before
going on without."""


def may_publish(turn: Turn) -> bool:
    """Whether a table may be published now; see the module's text."""
    state = turn.state
    if turn.waiting_for_ranks() and turn.at_s < state.started_at_s + JOIN_GRACE_S:
        return False
    return state.published or not turn.layout().missing()


def publish(turn: Turn, unlist: list[StepRun]) -> None:
    """Publish one table: it lists all that is verified and drops the replicas of `unlist`."""
    state = turn.state
    state.epoch += 1
    _list_verified(turn, frozenset(s.step.slot for s in unlist))
    for step in unlist:
        step.epoch = state.epoch
        slot = turn.slot(step.step.slot.rank, step.step.slot.index)
        step.tag = slot.tag if slot is not None else -1
        fire(turn, step, StepEvent.PUBLISHED)
    state.published = True
    state.table_dirty = False
    state.published_at_s = turn.at_s
    turn.commands.append(PublishTable(table=listed_table(turn)))


def _list_verified(turn: Turn, leaving: frozenset[SlotId]) -> None:
    """VERIFIED slots become LISTED: those of adds by their machine, adopted ones at once.

    No expert twice on a rank: an add within its rank (out of a slot that is to be given up) whose
    removal was called off is aborted. Left VERIFIED, it would ask for one table after the other.
    """
    steps = list(turn.state.parked.values())
    if turn.state.run is not None:
        steps.extend(turn.state.run.steps.values())
    adds = {
        s.step.slot: s
        for s in steps
        if s.step.kind is StepKind.ADD and s.state == AddState.VERIFIED
    }
    for rank in turn.state.ranks:
        listed = {
            s.key
            for index, s in enumerate(rank.slots)
            if s.use is SlotUse.LISTED and SlotId(rank.rank, index) not in leaving
        }
        for index, slot in enumerate(rank.slots):
            if slot.use is not SlotUse.VERIFIED:
                continue
            found = adds.get(SlotId(rank.rank, index))
            if slot.key in listed:
                assert found is not None, f"rank {rank.rank} took up key {slot.key} twice"
                fire(turn, found, StepEvent.CANCELLED, "its rank still lists the expert")
                continue
            listed.add(slot.key)
            if found is None:
                slot.use = SlotUse.LISTED
                continue
            found.epoch = turn.state.epoch
            fire(turn, found, StepEvent.PUBLISHED)
    parked = turn.state.parked
    turn.state.parked = {k: s for k, s in parked.items() if not is_terminal(s.step.kind, s.state)}


def listed_table(turn: Turn) -> RoutingTable:
    """Table of what is listed now, at the present epoch. Asserts that it lists each expert at most
    once a rank."""
    state, spec = turn.state, turn.spec
    width = max((r.num_slots for r in state.ranks), default=0)
    slots = np.full((len(state.ranks), width), ABSENT, dtype=np.int32)
    tags: dict[SlotId, int] = {}
    for rank in state.ranks:
        if not rank.holds:
            continue
        slots[rank.rank, : rank.num_slots] = EMPTY
        for index, slot in enumerate(rank.slots):
            if slot.use is SlotUse.LISTED:
                assert slot.tag >= 0, f"rank {rank.rank} slot {index} is listed without a tag"
                slots[rank.rank, index] = slot.key
                tags[SlotId(rank.rank, index)] = slot.tag
    layout = ExpertLayout(slots, spec.num_layers, spec.num_experts)
    assert int(layout.hosts.max(initial=0)) <= 1, "an expert is listed twice on one rank"
    return build_table(
        layout,
        tags,
        term=state.term,
        epoch=state.epoch,
        model=spec.model,
        weights_version=spec.weights_version,
        ranks=tuple(r.address for r in state.ranks if r.holds and r.address is not None),
    )


def router_joined(turn: Turn, router: str, incarnation: int) -> None:
    """The router is waited for from now on; what an earlier life of it said no longer counts."""
    turn.state.routers[router] = RouterState(
        router=router, incarnation=incarnation, joined_at_s=turn.at_s
    )


def router_answered(turn: Turn, router: str, *, applied: int = -1, quiesced: int = -1) -> None:
    """A router uses an epoch, or has nothing older in flight. One that was left out counts again
    once it is current."""
    known = turn.state.routers.get(router)
    if known is None:
        return
    known.applied = max(known.applied, applied)
    known.quiesced = max(known.quiesced, quiesced)
    if not known.in_set and known.applied >= turn.state.epoch:
        known.in_set = True
        known.joined_at_s = turn.at_s


def silence_ends_at(turn: Turn, router: RouterState) -> float:
    """Time at which a router that has not applied the newest table leaves the set; never for one
    that has."""
    if not router.in_set or not turn.state.published or router.applied >= turn.state.epoch:
        return NEVER_S
    return max(turn.state.published_at_s, router.joined_at_s) + turn.config.router_silence_s


def drop_silent_routers(turn: Turn) -> None:
    """Routers silent for too long leave the set until they have fetched."""
    for router in sorted(turn.state.routers):
        known = turn.state.routers[router]
        if turn.at_s >= silence_ends_at(turn, known):
            known.in_set = False
            turn.record(
                "router_left",
                "noted",
                f"router {router} did not apply epoch {turn.state.epoch} in "
                f"{turn.config.router_silence_s} s",
            )


def advance_removals(turn: Turn) -> bool:
    """UNLISTED -> ACKED -> DRAINED where every router in the set has answered. Whether any
    moved."""
    moved = False
    if turn.at_s < turn.state.acks_count_from_s:
        return False
    routers = [r for r in turn.state.routers.values() if r.in_set]
    for step_id in sorted(turn.state.removing):
        step = turn.known_step(step_id)
        if turn.rank(step.step.slot.rank).status is not RankStatus.LIVE:
            continue  # nobody is there yet who could be asked to release
        if step.state == RemoveState.UNLISTED and all(r.applied >= step.epoch for r in routers):
            fire(turn, step, StepEvent.ACKED)
            moved = True
        if step.state == RemoveState.ACKED and all(r.quiesced >= step.epoch for r in routers):
            fire(turn, step, StepEvent.QUIESCED)
            moved = True
    return moved


def remaining_replicas(turn: Turn, step: StepRun) -> int:
    """Listed or verified replicas of the step's expert on other slots of ranks that hold."""
    own = step.step.slot
    hosts = turn.layout().slots_of(step.step.layer, step.step.expert)
    return sum(slot != own for slot in hosts)
