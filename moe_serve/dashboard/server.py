"""The page as something that starts and stops: a port, the application, the feed.

`DashboardServer` lives in a running event loop; `DashboardThread` gives it a loop and a thread of
its own, for a process whose main thread belongs to somebody else.

Responsible for binding and for ending everything it began. Must never fail halfway: a taken port
leaves nothing running. Called by `actor`, the demo and tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import structlog
from aiohttp import web

from moe_serve.dashboard.app import Page, allowed_hosts, load_assets
from moe_serve.dashboard.feed import Feed
from moe_serve.dashboard.settings import DashboardSettings
from moe_serve.errors import StartRefused

BACKLOG = 64
SHUTDOWN_TIMEOUT_S = 2.0
LINGER_S = 1.0
"""Time for the rest of a body that nobody reads, before its connection is closed."""


class DashboardServer:
    """The page on one port. log: None is stderr. clock_s: by which sessions age."""

    def __init__(
        self,
        settings: DashboardSettings,
        *,
        log: structlog.typing.FilteringBoundLogger | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._log = log
        self._clock_s = clock_s
        self._runner: web.AppRunner | None = None
        self.feed: Feed | None = None
        """What the page knows, None before `start`."""
        self.url = ""
        """Where a browser finds the page, "" before `start`."""

    async def start(self) -> str:
        """Bind, serve, begin to watch the controller; returns the URL. The controller need not be
        there yet. Raises StartRefused."""
        assets = load_assets()
        bound = bind(self._settings.host, self._settings.port)
        port = int(bound.getsockname()[1])
        self.feed = Feed(self._settings)
        page = Page(self.feed, self._settings, assets, log=self._log, clock_s=self._clock_s)
        hosts = allowed_hosts(self._settings.host, port)
        self._runner = web.AppRunner(
            page.application(hosts),
            access_log=None,
            logger=_silent(),
            shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            lingering_time=LINGER_S,
        )
        await self._runner.setup()
        await web.SockSite(self._runner, bound, backlog=BACKLOG).start()
        await self.feed.start()
        name = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
        self.url = f"http://{name}:{port}/"
        return self.url

    async def stop(self) -> None:
        """Close the port, every stream and the connection to the controller."""
        if self.feed is not None:
            await self.feed.stop()
        if self._runner is not None:
            await self._runner.cleanup()


def _silent() -> logging.Logger:
    """The web server's own log, which quotes malformed headers: a cookie may be among them. What
    our handlers do wrong is told by `edge`."""
    log = logging.Logger("page")  # not in the tree: nothing of it is passed on
    log.addHandler(logging.NullHandler())
    return log


def bind(host: str, port: int) -> socket.socket:
    """A bound, not yet listening socket. Raises StartRefused where the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise StartRefused(
            f"the page cannot bind {host}:{port}: {error.strerror}; "
            "choose another port, or 0 for any free one"
        ) from error
    bound.setblocking(False)
    return bound


class DashboardThread:
    """A DashboardServer in a daemon thread with its own loop. `start` may be called again."""

    def __init__(self, settings: DashboardSettings) -> None:
        self._settings = settings
        self._started: Future[str] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="dashboard", daemon=True)
        self._thread.start()

    def url(self, timeout_s: float = 30.0) -> str:
        """URL of the page, once it is served. Raises StartRefused, TimeoutError."""
        return self._started.result(timeout_s)

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the page and its thread."""
        if self._loop is not None and self._stop is not None:
            # A page that did not start ends its loop by itself, at any moment.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = DashboardServer(self._settings)
        try:
            url = await server.start()
        except Exception as error:
            self._started.set_exception(error)
            return
        self._started.set_result(url)
        await self._stop.wait()
        await server.stop()
