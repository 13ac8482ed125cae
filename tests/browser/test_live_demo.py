"""The page of a real demo, watched in a browser while a model writes text and experts move.

What the other tests of the page make up, this one takes from a running service: which domain is
written is read from the demo's own words, load from the page's API, pictures from the browser.
"""

import asyncio
import base64
import contextlib
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moe_serve.demo.prompts import SCHEDULE
from moe_serve.explain import Kind
from tests.browser.cdp import Tab, browser_tab
from tests.browser.rig import DRAWN, MARKS, PIXELS, PROGRAM, SPOKEN, WORTH
from tests.cli_process import Shell

SECONDS = 48
"""Two rounds through eight domains of three seconds each; the browser looks at most of one."""
START_S = 240.0
WATCH_S = 8.0
REPORT_LAG_S = 0.3
"""What routers counted so long before a window may be in it."""
ON_ITS_WAY = {"planned", "running"}
ORDER = ("planned", "running", "done", "aborted", "dropped")
pytestmark = [*MARKS, pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(420)]


@dataclass
class Watched:
    """Everything seen. domains: (domain, date at which its text came), a text comes when the last
    of its tokens is computed; frames: (date of its end, its length in seconds, load [layers,
    experts]) by window; pictures: one number a window that was drawn; told: moves in the order in
    which the page's stream brought them. Dates are seconds of the Unix epoch."""

    domains: list[tuple[str, float]] = field(default_factory=list)
    frames: dict[int, tuple[float, float, NDArray[np.float64]]] = field(default_factory=dict)
    pictures: dict[int, int] = field(default_factory=dict)
    moves: list[dict[str, Any]] = field(default_factory=list)
    told: list[dict[str, Any]] = field(default_factory=list)
    rows: dict[str, str] = field(default_factory=dict)
    phases: dict[str, int] = field(default_factory=dict)
    spoken: str = ""
    sheet: str = ""
    verdict: str = ""


def load_of(doc: dict[str, Any]) -> NDArray[np.float64]:
    """Demand of a frame, over both phases, [layers, experts]."""
    packed = np.frombuffer(base64.b64decode(doc["load"]["data"]), "<u2").astype(float)
    by_phase = packed.reshape(doc["phases"], doc["layers"], doc["experts"])
    return np.asarray(by_phase.sum(axis=0) * doc["load"]["scale"])


KINDS = {kind: kind.value.replace("_", " ") for kind in Kind} | {
    Kind.COPY: "copy in progress",
    Kind.MEMORY: "memory pressure",
}
"""Causes in the page's words."""
CAUSE = f"(?:{'|'.join(KINDS.values())})"
VERDICT = re.compile(
    rf"[●▲◌] (?:Nothing is slow|Idle: no requests to look at|Slow: {CAUSE}(?: and {CAUSE})*)"
)
LISTEN = """(() => {
  window.told = [];
  new EventSource('/api/v1/stream').addEventListener('move',
    (event) => window.told.push(...JSON.parse(event.data)));
})()"""


class Demo:
    """`moe-serve demo` as a process, its words read as they come."""

    def __init__(self, process: asyncio.subprocess.Process, seen: Watched) -> None:
        self.process, self._seen = process, seen
        self.url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.lines: list[str] = []

    async def read(self) -> None:
        assert self.process.stdout is not None
        async for raw in self.process.stdout:
            line = raw.decode(errors="replace").rstrip()
            self.lines.append(line)
            if found := re.search(r"page: (http\S+)", line):
                self.url.set_result(found[1])
            found = re.match(r" *([A-Za-z]+) .*\S", line)
            if found and found[1] in SCHEDULE:
                self._seen.domains.append((found[1], datetime.now(UTC).timestamp()))
        if not self.url.done():
            self.url.set_exception(AssertionError("\n".join(self.lines[-20:])))


