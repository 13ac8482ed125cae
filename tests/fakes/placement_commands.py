"""What an operator asks of the fake controller: plans, pause, drain, explanations, and who may ask.

With `tokens` empty everybody may ask for everything, as on a loopback service without a token file.
"""

import asyncio
import time
from typing import Any

import grpc

from moe_serve.rpc import placement_pb2 as pb

ADMIN_ONLY = frozenset(
    {"ComputePlan", "ApplyPlan", "Pause", "Resume", "DrainRank", "UndrainRank", "SetBudget"}
)
STAGES = ("queue", "split", "wire", "wait", "compute", "combine", "other")
BOUNDS_S = tuple(0.0001 * 2**k for k in range(18))


def made_explanation() -> pb.ExplainResponse:
    """Nothing slow, with a request or two in each stage."""
    buckets = [0] * (len(BOUNDS_S) + 1)
    buckets[3] = 40
    return pb.ExplainResponse(
        verdict="nothing_slow",
        stages=[
            pb.Stage(
                phase=phase,
                stage=stage,
                requests=40,
                seconds=0.03 * (1 + number),
                p50_s=0.0007,
                p99_s=0.0008,
                buckets=buckets,
            )
            for phase in ("prefill", "decode")
            for number, stage in enumerate(STAGES)
        ],
        ranks=[
            pb.RankPart(rank=rank, sub_calls=40, last=10, pairs=400, slowness=1.0)
            for rank in range(2)
        ],
        bounds_s=BOUNDS_S,
        seconds=10.0,
        age_s=0.4,
        requests=80,
        mean_s=0.0042,
        p99_s=0.011,
    )


