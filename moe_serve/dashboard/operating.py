"""What an operator may do from the page: log in with a token, then pause, resume, plan, drain.

A service with tokens wants one of role `admin`; it is kept in the page's memory for the session and
sent with each command. A service without tokens takes every local caller as an operator, so a
session needs none there, but it needs the session all the same: without its CSRF token nothing is
commanded.

Responsible for who may command. Must never command with the page's own token, and never log, answer
or name an operator's. Called by `app`.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
import structlog
from aiohttp import web

from moe_serve.dashboard import schemas
from moe_serve.dashboard.answers import ApiError, answered, of_controller, of_question
from moe_serve.dashboard.endpoints import Endpoint, Given, read_body
from moe_serve.dashboard.feed import Feed
from moe_serve.dashboard.kept import Kept
from moe_serve.dashboard.reading import Reading
from moe_serve.dashboard.sessions import LIFE_S, Guesses, Session, Sessions, same
from moe_serve.dashboard.settings import DashboardSettings
from moe_serve.dashboard.upstream import Calls, is_refusal
from moe_serve.documents import schemas as shapes
from moe_serve.documents.views import Json
from moe_serve.errors import MoeServeError
from moe_serve.rpc import placement_pb2 as pb
from moe_serve.rpc.auth import TOKEN_CHARS_MAX

Log = structlog.typing.FilteringBoundLogger
COOKIE = "moe_serve_session"
CSRF_HEADER = "X-CSRF-Token"
TEXT_MAX = 200
"""Characters of a reason, policy or plan id, as the controller takes them."""
_Text = Annotated[str, msgspec.Meta(max_length=TEXT_MAX)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
_COMMAND_ERRORS = (404, 408, 409, 413, 415, 429, 503)


class LoginBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a login. token: needed where the service asks for tokens."""

    token: Annotated[str, msgspec.Meta(max_length=TOKEN_CHARS_MAX)] = ""


class PauseBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a pause."""

    reason: _Text = ""


class NoBody(msgspec.Struct, forbid_unknown_fields=True):
    """An empty object."""


class PlanBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a plan to compute. "" and 0: as configured."""

    policy: _Text = ""
    max_moves: _Count = 0


class ApplyBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a plan to run. validate_only: check it, start nothing."""

    plan_id: Annotated[str, msgspec.Meta(min_length=1, max_length=TEXT_MAX)]
    validate_only: bool = False


class RankBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of what concerns one rank."""

    rank: _Count


def _command(path: str, about: str, body: type[msgspec.Struct], schema: Json) -> Endpoint:
    return Endpoint("POST", path, about, schema, body=body, errors=_COMMAND_ERRORS, csrf=True)


SESSION = Endpoint(
    "GET",
    "/api/v1/session",
    "Whether this browser may command. Its time runs out, so it differs each time and has no ETag.",
    schemas.SESSION,
)
LOGIN = Endpoint(
    "POST",
    "/api/v1/session",
    "Begin to command: checks a token, answers a cookie and the CSRF token of later commands.",
    schemas.SESSION,
    body=LoginBody,
    errors=(408, 413, 415, 429, 503),
)
LOGOUT = Endpoint(
    "DELETE",
    "/api/v1/session",
    "Stop commanding; the cookie is worth nothing after.",
    schemas.SESSION,
    csrf=True,
)
PAUSE = _command(
    "/api/v1/pause", "Stop automatic plans; repairs go on.", PauseBody, schemas.COMMANDED
)
RESUME = _command("/api/v1/resume", "Let automatic plans run again.", NoBody, schemas.COMMANDED)
COMPUTE = _command("/api/v1/plan", "Compute a plan. Nothing moves.", PlanBody, shapes.PLAN)
APPLY = _command("/api/v1/apply", "Run a computed plan.", ApplyBody, schemas.COMMANDED)
DRAIN = _command("/api/v1/drain", "Move everything off a rank.", RankBody, schemas.COMMANDED)
UNDRAIN = _command(
    "/api/v1/undrain", "Let a drained rank hold replicas again.", RankBody, schemas.COMMANDED
)


