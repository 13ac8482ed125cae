"""`compute_target`: the policy and the planner, run away from the loop on the data of one command.

Responsible for turning a ComputeTarget into its answer; a pure function, so that a replay may
compute it again. Called by the drivers (a thread of the controller, the simulator, replay).
"""

from __future__ import annotations

import msgspec

from placement.config import RebalanceConfig
from placement.layout import LayoutError
from placement.messages.effects import ComputeTarget
from placement.messages.events import TargetComputed, TargetFailed
from placement.planner import ALL_AT_ONCE, PlannerError, WaveConfig, fit, make_plan
from placement.planner.price import mean_demand
from placement.policy import propose
from placement.policy.base import PolicyError

_REASONS = {
    "initial": "first fill",
    "repair": "repair",
    "budget": "budget",
    "drain": "drain",
    "staging": "staging slot",
}


def compute_target(
    command: ComputeTarget, config: RebalanceConfig
) -> TargetComputed | TargetFailed:
    """Answer to the command; `at_s` is 0 and restamped by the driver.

    TargetFailed where the input admits no layout, with what is short. A policy sees a layout that
    already fits the
    topology: replicas on draining ranks and above smaller budgets are gone from it, last replicas
    as experts to repair.
    """
    request = command.input
    try:
        fitted = fit(
            request.layout,
            request.topology,
            mean_demand(request),
            staging_slots=request.staging_slots,
        )
        target = propose(command.policy, msgspec.structs.replace(request, layout=fitted))
        waves = WaveConfig(
            adds_per_rank=ALL_AT_ONCE if command.cause == "initial" else config.wave_adds_per_rank,
            copies_from_rank=(
                ALL_AT_ONCE if command.cause == "initial" else config.wave_copies_from_rank
            ),
            evict_first=command.cause == "budget",
        )
        plan = make_plan(
            request.layout, target, request, waves, reason=_REASONS.get(command.cause, "")
        )
    except (PolicyError, PlannerError, LayoutError) as error:
        return TargetFailed(at_s=0.0, request_id=command.request_id, reason=str(error))
    return TargetComputed(
        at_s=0.0,
        request_id=command.request_id,
        layout_revision=command.layout_revision,
        slots=target.slots,
        plan=plan,
        notes=plan.refused[:8],
    )
