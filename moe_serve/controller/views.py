"""What people see, built from engine, parts and book: placement, load, steps, plans, records.

Responsible for form only; pure functions of what they are given. Must never change anything nor ask
a part. Called by admin and by the service's `describe`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from moe_serve.controller.book import Book, KeptMove, KeptRecord
from moe_serve.controller.parts import PartTable
from moe_serve.controller.recent import Recent
from moe_serve.controller.room import room_of, room_view
from moe_serve.controller.settings import ControllerSettings
from moe_serve.controller.stages import StageFolder
from moe_serve.ports import RunningCopy, ShardMemory
from moe_serve.rpc import placement_pb2 as pb
from placement.engine import EngineState
from placement.engine.stall import stalled
from placement.engine.state import (
    NEVER_S,
    RankState,
    RankStatus,
    SlotState,
    SlotUse,
    StepRun,
)
from placement.load import LoadWindow
from placement.messages.effects import Answer
from placement.routing import RoutingTable
from placement.scoring import balancedness, layer_balancedness

MOVES_SHOWN = 200
"""Moves in one placement view, newest last."""
PROBLEMS_SHOWN = 32
_KINDS: Final = {
    "replicate": pb.MOVE_KIND_REPLICATE,
    "migrate": pb.MOVE_KIND_MIGRATE,
    "evict": pb.MOVE_KIND_EVICT,
}
_STEP_KINDS: Final = {"add": pb.STEP_KIND_ADD, "remove": pb.STEP_KIND_REMOVE}
_MOVE_STATES: Final = {
    "running": pb.MOVE_STATE_RUNNING,
    "done": pb.MOVE_STATE_DONE,
    "aborted": pb.MOVE_STATE_ABORTED,
}
_ENDED = frozenset({"listed", "aborted", "released"})


@dataclass(frozen=True, slots=True)
class Sight:
    """What views are built from, at one moment. `table`: the newest sent in this term. `problems`:
    what is wrong with the controller itself. Times are driver times."""

    settings: ControllerSettings
    state: EngineState
    parts: PartTable
    stages: StageFolder
    recent: Recent
    book: Book
    table: RoutingTable | None
    now_s: float
    started_s: float
    problems: tuple[str, ...] = ()


def router_ready(sight: Sight, router: str) -> bool:
    """Whether a router is in the acknowledging set and uses a table."""
    known = sight.state.routers.get(router)
    part = sight.parts.routers.get(router)
    return part is not None and known is not None and known.in_set and part.applied >= 0


def placement_view(sight: Sight) -> pb.GetPlacementResponse:
    """Who is where now, what moves, what is wrong."""
    settings, state, spec = sight.settings, sight.state, sight.settings.spec
    missing = _missing(sight)
    problems = _problems(sight, missing)
    steps = _open_steps(state)
    return pb.GetPlacementResponse(
        model=spec.model,
        weights_version=spec.weights_version,
        num_layers=spec.num_layers,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        slot_bytes=spec.slot_bytes,
        term=state.term,
        epoch=state.epoch,
        state=_state(state, degraded=bool(problems)),
        problems=problems,
        ranks=[_rank(sight, rank, steps) for rank in state.ranks],
        routers=[_router(sight, name) for name in _router_names(sight)],
        moves=[move_view(state, move) for move in sight.book.moves[-MOVES_SHOWN:]],
        policy=settings.config.policy,
        moves_done=dict(state.moves_done),
        network=settings.network,
        accepts_insecure=settings.accept_insecure,
        simulated=settings.simulated,
        uptime_s=sight.now_s - sight.started_s,
        missing=missing,
        epochs_published=sight.book.epochs_published,
        service_id=settings.service_id,
        plans_stalled=state.plans_stalled,
        replicas_replaced=sight.book.replicas_replaced,
    )


def _missing(sight: Sight) -> list[int]:
    """Keys without a listed replica."""
    listed = {
        slot.key
        for rank in sight.state.ranks
        if rank.holds
        for slot in rank.slots
        if slot.use is SlotUse.LISTED
    }
    return [key for key in range(sight.settings.spec.num_keys) if key not in listed]


def _state(state: EngineState, *, degraded: bool) -> str:
    if not state.published:
        return "starting"
    if degraded:
        return "degraded"
    if state.run is not None:
        return "moving"
    if state.paused:
        return "paused"
    return "planning" if state.outstanding is not None else "steady"


def _problems(sight: Sight, missing: list[int]) -> list[str]:
    state = sight.state
    found = [*sight.problems, *(sight.parts.problems[p] for p in sorted(sight.parts.problems))]
    if stands_still := stalled(state):
        found.append(stands_still)
    found += sight.recent.targets.problems(sight.now_s, sight.settings.config)
    if missing and state.published:
        layer, expert = divmod(missing[0], sight.settings.spec.num_experts)
        found.append(
            f"{len(missing)} experts have no listed replica (first: layer {layer} expert {expert});"
            " calls that need them fail until they are repaired"
        )
    for rank in state.ranks:
        if rank.status is RankStatus.LOST and not rank.wants_shard:
            found.append(f"rank {rank.rank} was lost while drained; undrain it for a new shard")
        elif rank.status is RankStatus.LOST:
            found.append(f"rank {rank.rank} is lost; a new shard is being created")
        elif rank.suspected_at_s != NEVER_S:
            part = sight.parts.shards.get(rank.rank)
            why = part.suspected if part is not None else ""
            found.append(f"rank {rank.rank} does not answer{': ' if why else ''}{why}")
    found.extend(
        f"{name} does not answer; clients use another router"
        for name in sorted(sight.parts.routers)
        if sight.parts.routers[name].silent
    )
    return found[:PROBLEMS_SHOWN]


def _open_steps(state: EngineState) -> dict[tuple[int, int], StepRun]:
    """Steps that have begun and not ended, by (rank, slot index)."""
    return {
        (step.step.slot.rank, step.step.slot.index): step
        for step in _steps(state)
        if step.state not in _ENDED and step.state != "planned"
    }


def _steps(state: EngineState) -> list[StepRun]:
    own = [] if state.run is None else list(state.run.steps.values())
    return sorted([*own, *state.parked.values()], key=lambda step: step.step.step_id)


def _rank(sight: Sight, rank: RankState, steps: dict[tuple[int, int], StepRun]) -> pb.Rank:
    part = sight.parts.shards.get(rank.rank)
    report = None if part is None else part.report
    slot_bytes = sight.settings.spec.slot_bytes
    uses = [slot.use for slot in rank.slots]
    reserved = uses.count(SlotUse.TAKEN) * slot_bytes
    resident = sum(u not in (SlotUse.EMPTY, SlotUse.TAKEN) for u in uses) * slot_bytes
    return pb.Rank(
        rank=rank.rank,
        node=rank.node,
        failure_domain=rank.failure_domain,
        address="" if rank.address is None else rank.address.address,
        incarnation=max(0, rank.incarnation),
        state=_rank_state(rank),
        num_slots=rank.num_slots,
        budget_bytes=rank.budget_bytes,
        resident_bytes=resident if report is None else report.resident_bytes,
        reserved_bytes=reserved if report is None else report.reserved_bytes,
        backlog_s=0.0 if report is None else report.backlog_s,
        slots=[
            _slot(sight, index, slot, steps.get((rank.rank, index)))
            for index, slot in enumerate(rank.slots)
        ],
        pid=0 if part is None else part.info.pid,
        profile=rank.profile,
        memory=None if report is None else _memory(report.memory),
        copies=[] if report is None else [_copy(one) for one in report.copies],
    )


def _memory(memory: ShardMemory) -> pb.RankMemory:
    return pb.RankMemory(
        slab_bytes=memory.slab_bytes,
        free_bytes=memory.free_bytes,
        largest_free_run_bytes=memory.largest_free_run_bytes,
        loaded_bytes=memory.loaded_bytes,
        process_bytes=memory.process_bytes,
        host_cache_bytes=memory.host_cache_bytes,
    )


def _copy(copy: RunningCopy) -> pb.RunningCopy:
    return pb.RunningCopy(
        step_id=copy.step_id,
        slot=copy.slot,
        layer=copy.layer,
        expert=copy.expert,
        source=copy.source,
        done_bytes=copy.done_bytes,
        total_bytes=copy.total_bytes,
        seconds=copy.seconds,
    )


def _rank_state(rank: RankState) -> str:
    if rank.status is RankStatus.REMOVED:
        return "removed"
    if rank.status in (RankStatus.LOST, RankStatus.EXPECTED):
        return "lost"
    if rank.status is RankStatus.RESTORED or rank.suspected_at_s != NEVER_S:
        return "suspect"
    return "draining" if rank.draining else "up"


def _slot(sight: Sight, index: int, slot: SlotState, step: StepRun | None) -> pb.Slot:
    if slot.key < 0:
        return pb.Slot(index=index, layer=-1, expert=-1, tag=-1, state="")
    layer, expert = divmod(slot.key, sight.settings.spec.num_experts)
    state = slot.use.name if step is None else step.state.upper()
    return pb.Slot(index=index, layer=layer, expert=expert, tag=slot.tag, state=state)


def _router_names(sight: Sight) -> list[str]:
    return sorted({*sight.settings.routers, *sight.parts.routers})


def _router(sight: Sight, name: str) -> pb.Router:
    part = sight.parts.routers.get(name)
    if part is None:
        return pb.Router(router=name, state="lost", applied_epoch=-1, quiesced_epoch=-1)
    report = part.report
    return pb.Router(
        router=name,
        address=part.info.grpc_address,
        incarnation=part.name.incarnation,
        state="silent" if part.silent else "up",
        applied_epoch=part.applied,
        quiesced_epoch=part.quiesced,
        pid=part.info.pid,
        counters={} if report is None else report.counters,
        quantiles={} if report is None else report.quantiles,
    )


def move_view(state: EngineState, move: KeptMove) -> pb.Move:
    """A move as it stands: planned until the first of its steps begins."""
    shown = _MOVE_STATES[move.state]
    run = state.run
    if run is not None and run.plan_id == move.plan_id and move.state == "running":
        steps = [s.state for s in run.steps.values() if s.step.move_id == move.move_id]
        if steps and all(s == "planned" for s in steps):
            shown = pb.MOVE_STATE_PLANNED
    return pb.Move(
        move_id=move.move_id,
        plan_id=move.plan_id,
        kind=_KINDS[move.kind],
        layer=move.layer,
        expert=move.expert,
        source_rank=move.source_rank,
        target_rank=move.target_rank,
        copy_bytes=move.copy_bytes,
        cross_node=move.cross_node,
        reason=move.reason,
        gain_s_per_s=move.gain_s_per_s,
        state=shown,
        started_at_s=move.started_at_s,
        ended_at_s=move.ended_at_s,
        room=room_view(move.room),
    )


def steps_view(sight: Sight) -> list[pb.Step]:
    """Steps of the running plan, and verified ones that wait for a table, in order of their
    number."""
    run = sight.state.run
    return [
        pb.Step(
            plan_id=run.plan_id if run is not None and s.step.step_id in run.steps else "",
            step_id=s.step.step_id,
            kind=_STEP_KINDS[s.step.kind.value],
            move_id=s.step.move_id,
            rank=s.step.slot.rank,
            slot=s.step.slot.index,
            layer=s.step.layer,
            expert=s.step.expert,
            state=s.state.upper(),
            wave=s.step.wave,
            since_s=_in_state_s(sight, s.step.step_id),
        )
        for s in _steps(sight.state)
    ]


def _in_state_s(sight: Sight, step_id: int) -> float:
    """Seconds a step has been in its state; since its plan began where nothing else is known."""
    since_s = sight.book.since_s(step_id)
    if since_s is None:
        since_s = sight.now_s if sight.state.run is None else sight.state.run.started_at_s
    return max(0.0, sight.now_s - since_s)


def plan_view(answer: Answer) -> pb.PlanView:
    """A computed plan with its reasons and prices."""
    plan = answer.plan
    if plan is None:
        return pb.PlanView(plan_id=answer.plan_id, balancedness_before=1.0, balancedness_after=1.0)
    room = room_of(plan)
    return pb.PlanView(
        plan_id=answer.plan_id,
        moves=[
            pb.Move(
                move_id=m.move_id,
                plan_id=answer.plan_id,
                kind=_KINDS[m.kind.value],
                layer=m.layer,
                expert=m.expert,
                source_rank=m.source_rank,
                target_rank=m.target_rank,
                copy_bytes=m.copy_bytes,
                cross_node=m.cross_node,
                reason=m.reason,
                gain_s_per_s=m.gain_s_per_s,
                state=pb.MOVE_STATE_PLANNED,
                room=room_view(room.get(m.move_id, ())),
            )
            for m in plan.moves
        ],
        copy_bytes=plan.copy_bytes,
        cross_node_bytes=plan.cross_node_bytes,
        cost_s=plan.cost_s,
        gain_s_per_s=plan.gain_s_per_s,
        balancedness_before=plan.balancedness_before,
        balancedness_after=plan.balancedness_after,
        refused=plan.refused,
    )


def load_view(sight: Sight, window: LoadWindow) -> pb.GetLoadResponse:
    """A closed window: demand, execution, and the balance that was served over ranks that hold
    replicas."""
    phases, layers, experts = window.executed_pairs.shape
    holding = [r.rank for r in sight.state.ranks if r.holds and r.rank < len(window.rank_pairs)]
    loads = window.rank_pairs[holding] if holding else np.zeros((1, layers))
    served = balancedness(loads)
    return pb.GetLoadResponse(
        window=window.index,
        start_s=window.start_s,
        end_s=window.end_s,
        age_s=max(0.0, sight.now_s - window.end_s),
        demand=_raw(window.demand.sum(axis=0), "<i8"),
        executed=_raw(window.executed_pairs, "<i8"),
        rank_pairs=_raw(window.rank_pairs, "<i8"),
        rank_busy=_raw(window.rank_busy_s, "<f8"),
        num_phases=phases,
        num_layers=layers,
        num_experts=experts,
        num_ranks=len(window.rank_pairs),
        balancedness=served,
        imbalance=1.0 / served - 1.0,
        layer_imbalance=(1.0 / layer_balancedness(loads) - 1.0).tolist(),
        sources_missing=window.sources_missing,
    )


def _raw(array: npt.NDArray[Any], dtype: str) -> bytes:
    return np.ascontiguousarray(array, dtype=np.dtype(dtype)).tobytes()


def record_view(kept: KeptRecord) -> pb.DecisionRecord:
    """A decision record, with its wall-clock time."""
    record = kept.record
    return pb.DecisionRecord(
        at_s=record.at_s,
        seq=record.seq,
        rule=record.rule,
        outcome=record.outcome,
        detail=record.detail,
        plan_id=record.plan_id,
        move_id=record.move_id,
        numbers=record.numbers,
        expected_gain_s_per_s=record.expected_gain_s_per_s,
        realised_gain_s_per_s=record.realised_gain_s_per_s,
        copy_bytes=record.copy_bytes,
        wall_time_s=kept.wall_time_s,
        refused=record.refused,
    )