@contextlib.asynccontextmanager
async def demo(shell: Shell, seen: Watched) -> AsyncIterator[Demo]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "moe_serve", "demo", "--seconds", str(SECONDS)),
        env={**shell.environment, "PYTHONUNBUFFERED": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    made = Demo(process, seen)
    reader = asyncio.create_task(made.read())
    try:
        yield made
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), 120.0)
        await reader


async def watch(tab: Tab, seen: Watched, until: asyncio.Event) -> None:
    """Note frames, pictures and moves until told otherwise."""
    while not until.is_set():
        doc = await tab.ask("fetch('/api/v1/frame').then((a) => a.ok ? a.json() : null)")
        if doc:
            known = (doc["wall_s"], doc["end_s"] - doc["start_s"], load_of(doc))
            seen.frames.setdefault(doc["window"], known)
        drawn, picture, again = await tab.ask(
            f"(() => [{DRAWN}, {PIXELS}, {DRAWN}])().map((x) => x ?? 0)"
        )
        if drawn == again and drawn > 0:
            seen.pictures[drawn] = picture
        rows = "[...document.querySelectorAll('.moves tbody tr')].map((r) => r.innerText)"
        for row in await tab.ask(rows):
            seen.rows[str(row)] = str(row)
        await asyncio.sleep(0.2)


async def same_window_pictures(tab: Tab, seen: Watched) -> None:
    """Pictures of both phases of one window."""
    for _ in range(40):
        found = {}
        windows = []
        for phase in ("Prefill", "Decode"):
            buttons = "[...document.querySelectorAll('.heat button')]"
            await tab.ask(f"{buttons}.find((b) => b.innerText.trim() === '{phase}').click()")
            await tab.ask("new Promise((ok) => requestAnimationFrame(() => ok(1)))")
            drawn, picture = await tab.ask(f"[{DRAWN}, {PIXELS}]")
            found[phase] = picture
            windows.append(drawn)
        if len(set(windows)) == 1 and found["Prefill"] != found["Decode"]:
            seen.phases = found
            return
        await asyncio.sleep(0.3)


async def by_keys(tab: Tab, seen: Watched) -> None:
    """From the map to an expert and back, with keys only."""
    await tab.ask("document.querySelector('.map canvas').focus()")
    await tab.press("ArrowRight")
    await tab.press("ArrowRight")
    await tab.until(f"{SPOKEN}.startsWith('Layer 0, expert 1')")
    seen.spoken = await tab.ask(SPOKEN)
    await tab.press("Enter")
    await tab.until("document.querySelector('[role=dialog]') !== null")
    await tab.until("document.querySelector('[role=dialog]').innerText.includes('expert 1')")
    seen.sheet = await tab.ask("document.querySelector('[role=dialog]').innerText")
    await tab.until("document.querySelector('[role=dialog]').contains(document.activeElement)")
    await tab.press("Escape")
    await tab.until("document.querySelector('[role=dialog]') === null")


async def look_around(tab: Tab, seen: Watched) -> None:
    """Phases, keys, why it is slow, and what moved."""
    await same_window_pictures(tab, seen)
    await by_keys(tab, seen)
    await tab.ask("location.hash = '#view=why'")
    verdict = "document.querySelector('[data-figure=verdict]')"
    await tab.until(f"{verdict} !== null")
    seen.verdict = await tab.ask(f"{verdict}.innerText")
    seen.told = await tab.ask("window.told")
    seen.moves = (await tab.ask("fetch('/api/v1/moves').then((a) => a.json())"))["moves"]


def steps_of(told: list[dict[str, Any]]) -> dict[tuple[str, int], list[str]]:
    """States of each move in the order in which they were told, by (plan, move)."""
    found: dict[tuple[str, int], list[str]] = {}
    for move in told:
        states = found.setdefault((move["plan_id"], move["move_id"]), [])
        if states[-1:] != [move["state"]]:
            states.append(move["state"])
    return found


