"""A plan as a diff with reasons and prices. Pure. Called by the plan command."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType

from moe_serve.cli.figures import shown_bytes, shown_imbalance, shown_number, shown_seconds
from moe_serve.cli.views.moves import moves_sum, moves_table
from moe_serve.documents.plans import plan_view
from moe_serve.rpc import placement_pb2 as pb


def plan_parts(plan: pb.PlanView, placement: pb.GetPlacementResponse) -> list[RenderableType]:
    """Header, diff, prediction, price, and what to run next. Nothing in it has happened."""
    parts: list[RenderableType] = [
        f"Model {placement.model} | term {placement.term}, epoch {placement.epoch} | "
        f"{placement.num_layers} layers x {placement.num_experts} experts | "
        f"{len(placement.ranks)} ranks" + (" | simulated" if placement.simulated else "")
    ]
    if plan.moves:
        parts.append(moves_table(plan.moves, states=False))
        parts.append(
            f"Imbalance {shown_imbalance(plan.balancedness_before)} -> "
            f"{shown_imbalance(plan.balancedness_after)} (balancedness "
            f"{shown_number(plan.balancedness_before, '.3f')} -> "
            f"{shown_number(plan.balancedness_after, '.3f')}), "
            "predicted, not measured"
        )
    parts.append(f"Plan: {price_line(plan)}")
    parts += [f"Refused: {reason}" for reason in plan.refused]
    if plan.moves and plan.plan_id:
        parts.append(f"Nothing moved. Run: moe-serve apply {plan.plan_id}")
    else:
        parts.append("Nothing moved.")
    return parts


def price_line(plan: pb.PlanView) -> str:
    """What it moves, what that costs and what it saves."""
    text = moves_sum(plan.moves)
    if not plan.moves:
        return text
    return (
        f"{text}; {shown_bytes(plan.copy_bytes)} to copy "
        f"({shown_bytes(plan.cross_node_bytes)} between nodes or from the checkpoint), costs "
        f"{shown_seconds(plan.cost_s)} of rank time, saves "
        f"{shown_number(plan.gain_s_per_s, '.3g')} s a second"
    )


def plan_plain(plan: pb.PlanView, placement: pb.GetPlacementResponse) -> dict[str, Any]:
    """The same for programs: the plan as everywhere, and of which table it was computed."""
    view = plan_view(pb.ExplainPlanResponse(plan=plan), priced=True)
    return {"term": placement.term, "epoch": placement.epoch, **view}
