"""The page in headless Chromium: heat that changes, a move with its reason, what is not live."""

import asyncio
import contextlib
import struct
import sys
from pathlib import Path

from tests.browser.rig import DRAWN, MARKS, PAINTED, PIXELS, SPOKEN, WORTH, colours, rig
from tests.fakes.placement_service import Script

ROOT = Path(__file__).resolve().parents[2]
pytestmark = MARKS


async def test_heat_changes_with_the_traffic_and_moves_show_their_reason() -> None:
    async with rig(Script(domain_windows=1)) as r:
        first = await r.tab.ask(PIXELS)
        await r.window()
        await r.window()
        assert await r.tab.ask(PIXELS) != first, "another domain is another picture"

        assert "Nothing has moved yet" in await r.text(".moves")
        (move, *_) = r.service.begin_plan()
        r.service.tell()
        await r.tab.until("document.querySelectorAll('.moves tbody tr').length > 0")
        row = await r.text(".moves tbody tr:last-child")
        assert move.reason in row
        assert f"L{move.layer} E{move.expert}" in row
        assert "running" in row
        await r.tab.until("document.querySelector('.pill.is-moving') !== null")
        # The layer's devices show the replica on its way, in words.
        await r.go(f"#layer={move.layer}")
        await r.tab.until("document.querySelector('.slot.in') !== null")
        assert await r.text(".slot.in") == f"↓E{move.expert}copying"

        epoch = r.service.epoch
        r.service.finish_plan()
        await r.window()
        await r.tab.until("document.querySelector('.moves tbody tr:last-child .s-done') !== null")
        await r.tab.until(
            "document.querySelector('[data-figure=epoch]').innerText"
            f" === 'term 1 · epoch {epoch + 1}'"
        )
        await r.tab.until("document.querySelector('.timeline .cell b') !== null")

        assert colours(await r.tab.picture()) > 100, "a heat map has many colours"


async def test_a_large_model_is_drawn_cell_by_cell_in_every_mode() -> None:
    script = Script(layers=58, experts=256, ranks=32, pairs=200_000)
    async with rig(script, "#mode=share&layer=7") as r:
        await r.tab.until("document.querySelector('.devices select')?.value === '7'")
        pictures = set()
        for name in ("Load", "Load ÷ fair share", "Replicas"):
            await r.press_button(name, ".heat")
            await r.tab.ask(PAINTED)
            pictures.add(await r.tab.ask(PIXELS))
        assert len(pictures) == 3
        wide = await r.tab.ask("document.querySelector('.map canvas').width")
        assert wide >= 256 * 4
        assert await r.tab.ask("document.documentElement.scrollWidth <= innerWidth")
        assert len(await r.tab.ask("[...document.querySelectorAll('.rank')].map((x) => 1)")) == 32


async def test_keys_move_a_cell_that_is_read_out() -> None:
    async with rig() as r:
        await r.tab.ask("document.querySelector('.map canvas').focus()")
        await r.tab.press("ArrowRight")
        await r.tab.until(f"{SPOKEN}.startsWith('Layer 0, expert 0')")
        await r.tab.press("ArrowRight")
        await r.tab.press("ArrowDown")
        said = await r.tab.until(f"{SPOKEN}.startsWith('Layer 1, expert 1') && {SPOKEN}")
        assert "replica" in said
        await r.tab.press("End")
        await r.tab.until(f"{SPOKEN}.startsWith('Layer 1, expert 31')")
        await r.tab.press("PageDown")
        await r.tab.until(f"{SPOKEN}.startsWith('Layer 3, expert 31')")
        await r.tab.press("Enter")
        await r.tab.until("location.hash.includes('layer=3')")
        await r.tab.until("location.hash.includes('expert=3.31')")


async def test_old_heat_is_never_shown_as_live() -> None:
    async with rig(stale_windows=2.0) as r:
        await r.tab.until(f"{WORTH} === 'stale'")
        assert "stale" in await r.text("[data-figure=worth]")
        assert "old" in await r.text(".banner")
        assert await r.tab.ask(
            "getComputedStyle(document.querySelector('.map canvas')).filter"
        ) != ("none")
        await r.server.stop(0)
        await r.tab.until(f"{WORTH} === 'away'")
        assert "not reachable" in await r.text(".banner")
        # What was last known is still there, called what it is.
        assert await r.tab.ask(f"{DRAWN} > 0 && document.querySelector('.veil') !== null")


async def test_names_from_the_controller_are_text() -> None:
    script = Script(model="<img src=x onerror=alert(1)>", problems=["<script>boom()</script> now"])
    async with rig(script) as r:
        assert await r.text("h1") == script.model
        assert "<script>boom()</script> now" in await r.text(".banner")
        assert await r.tab.ask("document.querySelectorAll('h1 img, .banner script').length") == 0


async def test_a_script_writes_the_picture_for_readme(tmp_path: Path) -> None:
    async with rig() as r:
        out = tmp_path / "page.png"
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "docs.make_screenshot", r.url, str(out), "--width", "900", "--height", "600"),
            *("--watch-s", "0.5"),
            cwd=ROOT,
        )
        while process.returncode is None:
            r.service.close_window()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 0.5)
        assert process.returncode == 0
        picture = await asyncio.to_thread(out.read_bytes)
        assert struct.unpack(">II", picture[16:24]) == (900, 600)
        assert colours(picture) > 100