def domains_of(seen: Watched, start_s: float, end_s: float) -> set[str]:
    """Domains of the texts of which tokens were computed between two dates: of those that came
    then, and of the one after them, which was being written at the end."""
    found: set[str] = set()
    for name, came_s in seen.domains:
        if came_s > start_s:
            found.add(name)
        if came_s > end_s:
            return found
    return set()  # what was being written then has not come


def likeness(seen: Watched) -> tuple[list[float], list[float], int]:
    """Cosines of the load of two windows in which the same domain was written, of two in which
    different ones were, and how many domains were met."""
    found = []
    for end_s, window_s, load in seen.frames.values():
        names = domains_of(seen, end_s - window_s - REPORT_LAG_S, end_s)
        if len(names) == 1 and load.any():  # a window without tokens is like none
            found.append((names.pop(), load.ravel() / np.linalg.norm(load)))
    same: list[float] = []
    other: list[float] = []
    for i, (name, load) in enumerate(found):
        for again, second in found[:i]:
            (same if name == again else other).append(float(load @ second))
    return same, other, len({name for name, _ in found})


async def enough(seen: Watched) -> None:
    """Wait until windows can be compared: longer than WATCH_S where the machine is busy."""
    await asyncio.sleep(WATCH_S)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(WATCH_S):
            while True:
                same, other, _ = likeness(seen)
                if same and other and len(set(seen.pictures) & set(seen.frames)) >= 3:
                    return
                await asyncio.sleep(0.2)


async def test_heat_follows_the_text_and_experts_move_before_the_eyes(tmp_path: Path) -> None:
    assert PROGRAM is not None
    seen, over = Watched(), asyncio.Event()
    with Shell(tmp_path).cleaned() as shell:
        async with demo(shell, seen) as running, browser_tab(PROGRAM) as tab:
            url = await asyncio.wait_for(asyncio.shield(running.url), START_S)
            await tab.open(url)
            await tab.until(f"{WORTH} === 'live' && {DRAWN} > 0", 90.0)
            await tab.ask(LISTEN)
            watching = asyncio.create_task(watch(tab, seen, over))
            await tab.until("document.querySelector('.moves tbody .s-done') !== null", 90.0)
            await enough(seen)
            over.set()
            await watching
            await look_around(tab, seen)
            assert tab.errors == []

    moved = [move for move in seen.moves if move["state"] == "done"]
    same, other, domains = likeness(seen)
    assert same, f"no domain was seen twice: {domains} in {sorted(seen.frames)}"
    assert other, f"one domain was seen only: {domains} in {sorted(seen.frames)}"
    alike, unlike = float(np.mean(same)), float(np.mean(other))
    print(
        f"{len(seen.frames)} windows of {domains} domains, load alike {alike:.3f} within one and "
        f"{unlike:.3f} across; {len(moved)} moves done; {seen.verdict!r}"
    )
    assert domains >= 2
    assert alike > unlike, "the heat of a domain is its own"
    drawn = set(seen.pictures) & set(seen.frames)
    assert len(drawn) >= 3
    heats = {seen.frames[window][2].tobytes() for window in drawn}
    pictures = {seen.pictures[window] for window in drawn}
    assert len(pictures) >= len(heats) >= 3, "each heat is another picture"
    # A move with its reason, first on its way and then done, as the API has it too.
    assert moved
    assert all(move["reason"] for move in moved)
    told = [row for row in seen.rows if any(move["reason"] in row for move in moved)]
    assert any("done" in row for row in told)
    steps = steps_of(seen.told)
    came = [steps.get((move["plan_id"], move["move_id"]), []) for move in moved]
    assert any(states[-1] == "done" and set(states[:-1]) & ON_ITS_WAY for states in came if states)
    assert all(states == sorted(states, key=ORDER.index) for states in steps.values()), steps
    assert seen.phases["Prefill"] != seen.phases["Decode"]
    assert "Layer 0, expert 1" in seen.spoken
    assert "expert 1" in seen.sheet
    assert VERDICT.fullmatch(seen.verdict), seen.verdict
