"""Orders from the page to a service that `up` started: nothing between button and ranks is made up.

What came of each order is asked of the command line, which goes another way to the controller.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.browser.cdp import browser_tab
from tests.browser.rig import MARKS, PROGRAM, Page
from tests.browser.test_operator import DIALOG
from tests.cli_process import ROOT, Shell, said

ORDER_S = 90.0
SLOTS = 60
"""Three ranks of these hold every expert of the tiny model: one can be emptied."""
EMPTIED = 3
pytestmark = [*MARKS, pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]


def a_service(folder: Path) -> str:
    """The example with room to empty a rank, as a file."""
    tree = yaml.safe_load((ROOT / "examples/tiny-moe.yaml").read_text())
    tree["fleet"]["ranks"][0]["slots"] = SLOTS
    file = folder / "service.yaml"
    file.write_text(yaml.safe_dump(tree))
    return str(file)


async def data(shell: Shell, *arguments: str) -> Any:
    """What the command says, without holding up the browser."""
    return await asyncio.to_thread(shell.data, *arguments)


async def until_status(shell: Shell, what: str, holds: Any) -> dict[str, Any]:
    """Status once it is so."""
    shown: dict[str, Any] = {}
    try:
        async with asyncio.timeout(ORDER_S):
            while True:
                shown = await data(shell, "status")
                if holds(shown):
                    return shown
                await asyncio.sleep(0.5)
    except TimeoutError:
        raise AssertionError(f"not within {ORDER_S:g} s: {what}; {shown}") from None


async def load(shell: Shell) -> None:
    """Skewed requests for a few windows."""
    skewed = ("--closed", "2", "--tokens", "64", "--zipf", "1.2", "--seconds", "8")
    done = await asyncio.to_thread(shell.cli, "bench", *skewed)
    assert done.returncode == 0, said(done)


async def test_an_operator_moves_experts_and_empties_a_rank_by_the_page(tmp_path: Path) -> None:
    assert PROGRAM is not None
    with Shell(tmp_path).cleaned() as shell:
        record = await data(shell, "up", "-f", a_service(tmp_path))
        async with browser_tab(PROGRAM) as tab:
            page = Page(tab, record["dashboard_url"])
            await tab.open(record["dashboard_url"])
            await page.click("[data-figure=operator]")
            await page.press_button("Take control", "dialog")

            await page.press_button("Pause", ".operator")
            await tab.until(f"{DIALOG} !== null")
            await tab.ask(f"{DIALOG}.querySelector('input').focus()")
            await tab.write("night shift")
            await page.press_button("Pause", "dialog")
            await tab.until("document.querySelector('.pill.is-paused') !== null", ORDER_S)
            assert (await data(shell, "status"))["state"] == "paused"

            await load(shell)
            await page.press_button("Plan", ".operator")
            await page.press_button("Compute", "dialog")
            await page.press_button("Apply this plan", ".plan")
            await page.press_button("Apply", "dialog")
            await tab.until(f"{DIALOG} === null", ORDER_S)
            plan_id = await tab.ask("new URLSearchParams(location.hash.slice(1)).get('plan')")
            await until_status(shell, "the plan has ended", lambda s: s["state"] != "moving")
            plan = (await data(shell, "explain", "plan", plan_id))["plan"]
            assert plan["state"] == "done"
            assert {move["state"] for move in plan["moves"]} == {"done"}
            await page.go("#view=moves")
            rows = "document.querySelectorAll('.moves tbody tr.is-done').length"
            await tab.until(f"{rows} >= {len(plan['moves'])}", ORDER_S)

            await page.press_button("Drain a rank", ".operator")
            await tab.until(f"{DIALOG}?.querySelector('select') != null")
            await tab.ask(f"{DIALOG}.querySelector('select').value = '{EMPTIED}'")
            await page.press_button("Drain", "dialog")
            await page.go("#view=devices")
            await until_status(
                shell,
                f"rank {EMPTIED} is empty",
                lambda s: (
                    s["ranks"][EMPTIED]["state"] == "draining"
                    and s["ranks"][EMPTIED]["resident_bytes"] == 0
                ),
            )
            await tab.until(
                "[...document.querySelectorAll('li.rank.is-draining .name')]"
                f".some((name) => name.innerText.startsWith('rank {EMPTIED}'))",
                ORDER_S,
            )
            await load(shell)  # and every expert is served all the same

            await page.press_button("Undrain", ".operator")
            await page.press_button("Undrain", "dialog")
            await until_status(
                shell, "it serves again", lambda s: s["ranks"][EMPTIED]["state"] == "up"
            )
            await page.press_button("Resume", ".operator")
            await page.press_button("Resume", "dialog")
            await tab.until("document.querySelector('.pill.is-paused') === null", ORDER_S)
            assert (await data(shell, "status"))["state"] != "paused"
            assert tab.errors == []
        done = await asyncio.to_thread(shell.cli, "events", "-o", "json")
        assert done.returncode == 0, said(done)
        records = [json.loads(line) for line in done.stdout.splitlines()]
        assert {"paused", "asked", "drain", "undrain"} <= {record["rule"] for record in records}
        assert any("night shift" in record["detail"] for record in records)
