"""The view of devices says which tokens its colours and figures are of, and lets them be chosen."""

import json
import re

from moe_serve.documents.window import PHASES
from tests.browser.rig import MARKS, Rig, rig

pytestmark = MARKS

COLOUR = "document.querySelector('[data-figure=colour]').innerText"
FIGURE = re.compile(r"^expert (\d+), slot \d+\. ([\d.]+)(k?) pairs/s", re.MULTILINE)
SLOTS = "[...document.querySelectorAll('.slot:not(.free):not(.in):not(.out)')]"


async def colours(r: Rig) -> dict[str, str]:
    """Colour of each listed slot, by its title up to the load."""
    found: dict[str, str] = await r.tab.ask(
        f"Object.fromEntries({SLOTS}.map((s) => [s.querySelector('button').title.split('.')[0],"
        " getComputedStyle(s).backgroundColor]))"
    )
    return found


async def titles(r: Rig) -> str:
    return str(await r.tab.ask(f"{SLOTS}.map((s) => s.querySelector('button').title).join('\\n')"))


def figures(text: str) -> dict[int, float]:
    """Pairs a second by expert, of titles."""
    return {
        int(expert): float(number) * (1000.0 if unit else 1.0)
        for expert, number, unit in FIGURE.findall(text)
    }


async def says(r: Rig, words: str) -> None:
    await r.tab.until(f"{COLOUR} === {json.dumps(words)}")


async def test_the_phase_is_chosen_in_the_view_and_said_by_colours_and_figures() -> None:
    async with rig(fragment="#view=devices&layer=1") as r:
        await says(r, "colour: load a replica, both phases")
        assert "pairs/s of both phases over 1 listed replica" in await titles(r)
        seen = [await colours(r)]
        bars = "[...document.querySelectorAll('.bar .fill')].map((b) => b.style.width).join()"
        drawn = await r.tab.ask(bars)
        for phase in PHASES:
            await r.press_button(phase.value.capitalize(), ".devices [aria-label=Phase]")
            await says(r, f"colour: load a replica, {phase.value}")
            assert f"phase={phase.value}" in await r.tab.ask("location.hash")
            text = await titles(r)
            assert f"pairs/s of {phase.value} over 1 listed replica" in text
            assert "both phases" not in text
            window_s = r.service.script.window_s
            wanted = r.service.demand[PHASES[phase], 1] / window_s
            told = figures(text)
            assert len(told) == len(wanted)
            # Three digits, and the scale on which a frame packs its counts.
            off = {e: n for e, n in told.items() if abs(n - wanted[e]) > 1.0 + 0.01 * wanted[e]}
            assert off == {}
            seen.append(await colours(r))
            # Bars are of both phases whatever is chosen, and say so.
            assert await r.tab.ask(bars) == drawn
        assert "bar: pairs/s of both phases" in await r.text(".devices .legend")
        assert "of both phases executed" in await r.tab.ask("document.querySelector('.bar').title")
        assert len({json.dumps(one, sort_keys=True) for one in seen}) == 3


async def test_what_colours_mean_is_said_in_every_mode() -> None:
    async with rig(fragment="#view=devices&layer=1&phase=decode") as r:
        r.expected.add("before_plan=1")
        load = await colours(r)
        for mode, words in {
            "share": "colour: load a replica ÷ fair share, decode",
            "replicas": "colour: listed replicas",
            "change": "colour: load a replica (the change since the last plan is on the map only), "
            "decode",
        }.items():
            await r.go(f"#view=devices&layer=1&phase=decode&mode={mode}")
            await says(r, words)
            # Where the mode has no figure of a slot, the colours are those that the words say.
            assert (await colours(r) == load) == (mode == "change"), mode
        # The card of the overview has no choice of its own and says the same.
        await r.go("#view=overview&layer=1&phase=decode&mode=load")
        await says(r, "colour: load a replica, decode")
        assert await r.tab.ask("document.querySelector('.devices [aria-label=Phase]')") is None
