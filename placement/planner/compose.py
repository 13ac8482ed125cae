"""`make_plan`: diff, order, proof, price and words, put together.

Responsible for the finished `Plan`. Must never choose where an expert should lie: that is the
target it is given. Called off the loop by `engine.compute_target`, by replay and by benchmarks.
"""

from __future__ import annotations

import msgspec

from placement.cost import copy_seconds
from placement.layout import ExpertLayout, SlotId
from placement.planner.drafts import Draft, difference, draft_moves
from placement.planner.order import Ordered, WaveLimits, order_moves
from placement.planner.plan import LayerFigure, Move, MoveKind, Plan, PlannedStep, StepKind
from placement.planner.price import LayerGain, layer_gains, mean_demand, usable_balancedness
from placement.planner.prove import prove
from placement.planner.reason import Shares, reason_of
from placement.policy.base import PolicyInput

ALL_AT_ONCE = 1 << 30
"""Wave limit of a first fill: nothing is served yet, so one table at its end is enough."""


class PlannerError(ValueError):
    """Current and target layout do not belong together; names what differs."""


class WaveConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How wide a wave may be, and whether evictions come first (a budget that must fall soon)."""

    adds_per_rank: int = 2
    copies_from_rank: int = 2
    evict_first: bool = False


def make_plan(
    current: ExpertLayout,
    target: ExpertLayout,
    request: PolicyInput,
    waves: WaveConfig,
    *,
    reason: str = "",
    first_move_id: int = 0,
    first_step_id: int = 0,
) -> Plan:
    """Plan from `current` to a layout whose ranks hold the same experts as `target`'s.

    current: what is listed now; may be wider than the topology where a rank must give slots up.
    target: fits `request.topology`. reason: prefix of each move's reason ("" for automatic plans).
    Moves that no feasible order allows are left out and named in `refused`. Raises PlannerError
    where the two do not belong together.
    """
    _check(current, target, request)
    limit = [s.num_slots if s.alive else 0 for s in request.topology.ranks]
    width = current.slots.shape[1]
    limit = [min(n, width) for n in limit]
    diff = difference(current, target, limit)
    drafts = draft_moves(
        current, diff, request.topology, slot_limit=limit, staging_slots=request.staging_slots
    )
    limits = WaveLimits(
        waves.adds_per_rank,
        waves.copies_from_rank,
        limit,
        request.staging_slots,
        request.floor,
        waves.evict_first,
    )
    ordered = order_moves(current, target, drafts, request.topology, limits)
    steps = _steps(ordered, drafts, current.num_experts, first_move_id, first_step_id)
    after = prove(current, steps, slot_limit=limit, staging_slots=request.staging_slots)
    return _priced(current, after, drafts, ordered, steps, request, reason, first_move_id)


def _check(current: ExpertLayout, target: ExpertLayout, request: PolicyInput) -> None:
    for name in ("num_layers", "num_experts", "num_ranks"):
        have, want = getattr(current, name), getattr(target, name)
        if have != want:
            raise PlannerError(f"current layout has {name} {have}, the target {want}")
    if target.missing():
        raise PlannerError(
            f"target leaves {target.missing()[:4]} (layer, expert) without a replica"
        )
    if target.num_ranks != request.topology.num_ranks:
        raise PlannerError(
            f"target has {target.num_ranks} ranks, the topology {request.topology.num_ranks}"
        )


def _steps(
    ordered: Ordered, drafts: list[Draft], num_experts: int, first_move: int, first_step: int
) -> tuple[PlannedStep, ...]:
    move_ids = _move_ids(ordered, drafts, first_move)
    return tuple(
        PlannedStep(
            step_id=first_step + s.step_id,
            kind=s.kind,
            move_id=move_ids[s.draft],
            slot=SlotId(*s.slot),
            layer=s.key // num_experts,
            expert=s.key % num_experts,
            wave=s.wave,
            after=tuple(first_step + a for a in s.after),
        )
        for s in ordered.steps
    )


def _move_ids(ordered: Ordered, drafts: list[Draft], first: int) -> dict[int, int]:
    kept = [i for i in range(len(drafts)) if i not in ordered.left_out]
    return {i: first + n for n, i in enumerate(kept)}


def _priced(
    current: ExpertLayout,
    after: ExpertLayout,
    drafts: list[Draft],
    ordered: Ordered,
    steps: tuple[PlannedStep, ...],
    request: PolicyInput,
    reason: str,
    first_move: int,
) -> Plan:
    topology, num_experts = request.topology, current.num_experts
    kept = sorted(_move_ids(ordered, drafts, first_move).items())
    layers = sorted({s.layer for s in steps})
    gains = layer_gains(current, after, layers, request)
    adds_in_layer = {layer: 0 for layer in layers}
    for i, _ in kept:
        if drafts[i].target >= 0:
            adds_in_layer[drafts[i].key // num_experts] += 1
    demand = mean_demand(request)
    shares = Shares(current, after, demand)
    moves: list[Move] = []
    copied = crossed = 0
    costs = dict.fromkeys(layers, 0.0)
    for i, move_id in kept:
        draft = drafts[i]
        layer, expert = divmod(draft.key, num_experts)
        source = ordered.sources[i] if draft.kind is MoveKind.REPLICATE else draft.source
        adds = draft.target >= 0
        copied_from = ordered.sources[i] if adds else -1
        cross = adds and (
            copied_from < 0 or topology.ranks[copied_from].node != topology.ranks[draft.target].node
        )
        size = request.spec.expert_bytes if adds else 0
        copied += size
        crossed += size if cross else 0
        if adds:
            costs[layer] += copy_seconds(size, copied_from, draft.target, topology)
        moves.append(
            Move(
                move_id=move_id,
                kind=draft.kind,
                layer=layer,
                expert=expert,
                source_rank=source,
                target_rank=draft.target,
                copy_bytes=size,
                cross_node=cross,
                reason=reason_of(draft, current, shares, reason),
                gain_s_per_s=gains[layer].saved_s / adds_in_layer[layer] if adds else 0.0,
            )
        )
    return Plan(
        moves=tuple(moves),
        steps=steps,
        copy_bytes=copied,
        cross_node_bytes=crossed,
        cost_s=sum(costs.values(), 0.0),  # floats even where nothing moves
        gain_s_per_s=sum((gain.saved_s for gain in gains.values()), 0.0),
        balancedness_before=usable_balancedness(current, demand, request),
        balancedness_after=usable_balancedness(after, demand, request),
        refused=_refused(ordered, drafts, num_experts),
        layers=_figures(steps, gains, costs, request.byte_price * request.spec.slot_bytes),
    )


def _figures(
    steps: tuple[PlannedStep, ...],
    gains: dict[int, LayerGain],
    costs: dict[int, float],
    slot_price: float,
) -> tuple[LayerFigure, ...]:
    writes, freed = dict.fromkeys(gains, 0), dict.fromkeys(gains, 0)
    for step in steps:
        adds = step.kind is StepKind.ADD
        writes[step.layer] += adds
        freed[step.layer] += -1 if adds else 1
    return tuple(
        LayerFigure(
            layer=layer,
            writes=writes[layer],
            cost_s=costs[layer],
            seconds_per_s=gain.before_s,
            gain_s_per_s=gain.saved_s,
            spread_s_per_s=gain.spread_s,
            freed_s_per_s=slot_price * freed[layer],
        )
        for layer, gain in gains.items()
    )


def _refused(ordered: Ordered, drafts: list[Draft], num_experts: int) -> tuple[str, ...]:
    return tuple(
        f"{drafts[i].kind} of layer {drafts[i].key // num_experts} "
        f"expert {drafts[i].key % num_experts} left out: {why}"
        for i, why in sorted(ordered.left_out.items())
    )
