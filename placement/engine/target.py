"""`compute_target`: the policy, or what an operator wants, and the planner, run away from the loop
on the data of one command.

Responsible for turning a ComputeTarget into its answer; a pure function, so that a replay may
compute it again. Called by the drivers (a thread of the controller, the simulator, replay).
"""

from __future__ import annotations

import msgspec

from placement.config import RebalanceConfig
from placement.engine.wanted import wanted_layout
from placement.layout import ExpertLayout, LayoutError
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
    already fits the topology: replicas on draining ranks and above smaller budgets are gone from
    it, last replicas as experts to repair. No policy is asked where the command says what each rank
    is to hold.
    """
    request, given = command.input, bool(command.target)
    try:
        notes: tuple[str, ...] = ()
        if given:
            wanted = wanted_layout(command.target, request)
            target, notes = wanted.layout, wanted.notes
            # The planner keeps the floor while it moves, as far as the placement has it.
            request = msgspec.structs.replace(request, floor=wanted.floor)
        else:
            target = _proposed(command)
        waves = WaveConfig(
            adds_per_rank=ALL_AT_ONCE if command.cause == "initial" else config.wave_adds_per_rank,
            copies_from_rank=(
                ALL_AT_ONCE if command.cause == "initial" else config.wave_copies_from_rank
            ),
            evict_first=command.cause == "budget",
        )
        reason = "as asked for" if given else _REASONS.get(command.cause, "")
        plan = make_plan(request.layout, target, request, waves, reason=reason)
    except (PolicyError, PlannerError, LayoutError) as error:
        return TargetFailed(at_s=0.0, request_id=command.request_id, reason=str(error))
    return TargetComputed(
        at_s=0.0,
        request_id=command.request_id,
        layout_revision=command.layout_revision,
        slots=target.slots,
        plan=plan,
        notes=notes if given else plan.refused[:8],
    )


def _proposed(command: ComputeTarget) -> ExpertLayout:
    """What the policy makes of the layout that is left when every rank holds only what it may."""
    request = command.input
    fitted = fit(
        request.layout,
        request.topology,
        mean_demand(request),
        staging_slots=request.staging_slots,
    )
    return propose(command.policy, msgspec.structs.replace(request, layout=fitted))
