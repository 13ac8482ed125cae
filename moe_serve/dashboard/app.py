"""The page's HTTP surface: one page, its assets, the API under /api/v1, one event stream.

    GET /                  the page
    GET /static/NAME       its assets, read once at start: no path of a request reaches a disk
    /api/v1/...            `reading`, `operating`; GET /api/v1/openapi.json describes all of it
    GET /api/v1/stream     server-sent events (`stream`)

Responsible for putting handlers behind paths. Must never answer a path that the OpenAPI document
does not name. Called by `server`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Awaitable, Callable
from importlib.resources import files
from importlib.resources.abc import Traversable

import msgspec
import structlog
from aiohttp import web

import placement
from moe_serve.dashboard import operating, reading, schemas
from moe_serve.dashboard.answers import (
    JSON,
    RETRY_AFTER_S,
    SECURITY_HEADERS,
    ApiError,
    add_headers,
    tag_of,
    tagged,
)
from moe_serve.dashboard.edge import allowed_hosts, guard, shape
from moe_serve.dashboard.endpoints import BODY_BYTES_MAX, Endpoint, Given, Handler
from moe_serve.dashboard.feed import Feed
from moe_serve.dashboard.kept import Kept
from moe_serve.dashboard.openapi import ANY_COOKIE, document
from moe_serve.dashboard.operating import Operating
from moe_serve.dashboard.reading import Reading
from moe_serve.dashboard.sessions import Guesses, Sessions
from moe_serve.dashboard.settings import DashboardSettings
from moe_serve.dashboard.stream import record_cursor, updates
from moe_serve.dashboard.upstream import Calls
from moe_serve.errors import StartRefused
from moe_serve.telemetry.logs import make_logger

__all__ = ["RETRY_AFTER_S", "SECURITY_HEADERS", "Page", "allowed_hosts", "guard", "load_assets"]

_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
    ".json": JSON,
}
STREAM = Endpoint(
    "GET",
    "/api/v1/stream",
    "Server-sent events without end: status, placement, frame (whole documents, newest only), move "
    "and record (lists of what is new). A record's id goes back as Last-Event-ID.",
    None,
    media="text/event-stream",
    errors=(503,),
)
OPENAPI = Endpoint("GET", "/api/v1/openapi.json", "This document.", schemas.OPENAPI, tagged=True)


class Asset(msgspec.Struct, frozen=True):
    """One file of the page."""

    body: bytes
    content_type: str
    etag: str


def load_assets() -> dict[str, Asset]:
    """Every file of the static folder by its path below it. Raises StartRefused where the page is
    missing from the installation."""
    root = files("moe_serve.dashboard") / "static"
    found: dict[str, Asset] = {}
    if root.is_dir():
        _collect(root, "", found)
    if "index.html" not in found:
        raise StartRefused("the page's files are missing; install the moe-serve wheel again")
    return found


def _collect(folder: Traversable, prefix: str, found: dict[str, Asset]) -> None:
    for entry in folder.iterdir():
        name = f"{prefix}{entry.name}"
        kind = _TYPES.get(f".{name.rpartition('.')[2]}")
        if entry.is_dir():
            _collect(entry, f"{name}/", found)
        elif kind is not None:
            body = entry.read_bytes()
            found[name] = Asset(body, kind, f'"{hashlib.sha256(body).hexdigest()[:20]}"')


class Page:
    """Handlers over one feed. log: where logins, commands and faults are told; None is stderr.
    clock_s: monotonic seconds, by which sessions and kept answers age."""

    def __init__(
        self,
        feed: Feed,
        settings: DashboardSettings,
        assets: dict[str, Asset],
        *,
        log: structlog.typing.FilteringBoundLogger | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._feed = feed
        self._settings = settings
        self._assets = assets
        self._log = make_logger(part="page", node=settings.node) if log is None else log
        self._clients: set[asyncio.Task[object]] = set()
        self._calls = Calls(settings)
        explained = Kept(clock_s, settings.answers_kept_s)
        plans = Kept(clock_s, settings.answers_kept_s)
        self._kept = (explained, plans)
        self._reading = Reading(feed, self._calls, explained, plans)
        self._operating = Operating(
            feed,
            settings,
            self._calls,
            self._reading,
            Sessions(clock_s),
            Guesses(clock_s),
            self._kept,
            self._log,
        )
        self._openapi = msgspec.json.encode(
            document([endpoint for endpoint, _ in self.served()], placement.__version__)
        )

    def served(self) -> list[tuple[Endpoint, Handler]]:
        """Every endpoint of the API with its handler."""
        read, operate = self._reading, self._operating
        return [
            (reading.FRAME, read.frame),
            (reading.PLACEMENT, read.placement),
            (reading.STATUS, read.status),
            (reading.HISTORY, read.history),
            (reading.EVENTS, read.events),
            (reading.MOVES, read.moves),
            (reading.PLAN, read.plan),
            (reading.EXPLAIN, read.explain),
            (reading.EXPERTS_CSV, read.experts_csv),
            (reading.EXPERT, read.expert),
            (operating.SESSION, operate.session),
            (operating.LOGIN, operate.login),
            (operating.LOGOUT, operate.logout),
            (operating.PAUSE, operate.pause),
            (operating.RESUME, operate.resume),
            (operating.COMPUTE, operate.compute),
            (operating.APPLY, operate.apply),
            (operating.DRAIN, operate.drain),
            (operating.UNDRAIN, operate.undrain),
            (STREAM, self._stream),
            (OPENAPI, self._described),
        ]

    def application(self, hosts: frozenset[str]) -> web.Application:
        """The application that answers for `hosts`, the values that Host may have."""
        app = web.Application(
            middlewares=[shape(self._log), guard(hosts)], client_max_size=BODY_BYTES_MAX
        )
        app.on_response_prepare.append(add_headers)
        app.on_shutdown.append(self._close)
        app.router.add_get("/", self._index)
        app.router.add_get("/static/{name:.+}", self._static)
        for endpoint, handler in self.served():
            if endpoint.method == "GET":
                # A HEAD of the stream would never end.
                app.router.add_get(
                    endpoint.path, _checked(endpoint, handler), allow_head=endpoint is not STREAM
                )
            else:
                app.router.add_route(endpoint.method, endpoint.path, _checked(endpoint, handler))
        return app

    async def _index(self, request: web.Request) -> web.Response:
        return self._asset(request, "index.html")

    async def _static(self, request: web.Request) -> web.Response:
        return self._asset(request, request.match_info["name"])

    def _asset(self, request: web.Request, name: str) -> web.Response:
        asset = self._assets.get(name)
        if asset is None:
            raise ApiError(404, "no such file", next_step="open /")
        return tagged(request, asset.body, asset.etag, asset.content_type)

    async def _described(self, request: web.Request, _given: Given) -> web.Response:
        body = self._openapi.replace(ANY_COOKIE.encode(), operating.cookie_name(request).encode())
        return tagged(request, body, tag_of(body), JSON)

    async def _stream(self, request: web.Request, _given: Given) -> web.StreamResponse:
        if len(self._clients) >= self._settings.clients_max:
            raise ApiError(
                503,
                f"{self._settings.clients_max} browsers are watching already",
                code="too_many_streams",
                next_step="close one",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        task = asyncio.current_task()
        assert task is not None, "handlers run in tasks"
        self._clients.add(task)
        response = web.StreamResponse(
            headers={"Content-Type": STREAM.media, "X-Accel-Buffering": "no"}
        )
        try:
            await response.prepare(request)
            await self._send(request, response)
        finally:
            self._clients.discard(task)
        return response

    async def _send(self, request: web.Request, response: web.StreamResponse) -> None:
        after = record_cursor(self._feed, request.headers.get("Last-Event-ID", ""))
        # A browser that left, or takes nothing, ends its own stream and nothing else.
        with contextlib.suppress(ConnectionError, TimeoutError):
            await response.write(b"retry: 2000\n\n")
            async with contextlib.aclosing(updates(self._feed, after)) as batches:
                async for batch in batches:
                    data = b"".join(event.encoded() for event in batch)
                    async with asyncio.timeout(self._settings.write_timeout_s):
                        await response.write(data)

    async def _close(self, _app: web.Application) -> None:
        for task in list(self._clients):
            task.cancel()
        for kept in self._kept:
            kept.close()
        await self._calls.close()


def _checked(
    endpoint: Endpoint, handler: Handler
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(request: web.Request) -> web.StreamResponse:
        endpoint.check_accept(request)
        return await handler(request, endpoint.given(request))

    return answer
