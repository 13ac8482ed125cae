"""Take a picture of a running page, for README: `python -m docs.make_screenshot URL out.png`.

The URL is the one `moe-serve up` and `moe-serve demo` print; its fragment chooses the view
(`#mode=share&layer=2`). Run it from the checkout: it drives Chromium as the page's tests do.
"""

import argparse
import asyncio
from pathlib import Path

from tests.browser.cdp import browser_tab, chromium

# Live, and drawn where the view has the map.
READY = (
    "document.documentElement.dataset.worth === 'live'"
    " && Number(document.documentElement.dataset.window) > 0"
    " && Number(document.querySelector('.map canvas')?.dataset.window ?? 1) > 0"
)


async def take(arguments: argparse.Namespace) -> None:
    """Open the page, wait until it is live and has watched for a while, write the PNG."""
    program = chromium()
    if program is None:
        raise SystemExit("chromium is not installed; install it and run this again")
    async with browser_tab(program) as tab:
        await tab.theme(arguments.theme)
        await tab.open(arguments.url, arguments.width, arguments.height, arguments.scale)
        await tab.until(READY, 60.0)
        await asyncio.sleep(arguments.watch_s)
        if arguments.until:
            await tab.until(arguments.until, 120.0)
        await asyncio.to_thread(arguments.out.write_bytes, await tab.picture(arguments.whole))
        if tab.errors:
            raise SystemExit(f"the page reported errors: {tab.errors}")


def main() -> None:
    """Read the command line and take the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, default=1440)
    parser.add_argument("--height", type=int, default=1000)
    parser.add_argument("--scale", type=float, default=1.0, help="device pixels a CSS pixel")
    parser.add_argument("--theme", choices=("light", "dark"), default="dark")
    parser.add_argument("--whole", action="store_true", help="the whole page, not one window")
    parser.add_argument("--watch-s", type=float, default=3.0, help="seconds to watch before")
    parser.add_argument("--until", default="", help="JavaScript condition to wait for")
    asyncio.run(take(parser.parse_args()))


if __name__ == "__main__":
    main()
