"""A link holds the view: what a person chose is in the address, and the address brings it back."""

import json
import re

import pytest

from tests.browser.rig import MARKS, PAINTED, Rig, rig

pytestmark = MARKS

LIST = "document.querySelector('[aria-label=Lists] [aria-selected=true]')?.innerText"
BACK = "document.querySelector('[data-figure=back]')"


async def opened_anew(r: Rig) -> str:
    """Leave, and come back by the address that stands there now; returns it."""
    address = str(await r.tab.ask("location.href"))
    await r.tab.open("about:blank")
    await r.tab.until("location.href === 'about:blank'")
    await r.tab.open(address)
    await r.come_alive()
    return address


async def test_the_list_of_decisions_is_in_the_link() -> None:
    async with rig(fragment="#view=moves") as r:
        r.service.record("in_balance", "kept", "gain below band")
        r.service.tell()
        assert await r.tab.ask(LIST) == "Moves"
        assert "list=" not in await r.tab.ask("location.hash"), "the first choice stays out"
        await r.press_button("Decisions", ".moves")
        await r.tab.until("document.querySelector('#lists').innerText.includes('in_balance')")
        assert "list=decisions" in await r.tab.ask("location.hash")
        await opened_anew(r)
        await r.tab.until(f"{LIST} === 'Decisions'")
        await r.tab.until("document.querySelector('#lists').innerText.includes('in_balance')")
        await r.go("#view=overview&list=decisions")
        await r.tab.until(f"{LIST} === 'Decisions'")
        await r.go("#view=overview&list=nothing")
        await r.tab.until(f"{LIST} === 'Moves'")


@pytest.mark.parametrize(("seconds", "words"), [(60, "minute"), (300, "5 minutes")])
async def test_how_far_to_look_back_for_causes_is_in_the_link(seconds: int, words: str) -> None:
    async with rig(fragment="#view=why") as r:
        await r.tab.until(f"{BACK}?.selectedOptions[0].innerText === 'newest windows'")
        assert "back=" not in await r.tab.ask("location.hash"), "the first choice stays out"
        chosen = f"{BACK}.value = '{seconds}'; {BACK}.dispatchEvent(new Event('change'))"
        await r.tab.ask(chosen)
        await r.tab.until(f"location.hash.includes('back={seconds}')")
        await opened_anew(r)
        await r.tab.until(f"{BACK}?.selectedOptions[0].innerText === {json.dumps(words)}")
        asked = "performance.getEntriesByType('resource').map((e) => e.name)"
        await r.tab.until(f"{asked}.some((n) => n.endsWith('/explain?seconds={seconds}'))")
        assert not await r.tab.ask(f"{asked}.some((n) => n.endsWith('/explain'))")


WRITTEN = re.compile(r"[`\"](\w+)=(?:\$\{|1\")")
CHOICES = {
    "view": "devices",
    "mode": "share",
    "phase": "decode",
    "layer": "2",
    "sort": "load",
    "zoom": "1-2,4-9",
    "expert": "2.5",
    "plan": "1-0001",
    "moves": "done",
    "since": "10m",
    "list": "decisions",
    "back": "60",
    "hottest": "1",
}


async def test_every_choice_of_a_link_stays_in_the_address() -> None:
    link = "#" + "&".join(f"{name}={value}" for name, value in CHOICES.items())
    async with rig(fragment=link) as r:
        await r.tab.ask(PAINTED)
        assert await r.tab.ask("location.hash") == link
        source = await r.tab.ask("fetch('/static/url.js').then((a) => a.text())")
        assert set(WRITTEN.findall(source)) == set(CHOICES), "all that the page writes is tried"
