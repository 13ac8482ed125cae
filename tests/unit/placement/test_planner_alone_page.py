"""The how-to page's Python blocks run as they stand, one after the other."""

import re

from tests.architecture.tree import ROOT

PAGE = ROOT / "docs" / "how-to" / "use-the-planner-alone.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_blocks_run() -> None:
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert len(blocks) == 3
    scope: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), scope)  # noqa: S102  # our own page
    assert scope["tokens"].sum() == 10
