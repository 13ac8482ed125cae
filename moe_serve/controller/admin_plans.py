"""What a plan that people ask for is to lead to: what a policy wants, an earlier placement, or one
that is given.

Responsible for checking such a request and for finding the earlier placement. Must never ask the
engine. Called by `admin`.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_serve.controller.admin_checks import check_count, check_text, wrong
from moe_serve.controller.befores import Befores, Keys
from moe_serve.controller.views import Sight
from moe_serve.errors import NotFound
from moe_serve.rpc import placement_pb2 as pb


@dataclass(frozen=True, slots=True)
class PlanGoal:
    """`target`: keys by rank, () = what a policy wants. `before_plan`: the plan it leads back
    before, "" = none. `notes`: what follows from it, for people."""

    target: Keys = ()
    before_plan: str = ""
    notes: tuple[str, ...] = ()


def goal_of(request: pb.ComputePlanRequest, sight: Sight) -> PlanGoal:
    """What the request wants a plan for. Raises InvalidArgument naming the field, NotFound naming
    the plans that can be gone back before."""
    check_text("policy", request.policy)
    check_count("max_moves", request.max_moves)
    check_text("before_plan", request.before_plan)
    if not request.before_plan and not request.target:
        return PlanGoal()
    if request.before_plan and request.target:
        raise wrong("target", "cannot be given together with before_plan; leave one out")
    field = "before_plan" if request.before_plan else "target"
    if request.policy or request.max_moves:
        raise wrong(field, "says what is to lie where: leave policy and max_moves out")
    num_ranks = len(sight.state.ranks)
    if request.target:
        return PlanGoal(target=_given(request, num_ranks, sight.settings.spec.num_keys))
    return _earlier(request.before_plan, sight.book.befores, num_ranks)


def _given(request: pb.ComputePlanRequest, num_ranks: int, num_keys: int) -> Keys:
    rows: dict[int, tuple[int, ...]] = {}
    for number, one in enumerate(request.target):
        where = f"target[{number}]"
        if not 0 <= one.rank < num_ranks:
            raise wrong(f"{where}.rank", f"{one.rank} must lie in [0, {num_ranks})")
        if one.rank in rows:
            raise wrong(f"{where}.rank", f"{one.rank} is named twice")
        bad = next((n for n, key in enumerate(one.experts) if not 0 <= key < num_keys), None)
        if bad is not None:
            raise wrong(
                f"{where}.experts[{bad}]",
                f"{one.experts[bad]} must lie in [0, {num_keys}), layer * num_experts + expert",
            )
        row = tuple(sorted(set(one.experts)))
        if len(row) != len(one.experts):
            raise wrong(f"{where}.experts", f"rank {one.rank}: an expert is named twice")
        rows[one.rank] = row
    unnamed = [rank for rank in range(num_ranks) if rank not in rows]
    if unnamed:
        raise wrong(
            "target",
            f"names {len(rows)} of {num_ranks} ranks; rank {unnamed[0]} is missing: name it too, "
            "without experts where it is to hold nothing",
        )
    return tuple(rows[rank] for rank in range(num_ranks))


def _earlier(plan_id: str, befores: Befores, num_ranks: int) -> PlanGoal:
    before = befores.find(plan_id)
    if before is None:
        known = ", ".join(f"{one.plan_id} ({one.cause})" for one in befores.kept)
        raise NotFound(
            f"the placement before plan {plan_id!r} is not known"
            + (
                f"; known are those before {known}, newest first"
                if known
                else ": no plan has moved anything since this controller's journal began"
            )
        )
    rows = befores.keys_of(before)
    added = range(len(rows), num_ranks)
    notes = tuple(f"rank {rank} was added since, and would hold nothing" for rank in added)
    # Ranks keep their numbers, and no number ever goes: a placement of more ranks is of another
    # service, and its plan is refused as such.
    return PlanGoal((*rows, *(() for _ in added)), before.plan_id, notes)
