"""What a person can do with the page: filter, sort, zoom, jump, open an expert, read why."""

import json

import numpy as np

from moe_serve.rpc import placement_pb2 as pb
from tests.browser.rig import DRAWN, MARKS, PAINTED, PIXELS, SPOKEN, WORTH, Rig, rig
from tests.fakes.placement_service import Script

pytestmark = MARKS

ROWS = "[...document.querySelectorAll('.hottest tbody tr')]"
FOCUS = "document.activeElement?.id"


async def hottest(r: Rig) -> list[tuple[int, float]]:
    """Cells and pairs a second of the table, from the top."""
    found = await r.tab.ask(
        f"{ROWS}.map((row) => [Number(row.dataset.cell), "
        "Number(row.querySelector('[data-pairs]').dataset.pairs)])"
    )
    return [(int(cell), float(pairs)) for cell, pairs in found]


async def test_the_fifty_hottest_are_the_numbers_of_the_frame() -> None:
    async with rig(fragment="#hottest=1") as r:
        await r.window()
        await r.tab.until(f"{ROWS}.length === 50")
        frame = await r.api("api/v1/frame")
        # Nobody closes windows here but this test: table and frame are of the same one.
        assert frame["window"] == r.service.window
        window_s = frame["end_s"] - frame["start_s"]
        demand = r.service.demand.sum(axis=0).reshape(-1) / window_s
        shown = await hottest(r)
        order = np.lexsort((np.arange(demand.size), -demand))[:50]
        assert [cell for cell, _ in shown] == [int(cell) for cell in order]
        off = frame["load"]["scale"] / window_s * r.service.demand.shape[0]
        for cell, pairs in shown:
            assert abs(pairs - demand[cell]) <= off

        await r.press_button("Decode", ".heat")
        decode = r.service.demand[1].reshape(-1)
        await r.tab.until(f"{ROWS}[0].dataset.cell === '{int(np.argmax(decode))}'")


async def test_phases_show_other_heat() -> None:
    async with rig() as r:
        pictures = []
        for name in ("All", "Prefill", "Decode"):
            await r.press_button(name, ".heat")
            await r.tab.ask(PAINTED)
            pictures.append(await r.tab.ask(PIXELS))
        assert len(set(pictures)) == 3
        assert "phase=decode" in await r.tab.ask("location.hash")


async def test_columns_are_sorted_by_load_and_by_rank() -> None:
    async with rig(fragment="#sort=load") as r:
        demand = r.service.demand.sum(axis=0)
        await r.tab.ask("document.querySelector('#map').focus()")
        await r.tab.press("ArrowRight")
        first = int(np.argmax(demand[0]))
        await r.tab.until(f"{SPOKEN}.startsWith('Layer 0, expert {first} ')")
        assert "number 1 of 32" in await r.tab.ask(SPOKEN)
        await r.tab.press("End")
        await r.tab.until(f"{SPOKEN}.includes('no tokens')")

        await r.press_button("Rank", ".heat")
        await r.tab.ask("document.querySelector('#map').focus()")
        await r.tab.press("Home")
        await r.tab.until(f"{SPOKEN}.includes('on rank 0')")
        await r.tab.press("End")
        await r.tab.until(f"{SPOKEN}.includes('on rank 3')")
        assert "sort=device" in await r.tab.ask("location.hash")


async def test_a_drag_zooms_and_the_link_says_so() -> None:
    async with rig(Script(layers=58, experts=256, ranks=8, pairs=100_000)) as r:
        whole = await r.tab.ask(PIXELS)
        box = await r.tab.ask(
            "(() => { const b = document.querySelector('#map').getBoundingClientRect();"
            " return [b.left, b.top]; })()"
        )
        await r.tab.drag((box[0] + 60, box[1] + 40), (box[0] + 260, box[1] + 120))
        zoom = await r.tab.until("new URLSearchParams(location.hash.slice(1)).get('zoom')")
        rows, columns = (tuple(map(int, part.split("-"))) for part in zoom.split(","))
        assert 0 < rows[0] < rows[1] < 57
        assert 0 < columns[0] < columns[1] < 255
        await r.tab.ask(PAINTED)
        assert await r.tab.ask(PIXELS) != whole
        # A drag chooses nothing.
        assert "expert=" not in await r.tab.ask("location.hash")

        await r.go("#zoom=2-9,16-31")
        shown = "document.querySelector('[aria-label=\"Show all\"]').textContent"
        await r.tab.until(f"/L2.9 . E16.31/.test({shown})")
        await r.click("[aria-label='Show all']")
        await r.tab.until("!location.hash.includes('zoom=')")
        await r.tab.ask("document.querySelector('#map').focus()")
        await r.tab.press("ArrowRight")
        await r.tab.press("+")
        assert await r.tab.until("location.hash.includes('zoom=0-28,0-127')")
        await r.tab.press("End")  # goes where the picture was not
        await r.tab.until("location.hash.includes('zoom=0-28,128-255')")
        await r.tab.press("0")
        await r.tab.until("!location.hash.includes('zoom=')")


