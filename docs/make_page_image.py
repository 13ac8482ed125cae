"""Make README's picture of the page from a real run: `python -m docs.make_page_image`.

Starts `moe-serve demo`, waits until the page has something to show, takes docs/images/page.png in
headless Chromium, and ends the demo. Run from a checkout (the browser driver is the tests').
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

SECONDS = 75
"""Length of the run."""
WAIT_S = 42.0
"""From the page's address to the picture: domains have changed and plans have run by then."""
PICTURE = Path(__file__).parent / "images" / "page.png"


def main() -> int:
    """Run the demo and take the picture. Returns the exit status of the picture's script."""
    demo = subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, "-m", "moe_serve", "demo", "--seconds", str(SECONDS), "--quiet"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert demo.stdout is not None, "stdout is a pipe"
    try:
        for line in demo.stdout:
            found = re.search(r"page: (http\S+)", line)
            if found:
                break
        else:
            print("the demo ended before it named a page", file=sys.stderr)
            return 1
        time.sleep(WAIT_S)
        PICTURE.parent.mkdir(exist_ok=True)
        picture = ["--theme", "light", "--width", "1400", "--height", "1000", "--watch-s", "8"]
        done = subprocess.run(  # noqa: S603 - our own program
            [sys.executable, "-m", "docs.make_screenshot", found[1], str(PICTURE), *picture],
            check=False,
        )
        return done.returncode
    finally:
        demo.terminate()
        demo.communicate(timeout=120)


if __name__ == "__main__":
    sys.exit(main())