class PlacementCommands:
    """Commands of a FakePlacementService; state that a test may look at or set."""

    def __init__(self) -> None:
        self.tokens: dict[str, str] = {}
        """Live tokens and their role, "read" or "admin"; none = nobody needs one."""
        self.callers: list[tuple[str, str]] = []
        """(method, token) of every call, "" without a token."""
        self.asked: list[Any] = []
        """Requests of admin methods that were let in."""
        self.explanation = made_explanation()
        """What Explain answers."""
        self.refusals: dict[str, tuple[grpc.StatusCode, str]] = {}
        """Methods that end with a status, by name."""
        self.delay_s: dict[str, float] = {}
        """Methods that take so long, by name."""
        self.plan_views: dict[str, pb.PlanView] = {}
        self.plan_room: list[pb.Removed] = []
        """What each move of a computed plan removes."""
        self.forgotten: set[str] = set()
        """Plans of which only records are left."""
        self.drained: set[int] = set()

    async def _let_in(self, name: str, context: Any) -> None:
        """Ends the call of whoever may not ask."""
        given = dict(context.invocation_metadata() or ()).get("authorization", "")
        token = str(given).removeprefix("Bearer ")
        self.callers.append((name, token))
        if self.tokens:
            role = self.tokens.get(token)
            if role is None:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "not one of the live tokens")
            if name in ADMIN_ONLY and role != "admin":
                await context.abort(
                    grpc.StatusCode.PERMISSION_DENIED, "needs a token of role admin"
                )
        if name in self.refusals:
            await context.abort(*self.refusals[name])
        if name in self.delay_s:
            await asyncio.sleep(self.delay_s[name])

    async def Pause(self, request: Any, context: Any) -> pb.PauseResponse:
        await self._command("Pause", request, context)
        self.state = "paused"
        self.tell()
        return pb.PauseResponse()

    async def Resume(self, request: Any, context: Any) -> pb.ResumeResponse:
        await self._command("Resume", request, context)
        self.state = "steady"
        self.tell()
        return pb.ResumeResponse()

    async def DrainRank(self, request: Any, context: Any) -> pb.DrainRankResponse:
        await self._command("DrainRank", request, context)
        self.drained.add(request.rank)
        self.tell()
        return pb.DrainRankResponse(plan_id="drain-1", message=f"rank {request.rank} is emptied")

    async def UndrainRank(self, request: Any, context: Any) -> pb.UndrainRankResponse:
        await self._command("UndrainRank", request, context)
        self.drained.discard(request.rank)
        self.tell()
        return pb.UndrainRankResponse()

    async def ComputePlan(self, request: Any, context: Any) -> pb.ComputePlanResponse:
        await self._command("ComputePlan", request, context)
        plan = self._made_plan(request.max_moves or 3)
        self.plan_views[plan.plan_id] = plan
        return pb.ComputePlanResponse(plan=plan)

    async def ApplyPlan(self, request: Any, context: Any) -> pb.ApplyPlanResponse:
        await self._command("ApplyPlan", request, context)
        if not request.plan_id:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "plan_id: must be given")
        if request.plan_id not in self.plan_views:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"plan {request.plan_id} has gone stale"
            )
        if request.validate_only:
            return pb.ApplyPlanResponse(message="can be applied; nothing is started")
        self.begin_plan()
        self.tell()
        return pb.ApplyPlanResponse(message=f"plan {request.plan_id} runs")

    async def Explain(self, request: Any, context: Any) -> pb.ExplainResponse:
        await self._guard("Explain", context)
        return self.explanation

    async def ExplainPlan(self, request: Any, context: Any) -> pb.ExplainPlanResponse:
        await self._guard("ExplainPlan", context)
        self._remember_plans()
        plan_id = request.plan_id or next(reversed(self.plan_views), "")
        if plan_id in self.forgotten:
            return pb.ExplainPlanResponse(
                plan=pb.PlanView(plan_id=plan_id, balancedness_before=1.0, balancedness_after=1.0),
                records=[r for r in self.records if r.plan_id == plan_id],
            )
        if plan_id not in self.plan_views:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no plan {plan_id!r} is known")
        return pb.ExplainPlanResponse(
            plan=self.plan_views[plan_id],
            records=[r for r in self.records if r.plan_id == plan_id],
            measured_before=0.71,
            measured_after=0.93 if self.state == "steady" else 0.0,
        )

    async def _command(self, name: str, request: Any, context: Any) -> None:
        await self._guard(name, context)
        self.asked.append(request)

    def _remember_plans(self) -> None:
        """Plans that ran, as the controller would keep them."""
        for plan_id in dict.fromkeys(move.plan_id for move in self.moves):
            moves = [move for move in self.moves if move.plan_id == plan_id]
            self.plan_views[plan_id] = self._view(plan_id, moves)

    def _made_plan(self, wanted: int) -> pb.PlanView:
        """A plan that nothing runs: the first listed replicas of rank 0 also on the last rank."""
        number = len(self.plan_views) + 1
        last = self.script.ranks - 1
        held = [s for s in self.slots[0] if s["state"] == "LISTED"]
        fits = [s for s in held if last not in self.holders(s["layer"], s["expert"])]
        moves = [
            pb.Move(
                move_id=move_id,
                plan_id=f"asked-{number}",
                kind=pb.MOVE_KIND_REPLICATE,
                layer=slot["layer"],
                expert=slot["expert"],
                source_rank=0,
                target_rank=last,
                room=self.plan_room,
                copy_bytes=42 << 20,
                cross_node=True,
                reason="hot expert: 3.1x fair share",
                gain_s_per_s=0.04,
                state=pb.MOVE_STATE_PLANNED,
            )
            for move_id, slot in enumerate(fits[:wanted])
        ]
        return self._view(f"asked-{number}", moves)

    def _view(self, plan_id: str, moves: list[pb.Move]) -> pb.PlanView:
        return pb.PlanView(
            plan_id=plan_id,
            moves=moves,
            copy_bytes=sum(m.copy_bytes for m in moves),
            cross_node_bytes=sum(m.copy_bytes for m in moves if m.cross_node),
            cost_s=0.5,
            gain_s_per_s=sum(m.gain_s_per_s for m in moves),
            balancedness_before=0.7,
            balancedness_after=0.92,
            refused=["layer 3 expert 1: gain below cost"],
        )

    def realise(self, plan_id: str, gain_s_per_s: float) -> None:
        """Leave the record that measures a plan afterwards."""
        self.record(
            "realised_gain",
            "done",
            "measured on the first whole window with load after the plan, by its own demand",
            plan_id=plan_id,
            expected_gain_s_per_s=0.2,
            realised_gain_s_per_s=gain_s_per_s,
            numbers={"measured_at_s": time.monotonic()},
        )