async def test_slash_goes_to_an_expert_and_says_what_is_wrong() -> None:
    async with rig() as r:
        await r.tab.press("/")
        await r.tab.until(f"{FOCUS} === 'jump'")
        await r.tab.write("L9 E3")
        await r.tab.press("Enter")
        await r.tab.until(
            "document.querySelector('#jump-wrong').textContent.includes('layers 0 to 3')"
        )
        await r.tab.ask("document.querySelector('#jump').value = ''")
        await r.tab.write("l2 e30")
        await r.tab.press("Enter")
        await r.tab.until(f"{SPOKEN}.startsWith('Layer 2, expert 30')")
        await r.tab.until(f"{FOCUS} === 'map'")
        assert "layer=2" in await r.tab.ask("location.hash")


async def test_the_panel_of_an_expert_opens_and_gives_the_focus_back() -> None:
    async with rig() as r:
        moves = r.service.begin_plan()
        r.service.finish_plan()
        await r.window()
        move = moves[0]
        await r.tab.press("/")
        await r.tab.until(f"{FOCUS} === 'jump'")
        await r.tab.write(f"L{move.layer} E{move.expert}")
        await r.tab.press("Enter")
        await r.tab.until(f"{FOCUS} === 'map'")
        await r.tab.press("Enter")
        await r.tab.until("document.activeElement.closest('.sheet') !== null")
        await r.tab.until("document.querySelector('.sheet .spark svg') !== null")
        panel = await r.text(".sheet")
        assert f"Layer {move.layer}, expert {move.expert}" in panel
        demand = r.service.demand.sum(axis=0)[move.layer]
        assert f"{1 + int((demand > demand[move.expert]).sum())} of 32" in panel
        for rank in r.service.holders(move.layer, move.expert):
            assert f"rank {rank}\t" in panel
        assert move.reason in panel
        assert f"expert={move.layer}.{move.expert}" in await r.tab.ask("location.hash")

        await r.tab.press("Escape")
        await r.tab.until("document.querySelector('.sheet') === null")
        await r.tab.until(f"{FOCUS} === 'map'")
        await r.tab.until(f"{SPOKEN}.startsWith('Layer {move.layer}, expert {move.expert}')")


async def test_escape_closes_the_panel_of_an_expert_before_the_focus_is_in_it() -> None:
    async with rig() as r:
        await r.tab.press("/")
        await r.tab.until(f"{FOCUS} === 'jump'")
        await r.tab.write("L1 E3")
        await r.tab.press("Enter")
        await r.tab.until(f"{FOCUS} === 'map'")
        # Both keys before anything is drawn.
        keys = [
            f"document.getElementById('map').dispatchEvent(new KeyboardEvent('keydown',"
            f" {{key: '{key}', bubbles: true, cancelable: true}}))"
            for key in ("Enter", "Escape")
        ]
        await r.tab.ask("; ".join(keys))
        await r.tab.ask(PAINTED)
        await r.tab.until("document.querySelector('.sheet') === null")
        assert "expert=" not in await r.tab.ask("location.hash")
        assert await r.tab.ask(f"{FOCUS} === 'map'")
        await r.tab.until(f"{SPOKEN}.startsWith('Layer 1, expert 3')")
        # And where the focus has gone elsewhere meanwhile.
        await r.tab.press("Enter")
        await r.tab.until("document.activeElement.closest('.sheet') !== null")
        await r.tab.ask("document.activeElement.blur()")
        await r.tab.press("Escape")
        await r.tab.until("document.querySelector('.sheet') === null")
        await r.tab.until(f"{FOCUS} === 'map'")


async def test_change_asks_again_after_a_fault_that_passes() -> None:
    async with rig() as r:
        r.expected.add("before_plan=1")
        r.service.begin_plan()
        r.service.finish_plan()
        r.service.tell()
        await r.go("#view=timeline")
        await r.tab.until("document.querySelector('[data-figure=plans]') !== null")
        await r.go("#view=overview")
        # The first question meets a server that is out of breath.
        await r.tab.ask(
            "(() => { const real = window.fetch; let left = 1; window.fetch = (path, more) =>"
            " String(path).includes('before_plan') && left-- > 0"
            " ? Promise.resolve(new Response('', {status: 503})) : real(path, more); })()"
        )
        await r.go("#mode=change")
        await r.tab.until("document.querySelector('[data-figure=unseen]') !== null")
        await r.tab.until("document.querySelector('[data-figure=unseen]') === null")


