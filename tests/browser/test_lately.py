"""What moved lately and what it cost: the line adds up, and changes with the choice in the URL."""

from moe_serve.rpc import placement_pb2 as pb
from tests.browser.rig import MARKS, Rig, rig
from tests.fakes.placement_service import Script

pytestmark = MARKS

LINE = "[data-figure=lately]"
ROWS = "document.querySelectorAll('[data-figure=moves] tbody tr').length"
LONG_AGO_S = 300.0
MIB = 1 << 20


async def windows(r: Rig, imbalance: float, count: int = 10) -> None:
    """Close windows that were so much out of balance."""
    for _ in range(count):
        r.service.close_window()
        assert r.service.load is not None
        r.service.load.imbalance = imbalance
        shown = f"Number(document.documentElement.dataset.window) === {r.service.window}"
        await r.tab.until(shown)


def long_ago(moves: list[pb.Move]) -> None:
    for move in moves:
        move.started_at_s -= LONG_AGO_S
        move.ended_at_s -= LONG_AGO_S


def begun_ago(moves: list[pb.Move], ago_s: float) -> None:
    for move in moves:
        move.started_at_s -= ago_s


async def says(r: Rig, *words: str) -> str:
    """Wait until the line has the last words; the line, which must have them all."""
    found = f"document.querySelector('{LINE}')?.innerText ?? ''"
    await r.tab.until(f"({found}).includes({words[-1]!r})")
    line = await r.text(LINE)
    assert [part for part in words if part not in line] == [], line
    return line


def mib(count: int) -> str:
    return f"{count:.1f} MiB" if count < 100 else f"{count:.0f} MiB"


async def test_the_line_adds_up_what_moved_and_changes_with_the_choice() -> None:
    async with rig(Script(up_s=3600.0), "#view=moves") as r:
        old = r.service.begin_plan(2)
        r.service.finish_plan()
        long_ago(old)
        await windows(r, 0.62)
        new = r.service.begin_plan(3)
        assert (len(old), len(new)) == (2, 3)
        r.service.finish_plan()
        new[2].state = pb.MOVE_STATE_ABORTED
        done = new[:2]
        new[0].cross_node, new[1].cross_node = True, False
        new[0].gain_s_per_s, new[1].gain_s_per_s, new[2].gain_s_per_s = 0.011, 0.0034, 0.5
        for move in old:
            move.gain_s_per_s, move.cross_node = 0.02, False
        r.service.realise(new[0].plan_id, 0.0125)
        r.service.tell()
        await windows(r, 0.21)

        copied = sum(m.copy_bytes for m in done) // MIB
        line = await says(
            r,
            "In the last minute: 3 moves begun, 2 completed, 1 aborted",
            f"{mib(copied)} copied, {mib(new[0].copy_bytes // MIB)} of it between nodes",
            "predicted gain of the completed +1.44% (0.0144 s/s)",
            "realised +1.25% (0.0125 s/s)",
            "of +20.0% predicted, 1 plan measured",
            "0.62 → 0.21",
            "better",
        )
        assert "planned" not in line
        assert "under way" not in line
        assert await r.tab.ask(ROWS) == 3
        assert "since=" not in await r.tab.ask("location.hash"), "the first choice stays out"
        # What a screen reader says instead of the arrow.
        spoken = f"document.querySelector('{LINE} .spoken').textContent"
        assert await r.tab.ask(spoken) == "from 0.62 before the first of them to 0.21 now"

        await r.press_button("10 minutes", ".lately")
        copied += sum(m.copy_bytes for m in old) // MIB
        await says(
            r,
            "5 moves begun, 4 completed, 1 aborted",
            f"{mib(copied)} copied",
            "+5.44% (0.0544 s/s)",
            "before the first of them it was not seen",
            "In the last 10 minutes:",
        )
        assert await r.tab.ask(ROWS) == 5
        assert "since=10m" in await r.tab.ask("location.hash")

        # A link holds the choice, in a page that is opened anew too.
        await r.tab.open(r.url + "#view=moves&since=all&moves=aborted", 1440, 1000)
        await says(r, "5 moves begun", "Of all that is kept:")
        pressed = "document.querySelector('.lately [aria-pressed=true]').innerText"
        assert await r.tab.ask(pressed) == "all that is kept"
        await r.tab.until(f"{ROWS} === 1")
        assert "since=all" in await r.tab.ask("location.hash")


async def test_what_got_worse_is_called_worse_and_the_same_the_same() -> None:
    async with rig(Script(up_s=3600.0), "#view=moves") as r:
        await windows(r, 0.3)
        r.service.begin_plan()
        r.service.tell()
        await windows(r, 0.5)
        begun = (
            "3 moves begun, 0 completed",
            "3 under way",
            "nothing copied",
            "nothing measured yet",
        )
        await says(r, *begun, "0.30 → 0.50", "worse")
        await windows(r, 0.306)
        await says(r, "0.30 → 0.31", "about the same")


async def test_a_plan_that_takes_longer_than_a_minute_does_not_vanish_under_way() -> None:
    async with rig(Script(up_s=3600.0), "#view=moves") as r:
        moves = r.service.begin_plan()
        moves[2].state = pb.MOVE_STATE_PLANNED
        begun_ago(moves, 90.0)
        r.service.tell()
        under_way = "0 moves begun, 0 completed, 0 aborted, 2 under way, 1 still planned"
        await says(r, f"In the last minute: {under_way}")
        assert await r.tab.ask(ROWS) == 3
        await r.press_button("running 3", ".moves")
        await r.tab.until(f"{ROWS} === 3")
        await r.go("#view=overview")
        await says(r, under_way)
        await r.tab.until(f"{ROWS} === 3")
        assert await r.text(".moves caption") == "", "rows under way are called older ones"
        # What ends is of this minute; then that is over too.
        moves[2].state = pb.MOVE_STATE_RUNNING
        r.service.finish_plan()
        r.service.tell()
        await says(r, "0 moves begun, 3 completed, 0 aborted", "3 completed")
        assert "under way" not in await r.text(LINE)
        for move in moves:
            move.ended_at_s -= LONG_AGO_S
        r.service.tell()
        await says(r, "nothing moved.")


async def test_a_minute_without_moves_says_so_and_shows_the_rest_when_asked() -> None:
    async with rig(Script(up_s=3600.0), "#view=moves") as r:
        moves = r.service.begin_plan()
        r.service.finish_plan()
        long_ago(moves)
        r.service.tell()
        await says(r, "In the last minute: nothing moved.")
        assert await r.tab.ask(ROWS) == 0
        assert "no move began, ended or was under way" in await r.text(".moves .none")
        # The overview keeps its few newest rows, and says that they are older.
        await r.go("#view=overview")
        await r.tab.until(f"{ROWS} === {len(moves)}")
        assert "The newest before that" in await r.text(".moves caption")
        await says(r, "nothing moved.")
        await r.go("#view=moves")
        await r.press_button("Show all that is kept", ".moves")
        await r.tab.until(f"{ROWS} === {len(moves)}")
        assert "since=all" in await r.tab.ask("location.hash")
