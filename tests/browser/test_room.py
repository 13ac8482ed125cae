"""What leaves a rank so that a move fits: named where the move is, and where the expert is."""

from moe_serve.rpc import placement_pb2 as pb
from tests.browser.rig import MARKS, Rig, rig

pytestmark = MARKS


def replacing(r: Rig) -> tuple[pb.Move, pb.Removed]:
    """Of a plan that begins: a move that adds a replica, and one listed where that goes, which it
    replaces."""
    moves = r.service.begin_plan()
    move = next(m for m in moves if m.kind == pb.MOVE_KIND_REPLICATE)
    slots = r.service.slots[move.target_rank]
    gone = next(s for s in slots if s["state"] == "LISTED")
    move.room.add(layer=gone["layer"], expert=gone["expert"], rank=move.target_rank)
    r.service.replaced = 1
    r.service.tell()
    return move, move.room[0]


async def test_a_move_and_the_expert_that_made_room_for_it_name_each_other() -> None:
    async with rig(fragment="#view=moves") as r:
        move, gone = replacing(r)
        words = f"in place of L{gone.layer} E{gone.expert}"
        rows = "document.querySelector('[data-figure=moves]')?.innerText ?? ''"
        await r.tab.until(f"({rows}).includes('{words}')")
        await r.tab.until("document.querySelector('header').innerText.includes('1 made room')")
        await r.go(f"#view=plan&plan={move.plan_id}")
        table = "document.querySelector('[data-figure=plan-moves]')?.innerText ?? ''"
        await r.tab.until(f"({table}).includes('{words}')")
        assert "1 in place of another replica" in await r.text(".plan .sums")
        row = f"[data-figure=rank-slots] tbody tr:nth-child({move.target_rank + 1})"
        was, leave, come, now, _ = (await r.text(row)).split("\t")[1:]
        came = int(come) if come.isdigit() else 0
        assert (int(leave), int(now)) == (1, int(was) - 1 + came)
        await r.go(f"#view=plan&expert={gone.layer}.{gone.expert}")
        left = f"left rank {gone.rank}, made room for L{move.layer} E{move.expert}"
        mine = "document.querySelector('[data-figure=expert-moves]')?.innerText ?? ''"
        await r.tab.until(f"({mine}).includes('{left}')")
        await r.go(f"#view=plan&expert={move.layer}.{move.expert}")
        await r.tab.until(f"({mine}).includes('{words}')")
