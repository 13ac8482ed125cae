"""A page to look at: fake controller, the real page server, a browser tab, and what they show."""

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import pytest
from matplotlib.image import imread

from moe_serve.dashboard.server import DashboardServer
from moe_serve.dashboard.settings import DashboardSettings
from tests.browser.cdp import PageError, Tab, browser_tab, chromium
from tests.fakes.placement_service import FakePlacementService, Script, serve

PROGRAM = chromium()
# One loop for all tests of a module: gRPC serves every loop of a process with one poller, and a
# loop that has been closed disturbs it.
MARKS = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        PROGRAM is None, reason="chromium is not installed: the page is not looked at"
    ),
]

DRAWN = "Number(document.querySelector('.map canvas')?.dataset.window)"
WORTH = "document.documentElement.dataset.worth"
# One number for all pixels of the map, so that two pictures can be compared.
PIXELS = """(() => {
  const c = document.querySelector('.map canvas');
  const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
  let h = 0; for (let i = 0; i < d.length; i++) h = (h * 31 + d[i]) | 0; return h; })()"""
PAINTED = "new Promise((ok) => requestAnimationFrame(() => requestAnimationFrame(() => ok(true))))"
SPOKEN = "document.querySelector('[data-figure=spoken]').textContent"


class Page:
    """A tab that shows the page, and what a person does there."""

    def __init__(self, tab: Tab, url: str) -> None:
        self.tab, self.url = tab, url

    async def text(self, selector: str) -> str:
        """What a person reads there, "" where there is no such thing."""
        return str(
            await self.tab.ask(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        )

    async def click(self, selector: str) -> None:
        """Wait for an element and click it."""
        found = f"document.querySelector({json.dumps(selector)})"
        await self.tab.until(f"({found} && !{found}.disabled ? ({found}.click(), true) : false)")

    async def press_button(self, words: str, inside: str = "body") -> None:
        """Click the button that says so, once it is there."""
        buttons = f"[...document.querySelectorAll({json.dumps(inside + ' button')})]"
        await self.tab.until(
            f"(() => {{ const b = {buttons}.find((x) => x.innerText.trim() === {json.dumps(words)}"
            " && !x.disabled); b?.click(); return b !== undefined; })()"
        )

    async def go(self, fragment: str) -> None:
        """Follow a link of the page."""
        await self.tab.ask(f"location.hash = {json.dumps(fragment)}")
        await self.tab.ask(PAINTED)

    async def api(self, path: str) -> Any:
        """What the page's server says itself."""
        async with aiohttp.ClientSession() as session, session.get(self.url + path) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()


class Rig(Page):
    """Fake controller, page, tab."""

    def __init__(self, service: FakePlacementService, tab: Tab, url: str, server: Any) -> None:
        super().__init__(tab, url)
        self.service, self.server = service, server
        self.expected: set[str] = set()
        """Parts of errors that the browser may report: answers of the API that are refusals."""

    async def window(self) -> None:
        """Close a window and wait until it is painted."""
        self.service.close_window()
        shown = f"Number(document.documentElement.dataset.window) === {self.service.window}"
        no_map = "document.querySelector('.map canvas') === null"
        await self.tab.until(f"{shown} && ({no_map} || {DRAWN} === {self.service.window})")
        await self.tab.ask(PAINTED)

    async def come_alive(self, timeout_s: float = 60.0) -> None:
        """Close windows until the page shows one as live."""
        async with asyncio.timeout(timeout_s):
            while True:
                self.service.close_window()
                with contextlib.suppress(PageError):
                    await self.tab.until(f"{WORTH} === 'live' && {SEEN}", 0.5)
                    return


# Views without the map are alive once they have figures.
SEEN = f"(document.querySelector('.map canvas') === null || {DRAWN} > 0)"


@contextlib.asynccontextmanager
async def rig(
    script: Script | None = None,
    fragment: str = "",
    *,
    tokens: dict[str, str] | None = None,
    size: tuple[int, int] = (1440, 1000),
    theme: str = "light",
    **settings: Any,
) -> AsyncIterator[Rig]:
    """Everything up and alive; afterwards the browser must have reported no error."""
    assert PROGRAM is not None
    service = FakePlacementService(script or Script())
    service.tokens = tokens or {}
    server, address = await serve(service)
    page = DashboardServer(
        DashboardSettings(
            admin_address=address, status_interval_s=0.2, publish_interval_s=0.05, **settings
        )
    )
    try:
        url = await page.start()
        async with browser_tab(PROGRAM) as tab:
            made = Rig(service, tab, url, server)
            await tab.theme(theme)
            await tab.open(url + fragment, *size)
            await made.come_alive()
            yield made
            errors = [e for e in tab.errors if not any(part in e for part in made.expected)]
            assert errors == [], errors
    finally:
        await page.stop()
        await server.stop(0)


def colours(png: bytes) -> int:
    """Number of distinct colours of a PNG."""
    pixels = imread(io.BytesIO(png), format="png")
    return len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0))
