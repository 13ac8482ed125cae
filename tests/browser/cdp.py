"""Headless Chromium over the DevTools protocol: open a page, ask it things, take its picture.

Small on purpose: one browser, one tab, a WebSocket of aiohttp. The browser gets a profile that is
thrown away, no proxy and no way to fetch anything by itself.
"""

import asyncio
import base64
import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--mute-audio",
    "--no-proxy-server",
    "--remote-debugging-port=0",
)
NAMES = "MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost"
"""How names are resolved: none that is not of this machine."""
START_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 60.0


def chromium() -> str | None:
    """Path of Chromium, None where it is not installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class PageError(AssertionError):
    """The page threw, or the protocol answered with an error."""


class Tab:
    """One tab. `errors` collects what the page threw and what it wrote as an error; `sent` and
    `answered`, once `network` was called, each request as (method, URL) and its status, by the
    browser's id, also where no script may see it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._next = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self.errors: list[str] = []
        self.sent: dict[str, tuple[str, str]] = {}
        self.answered: dict[str, int] = {}
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            data = json.loads(message.data)
            waiter = self._waiting.pop(data.get("id", 0), None)
            if waiter is not None and not waiter.done():
                waiter.set_result(data)
            elif data.get("method") == "Runtime.exceptionThrown":
                details = data["params"]["exceptionDetails"]
                thrown = details.get("exception", {}).get("description", details["text"])
                self.errors.append(thrown)
            elif data.get("method") == "Network.requestWillBeSent":
                request = data["params"]["request"]
                self.sent[data["params"]["requestId"]] = request["method"], request["url"]
            elif data.get("method") == "Network.responseReceivedExtraInfo":
                self.answered[data["params"]["requestId"]] = data["params"]["statusCode"]
            elif data.get("method") == "Log.entryAdded":
                entry = data["params"]["entry"]
                if entry["level"] == "error":
                    self.errors.append(f"{entry['text']} {entry.get('url', '')}")

    async def call(self, method: str, **params: Any) -> Any:
        """One command of the protocol; returns its result. Raises PageError, TimeoutError."""
        self._next += 1
        number = self._next
        waiter = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        answer = await asyncio.wait_for(waiter, CALL_TIMEOUT_S)
        if "error" in answer:
            raise PageError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    async def open(self, url: str, width: int = 1440, height: int = 1000, scale: float = 1) -> None:
        """Show a page in a window of that size, in CSS pixels."""
        await self.call("Page.enable")
        await self.call("Runtime.enable")
        await self.call("Log.enable")
        await self.resize(width, height, scale)
        await self.call("Page.navigate", url=url)

    async def network(self) -> None:
        """Note requests and answers from here on."""
        await self.call("Network.enable")

    async def resize(self, width: int, height: int, scale: float = 1) -> None:
        """Change the window."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    async def theme(self, name: str) -> None:
        """`light` or `dark`, as the system would say."""
        feature = {"name": "prefers-color-scheme", "value": name}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def ask(self, expression: str) -> Any:
        """Value of a JavaScript expression, promises awaited. Raises PageError."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise PageError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 30.0) -> Any:
        """Ask until the answer is true; returns it. Raises PageError naming the expression."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                value = await self.ask(expression)
            except PageError:
                # Between two documents there is nothing to ask.
                value = None
            if value:
                return value
            if time.monotonic() > deadline_s:
                raise PageError(f"not within {timeout_s:g} s: {expression}; errors: {self.errors}")
            await asyncio.sleep(0.05)

    async def press(self, key: str) -> None:
        """One key, down and up."""
        codes = {
            "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Home": 36,
            "End": 35, "Enter": 13, "Tab": 9, "PageUp": 33, "PageDown": 34, "Escape": 27,
        }  # fmt: skip
        text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                windowsVirtualKeyCode=codes.get(key, ord(key[0].upper())),
                **(text if kind == "keyDown" else {}),
            )

    async def write(self, text: str) -> None:
        """Type into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press the mouse, go somewhere, let go; in CSS pixels."""

        async def at(kind: str, place: tuple[float, float], **more: Any) -> None:
            await self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], **more)

        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        await at("mouseMoved", start)
        await at("mousePressed", start, button="left", buttons=1, clickCount=1)
        for place in (middle, end):
            await at("mouseMoved", place, button="left", buttons=1)
        await at("mouseReleased", end, button="left", clickCount=1)

    async def picture(self, whole: bool = False) -> bytes:
        """PNG of the window, or of the whole page."""
        more: dict[str, Any] = {"captureBeyondViewport": True} if whole else {}
        answer = await self.call("Page.captureScreenshot", format="png", **more)
        return base64.b64decode(answer["data"])

    async def close(self) -> None:
        """End the connection."""
        await self._socket.close()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)


@contextlib.asynccontextmanager
async def browser_tab(program: str, names: str = NAMES) -> AsyncIterator[Tab]:
    """A fresh browser with one tab; both are gone, with the profile, afterwards. names: rules by
    which it resolves them."""
    with tempfile.TemporaryDirectory(prefix="moe-serve-page-", ignore_cleanup_errors=True) as home:
        process = await asyncio.create_subprocess_exec(
            program,
            *FLAGS,
            f"--host-resolver-rules={names}",
            f"--user-data-dir={home}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            port = await _port(Path(home), process)
            async with aiohttp.ClientSession() as session:
                address = await _tab_address(session, port)
                socket = await session.ws_connect(address, max_msg_size=0)
                tab = Tab(socket)
                try:
                    yield tab
                finally:
                    await tab.close()
        finally:
            await _end(process)


async def _port(home: Path, process: asyncio.subprocess.Process) -> int:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    file = home / "DevToolsActivePort"
    while True:
        # Written in one go, but created before: an empty file means not yet.
        lines = file.read_text().splitlines() if file.exists() else []
        if lines:
            return int(lines[0])
        assert process.returncode is None, f"Chromium ended with {process.returncode}"
        assert time.monotonic() < deadline_s, f"Chromium said nothing for {START_TIMEOUT_S:g} s"
        await asyncio.sleep(0.05)


async def _tab_address(session: aiohttp.ClientSession, port: int) -> str:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            tabs = [tab for tab in await answer.json() if tab["type"] == "page"]
        if tabs:
            return str(tabs[0]["webSocketDebuggerUrl"])
        assert time.monotonic() < deadline_s, "Chromium opened no tab"
        await asyncio.sleep(0.05)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 10)
        except TimeoutError:
            process.kill()
            await process.wait()
