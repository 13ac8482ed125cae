"""A plan as a picture: who is where before it and after it, slot by slot, and what it costs.

Before is the placement as the page saw it when the plan began (or was computed); after is that with
the moves applied. A page that did not see it begin says null and draws nothing.

Worked example: rank 0 holds experts 0 and 1, rank 1 holds 2 and has an empty slot. Replicating 0 to
rank 1 gives before [[0, 1], [2, -1]] and after [[0, 1], [2, 0]] with the state COMES there.

Responsible for applying moves to slots. Must never guess what it did not see. Called by `feed` and
`reading`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from moe_serve.dashboard.frames import ABSENT, REPLICAS_MAX, pack
from moe_serve.documents.plans import plan_document
from moe_serve.documents.replicas import EMPTY, LISTED, pair_of, shape_of
from moe_serve.documents.views import MOVE_STATES, Json
from moe_serve.documents.window import CELLS_MAX
from moe_serve.rpc import placement_pb2 as pb

PLANS_MAX = 16
"""Plans whose beginning is remembered; each costs 4 bytes a slot."""
SEEN_MAX = 400
"""Plans that are known to have been seen before."""
STATES = ("", LISTED, "LEAVES", "COMES")
_LISTED, _LEAVES, _COMES = 1, 2, 3
_T = TypeVar("_T")
Pairs = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Listed replicas: pair i32 [ranks, width] as in `frames` (layer * experts + expert)."""

    layers: int
    experts: int
    pair: Pairs

    def pair_of(self, layer: int, expert: int) -> int | None:
        """The expert as `pair` has it, None where the model has no such expert."""
        known = 0 <= layer < self.layers and 0 <= expert < self.experts
        return layer * self.experts + expert if known else None


def layout_of(placement: pb.GetPlacementResponse) -> Layout:
    """The table as it is served: what comes or goes is left out."""
    layers, experts = shape_of(placement)
    ranks = placement.ranks
    width = max((rank.num_slots for rank in ranks), default=0)
    width = max([width, *(s.index + 1 for r in ranks for s in r.slots if s.index >= 0)])
    assert width * len(ranks) <= CELLS_MAX, "placements of absurd size are refused before"
    pair = np.full((len(ranks), width), ABSENT, dtype=np.int32)
    for row, rank in enumerate(ranks):
        pair[row, : max(0, rank.num_slots)] = EMPTY
        for slot in rank.slots:
            held = pair_of(slot, layers, experts)
            if slot.state == LISTED and slot.index >= 0 and held != EMPTY:
                pair[row, slot.index] = held
    return Layout(layers, experts, pair)


class Beginnings:
    """Layouts in which plans began, and plans that were computed through this page."""

    def __init__(self) -> None:
        self.newest = ""
        """The plan that began or was computed last."""
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._known: OrderedDict[str, Layout] = OrderedDict()
        self._views: OrderedDict[str, pb.PlanView] = OrderedDict()
        self._last: Layout | None = None

    def see(self, placement: pb.GetPlacementResponse) -> None:
        """A placement has come: a plan in it that was in none before began since the last one."""
        fresh = layout_of(placement)
        by_plan: dict[str, list[pb.Move]] = {}
        for move in placement.moves:
            by_plan.setdefault(move.plan_id, []).append(move)
        for plan_id, moves in by_plan.items():
            if plan_id in self._seen:
                continue
            # In the first placement of this life a plan is under way already: its beginning is
            # known only where nothing of it has ended.
            before = self._last
            if before is None and all(_is_unfinished(move) for move in moves):
                before = fresh
            if before is not None:
                _bounded(self._known, plan_id, before, PLANS_MAX)
            if self._last is not None or any(_is_unfinished(move) for move in moves):
                self.newest = plan_id
            # Last: whoever asks meanwhile finds the plan unseen, or all that is known of it.
            _bounded(self._seen, plan_id, None, SEEN_MAX)
        self._last = fresh

    def computed(self, plan: pb.PlanView) -> None:
        """A plan was computed for somebody here."""
        if plan.plan_id:
            _bounded(self._views, plan.plan_id, plan, PLANS_MAX)
            self.newest = plan.plan_id

    def view(self, plan_id: str) -> pb.PlanView | None:
        """A plan that was computed here."""
        return self._views.get(plan_id)

    def before(self, plan_id: str, *, begun: bool) -> Layout | None:
        """The layout in which a plan began, None where that was not seen. One that has not begun
        would begin in the newest."""
        # One that was computed here and is in no placement yet began since the newest.
        unseen = plan_id in self._views and plan_id not in self._seen
        return self._known.get(plan_id, self._last if unseen or not begun else None)


