"""PlacementService: what people and programs may see of the placement and ask of the engine.

Responsible for checking requests, for typed errors, and for streams that slow readers cannot
lengthen: a watcher gets the newest view when it is ready for one. Must never change the engine but
by an event. Called over gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NoReturn, Protocol, TypeVar

import grpc.aio

from moe_serve.controller.admin_checks import (
    check_rank,
    check_text,
    raise_for,
    wrong,
)
from moe_serve.controller.admin_fleet import FleetAdmin
from moe_serve.controller.admin_plans import goal_of
from moe_serve.controller.book import KeptRecord
from moe_serve.controller.explaining import explain_plan_view, explain_view
from moe_serve.controller.life import Life
from moe_serve.controller.settings import ControllerSettings
from moe_serve.controller.tasks import Bell
from moe_serve.controller.views import (
    Sight,
    load_view,
    placement_view,
    plan_view,
    record_view,
    steps_view,
)
from moe_serve.errors import (
    DeadlineExceeded,
    MoeServeError,
    ResourceExhausted,
    Unavailable,
)
from moe_serve.rpc import placement_pb2 as pb
from moe_serve.rpc import placement_pb2_grpc
from moe_serve.rpc.status import abort
from placement.engine import RebalanceEngine
from placement.messages.effects import Answer
from placement.messages.events import (
    AnyEvent,
    ApplyAsked,
    BudgetAsked,
    DrainAsked,
    PauseAsked,
    PlanAsked,
    ResumeAsked,
)

EXPLAINS_MAX = 4
"""Calls of Explain under way: each takes a thread for a while."""
EXPLAIN_RETRY_S = 1.0
"""Wait that a caller beyond them is told."""
DEFAULT_TIMEOUT_S = 30.0
"""Deadline of a call that names none."""
WATCH_PAUSE_S = 0.1
"""Least time between two messages of a Watch stream."""
STEPS_PAGE = 100
STEPS_PAGE_MAX = 1000
INT32_MAX = (1 << 31) - 1
_T = TypeVar("_T")


class Source(Protocol):
    """What of the controller is needed here. Properties raise Unavailable between two lives."""

    settings: ControllerSettings

    @property
    def life(self) -> Life:
        """The life of the present term."""
        ...

    @property
    def bell(self) -> Bell:
        """Rings at every change."""
        ...

    def sight(self) -> Sight:
        """What views are built from."""
        ...

    def restart_soon(self) -> None:
        """End this controller, once the answer to who asked is on its way; it is started again."""
        ...


class PlacementServicer(placement_pb2_grpc.PlacementServiceServicer):
    """All RPCs over one controller."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._fleet = FleetAdmin(source)
        self._watchers = 0
        self._explains: set[asyncio.Task[pb.ExplainResponse]] = set()
        self._shown: tuple[int, pb.GetPlacementResponse] | None = None

    # ------------------------------------------------------------------------------- reading

    async def GetPlacement(
        self, request: pb.GetPlacementRequest, context: Any
    ) -> pb.GetPlacementResponse:
        """Who is where now."""
        return await _guard(context, self._placement)

    async def GetLoad(self, request: pb.GetLoadRequest, context: Any) -> pb.GetLoadResponse:
        """The newest closed window."""
        return await _guard(context, self._load)

    async def ListSteps(self, request: pb.ListStepsRequest, context: Any) -> pb.ListStepsResponse:
        """Steps of the running plan, a page at a time."""
        return await _guard(context, lambda: self._steps(request))

    async def WatchPlacement(
        self, request: pb.WatchPlacementRequest, context: Any
    ) -> AsyncIterator[pb.WatchPlacementResponse]:
        """The newest placement now and after every change."""
        async with _reporting(context):
            with self._watching():
                seen = -1
                while True:
                    seen = await self._source.bell.wait(seen)
                    yield pb.WatchPlacementResponse(placement=self._shared_placement(seen))
                    await asyncio.sleep(WATCH_PAUSE_S)

    async def WatchLoad(
        self, request: pb.WatchLoadRequest, context: Any
    ) -> AsyncIterator[pb.WatchLoadResponse]:
        """One message for each closed window; a slow reader gets the newest."""
        async with _reporting(context):
            with self._watching():
                seen, sent = -1, None
                while True:
                    seen = await self._source.bell.wait(seen)
                    sight = self._source.sight()
                    window = sight.book.window
                    if window is not None and window is not sent:
                        sent = window
                        yield pb.WatchLoadResponse(load=load_view(sight, window))
                        await asyncio.sleep(WATCH_PAUSE_S)

    async def WatchEvents(
        self, request: pb.WatchEventsRequest, context: Any
    ) -> AsyncIterator[pb.WatchEventsResponse]:
        """Kept records, then new ones. A reader slower than the records misses the oldest."""
        async with _reporting(context):
            with self._watching():
                last = request.after_seq if request.after_seq > 0 else -1
                seen = -1
                while True:
                    for kept in self._records_after(last):
                        last = kept.record.seq
                        yield pb.WatchEventsResponse(record=record_view(kept))
                    if request.no_follow:
                        return
                    seen = await self._source.bell.wait(seen)

    async def Explain(self, request: pb.ExplainRequest, context: Any) -> pb.ExplainResponse:
        """Why it is slow now."""
        return await _guard(context, lambda: self._explain(request))

    async def ExplainPlan(
        self, request: pb.ExplainPlanRequest, context: Any
    ) -> pb.ExplainPlanResponse:
        """All that is known of one plan."""
        return await _guard(context, lambda: explain_plan_view(self._source.sight(), request))

    # ------------------------------------------------------------------------------- asking

    async def ComputePlan(
        self, request: pb.ComputePlanRequest, context: Any
    ) -> pb.ComputePlanResponse:
        """A plan with reasons and prices, to what a policy wants or to a given placement. Nothing
        moves."""

        async def compute() -> pb.ComputePlanResponse:
            goal = goal_of(request, self._source.sight())
            answer = await self._ask(
                lambda n: PlanAsked(
                    at_s=0.0,
                    request_id=n,
                    policy=request.policy,
                    max_moves=request.max_moves or -1,
                    target=goal.target,
                )
            )
            return pb.ComputePlanResponse(
                plan=plan_view(answer),
                notes=[*goal.notes, *answer.notes],
                before_plan=goal.before_plan,
                paused=self._source.sight().state.paused,
            )

        return await _guard(context, compute)

    async def ApplyPlan(self, request: pb.ApplyPlanRequest, context: Any) -> pb.ApplyPlanResponse:
        """Run a computed plan, or only check whether it could run."""

        async def apply() -> pb.ApplyPlanResponse:
            check_text("plan_id", request.plan_id, needed=True)
            if request.validate_only:
                self._check_apply(request.plan_id)
                return pb.ApplyPlanResponse(
                    message=f"plan {request.plan_id} can be applied; nothing is started"
                )
            answer = await self._ask(
                lambda n: ApplyAsked(at_s=0.0, request_id=n, plan_id=request.plan_id)
            )
            return pb.ApplyPlanResponse(message=answer.message)

        return await _guard(context, apply)

    async def Pause(self, request: pb.PauseRequest, context: Any) -> pb.PauseResponse:
        """Stop automatic plans."""

        async def pause() -> pb.PauseResponse:
            check_text("reason", request.reason)
            await self._ask(lambda n: PauseAsked(at_s=0.0, request_id=n, reason=request.reason))
            return pb.PauseResponse()

        return await _guard(context, pause)

    async def Resume(self, request: pb.ResumeRequest, context: Any) -> pb.ResumeResponse:
        """Let automatic plans run again."""

        async def resume() -> pb.ResumeResponse:
            await self._ask(lambda n: ResumeAsked(at_s=0.0, request_id=n))
            return pb.ResumeResponse()

        return await _guard(context, resume)

    async def DrainRank(self, request: pb.DrainRankRequest, context: Any) -> pb.DrainRankResponse:
        """Move everything off a rank."""

        async def drain() -> pb.DrainRankResponse:
            self._check_rank(request.rank)
            answer = await self._ask(
                lambda n: DrainAsked(at_s=0.0, request_id=n, rank=request.rank)
            )
            return pb.DrainRankResponse(plan_id=answer.plan_id, message=answer.message)

        return await _guard(context, drain)

    async def UndrainRank(
        self, request: pb.UndrainRankRequest, context: Any
    ) -> pb.UndrainRankResponse:
        """Let a drained rank hold replicas again."""

        async def undrain() -> pb.UndrainRankResponse:
            self._check_rank(request.rank)
            raise_for(await self._source.life.supervision.undrain(request.rank))
            return pb.UndrainRankResponse()

        return await _guard(context, undrain)

    async def SetBudget(self, request: pb.SetBudgetRequest, context: Any) -> pb.SetBudgetResponse:
        """Change the bytes of expert slots a rank may use."""

        async def budget() -> pb.SetBudgetResponse:
            self._check_rank(request.rank)
            if request.budget_bytes < 0:
                raise wrong("budget_bytes", f"{request.budget_bytes} must be >= 0")
            most = INT32_MAX * self._source.settings.spec.slot_bytes
            if request.budget_bytes > most:
                raise wrong("budget_bytes", f"{request.budget_bytes} must be at most {most}")
            answer = await self._ask(
                lambda n: BudgetAsked(
                    at_s=0.0,
                    request_id=n,
                    rank=request.rank,
                    budget_bytes=request.budget_bytes,
                )
            )
            slots = request.budget_bytes // self._source.settings.spec.slot_bytes
            return pb.SetBudgetResponse(
                plan_id=answer.plan_id, message=answer.message, num_slots=slots
            )

        return await _guard(context, budget)

    async def AddRank(self, request: pb.AddRankRequest, context: Any) -> pb.AddRankResponse:
        """One more rank, or a removed one again."""
        return await _guard(context, lambda: self._fleet.add_rank(request))

    async def RemoveRank(
        self, request: pb.RemoveRankRequest, context: Any
    ) -> pb.RemoveRankResponse:
        """A rank leaves for good."""
        return await _guard(context, lambda: self._fleet.remove_rank(request))

    async def ReplaceRank(
        self, request: pb.ReplaceRankRequest, context: Any
    ) -> pb.ReplaceRankResponse:
        """A rank's shard is replaced."""
        return await _guard(context, lambda: self._fleet.replace_rank(request))

    async def ReplaceRouter(
        self, request: pb.ReplaceRouterRequest, context: Any
    ) -> pb.ReplaceRouterResponse:
        """A router is replaced; answers once its open calls have ended."""
        return await _guard(context, lambda: self._fleet.replace_router(request))

    async def RestartController(
        self, request: pb.RestartControllerRequest, context: Any
    ) -> pb.RestartControllerResponse:
        """The controller is started again."""
        return await _guard(context, lambda: self._fleet.restart_controller(request))

    # ------------------------------------------------------------------------------- inside

    async def _placement(self) -> pb.GetPlacementResponse:
        return placement_view(self._source.sight())

    def _shared_placement(self, version: int) -> pb.GetPlacementResponse:
        """One view a version, however many watch."""
        if self._shown is None or self._shown[0] != version:
            self._shown = (version, placement_view(self._source.sight()))
        return self._shown[1]

    async def _load(self) -> pb.GetLoadResponse:
        sight = self._source.sight()
        if sight.book.window is None:
            raise Unavailable(
                f"no load window has closed yet; one does every {sight.settings.config.window_s} s"
            )
        return load_view(sight, sight.book.window)

    async def _steps(self, request: pb.ListStepsRequest) -> pb.ListStepsResponse:
        size = request.page_size or STEPS_PAGE
        if not 0 < size <= STEPS_PAGE_MAX:
            raise wrong("page_size", f"{size} must lie in [1, {STEPS_PAGE_MAX}]")
        token = request.page_token
        if token and not (token.isascii() and token.isdecimal() and len(token) < 20):
            raise wrong("page_token", "must be a next_page_token of an earlier answer")
        first = int(token or "0")
        steps = [step for step in steps_view(self._source.sight()) if step.step_id >= first]
        rest = steps[size:]
        return pb.ListStepsResponse(
            steps=steps[:size], next_page_token=str(rest[0].step_id) if rest else ""
        )

    def _records_after(self, last: int) -> list[KeptRecord]:
        book = self._source.sight().book
        newest = book.newest(1)
        if newest and newest[0].record.seq < last:
            last = -1  # records are counted anew: the controller was rebuilt without a journal
        return book.records_after(last)

    async def _ask(self, make: Callable[[int], AnyEvent]) -> Answer:
        answer = await self._source.life.driver.ask(make)
        raise_for(answer)
        return answer

    def _check_apply(self, plan_id: str) -> None:
        """Raises what the engine would answer, found out on a copy of it."""
        self._source.life.driver.check_moves()
        live = self._source.life.driver.engine
        twin = RebalanceEngine.replayed(live.snapshot())
        effects = twin.step(ApplyAsked(at_s=live.state.now_s, request_id=-1, plan_id=plan_id))
        answer = next(c for c in effects.commands if isinstance(c, Answer) and c.request_id == -1)
        raise_for(answer)

    def _check_rank(self, rank: int) -> None:
        check_rank(rank, len(self._source.life.driver.engine.state.ranks))

    async def _explain(self, request: pb.ExplainRequest) -> pb.ExplainResponse:
        if len(self._explains) >= EXPLAINS_MAX:
            raise ResourceExhausted(
                f"{EXPLAINS_MAX} calls of Explain are under way already; ask again",
                retry_after_s=EXPLAIN_RETRY_S,
            )
        task = asyncio.create_task(explain_view(self._source.sight(), request))
        self._explains.add(task)
        task.add_done_callback(self._explained)
        # Shielded: the thread works on when the caller has left, and keeps its place until then.
        return await asyncio.shield(task)

    def _explained(self, task: asyncio.Task[pb.ExplainResponse]) -> None:
        self._explains.discard(task)
        if not task.cancelled():
            task.exception()  # the caller may have left: then nobody else looks at it

    @contextmanager
    def _watching(self) -> Iterator[None]:
        limit = self._source.settings.watchers_max
        if self._watchers >= limit:
            raise ResourceExhausted(f"{limit} streams watch already; close one")
        self._watchers += 1
        try:
            yield
        finally:
            self._watchers -= 1


async def _guard(context: Any, work: Callable[[], Awaitable[_T]]) -> _T:
    """Run a unary call under its deadline; errors become status."""
    left_s = context.time_remaining()
    try:
        async with asyncio.timeout(DEFAULT_TIMEOUT_S if left_s is None else left_s):
            return await work()
    except TimeoutError:
        await _abort(context, DeadlineExceeded("the controller did not answer in time"))
    except MoeServeError as error:
        await _abort(context, error)


@asynccontextmanager
async def _reporting(context: Any) -> AsyncIterator[None]:
    """Scope of a streaming call: errors become status."""
    try:
        yield
    except MoeServeError as error:
        await _abort(context, error)


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: MoeServeError) -> NoReturn:
    await abort(context, error)
    raise AssertionError("abort always raises")
