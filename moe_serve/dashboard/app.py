"""The page's HTTP surface: one page, its assets, read-only JSON, one event stream.

    GET /                        the page
    GET /static/NAME             its assets, read once at start: no path of a request reaches a disk
    GET /api/v1/frame            load of the newest window (ETag)
    GET /api/v1/placement        who is where, with moves (ETag)
    GET /api/v1/status           how fresh both are
    GET /api/v1/history          imbalance by window, plans
    GET /api/v1/events?after=N   decisions after number N
    GET /api/v1/stream           server-sent events (`stream`)

Responsible for the edge: hosts, methods, headers, limits. Must never change anything anywhere.
Called by `server`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from importlib.resources import files
from importlib.resources.abc import Traversable

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from moe_serve.dashboard.feed import Feed, Versioned
from moe_serve.dashboard.settings import DashboardSettings
from moe_serve.dashboard.stream import record_cursor, updates
from moe_serve.errors import StartRefused

_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
    ".json": "application/json",
}
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
RETRY_AFTER_S = 5
_DIGITS_MAX = 18


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


def allowed_hosts(host: str, port: int) -> frozenset[str]:
    """Values of the Host header that name what was bound: the address and `localhost`.

    >>> sorted(allowed_hosts("127.0.0.1", 8266))
    ['127.0.0.1:8266', 'localhost:8266']
    """
    name = f"[{host}]" if ":" in host else host
    return frozenset({f"{name}:{port}", f"localhost:{port}"})


def guard(hosts: frozenset[str]) -> Middleware:
    """Middleware: foreign Host or Origin 403 (a page elsewhere must not read this one through a
    name of its own), any method but GET and HEAD 405. Guards every path, known or not.
    """
    origins = frozenset(f"http://{host}" for host in hosts)
    here = ", ".join(sorted(hosts))

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.headers.getall("Host", []) not in [[host] for host in hosts]:
            raise web.HTTPForbidden(
                text=f"this page answers as {here} only; forward the same port number\n"
            )
        origin = request.headers.get("Origin")
        if origin is not None and origin not in origins:
            raise web.HTTPForbidden(text="requests from other origins are refused\n")
        if request.method not in {"GET", "HEAD"}:
            raise web.HTTPMethodNotAllowed(
                request.method, ["GET", "HEAD"], text="this page is read-only\n"
            )
        return await handler(request)

    return check


async def _add_headers(_request: web.Request, response: web.StreamResponse) -> None:
    # On prepare, not in a middleware: streams and errors get them too.
    response.headers.update(SECURITY_HEADERS)
    response.headers.setdefault("Cache-Control", "no-store")


class Page:
    """Handlers over one feed. `hosts`: what Host may say."""

    def __init__(self, feed: Feed, settings: DashboardSettings, assets: dict[str, Asset]) -> None:
        self._feed = feed
        self._settings = settings
        self._assets = assets
        self._clients: set[asyncio.Task[object]] = set()

    def application(self, hosts: frozenset[str]) -> web.Application:
        """The application that answers for `hosts`."""
        app = web.Application(middlewares=[guard(hosts)], client_max_size=1024)
        app.on_response_prepare.append(_add_headers)
        app.on_shutdown.append(self._close)
        app.router.add_get("/", self._index)
        app.router.add_get("/static/{name:.+}", self._static)
        app.router.add_get("/api/v1/frame", self._frame)
        app.router.add_get("/api/v1/placement", self._placement)
        app.router.add_get("/api/v1/status", self._status)
        app.router.add_get("/api/v1/history", self._history)
        app.router.add_get("/api/v1/events", self._events)
        app.router.add_get("/api/v1/stream", self._stream)
        return app

    async def _index(self, request: web.Request) -> web.Response:
        return self._asset(request, "index.html")

    async def _static(self, request: web.Request) -> web.Response:
        return self._asset(request, request.match_info["name"])

    def _asset(self, request: web.Request, name: str) -> web.Response:
        asset = self._assets.get(name)
        if asset is None:
            raise web.HTTPNotFound(text="no such file\n")
        return _tagged(request, asset.body, asset.etag, asset.content_type)

    async def _frame(self, request: web.Request) -> web.Response:
        return self._document(request, self._feed.frame, "no window has closed yet")

    async def _placement(self, request: web.Request) -> web.Response:
        if not self._feed.placement.version:
            return self._document(request, self._feed.placement, "nothing heard yet")
        moves = msgspec.json.encode(self._feed.history.moves_after(0))
        body = self._feed.placement.body[:-1] + b',"moves":' + moves + b"}"
        version = f"{self._feed.placement.version}-{self._feed.history.moves_version}"
        return _tagged(request, body, f'"{self._feed.life}-{version}"', "application/json")

    def _document(self, request: web.Request, document: Versioned, why_not: str) -> web.Response:
        if not document.version:
            raise web.HTTPServiceUnavailable(
                text=f"{why_not}: {self._feed.status_document()['message'] or 'try again'}\n",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        etag = f'"{self._feed.life}-{document.version}"'
        return _tagged(request, document.body, etag, "application/json")

    async def _status(self, _request: web.Request) -> web.Response:
        return _json(msgspec.json.encode(self._feed.status_document()))

    async def _history(self, _request: web.Request) -> web.Response:
        history = self._feed.history
        return _json(
            msgspec.json.encode({"points": list(history.points), "marks": list(history.marks)})
        )

    async def _events(self, request: web.Request) -> web.Response:
        after = request.query.get("after", "0")
        if not (after.isascii() and after.isdigit() and len(after) <= _DIGITS_MAX):
            raise web.HTTPBadRequest(text="after must be a number of a record, 0 or more\n")
        history = self._feed.history
        return _json(
            msgspec.json.encode(
                {
                    "life": self._feed.life,
                    "last": history.last_record,
                    "records": history.records_after(int(after)),
                }
            )
        )

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        if len(self._clients) >= self._settings.clients_max:
            raise web.HTTPServiceUnavailable(
                text=f"{self._settings.clients_max} browsers are watching already; close one\n",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        task = asyncio.current_task()
        assert task is not None, "handlers run in tasks"
        self._clients.add(task)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
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


def _tagged(request: web.Request, body: bytes, etag: str, content_type: str) -> web.Response:
    headers = {"ETag": etag, "Cache-Control": "no-cache"}
    wanted = [tag.strip() for tag in request.headers.get("If-None-Match", "").split(",")]
    if etag in wanted or f"W/{etag}" in wanted:
        return web.Response(status=304, headers=headers)
    charset = "utf-8" if content_type != "application/json" else None
    return web.Response(body=body, content_type=content_type, charset=charset, headers=headers)


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
