"""The page before a fake controller, or before none, on loopback ports."""

import asyncio
import contextlib
import io
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import aiohttp
from aiohttp import web

from moe_serve.dashboard.app import Page, load_assets
from moe_serve.dashboard.feed import Feed
from moe_serve.dashboard.server import DashboardServer, bind
from moe_serve.dashboard.settings import DashboardSettings
from moe_serve.telemetry.logs import make_logger
from tests.fakes.placement_service import FakePlacementService, Script, serve

WAIT_S = 30.0


class Rig:
    """A fake controller, the page before it, a client."""

    def __init__(self, **settings: Any) -> None:
        self.service = FakePlacementService(Script(window_s=0.2))
        self.settings = {"publish_interval_s": 0.02, "status_interval_s": 0.1, **settings}
        self.lines = io.StringIO()
        """What the page logs."""
        self.later_s = 0.0
        """By which the page's clock of sessions is ahead."""

    async def start(self) -> None:
        self.server, self.address = await serve(self.service)
        self.chosen = DashboardSettings(
            admin_address=self.address, backoff_min_s=0.05, **self.settings
        )
        self.page = DashboardServer(
            self.chosen,
            log=make_logger(self.lines, part="page"),
            clock_s=lambda: time.monotonic() + self.later_s,
        )
        self.url = await self.page.start()
        self.client = aiohttp.ClientSession(trust_env=False)

    async def stop(self) -> None:
        try:
            await self.client.close()
            await self.page.stop()
        finally:
            await self.server.stop(0)

    async def get(self, path: str, **more: Any) -> tuple[int, Mapping[str, str], bytes]:
        async with self.client.get(self.url + path, **more) as answer:
            return answer.status, answer.headers, await answer.read()

    async def json(self, path: str) -> Any:
        status, _, body = await self.get(path)
        assert status == 200, body
        return json.loads(body)

    async def until(self, path: str, wanted: Callable[[Any], bool]) -> Any:
        """Ask a path until its JSON is as wanted."""
        last: Any = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                while True:
                    status, _, body = await self.get(path)
                    last = json.loads(body) if status == 200 else body
                    if status == 200 and wanted(last):
                        return last
                    await asyncio.sleep(0.02)
        raise AssertionError(f"{path} was last {last!r}")

    def stream(self, **headers: str) -> Any:
        return self.client.get(self.url + "api/v1/stream", headers=headers)


@contextlib.asynccontextmanager
async def rig(**settings: Any) -> AsyncIterator[Rig]:
    made = Rig(**settings)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


@contextlib.asynccontextmanager
async def lone_page(**settings: Any) -> AsyncIterator[tuple[Feed, int]]:
    """The page without a controller; documents are put into its feed by hand."""
    bound = bind("127.0.0.1", 0)
    port = int(bound.getsockname()[1])
    chosen = DashboardSettings(admin_address="127.0.0.1:9", status_interval_s=0.1, **settings)
    feed = Feed(chosen)
    page = Page(feed, chosen, load_assets())
    runner = web.AppRunner(page.application(frozenset({f"127.0.0.1:{port}"})), shutdown_timeout=1.0)
    await runner.setup()
    await web.SockSite(runner, bound).start()
    await feed.start()
    try:
        yield feed, port
    finally:
        await feed.stop()
        await runner.cleanup()