def _bounded(kept: OrderedDict[str, _T], key: str, value: _T, most: int) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)


def _is_unfinished(move: pb.Move) -> bool:
    return MOVE_STATES.get(int(move.state)) in {"planned", "running"}


def applied(before: Layout, moves: Iterable[pb.Move]) -> tuple[Json, Json, Pairs]:
    """(slots before, slots after, pair after) of a plan: `frames.slot_arrays` with STATES.

    What leaves is taken first, with what only makes room for another, so that what comes may take
    its slot; where a rank has no free one it is drawn in a slot of its own behind the others.
    """
    ranks = len(before.pair)
    was = np.where(before.pair >= 0, _LISTED, 0).astype(np.uint8)
    rows = [list(row) for row in before.pair.tolist()]
    marks = [list(row) for row in was.tolist()]
    coming: list[tuple[int, int]] = []
    for move in moves:
        pair = before.pair_of(move.layer, move.expert)
        if pair is None:
            continue  # of another model: nothing of it can be drawn
        own = [] if move.kind == pb.MOVE_KIND_REPLICATE else [(move.source_rank, pair)]
        room = [(gone.rank, before.pair_of(gone.layer, gone.expert)) for gone in move.room]
        for rank, left in [*own, *room]:
            if left is not None and 0 <= rank < ranks and left in rows[rank]:
                slot = rows[rank].index(left)
                rows[rank][slot], marks[rank][slot] = EMPTY, 0
                was[rank, slot] = _LEAVES
        if move.kind != pb.MOVE_KIND_EVICT and 0 <= move.target_rank < ranks:
            coming.append((move.target_rank, pair))
    for rank, pair in coming:
        if EMPTY not in rows[rank]:
            rows[rank].append(EMPTY)
            marks[rank].append(0)
        slot = rows[rank].index(EMPTY)
        rows[rank][slot], marks[rank][slot] = pair, _COMES
    wide = max((len(row) for row in rows), default=0)
    after = np.full((ranks, wide), ABSENT, dtype=np.int32)
    now = np.zeros((ranks, wide), dtype=np.uint8)
    for rank, row in enumerate(rows):
        after[rank, : len(row)] = row
        now[rank, : len(row)] = marks[rank]
    return _slots(before.pair, was), _slots(after, now), after


def _slots(pair: Pairs, state: npt.NDArray[np.uint8]) -> Json:
    return {
        "width": pair.shape[1],
        "pair": pack(pair),
        "state": pack(state),
        "states": list(STATES),
    }


def replicas_of(layout: Layout, pair: Pairs) -> str:
    """Packed u8 [layers, experts] of the replicas in `pair`."""
    held = pair[(pair >= 0) & (pair < layout.layers * layout.experts)]
    counts = np.bincount(held, minlength=layout.layers * layout.experts)
    return pack(np.minimum(counts, REPLICAS_MAX).astype(np.uint8))


def drawn_plan(
    answer: pb.ExplainPlanResponse, moves: list[Json], before: Layout | None, *, priced: bool
) -> Json:
    """Document of one plan with its picture. moves: as the page knows them, with their dates and
    state; priced: as in `plan_document`. `before` None = not seen."""
    document = plan_document(answer, moves, priced=priced)
    if before is None:
        return document
    was, now, after = applied(before, answer.plan.moves)
    return document | {
        "layers": before.layers,
        "experts": before.experts,
        "before": {"slots": was},
        "after": {"slots": now},
        "replicas_before": replicas_of(before, before.pair),
        "replicas_after": replicas_of(before, after),
    }


def own_plan(plan_id: str, moves: list[pb.Move]) -> pb.ExplainPlanResponse:
    """What the page itself knows of a plan, in the form of the controller's answer."""
    return pb.ExplainPlanResponse(
        plan=pb.PlanView(
            plan_id=plan_id,
            moves=moves,
            copy_bytes=sum(m.copy_bytes for m in moves),
            cross_node_bytes=sum(m.copy_bytes for m in moves if m.cross_node),
            gain_s_per_s=sum(m.gain_s_per_s for m in moves),
        )
    )
