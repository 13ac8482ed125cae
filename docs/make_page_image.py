"""Make the pictures of the page from a real run: `python -m docs.make_page_image`.

Starts `moe-serve demo`, waits until the page has something to show, takes every view in headless
Chromium, light and dark, into docs/images (page.png is README's), and ends the demo. Run from a
checkout (the browser driver is the tests'). Two minutes.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from docs.make_screenshot import READY
from tests.browser.cdp import Tab, browser_tab, chromium

SECONDS = 180
"""Length of the run; it is ended as soon as the pictures are taken."""
WAIT_S = 42.0
"""From the page's address to the first picture: domains have changed and plans have run by then."""
FOLDER = Path(__file__).parent / "images"
BYTES_MAX = 300_000
SIZE = (1400, 1000)
HEIGHT_MAX = 1000


@dataclass(frozen=True)
class View:
    """name: of the file. fragment: of the page's URL. until: JavaScript, what must be there.
    height: of the picture at most, in CSS pixels."""

    name: str
    fragment: str
    until: str = "true"
    height: int = HEIGHT_MAX


VIEWS = (
    View("page", "view=overview", "document.querySelector('.moves tbody tr') !== null"),
    View("page-expert", "view=overview&mode=share&expert=1.7", "document.querySelector('.spark')"),
    View("page-devices", "view=devices&layer=1", "document.querySelector('.rank') !== null"),
    View("page-timeline", "view=timeline", "document.querySelector('[data-figure=plans] tr')"),
    View(
        "page-moves",
        "view=moves&since=10m",
        "document.querySelector('.moves tbody tr') !== null",
        620,
    ),
    View("page-plan", "view=plan", "document.querySelector('.plan .sums') !== null"),
    View("page-why", "view=why", "document.querySelector('[data-figure=verdict]') !== null"),
)


@contextmanager
def demo() -> Iterator[str]:
    """The demo while it runs; gives the address of its page. Raises SystemExit without one."""
    process = subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, "-m", "moe_serve", "demo", "--seconds", str(SECONDS), "--quiet"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None, "stdout is a pipe"
    try:
        for line in process.stdout:
            found = re.search(r"page: (http\S+)", line)
            if found:
                yield found[1]
                return
        raise SystemExit("the demo ended before it named a page")
    finally:
        process.terminate()
        process.communicate(timeout=120)


async def shot(tab: Tab, view: View, suffix: str) -> Path:
    """One view as a file."""
    await tab.ask(f"location.hash = {view.fragment!r}; scrollTo(0, 0)")
    await tab.until(f"{READY} && Boolean({view.until})", 60.0)
    height = await tab.ask(
        "Math.ceil(document.querySelector('#app').getBoundingClientRect().height)"
    )
    await tab.resize(SIZE[0], min(view.height, max(500, int(height))))
    await asyncio.sleep(1.5)  # fonts, charts and the transition of a colour
    out = FOLDER / f"{view.name}{suffix}.png"
    await asyncio.to_thread(out.write_bytes, await tab.picture())
    await tab.resize(*SIZE)
    return out


async def take(url: str, program: str) -> list[Path]:
    """Every view in both themes."""
    taken = []
    async with browser_tab(program) as tab:
        await tab.call("Emulation.setScrollbarsHidden", hidden=True)
        await tab.theme("light")
        await tab.open(url, *SIZE)
        for theme, suffix in (("light", ""), ("dark", "-dark")):
            await tab.theme(theme)
            taken += [await shot(tab, view, suffix) for view in VIEWS]
        if tab.errors:
            raise SystemExit(f"the page reported errors: {tab.errors}")
    return taken


def main() -> int:
    """Run the demo and take the pictures. Exit status 1 where one is too large to commit."""
    program = chromium()
    if program is None:
        raise SystemExit("chromium is not installed; install it and run this again")
    FOLDER.mkdir(exist_ok=True)
    with demo() as url:
        time.sleep(WAIT_S)
        taken = asyncio.run(take(url, program))
    large = [path.name for path in taken if path.stat().st_size > BYTES_MAX]
    for path in taken:
        print(f"{path.relative_to(FOLDER.parent.parent)}: {path.stat().st_size} bytes")
    if large:
        print(f"larger than {BYTES_MAX} bytes: {', '.join(large)}", file=sys.stderr)
    return 1 if large else 0


if __name__ == "__main__":
    sys.exit(main())
