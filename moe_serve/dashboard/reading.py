"""What anybody who reaches the page may read: load, placement, moves, plans, causes, experts.

Responsible for turning parameters into documents. Must never change anything anywhere. Called by
`app`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec
from aiohttp import web

from moe_serve.dashboard import schemas
from moe_serve.dashboard.answers import (
    JSON,
    ApiError,
    answered,
    of_nothing,
    of_question,
    tag_of,
    tagged,
    unavailable,
)
from moe_serve.dashboard.endpoints import INTEGER_MAX, Endpoint, Given, Param
from moe_serve.dashboard.feed import Feed, Versioned
from moe_serve.dashboard.history import MOVES_MAX, RECORDS_MAX
from moe_serve.dashboard.kept import Kept
from moe_serve.dashboard.plans import drawn_plan, own_plan
from moe_serve.dashboard.upstream import Calls, NotServed, TooManyReaders, is_refusal
from moe_serve.documents import schemas as shapes
from moe_serve.documents.experts import CSV_COLUMNS, csv_parts, expert_document
from moe_serve.documents.explanation import controller_away, explanation, is_away
from moe_serve.documents.plans import has_begun, is_priced, no_plan
from moe_serve.documents.replicas import Holders, holders_of, listed_ranks
from moe_serve.documents.views import Json
from moe_serve.documents.window import Counts, PhaseChoice, counts_of, of_phase
from moe_serve.errors import MoeServeError, NotFound
from moe_serve.explain.finding import SECONDS_MAX
from moe_serve.rpc import placement_pb2 as pb

EXPERT_MOVES_MAX = 20
CSV_BYTES_MAX = 4 << 20
NAME_CHARS_MAX = 200
"""Characters of a plan id."""
_AFTER = "only what is newer than this number of an earlier answer"
_AGES = "It carries ages, so it differs each time and has no ETag."
SINCE_S_MAX = 7 * 24 * 3600
"""Longest look back, a week: what is kept is bounded by number anyway."""

FRAME = Endpoint(
    "GET",
    "/api/v1/frame",
    "Load of the newest closed window, or of the last one before the newest plan began.",
    schemas.FRAME,
    params=(
        Param(
            "before_plan",
            "integer",
            "1: the frame just before the newest plan began; 404 where the page saw none begin",
            default=0,
            high=1,
        ),
    ),
    errors=(404, 503),
    tagged=True,
)
PLACEMENT = Endpoint(
    "GET",
    "/api/v1/placement",
    "Who is where: ranks, slots, routers, the newest moves, and what is wrong.",
    schemas.PLACEMENT,
    errors=(503,),
    tagged=True,
)
STATUS = Endpoint(
    "GET",
    "/api/v1/status",
    f"How fresh the figures are, as the page sees it. {_AGES}",
    schemas.STATUS,
)
HISTORY = Endpoint(
    "GET",
    "/api/v1/history",
    "Imbalance and speed by window, and plans as marks, oldest first.",
    schemas.HISTORY,
    tagged=True,
)
EVENTS = Endpoint(
    "GET",
    "/api/v1/events",
    "Decisions, oldest first. `n` is the page's number; `life` names the page's life.",
    schemas.EVENTS,
    params=(
        Param("after", "integer", _AFTER, default=0),
        Param(
            "since_s",
            "integer",
            "only what was decided in the last so many seconds, by `wall_s`; 0: all that is kept",
            default=0,
            high=SINCE_S_MAX,
        ),
        Param("limit", "integer", "at most so many", default=RECORDS_MAX, low=1, high=RECORDS_MAX),
    ),
    tagged=True,
)
MOVES = Endpoint(
    "GET",
    "/api/v1/moves",
    "Moves that are new or changed. Ask again after `version` until none are left.",
    schemas.MOVES,
    params=(
        Param("after", "integer", _AFTER, default=0),
        Param(
            "since_s",
            "integer",
            "only moves that began or ended in the last so many seconds, by `started_wall_s` and"
            " `ended_wall_s`, and those that are planned or running; 0: all that are kept",
            default=0,
            high=SINCE_S_MAX,
        ),
        Param("limit", "integer", "at most so many", default=MOVES_MAX, low=1, high=MOVES_MAX),
    ),
    tagged=True,
)
PLAN = Endpoint(
    "GET",
    "/api/v1/plan",
    "A plan with the slots before and after it, its price and what was measured.",
    shapes.PLAN,
    params=(Param("id", "text", "of the plan; none: the newest", default="", high=NAME_CHARS_MAX),),
    errors=(404, 429, 503),
    tagged=True,
)
EXPLAIN = Endpoint(
    "GET",
    "/api/v1/explain",
    f"Why it is slow now. Asked of the controller once a second at most. {_AGES}",
    shapes.EXPLAIN,
    params=(
        Param(
            "seconds",
            "integer",
            "how far to look back; 0: the newest ten windows",
            default=0,
            high=int(SECONDS_MAX),
        ),
    ),
    errors=(429, 503),
)
_PHASE = Param(
    "phase",
    "text",
    "which tokens count",
    default="all",
    choices=tuple(PhaseChoice),
)
EXPERTS_CSV = Endpoint(
    "GET",
    "/api/v1/experts.csv",
    f"Every expert of the newest window: {CSV_COLUMNS}.",
    None,
    params=(_PHASE,),
    media="text/csv",
    errors=(404, 413, 503),
    tagged=True,
)
EXPERT = Endpoint(
    "GET",
    "/api/v1/expert",
    "One expert: share, rank in its layer, replicas, 15 minutes of load, last moves.",
    shapes.EXPERT,
    params=(
        Param("layer", "integer", "from 0", high=INTEGER_MAX),
        Param("expert", "integer", "of the model, from 0", high=INTEGER_MAX),
    ),
    errors=(404, 503),
    tagged=True,
)


class Reading:
    """Handlers over one feed and the single calls to the controller."""

    def __init__(self, feed: Feed, calls: Calls, explained: Kept, plans: Kept) -> None:
        self._feed = feed
        self._calls = calls
        self._explained = explained
        self._plans = plans
        self._holders: tuple[int, Holders] = (0, {})
        self._csv: dict[str, tuple[str, bytes]] = {}

    async def frame(self, request: web.Request, given: Given) -> web.Response:
        """Answers FRAME."""
        if not given["before_plan"]:
            return self._document(request, self._feed.frame, "no window has closed yet")
        kept, plan_id = self._feed.before_plan.frame, self._feed.before_plan.plan_id
        if kept is None:
            raise ApiError(
                404,
                "no plan has begun since the page watches",
                code="no_plan",
                next_step="ask again after the next plan",
            )
        body = kept.body[:-1] + b',"before_plan":' + msgspec.json.encode(plan_id) + b"}"
        # Of the whole body: a next plan that begins in the same window names itself in it.
        return tagged(request, body, tag_of(body), JSON)

    async def placement(self, request: web.Request, _given: Given) -> web.Response:
        """Answers PLACEMENT."""
        if not self._feed.placement.version:
            return self._document(request, self._feed.placement, "nothing heard yet")
        moves = msgspec.json.encode(self._feed.history.moves_after(0))
        body = self._feed.placement.body[:-1] + b',"moves":' + moves + b"}"
        version = f"{self._feed.placement.version}-{self._feed.history.moves_version}"
        return tagged(request, body, f'"{self._feed.life}-{version}"', JSON)

    def _document(self, request: web.Request, document: Versioned, why_not: str) -> web.Response:
        if not document.version:
            raise self._not_yet(why_not)
        etag = f'"{self._feed.life}-{document.version}"'
        return tagged(request, document.body, etag, JSON)

    def _not_yet(self, why_not: str) -> ApiError:
        fault = self._feed.status_document()["message"]
        return unavailable(f"{why_not}: {fault}" if fault else why_not, code="nothing_yet")

    async def status(self, _request: web.Request, _given: Given) -> web.Response:
        """Answers STATUS."""
        return answered(self._feed.status_document())

    async def history(self, request: web.Request, _given: Given) -> web.Response:
        """Answers HISTORY."""
        history = self._feed.history
        return _tagged(request, {"points": list(history.points), "marks": list(history.marks)})

    async def events(self, request: web.Request, given: Given) -> web.Response:
        """Answers EVENTS."""
        records = self._feed.history.records_after(given["after"], self._since(given))
        document = {
            "life": self._feed.life,
            "last": self._feed.history.last_record,
            "records": records[: given["limit"]],
        }
        return _tagged(request, document)

    async def moves(self, request: web.Request, given: Given) -> web.Response:
        """Answers MOVES."""
        moves, version = self._feed.history.moves_page(
            given["after"], given["limit"], self._since(given)
        )
        document = {"life": self._feed.life, "version": version, "moves": moves}
        return _tagged(request, document)

    def _since(self, given: Given) -> float | None:
        """Date that `since_s` reaches back to, by the clock that dated what is asked for; None = to
        the first."""
        return self._feed.wall_s() - given["since_s"] if given["since_s"] else None

    # ---- plans

    async def plan(self, request: web.Request, given: Given) -> web.Response:
        """Answers PLAN."""
        return _tagged(request, await self.plan_of(given["id"]))

    async def plan_of(self, plan_id: str) -> Json:
        """Document of a plan, "" = the newest. Raises ApiError."""
        try:
            answer, _ = await self._plans.ask(plan_id, lambda: self._calls.explain_plan(plan_id))
        except MoeServeError as error:
            return self._own_plan(plan_id, error)
        if not answer.plan.plan_id:
            return no_plan()
        priced = is_priced(answer)
        own = None if answer.plan.moves else self._own(answer.plan.plan_id)
        if own is not None:
            told = pb.ExplainPlanResponse(records=answer.records)
            told.plan.CopyFrom(own[0].plan)
            answer, priced = told, own[1]
        return await self.drawn(answer, priced=priced)

    def _own_plan(self, plan_id: str, error: MoeServeError) -> Json:
        """What the page itself knows, where the controller knows less or cannot be asked."""
        found = self._own(plan_id or self._feed.beginnings.newest)
        if found is not None:
            return self._drawing(*found)()
        if not plan_id and isinstance(error, NotFound):
            return no_plan()
        raise _not_answered(error)

    def _own(self, plan_id: str) -> tuple[pb.ExplainPlanResponse, bool] | None:
        view = self._feed.beginnings.view(plan_id)
        if view is not None:
            return pb.ExplainPlanResponse(plan=view), True
        shown = self._feed.shown
        moves = [m for m in shown.moves if m.plan_id == plan_id] if shown is not None else []
        return (own_plan(plan_id, moves), False) if plan_id and moves else None

    async def drawn(self, answer: pb.ExplainPlanResponse, *, priced: bool) -> Json:
        """Document of a plan that the controller has told."""
        return await asyncio.to_thread(self._drawing(answer, priced))

    def _drawing(self, answer: pb.ExplainPlanResponse, priced: bool) -> Callable[[], Json]:
        # What is remembered is looked up here, on the loop that changes it; the rest may take a
        # thread.
        plan_id = answer.plan.plan_id
        moves = self._feed.history.moves_of(plan_id)
        before = self._feed.beginnings.before(plan_id, begun=has_begun(answer, moves))
        return partial(drawn_plan, answer, moves, before, priced=priced)

    # ---- why

    async def explain(self, _request: web.Request, given: Given) -> web.Response:
        """Answers EXPLAIN."""
        seconds = given["seconds"]
        try:
            answer, age_s = await self._explained.ask(
                seconds, lambda: self._calls.explain(float(seconds))
            )
        except MoeServeError as error:
            if not is_away(error):
                raise _not_answered(error) from None
            last_s = self._explained.last_age_s()
            return answered(
                controller_away(error.message, wall_s=self._feed.wall_s(), age_s=last_s)
            )
        return answered(explanation(answer, wall_s=self._feed.wall_s(), age_s=age_s))

    # ---- experts

    async def experts_csv(self, request: web.Request, given: Given) -> web.Response:
        """Answers EXPERTS_CSV."""
        phase = given["phase"]
        load = self._newest_load()
        etag = (
            f'"{self._feed.life}-{phase}-{self._feed.frame.version}-{self._feed.placement.version}"'
        )
        if self._csv.get(phase, ("", b""))[0] != etag:
            try:
                pairs = of_phase(counts_of(load, "demand"), PhaseChoice(phase))
            except NotFound as error:
                raise of_nothing(error) from None
            holders, _ = await self._holders_now()
            self._csv[phase] = (etag, await asyncio.to_thread(csv_of, pairs, holders))
        return tagged(request, self._csv[phase][1], etag, EXPERTS_CSV.media)

    async def expert(self, request: web.Request, given: Given) -> web.Response:
        """Answers EXPERT."""
        layer, expert = given["layer"], given["expert"]
        holders, shown = await self._holders_now()
        # All of the feed is read after that wait: what is read before and after it is of two
        # windows.
        load = self._newest_load()
        nodes = {} if shown is None else {rank.rank: rank.node for rank in shown.ranks}
        try:
            document = expert_document(load, holders, nodes, layer=layer, expert=expert)
        except NotFound as error:
            raise of_nothing(error) from None
        document["wall_s"] = self._feed.load_wall_s
        document["history"] = self._feed.loads.of(layer, expert)
        document["moves"] = self._feed.history.moves_of_expert(layer, expert, EXPERT_MOVES_MAX)
        return _tagged(request, document)

    def _newest_load(self) -> pb.GetLoadResponse:
        if self._feed.load is None:
            raise self._not_yet("no window has closed yet")
        return self._feed.load

    async def _holders_now(self) -> tuple[Holders, pb.GetPlacementResponse | None]:
        """Who holds what, and the placement that says so."""
        version, shown = self._feed.placement.version, self._feed.shown
        if shown is not None and self._holders[0] != version:
            self._holders = (version, await asyncio.to_thread(holders_of, shown))
        return self._holders[1], shown


def csv_of(pairs: Counts, holders: Holders) -> bytes:
    """All experts as CSV. Raises ApiError 413 above CSV_BYTES_MAX."""
    body = bytearray()
    for part in csv_parts(pairs, listed_ranks(holders)):
        body += part.encode()
        if len(body) > CSV_BYTES_MAX:
            raise ApiError(
                413,
                f"{pairs.size} experts are more than {CSV_BYTES_MAX} bytes of CSV",
                next_step="read /api/v1/frame, which is packed",
            )
    return bytes(body)


def _tagged(request: web.Request, document: Json) -> web.Response:
    """A document with the tag of its bytes."""
    body = msgspec.json.encode(document)
    return tagged(request, body, tag_of(body), JSON)


def _not_answered(error: MoeServeError) -> ApiError:
    """Errors of calls with the page's own token: none of them is the reader's fault but a wrong
    value."""
    if isinstance(error, NotServed):
        return unavailable(error.message, code="not_served", next_step="update the controller")
    if isinstance(error, TooManyReaders):
        return unavailable(error.message, code="too_many_questions")
    if is_refusal(error):
        return unavailable(
            "the controller refuses the page's own token",
            code="page_token_refused",
            next_step="start the page again with a live token of role read",
        )
    return of_question(error)