class Operating:
    """Handlers of sessions and commands. log: one line for each login and command, without
    tokens."""

    def __init__(
        self,
        feed: Feed,
        settings: DashboardSettings,
        calls: Calls,
        reading: Reading,
        sessions: Sessions,
        guesses: Guesses,
        kept: tuple[Kept, ...],
        log: Log,
    ) -> None:
        self._feed = feed
        self._settings = settings
        self._calls = calls
        self._reading = reading
        self._sessions = sessions
        self._guesses = guesses
        self._kept = kept
        self._log = log

    # ---- sessions

    async def session(self, request: web.Request, _given: Given) -> web.Response:
        """Answers SESSION."""
        return answered(self._said(self._session(request)))

    async def login(self, request: web.Request, _given: Given) -> web.Response:
        """Answers LOGIN."""
        body: LoginBody = await self._body(request, LOGIN)
        token = await self._checked(body.token) if self._needs_token else await self._unguarded()
        old = self._session(request)
        if old is not None:
            self._sessions.end(old)
        session = self._sessions.begin(token)
        self._log.info("operator logged in", session=session.number)
        response = answered(self._said(session))
        response.set_cookie(
            cookie_name(request),
            session.session_id,
            path="/api",
            max_age=int(LIFE_S),
            httponly=True,
            samesite="Strict",
            secure=request.secure,
        )
        return response

    async def logout(self, request: web.Request, _given: Given) -> web.Response:
        """Answers LOGOUT."""
        session = self._operator(request)
        self._sessions.end(session)
        self._log.info("operator logged out", session=session.number)
        response = answered(self._said(None))
        response.del_cookie(
            cookie_name(request),
            path="/api",
            httponly=True,
            samesite="Strict",
            secure=request.secure,
        )
        return response

    @property
    def _needs_token(self) -> bool:
        return bool(self._settings.token)

    async def _checked(self, token: str) -> str:
        """The token, once the controller has taken it. Raises ApiError."""
        wait_s = self._guesses.wait_s()
        if wait_s > 0:
            raise ApiError(
                429,
                "too many logins have failed",
                headers={"Retry-After": str(math.ceil(wait_s))},
            )
        if not token:
            raise ApiError(400, "token must be given", field="token")
        if not (token.isascii() and token.isprintable()) or " " in token:
            raise _wrong_token()
        begun_s = self._guesses.begin()
        try:
            await self._calls.check_operator(token)
        except MoeServeError as error:
            if is_refusal(error):
                self._log.warning("operator's login refused", reason=error.code)
                raise _wrong_token() from None
            self._guesses.forgive(begun_s)
            raise of_question(error) from None
        except BaseException:
            self._guesses.forgive(begun_s)  # the asker left: nobody has learnt anything
            raise
        self._guesses.forgive(begun_s)
        return token

    async def _unguarded(self) -> str:
        """No token, once a service without tokens has taken that. Raises ApiError."""
        try:
            await self._calls.check_operator("")
        except MoeServeError as error:
            if is_refusal(error):
                raise ApiError(
                    403,
                    "the service asks for tokens, and this page was started without",
                    code="not_operator",
                    next_step="start the page again; until then use the command line",
                ) from None
            raise of_question(error) from None
        return ""

    def _said(self, session: Session | None) -> Json:
        said: Json = {"operator": session is not None, "needs_token": self._needs_token}
        if session is not None:
            said["csrf"] = session.csrf
            said["expires_in_s"] = session.ends_in_s(self._sessions.now_s())
        return said

    def _session(self, request: web.Request) -> Session | None:
        given = request.cookies.get(cookie_name(request), "")
        return self._sessions.find(given) if given else None

    # ---- commands

    async def pause(self, request: web.Request, _given: Given) -> web.Response:
        """Answers PAUSE."""
        session, body = await self._ordered(request, PAUSE)
        await self._told(session, "pause", self._calls.pause(session.token, body.reason))
        return _done("automatic plans are paused; repairs go on")

    async def resume(self, request: web.Request, _given: Given) -> web.Response:
        """Answers RESUME."""
        session, _ = await self._ordered(request, RESUME)
        await self._told(session, "resume", self._calls.resume(session.token))
        return _done("automatic plans run again")

    async def compute(self, request: web.Request, _given: Given) -> web.Response:
        """Answers COMPUTE."""
        session, body = await self._ordered(request, COMPUTE)
        call = self._calls.compute_plan(session.token, body.policy, body.max_moves)
        plan: pb.PlanView = await self._told(session, "plan", call)
        self._feed.beginnings.computed(plan)
        return answered(await self._reading.drawn(pb.ExplainPlanResponse(plan=plan), priced=True))

    async def apply(self, request: web.Request, _given: Given) -> web.Response:
        """Answers APPLY."""
        session, body = await self._ordered(request, APPLY)
        call = self._calls.apply_plan(session.token, body.plan_id, body.validate_only)
        return _done(await self._told(session, "apply", call), body.plan_id)

    async def drain(self, request: web.Request, _given: Given) -> web.Response:
        """Answers DRAIN."""
        session, body = await self._ordered(request, DRAIN)
        answer: pb.DrainRankResponse = await self._told(
            session, "drain", self._calls.drain(session.token, body.rank), rank=body.rank
        )
        return _done(answer.message, answer.plan_id)

    async def undrain(self, request: web.Request, _given: Given) -> web.Response:
        """Answers UNDRAIN."""
        session, body = await self._ordered(request, UNDRAIN)
        call = self._calls.undrain(session.token, body.rank)
        await self._told(session, "undrain", call, rank=body.rank)
        return _done(f"rank {body.rank} may hold replicas again")

    async def _ordered(self, request: web.Request, endpoint: Endpoint) -> tuple[Session, Any]:
        """Session and body of a command that may be given. Nothing is read before that is known."""
        session = self._operator(request)
        return session, await self._body(request, endpoint)

    def _operator(self, request: web.Request) -> Session:
        """The session of a request that shows its CSRF token too. Raises ApiError."""
        session = self._session(request)
        if session is None:
            raise ApiError(
                403,
                "this page is read-only until an operator has logged in",
                code="not_operator",
                next_step="POST /api/v1/session",
            )
        if not same(session.csrf, request.headers.get(CSRF_HEADER, "")):
            raise ApiError(
                403,
                f"{CSRF_HEADER} is missing or not that of this session",
                code="csrf",
                next_step="read it from GET /api/v1/session",
            )
        return session

    async def _body(self, request: web.Request, endpoint: Endpoint) -> Any:
        assert endpoint.body is not None, endpoint.path
        return await read_body(request, endpoint.body, self._settings.body_timeout_s)

    async def _told(self, session: Session, command: str, call: Any, **more: int) -> Any:
        """The controller's answer, with a line in the log. Raises ApiError."""
        result = "CANCELLED"
        try:
            answer = await call
            result = "OK"
        except MoeServeError as error:
            result = error.code
            if is_refusal(error):
                self._sessions.end(session)  # its token is live no more
            raise of_controller(error) from None
        finally:
            for kept in self._kept:
                kept.forget()
            self._log.info(
                "operator's command", command=command, session=session.number, result=result, **more
            )
        return answer


def cookie_name(request: web.Request) -> str:
    """Name of the session's cookie: of this port, since browsers keep one jar for all ports of a
    host."""
    return f"{COOKIE}_{request.host.rpartition(':')[2]}"


def _wrong_token() -> ApiError:
    return ApiError(
        403,
        "the controller does not take this token for an operator's",
        code="wrong_token",
        next_step="use a live token of role admin",
    )


def _done(message: str, plan_id: str = "") -> web.Response:
    return answered({"message": message, "plan_id": plan_id or None})