async def test_change_compares_with_the_window_before_the_last_plan() -> None:
    async with rig(fragment="#mode=change") as r:
        r.expected.add("before_plan=1")
        await r.tab.until(
            "document.querySelector('[data-figure=unseen]')?.textContent.startsWith('Nothing')"
        )
        moves = r.service.begin_plan()
        r.service.finish_plan()
        r.service.tell()
        await r.tab.until("document.querySelector('[data-figure=unseen]') === null")
        await r.window()
        move = next(m for m in moves if m.kind == pb.MOVE_KIND_REPLICATE)
        await r.tab.press("/")
        await r.tab.until(f"{FOCUS} === 'jump'")
        await r.tab.write(f"L{move.layer} E{move.expert}")
        await r.tab.press("Enter")
        # Two replicas share what one had.
        await r.tab.until(
            "/2 replicas.*before the last plan \\(0\\.[45]\\d/"
            ".test(document.querySelector('.heat .cell').innerText)"
        )


async def test_a_plan_is_shown_before_and_after_with_its_moves() -> None:
    async with rig() as r:
        moves = r.service.begin_plan()
        r.service.tell()
        plan_id = moves[0].plan_id
        # The way of the keyboard from the timeline to the plan.
        await r.go("#view=timeline")
        await r.press_button(plan_id, "[data-figure=plans]")
        await r.tab.until("document.querySelectorAll('.sides canvas').length === 2")
        rows = "[...document.querySelectorAll('[data-figure=plan-moves] tbody tr')]"
        await r.tab.until(f"{rows}.length === {len(moves)}")
        text = await r.text(".plan")
        assert all(move.reason in text for move in moves)
        added = sum(m.kind == pb.MOVE_KIND_REPLICATE for m in moves)
        assert f"{128 + added} replicas" in text
        assert "between nodes" in text
        assert f"plan={plan_id}" in await r.tab.ask("location.hash")
        r.service.finish_plan()
        r.service.realise(plan_id, 0.031)
        await r.window()
        await r.tab.until("document.querySelector('.plan').innerText.includes('+3.10%')")


async def test_no_reason_of_a_plans_moves_is_cut_off() -> None:
    async with rig(size=(1400, 1000)) as r:
        moves = r.service.begin_plan()
        for move in moves:
            move.cross_node = True
            move.room.append(pb.Removed(layer=0, expert=25, rank=3))
        r.service.tell()
        await r.go(f"#view=plan&plan={moves[0].plan_id}")
        table = "document.querySelector('[data-figure=plan-moves]')"
        await r.tab.until(f"{table}?.innerText.includes('cross-node in place of L0 E25')")
        around = f"{table}.parentElement"
        assert await r.tab.ask(f"{around}.scrollWidth - {around}.clientWidth") == 0


async def test_moves_are_filtered_by_state() -> None:
    async with rig(fragment="#view=moves") as r:
        r.service.begin_plan()
        r.service.finish_plan()
        running = r.service.begin_plan()
        r.service.tell()
        rows = "document.querySelectorAll('[data-figure=moves] tbody tr').length"
        await r.tab.until(f"{rows} > {len(running)}")
        await r.go("#view=moves&moves=running")
        await r.tab.until(f"{rows} === {len(running)}")
        r.service.finish_plan()
        r.service.tell()
        await r.tab.until(
            "document.querySelector('.moves').innerText.includes('No move is running')"
        )


