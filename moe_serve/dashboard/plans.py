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

from moe_serve.dashboard.frames import (
    ABSENT,
    CELLS_MAX,
    EMPTY,
    LISTED,
    MOVE_STATES,
    REPLICAS_MAX,
    Json,
    move_view,
    pack,
    record_view,
)
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


def layout_of(placement: pb.GetPlacementResponse) -> Layout:
    """The table as it is served: what comes or goes is left out."""
    experts = placement.num_experts
    ranks = placement.ranks
    width = max((rank.num_slots for rank in ranks), default=0)
    width = max([width, *(s.index + 1 for r in ranks for s in r.slots if s.index >= 0)])
    assert width * len(ranks) <= CELLS_MAX, "placements of absurd size are refused before"
    pair = np.full((len(ranks), width), ABSENT, dtype=np.int32)
    for row, rank in enumerate(ranks):
        pair[row, : max(0, rank.num_slots)] = EMPTY
        for slot in rank.slots:
            fits = 0 <= slot.layer < placement.num_layers and 0 <= slot.expert < experts
            if slot.state == LISTED and slot.index >= 0 and fits:
                pair[row, slot.index] = slot.layer * experts + slot.expert
    return Layout(placement.num_layers, experts, pair)


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
            _bounded(self._seen, plan_id, None, SEEN_MAX)
            # In the first placement of this life a plan is under way already: its beginning is
            # known only where nothing of it has ended.
            before = self._last
            if before is None and all(_is_unfinished(move) for move in moves):
                before = fresh
            if before is not None:
                _bounded(self._known, plan_id, before, PLANS_MAX)
            if self._last is not None or any(_is_unfinished(move) for move in moves):
                self.newest = plan_id
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

    What leaves is taken first, so that what comes may take its slot; where a rank has no free one
    it is drawn in a slot of its own behind the others.
    """
    ranks, width = before.pair.shape
    was = np.where(before.pair >= 0, _LISTED, 0).astype(np.uint8)
    rows = [list(row) for row in before.pair.tolist()]
    marks = [list(row) for row in was.tolist()]
    coming: list[tuple[int, int]] = []
    for move in moves:
        if not (0 <= move.layer < before.layers and 0 <= move.expert < before.experts):
            continue  # of another model: nothing of it can be drawn
        pair = move.layer * before.experts + move.expert
        replicates = move.kind == pb.MOVE_KIND_REPLICATE
        if not replicates and 0 <= move.source_rank < ranks and pair in rows[move.source_rank]:
            slot = rows[move.source_rank].index(pair)
            rows[move.source_rank][slot], marks[move.source_rank][slot] = EMPTY, 0
            if slot < width:
                was[move.source_rank, slot] = _LEAVES
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


def has_begun(answer: pb.ExplainPlanResponse, moves: list[Json]) -> bool:
    """Whether a plan ever ran: by its records, its moves, or what the page saw of them."""
    return (
        bool(moves)
        or any(record.outcome == "started" for record in answer.records)
        or not all(move.state == pb.MOVE_STATE_PLANNED for move in answer.plan.moves)
    )


def plan_document(
    answer: pb.ExplainPlanResponse, moves: list[Json], before: Layout | None, *, priced: bool
) -> Json:
    """Document of one plan. moves: as the page knows them, with their dates and state; priced:
    whether the balance in `answer` is known and not only the moves. `before` None = not seen."""
    plan = answer.plan
    views = {view["move_id"]: view for view in moves}
    shown = [views.get(move.move_id) or move_view(move) for move in plan.moves]
    document: Json = {
        "plan": {
            "plan_id": plan.plan_id,
            "state": _state(shown) if has_begun(answer, moves) else "computed",
            "moves": shown,
            "copy_bytes": plan.copy_bytes,
            "cross_node_bytes": plan.cross_node_bytes,
            "cost_s": plan.cost_s if priced else None,
            "gain_s_per_s": plan.gain_s_per_s,
            "balancedness_before": plan.balancedness_before if priced else None,
            "balancedness_after": plan.balancedness_after if priced else None,
            "refused": list(plan.refused),
            "records": [record_view(record, 0) for record in answer.records],
        },
        "layers": 0 if before is None else before.layers,
        "experts": 0 if before is None else before.experts,
        "before": None,
        "after": None,
        "replicas_before": None,
        "replicas_after": None,
        "copy_bytes": plan.copy_bytes,
        "cross_node_bytes": plan.cross_node_bytes,
        "balancedness_before": plan.balancedness_before if priced else None,
        "balancedness_after": plan.balancedness_after if priced else None,
        "measured_before": answer.measured_before or None,
        "measured_after": answer.measured_after or None,
    }
    if before is not None:
        was, now, after = applied(before, plan.moves)
        document["before"], document["after"] = {"slots": was}, {"slots": now}
        document["replicas_before"] = replicas_of(before, before.pair)
        document["replicas_after"] = replicas_of(before, after)
    return document


def no_plan() -> Json:
    """Document where no plan is known."""
    document = plan_document(pb.ExplainPlanResponse(), [], None, priced=False)
    return document | {"plan": None, "copy_bytes": 0, "cross_node_bytes": 0}


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


def _state(moves: list[Json]) -> str:
    """running | done | aborted | dropped, of a plan that has begun, by its moves."""
    states = {view["state"] for view in moves}
    if states & {"running", "planned"}:
        return "running"
    return next((name for name in ("aborted", "dropped") if name in states), "done")
