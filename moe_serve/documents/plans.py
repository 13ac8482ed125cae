"""A plan as a document: what it moves, what that costs, what it promised and what was measured.

Who is where before and after it is drawn by whoever saw the plan begin; here it is null.

Responsible for telling what is not known (null) from what is nothing. Called by page and command
line.
"""

from __future__ import annotations

from collections.abc import Sequence

from moe_serve.documents.views import Json, move_view, record_view
from moe_serve.rpc import placement_pb2 as pb


def has_begun(answer: pb.ExplainPlanResponse, moves: Sequence[Json] = ()) -> bool:
    """Whether a plan ever ran: by its records, its moves, or what was seen of them."""
    return (
        bool(moves)
        or any(record.outcome == "started" for record in answer.records)
        or not all(move.state == pb.MOVE_STATE_PLANNED for move in answer.plan.moves)
    )


def is_priced(answer: pb.ExplainPlanResponse) -> bool:
    """Whether the balance in an answer is a figure. Of a plan so old that the controller has only
    its records, it tells no moves and the balance 0 or 1, which is none."""
    return bool(answer.plan.moves) or 0.0 < answer.plan.balancedness_before < 1.0


def plan_document(
    answer: pb.ExplainPlanResponse, moves: Sequence[Json] = (), *, priced: bool
) -> Json:
    """Document of one plan, without a picture of it.

    moves: views of its moves by somebody who knows more of them, their dates and what was dropped.
    priced: whether the balance in `answer` is known and not only the moves.
    """
    plan = answer.plan
    return {
        "plan": plan_view(answer, moves, priced=priced),
        "layers": 0,
        "experts": 0,
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


def plan_view(answer: pb.ExplainPlanResponse, moves: Sequence[Json] = (), *, priced: bool) -> Json:
    """The plan itself, with its moves and records."""
    plan = answer.plan
    known = {view["move_id"]: view for view in moves}
    shown = [known.get(move.move_id) or move_view(move) for move in plan.moves]
    return {
        "plan_id": plan.plan_id,
        "state": _state(shown, answer) if has_begun(answer, moves) else "computed",
        "moves": shown,
        "copy_bytes": plan.copy_bytes,
        "cross_node_bytes": plan.cross_node_bytes,
        "cost_s": plan.cost_s if priced else None,
        "gain_s_per_s": plan.gain_s_per_s,
        "balancedness_before": plan.balancedness_before if priced else None,
        "balancedness_after": plan.balancedness_after if priced else None,
        "refused": list(plan.refused),
        "records": [record_view(record) for record in answer.records],
    }


def no_plan() -> Json:
    """Document where no plan is known."""
    return plan_document(pb.ExplainPlanResponse(), priced=False) | {"plan": None}


def _state(moves: list[Json], answer: pb.ExplainPlanResponse) -> str:
    """running | done | aborted | dropped | unknown, of a plan that has begun, by its moves; where
    some are not known any more, by the record of its end."""
    states = {view["state"] for view in moves}
    if states & {"running", "planned"}:
        return "running"
    if "unknown" in states:
        ends = (record.outcome for record in answer.records if record.rule == "plan_done")
        return next(ends, "unknown")
    return next((name for name in ("aborted", "dropped") if name in states), "done")
