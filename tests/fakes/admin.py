"""A controller that answers the command line from memory, as scripted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np

from moe_serve.cli.admin import AdminTarget
from moe_serve.errors import (
    FailedPrecondition,
    InvalidArgument,
    MoeServeError,
    NotFound,
    Unavailable,
)
from moe_serve.rpc import placement_pb2 as pb

MIB = 1 << 20


def make_move(
    move_id: int,
    kind: pb.MoveKind.ValueType,
    *,
    plan_id: str = "",
    state: pb.MoveState.ValueType = pb.MOVE_STATE_PLANNED,
    source_rank: int = 0,
    target_rank: int = 1,
    copy_bytes: int = 3 * MIB,
    cross_node: bool = False,
    reason: str = "",
    gain_s_per_s: float = 0.0,
    room: Sequence[pb.Removed] = (),
) -> pb.Move:
    return pb.Move(
        move_id=move_id,
        plan_id=plan_id,
        kind=kind,
        layer=move_id,
        expert=10 + move_id,
        source_rank=source_rank,
        target_rank=target_rank,
        copy_bytes=copy_bytes,
        cross_node=cross_node,
        reason=reason,
        gain_s_per_s=gain_s_per_s,
        state=state,
        room=room,
    )


def make_placement(**fields: object) -> pb.GetPlacementResponse:
    ranks = [
        pb.Rank(
            rank=rank,
            node=f"node-{'ab'[rank]}",
            state="up",
            num_slots=3,
            budget_bytes=9 * MIB,
            resident_bytes=6 * MIB,
            backlog_s=0.0004 * rank,
            pid=100 + rank,
            profile="declared-cpu",
            memory=pb.RankMemory(
                slab_bytes=9 * MIB, free_bytes=3 * MIB, largest_free_run_bytes=(3 - rank) * MIB
            ),
            slots=[
                pb.Slot(index=0, layer=0, expert=rank, tag=1, state="LISTED"),
                pb.Slot(index=1, layer=1, expert=rank, tag=2, state="LISTED"),
                pb.Slot(index=2, layer=-1, expert=-1, tag=-1),
            ],
        )
        for rank in range(2)
    ]
    router = pb.Router(
        router="router-0",
        address="127.0.0.1:4711",
        state="up",
        applied_epoch=7,
        quiesced_epoch=6,
        pid=200,
        counters={"requests": 1234.0, "failed": 0.0},
        quantiles={"dispatch_p50_s": 0.0021, "dispatch_p99_s": 0.0125},
    )
    placement = pb.GetPlacementResponse(
        service_id="tiny",
        model="tiny-moe",
        weights_version="v1",
        num_layers=2,
        num_experts=2,
        top_k=1,
        slot_bytes=3 * MIB,
        term=2,
        epoch=7,
        epochs_published=5,
        state="steady",
        policy="incremental",
        network="loopback",
        uptime_s=75.0,
        moves_done={"replicate": 3, "migrate": 1},
        replicas_replaced=2,
        ranks=ranks,
        routers=[router],
    )
    placement.MergeFrom(pb.GetPlacementResponse(**fields))
    return placement


def make_load() -> pb.GetLoadResponse:
    return pb.GetLoadResponse(
        window=12,
        start_s=24.0,
        end_s=26.0,
        age_s=0.5,
        balancedness=0.8,
        imbalance=0.25,
        layer_imbalance=[0.1, 0.4],
        demand=b"\1" + b"\0" * 15,
        num_phases=1,
        num_layers=1,
        num_experts=2,
    )


def make_window(
    demand: np.ndarray, rank_pairs: np.ndarray | None = None, busy: np.ndarray | None = None
) -> pb.GetLoadResponse:
    """A window of two seconds with its arrays: demand [phases, layers, experts], rank_pairs [ranks,
    layers], busy [ranks, phases]."""
    phases, layers, experts = demand.shape
    rank_pairs = np.zeros((2, layers)) if rank_pairs is None else rank_pairs
    busy = np.zeros((len(rank_pairs), phases)) if busy is None else busy
    return pb.GetLoadResponse(
        window=12,
        start_s=24.0,
        end_s=26.0,
        age_s=0.5,
        balancedness=0.8,
        imbalance=0.25,
        layer_imbalance=[0.25 * layer for layer in range(layers)],
        demand=demand.astype("<i8").tobytes(),
        rank_pairs=rank_pairs.astype("<i8").tobytes(),
        rank_busy=busy.astype("<f8").tobytes(),
        num_phases=phases,
        num_layers=layers,
        num_experts=experts,
        num_ranks=len(rank_pairs),
    )


def make_plan() -> pb.PlanView:
    return pb.PlanView(
        plan_id="2-4",
        moves=[
            make_move(
                0,
                pb.MOVE_KIND_REPLICATE,
                cross_node=True,
                reason="3.1 x fair share on rank 0",
                gain_s_per_s=0.0123,
                room=[pb.Removed(layer=1, expert=3, rank=1)],
            ),
            make_move(1, pb.MOVE_KIND_MIGRATE, source_rank=1, target_rank=0, reason="frees rank 1"),
            make_move(2, pb.MOVE_KIND_EVICT, copy_bytes=0, reason="[idle] for 6 windows"),
        ],
        copy_bytes=6 * MIB,
        cross_node_bytes=3 * MIB,
        cost_s=0.05,
        gain_s_per_s=0.0123,
        balancedness_before=0.5,
        balancedness_after=0.8,
    )


def make_record(seq: int, rule: str = "plan_done", **fields: object) -> pb.DecisionRecord:
    return pb.DecisionRecord(
        at_s=1.0 * seq, seq=seq, rule=rule, outcome="done", wall_time_s=1_800_000_000.0, **fields
    )


def make_explanation(**fields: object) -> pb.ExplainResponse:
    """Two causes, both phases, a newest record."""
    answer = pb.ExplainResponse(
        verdict="slow",
        causes=[
            pb.Cause(
                kind="hot_expert",
                share=0.42,
                text="expert 3 of layer 1 is hot",
                next_step="let it have more replicas",
                rank=1,
                layer=1,
                expert=3,
                evidence={"times_even_share": 3.25, "replicas": 1.0},
            ),
            pb.Cause(kind="slow_rank", share=0.25, text="rank 0 is slow", next_step="look", rank=0),
        ],
        stages=[
            pb.Stage(phase=phase, stage=stage, requests=50, seconds=s, p50_s=s / 50, p99_s=s / 25)
            for phase in ("prefill", "decode")
            for stage, s in (("queue", 0.1), ("wait", 0.2), ("compute", 0.7))
        ],
        ranks=[
            pb.RankPart(
                rank=rank,
                sub_calls=100,
                last=40 * rank,
                late_s=0.08 * rank,
                wire_s=0.1,
                wait_s=0.2,
                compute_s=0.5,
                pairs=400,
                slowness=1.0 + rank,
            )
            for rank in range(2)
        ],
        seconds=20.0,
        age_s=0.2,
        requests=100,
        mean_s=0.02,
        p99_s=0.06,
        newest=make_record(7, "paused", detail="automatic plans are paused", refused=["plan: no"]),
    )
    answer.MergeFrom(pb.ExplainResponse(**fields))
    return answer


@dataclass
class FakeAdmin:
    """`moe_serve.cli.admin.Admin` in memory. `asked` lists what was asked for, in order."""

    placements: list[pb.GetPlacementResponse] = field(default_factory=lambda: [make_placement()])
    window: pb.GetLoadResponse | None = field(default_factory=make_load)
    plan: pb.PlanView = field(default_factory=make_plan)
    plan_notes: tuple[str, ...] = ()
    paused: bool = False
    explanation: pb.ExplainResponse | MoeServeError = field(default_factory=make_explanation)
    records: list[pb.DecisionRecord] = field(default_factory=list)
    step_pages: list[list[pb.Step]] = field(default_factory=list)
    asked: list[tuple[object, ...]] = field(default_factory=list)
    asked_within: list[float] = field(default_factory=list)
    targets: list[AdminTarget] = field(default_factory=list)
    closed: bool = False

    def __call__(self, target: AdminTarget) -> FakeAdmin:
        self.targets.append(target)
        return self

    def placement(self) -> pb.GetPlacementResponse:
        return self.placements.pop(0) if len(self.placements) > 1 else self.placements[0]

    def watch_placement(self) -> Iterator[pb.GetPlacementResponse]:
        yield from self.placements

    def load(self) -> pb.GetLoadResponse:
        if self.window is None:
            raise Unavailable("no load window has closed yet")
        return self.window

    def compute_plan(self, policy: str, max_moves: int) -> pb.PlanView:
        self.asked.append(("compute_plan", policy, max_moves))
        if policy == "nonsense":
            raise InvalidArgument("policy 'nonsense' is not one of eplb, incremental, static")
        return self.plan

    def plan_to(
        self, before_plan: str, target: Sequence[Sequence[int]] = ()
    ) -> pb.ComputePlanResponse:
        self.asked.append(("plan_to", before_plan, tuple(map(tuple, target))))
        if before_plan not in ("", "newest", "2-3"):
            raise NotFound(
                f"the placement before plan {before_plan!r} is not known; known are those before "
                "2-3 (auto), newest first"
            )
        return pb.ComputePlanResponse(
            plan=self.plan,
            notes=self.plan_notes,
            before_plan="2-3" if before_plan else "",
            paused=self.paused,
        )

    def apply_plan(self, plan_id: str, validate_only: bool) -> str:
        self.asked.append(("apply_plan", plan_id, validate_only))
        if plan_id != self.plan.plan_id:
            raise NotFound(f"plan {plan_id} is not known; run `moe-serve plan`")
        return ""

    def steps(self) -> Iterator[pb.Step]:
        return iter(self.step_pages.pop(0) if self.step_pages else [])

    def events(self, after_seq: int, follow: bool) -> Iterator[pb.DecisionRecord]:
        self.asked.append(("events", after_seq, follow))
        yield from (record for record in self.records if record.seq > after_seq)

    def explain(self, seconds: float) -> pb.ExplainResponse:
        self.asked.append(("explain", seconds))
        if isinstance(self.explanation, MoeServeError):
            raise self.explanation
        return self.explanation

    def explain_plan(self, plan_id: str) -> pb.ExplainPlanResponse:
        self.asked.append(("explain_plan", plan_id))
        if plan_id not in ("", self.plan.plan_id):
            raise NotFound(f"no plan {plan_id!r} is kept")
        plan = pb.PlanView()
        plan.CopyFrom(self.plan)
        live = {m.move_id: m for m in self.placements[0].moves if m.plan_id == plan.plan_id}
        for move in plan.moves:  # as the controller: those that have begun are told as they stand
            move.CopyFrom(live.get(move.move_id, move))
        return pb.ExplainPlanResponse(
            plan=plan, records=self.records, measured_before=0.51, measured_after=0.0
        )

    def pause(self, reason: str) -> None:
        self.asked.append(("pause", reason))

    def resume(self) -> None:
        self.asked.append(("resume",))

    def drain(self, rank: int) -> pb.DrainRankResponse:
        self.asked.append(("drain", rank))
        if rank >= len(self.placements[0].ranks):
            raise InvalidArgument(f"rank {rank} does not exist; ranks are 0 to 1")
        if rank == 1:
            raise FailedPrecondition("rank 1 cannot be drained: 4 slots short on the others")
        return pb.DrainRankResponse(plan_id="2-5", message="rank 0: 2 replicas will move")

    def add_rank(
        self, group: int, node: str, again: int | None, key: str = ""
    ) -> pb.AddRankResponse:
        self.asked.append(("add_rank", group, node, again, key))
        return pb.AddRankResponse(rank=2, message="rank 2 is being started")

    def remove_rank(self, rank: int, accept_lower_floor: bool) -> pb.RemoveRankResponse:
        self.asked.append(("remove_rank", rank, accept_lower_floor))
        if rank == 1:
            raise FailedPrecondition("the other ranks lack 4 slots")
        return pb.RemoveRankResponse(message=f"rank {rank} is to leave")

    def replace_rank(
        self, rank: int, incarnation: int, accept_lower_floor: bool
    ) -> pb.ReplaceRankResponse:
        self.asked.append(("replace_rank", rank, incarnation, accept_lower_floor))
        return pb.ReplaceRankResponse()

    def replace_router(
        self, router: str, incarnation: int, accept_gap: bool
    ) -> pb.ReplaceRouterResponse:
        self.asked.append(("replace_router", router, incarnation, accept_gap))
        return pb.ReplaceRouterResponse()

    def restart_controller(self, term: int) -> pb.RestartControllerResponse:
        self.asked.append(("restart_controller", term))
        return pb.RestartControllerResponse(term=term)

    def undrain(self, rank: int) -> None:
        self.asked.append(("undrain", rank))

    def set_budget(self, rank: int, budget_bytes: int) -> pb.SetBudgetResponse:
        self.asked.append(("set_budget", rank, budget_bytes))
        return pb.SetBudgetResponse(
            plan_id="2-6", message="1 replica is evicted", num_slots=budget_bytes // (3 * MIB)
        )

    def within(self, seconds: float) -> AbstractContextManager[None]:
        self.asked_within.append(seconds)
        return nullcontext()

    def close(self) -> None:
        self.closed = True
