"""Every view in both themes under axe-core: no serious and no critical finding."""

import json
from pathlib import Path

import pytest

from tests.browser.rig import MARKS, PAINTED, rig

pytestmark = MARKS

AXE = Path(__file__).parent / "vendor" / "axe.min.js"
VIEWS = ("overview", "devices", "timeline", "moves", "plan", "why")
RUN = """axe.run(document, {resultTypes: ['violations']}).then((found) => found.violations
  .filter((v) => v.impact === 'serious' || v.impact === 'critical')
  .map((v) => [v.id, ...v.nodes.slice(0, 3).map((n) => n.html + ' ' + n.failureSummary)]))"""


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_no_view_has_a_serious_finding(theme: str) -> None:
    source = AXE.read_text(encoding="utf-8")
    async with rig(theme=theme) as r:
        r.service.explanation.verdict = "slow"
        r.service.explanation.causes.add(
            kind="slow_rank", share=0.3, text="rank 1 is slow", next_step="drain it", rank=1
        )
        r.service.begin_plan()
        r.service.finish_plan()
        r.service.begin_plan()
        await r.window()
        # Evaluated through the debugger: the page's policy lets no foreign script run.
        await r.tab.ask(source + "; true")
        views = [f"#view={name}" for name in VIEWS]
        views += [
            "#view=overview&mode=change&hottest=1&expert=1.2",
            "#view=moves&moves=done&since=all",
        ]
        for fragment in views:
            await r.go(fragment)
            await r.tab.until("document.querySelector('#view .card h2, #view .card') !== null")
            await r.tab.ask(PAINTED)
            assert await r.tab.ask(RUN) == [], f"{theme} {fragment}"
        await r.click("[data-figure=operator]")
        await r.tab.until("document.querySelector('dialog[open]') !== null")
        assert await r.tab.ask(RUN) == [], f"{theme}: dialog"
        r.service.state = "paused"
        r.service.script.problems.append("something is wrong; mend it")
        r.service.tell()
        await r.press_button("Take control", "dialog")
        await r.tab.until("document.querySelector('.operator') !== null")
        await r.tab.until(
            "document.querySelector('[data-figure=paused], .banner .problem') !== null"
        )
        assert await r.tab.ask(RUN) == [], f"{theme}: operator and banner"
        await r.go("#view=why")
        await r.tab.until("document.querySelector('[data-figure=wrong]') !== null")
        assert await r.tab.ask(RUN) == [], f"{theme}: what else is wrong"


async def test_tabs_are_walked_by_arrow_keys() -> None:
    async with rig() as r:
        await r.tab.ask("document.querySelector('#tab-overview').focus()")
        for name in (*VIEWS[1:], VIEWS[0]):
            await r.tab.press("ArrowRight")
            await r.tab.until(f"document.activeElement.id === {json.dumps('tab-' + name)}")
            await r.tab.until(f"location.hash.includes({json.dumps('view=' + name)})")
