"""What leaves a rank so that a move fits: named where the move is, and where the expert is."""

from moe_serve.rpc import placement_pb2 as pb
from tests.browser.rig import MARKS, Rig, rig

pytestmark = MARKS

STATES = {
    "planned": pb.MOVE_STATE_PLANNED,
    "done": pb.MOVE_STATE_DONE,
    "aborted": pb.MOVE_STATE_ABORTED,
    "running": pb.MOVE_STATE_RUNNING,
}
SAID = (
    ("planned", "leaves", "makes"),
    ("done", "left", "made"),
    ("aborted", "was to leave", "to make"),
    ("running", "leaves", "makes"),
    ("dropped", "was to leave", "to make"),
)


def replacing(r: Rig) -> tuple[pb.Move, pb.Removed]:
    """Of a plan that begins: a move that adds a replica, and the first of two listed where that
    goes, which it replaces."""
    moves = r.service.begin_plan()
    move = next(m for m in moves if m.kind == pb.MOVE_KIND_REPLICATE)
    slots = r.service.slots[move.target_rank]
    for gone in [s for s in slots if s["state"] == "LISTED"][:2]:
        move.room.add(layer=gone["layer"], expert=gone["expert"], rank=move.target_rank)
    r.service.replaced = 2
    r.service.tell()
    return move, move.room[0]


async def test_a_move_and_the_expert_that_made_room_for_it_name_each_other() -> None:
    async with rig(fragment="#view=moves") as r:
        move, gone = replacing(r)
        words = f"in place of L{gone.layer} E{gone.expert}, L{move.room[1].layer}"
        rows = "document.querySelector('[data-figure=moves]')?.innerText ?? ''"
        await r.tab.until(f"({rows}).includes('{words}')")
        told = (
            "document.querySelector('header small[aria-label]')?.getAttribute('aria-label') ?? ''"
        )
        await r.tab.until(f"({told}).endsWith('; 2 replicas removed to make room')")
        await r.go(f"#view=plan&plan={move.plan_id}")
        table = "document.querySelector('[data-figure=plan-moves]')?.innerText ?? ''"
        await r.tab.until(f"({table}).includes('{words}')")
        # As many as the header counts once they are gone: replicas, not moves.
        assert "in place of 2 replicas" in await r.text(".plan .sums")
        row = f"[data-figure=rank-slots] tbody tr:nth-child({move.target_rank + 1})"
        was, leave, come, now, _ = (await r.text(row)).split("\t")[1:]
        came = int(come) if come.isdigit() else 0
        assert (int(leave), int(now)) == (2, int(was) - 2 + came)
        await r.go(f"#view=moves&expert={gone.layer}.{gone.expert}")
        mine = "document.querySelector('[data-figure=expert-moves]')?.innerText ?? ''"
        row_of_it = (
            "[...document.querySelectorAll('[data-figure=moves] tbody tr')]"
            f".find((row) => row.innerText.includes('{words}'))"
        )
        for state, leaves, makes in SAID:
            if state == "dropped":  # a move under way that is no longer named
                r.service.moves.remove(move)
            else:
                move.state = STATES[state]
            r.service.tell()
            await r.tab.until(f"{row_of_it}?.className === 'is-{state}'")
            r.service.close_window()  # with which the panel asks again
            way = f"{leaves} rank {gone.rank}, {makes} room for L{move.layer} E{move.expert}"
            await r.tab.until(f"({mine}).includes('{way} · {state}')")
        await r.go(f"#view=plan&expert={move.layer}.{move.expert}")
        await r.tab.until(f"({mine}).includes('{words}')")