async def test_why_slow_names_the_scripted_causes() -> None:
    script = Script(model="<b>m</b>")
    async with rig(script, "#view=why") as r:
        await r.tab.until(
            "document.querySelector('[data-figure=verdict]')?.innerText.includes('Nothing is slow')"
        )
        text = "<script>boom()</script> expert 7 of layer 1 takes 41% longer"
        r.service.explanation.verdict = "slow"
        r.service.explanation.causes.add(
            kind="hot_expert",
            share=0.41,
            text=text,
            next_step="moe-serve plan",
            rank=2,
            layer=1,
            expert=7,
            evidence={"spread_s": 0.0031, "wait_share": 0.19},
        )
        r.service.record("in_balance", "kept", "nothing to gain", numbers={"regret_s": 0.25})
        newest = r.service.explanation.newest
        newest.CopyFrom(r.service.records[-1])
        newest.wall_time_s -= 7200.0
        r.service.explanation.causes.add(
            kind="copy", share=0.08, text="a copy runs", rank=1, layer=-1, expert=-1
        )
        await r.window()
        await r.tab.until("document.querySelectorAll('.cause').length === 2")
        assert "hot expert and copy in progress" in await r.text("[data-figure=verdict]")
        first = await r.text(".cause")
        for words in (text, "41%", "moe-serve plan", "rank 2", "L1 E7", "3.10 ms", "19%"):
            assert words in first
        assert await r.tab.ask("document.querySelectorAll('.cause script').length") == 0
        newest_row = "[...document.querySelectorAll('.why-view tbody tr')].at(-1).innerText"
        row = str(await r.tab.ask(newest_row)).split("\t")
        assert (row[1], row[2]) == ("in_balance", "kept")
        assert row[0] == "2 h ago"
        assert "nothing to gain" in row[3]
        assert "regret_s 0.25" in row[3]
        assert (
            await r.tab.ask("document.querySelectorAll('[data-figure=stages] tbody tr').length")
            == 7
        )

        await r.go("#view=overview")
        await r.tab.until("document.querySelector('.strip')?.innerText.includes('hot expert')")


async def test_nothing_is_slow_does_not_stand_alone_where_something_is_wrong() -> None:
    problems = ["no target placement could be computed for 74 s; see to it", "rank 3 is lost"]
    async with rig(fragment="#view=why") as r:
        wrong = "[...document.querySelectorAll('[data-figure=wrong]')].map((p) => p.innerText)"
        await r.tab.until(
            "document.querySelector('[data-figure=verdict]')?.innerText.includes('Nothing is slow')"
        )
        assert await r.tab.ask(wrong) == []
        r.service.script.problems += problems
        r.service.state = "degraded"
        r.service.tell()
        await r.tab.until(f"{wrong}.length === 2")
        assert "Nothing is slow" in await r.text("[data-figure=verdict]")
        first, second = await r.tab.ask(wrong)
        assert first.endswith(f"But something is wrong: {problems[0]}")
        assert second.endswith(problems[1])
        banner = await r.text(".banner")
        assert all(text in banner for text in problems)

        await r.go("#view=overview")
        await r.tab.until(f"{wrong}.length === 1")
        assert (await r.text(".strip [data-figure=wrong]")).endswith(f"{problems[0]} (and 1 more)")

        r.service.script.problems.clear()
        r.service.state = "steady"
        r.service.tell()
        await r.tab.until(f"{wrong}.length === 0")


async def test_the_memory_of_ranks_is_said_in_words() -> None:
    async with rig(fragment="#view=devices&layer=1") as r:
        moves = r.service.begin_plan()
        r.service.tell()
        target = next(m for m in moves if m.copy_bytes).target_rank
        copies = sum(m.target_rank == target and m.copy_bytes > 0 for m in moves)
        row = f".rank:nth-child({target + 1})"
        staged = f"staging {42 * copies:.0f}"
        await r.tab.until(
            f"document.querySelector({json.dumps(row)})?.innerText.includes({json.dumps(staged)})"
        )
        text = await r.text(row)
        assert "experts " in text
        assert " free " in text
        assert await r.tab.ask(
            f"document.querySelector({json.dumps(row + ' .m-staging')}) !== null"
        )


async def test_a_held_picture_waits_and_says_so() -> None:
    async with rig(Script(domain_windows=1)) as r:
        await r.tab.press("p")
        await r.tab.until("document.querySelector('[data-figure=held]') !== null")
        before = await r.tab.ask(DRAWN)
        points = "document.querySelector('.chart .plot').getAttribute('aria-label')"
        told = await r.tab.ask(points)
        for _ in range(3):
            r.service.close_window()
        await r.tab.until(f"{points} !== {json.dumps(told)}")  # it has heard of them
        assert await r.tab.ask(DRAWN) == before
        await r.press_button("Go on", ".heat")
        await r.tab.until(f"{DRAWN} === {r.service.window}")


async def test_a_paused_controller_is_called_paused() -> None:
    async with rig() as r:
        r.service.state = "paused"
        r.service.tell()
        await r.tab.until("document.querySelector('.pill.is-paused') !== null")
        await r.tab.until("document.querySelector('[data-figure=paused]') !== null")
        assert await r.tab.ask(WORTH) == "live"
        r.service.state = "degraded"
        r.service.script.problems.append("experts are missing; add a rank")
        r.service.tell()
        await r.tab.until("document.querySelector('.pill.is-degraded') !== null")
        assert "experts are missing" in await r.text(".banner")
