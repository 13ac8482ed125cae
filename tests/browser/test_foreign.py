"""What a page of somebody else can do with this one through a person's browser: nothing.

Two ways lead there: a page on another port of this machine that fetches from it, and a name of
somebody else that leads to 127.0.0.1 (DNS rebinding), by which the browser takes both for one site.
Here all is tried that a browser sends by itself; each guard of the edge alone is tested over
sockets.
"""

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from moe_serve.dashboard.server import DashboardServer
from moe_serve.dashboard.settings import DashboardSettings
from tests.browser.cdp import NAMES, Tab, browser_tab
from tests.browser.rig import MARKS, PROGRAM
from tests.fakes.placement_service import FakePlacementService, serve

pytestmark = MARKS

EVIL = "evil.test"
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "PURGE")
SIMPLE = ("GET", "HEAD", "POST")
"""Methods that a browser sends to another origin without asking it first, by OPTIONS."""
OWN_STREAMS = {"WatchPlacement", "WatchLoad", "WatchEvents"}
ASK = """async (urls, methods, mode, headers) => {
  const found = [];
  for (const url of urls) for (const method of methods) {
    const body = method === 'GET' || method === 'HEAD' ? undefined : '{}';
    const answer = await fetch(url, {method, mode, headers, body, credentials: 'include'})
      .then((a) => a.status, () => -1);
    found.push([method, url, answer]);
  }
  return found;
}"""
REFUSED = -1
"""The browser lets the asker see nothing."""


@dataclass
class World:
    """The page, its paths, a page of somebody else on another port, and a tab."""

    service: FakePlacementService
    tab: Tab
    url: URL
    paths: list[str]
    elsewhere: URL

    async def ask(self, base: URL, methods: tuple[str, ...], **how: Any) -> list[list[Any]]:
        """[method, URL, status that the asker sees] of each path and method."""
        urls = [str(base.join(URL(path))) for path in self.paths]
        given = [urls, methods, how.get("mode", "cors"), how.get("headers", {})]
        asked = ", ".join(json.dumps(one) for one in given)
        found: list[list[Any]] = await self.tab.ask(f"({ASK})({asked})")
        assert len(found) == len(urls) * len(methods)
        return found

    def heard(self) -> list[str]:
        """What the controller was asked, but for the page's own streams."""
        return [name for name, _ in self.service.callers if name not in OWN_STREAMS]

    def statuses(self) -> dict[tuple[str, str], set[int]]:
        """Statuses that the browser got from the page, by (method, path)."""
        found: dict[tuple[str, str], set[int]] = {}
        for number, (method, address) in self.tab.sent.items():
            url = URL(address)
            if url.port == self.url.port and number in self.tab.answered:
                found.setdefault((method, url.path), set()).add(self.tab.answered[number])
        return found


async def nothing_here(_request: web.Request) -> web.Response:
    return web.Response(text="<!doctype html><title>elsewhere</title>", content_type="text/html")


@contextlib.asynccontextmanager
async def world() -> AsyncIterator[World]:
    assert PROGRAM is not None
    service = FakePlacementService()
    service.close_window()
    server, address = await serve(service)
    page = DashboardServer(DashboardSettings(admin_address=address))
    other = web.Application()
    other.router.add_get("/", nothing_here)
    runner = web.AppRunner(other)
    try:
        url = URL(await page.start())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        async with (
            aiohttp.ClientSession(trust_env=False) as client,
            client.get(url / "api/v1/openapi.json") as answer,
        ):
            paths = list((await answer.json())["paths"])
        paths += ["/", "/static/app.js", "/api/v1/nothing"]
        async with browser_tab(PROGRAM, f"MAP {EVIL} 127.0.0.1, {NAMES}") as tab:
            await tab.network()
            elsewhere = URL.build(scheme="http", host="127.0.0.1", port=runner.addresses[0][1])
            yield World(service, tab, url, paths, elsewhere)
    finally:
        await runner.cleanup()
        await page.stop()
        await server.stop(0)


async def opened(tab: Tab, url: URL) -> None:
    await tab.open(str(url))
    await tab.until(f"document.readyState === 'complete' && location.origin === '{url.origin()}'")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", EVIL])
async def test_a_page_on_another_port_gets_no_answer_and_moves_nothing(host: str) -> None:
    async with world() as w:
        await opened(w.tab, w.elsewhere.with_host(host))
        found = await w.ask(w.url, METHODS)
        assert [one for one in found if one[2] != REFUSED] == []
        assert [
            one for one in await w.ask(w.url, SIMPLE, mode="no-cors") if one[2] != REFUSED
        ] == []
        marked = {"X-CSRF-Token": "guess", "Content-Type": "application/json"}
        found = await w.ask(w.url, SIMPLE, headers=marked)
        assert [one for one in found if one[2] != REFUSED] == []

        statuses = w.statuses()
        assert {status for some in statuses.values() for status in some} == {403}
        asked = {*SIMPLE, "OPTIONS"}  # the browser sends the others only after its question
        assert set(statuses) == {(method, path) for method in asked for path in w.paths}
        assert w.heard() == []


async def test_a_name_of_somebody_else_that_leads_here_is_refused_on_every_method() -> None:
    async with world() as w:
        here = w.url.with_host(EVIL)
        await opened(w.tab, here)
        assert "answers as" in await w.tab.ask("document.body.innerText")
        found = await w.ask(here, METHODS)
        assert {tuple(one[:2]) for one in found if one[2] == 403} == {
            (method, str(here.join(URL(path)))) for method in METHODS for path in w.paths
        }
        marked = {"X-CSRF-Token": "guess", "Content-Type": "application/json"}
        assert {one[2] for one in await w.ask(here, METHODS, headers=marked)} == {403}
        assert w.heard() == []


async def test_the_page_itself_is_let_in_by_the_same_questions() -> None:
    async with world() as w:
        await opened(w.tab, w.url)
        w.paths.remove("/api/v1/stream")  # has no end
        found = await w.ask(w.url, ("GET",))
        wanted = {"/api/v1/expert": 400, "/api/v1/nothing": 404}
        wanted |= dict.fromkeys(("/api/v1/pause", "/api/v1/resume", "/api/v1/apply"), 405)
        wanted |= dict.fromkeys(("/api/v1/drain", "/api/v1/undrain"), 405)
        statuses = {URL(url).path: status for _, url, status in found}
        assert {path for path, status in statuses.items() if status == 403} == set()
        assert {path: statuses[path] for path in wanted} == wanted
        assert "Explain" in w.heard()
