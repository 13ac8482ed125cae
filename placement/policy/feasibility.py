"""What a request allows at all: input checks, capacity of each rank, the floor that memory can
reach.

Responsible for typed refusals. Must never place anything. Called by `propose`, by every policy,
and by whoever wants to say how far a budget reaches before asking for a layout.

Example. Two failure domains of two ranks, 41 slots a rank of which one is staging, 4 x 32 = 128
keys: each domain can hold 80 different keys, 160 in all, so every expert has a replica (128 <=
160) but not one in each domain (256 > 160): the reachable floor is 1 and 32 slots are left for
load.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from placement.policy.base import PolicyError, PolicyInput
from placement.topology import NUM_PHASES, Topology

RATE_MAX: Final = 1e30
"""Pairs a second that no expert can be asked for; sums and products below stay finite."""
TOKENS_MAX: Final = 1e12
"""The same for tokens of a layer call."""


def capacities(topology: Topology, staging_slots: int) -> npt.NDArray[np.int64]:
    """Slots that may be filled: int64 [ranks]; 0 on ranks that are lost or draining."""
    return np.array(
        [spec.room(staging_slots) if topology.usable(spec.rank) else 0 for spec in topology.ranks],
        dtype=np.int64,
    )


def domains(topology: Topology, staging_slots: int) -> npt.NDArray[np.int64]:
    """Failure domain of each rank as a number, by order of name: int64 [ranks].

    -1 on ranks that may hold nothing: lost, draining, or without a slot beside staging.
    """
    capacity = capacities(topology, staging_slots)
    names = sorted({s.failure_domain for s in topology.ranks if capacity[s.rank] > 0})
    return np.array(
        [
            names.index(spec.failure_domain) if capacity[spec.rank] > 0 else -1
            for spec in topology.ranks
        ],
        dtype=np.int64,
    )


def reachable_floor(topology: Topology, *, num_keys: int, floor: int, staging_slots: int) -> int:
    """Largest number of failure domains, at most `floor`, that every one of `num_keys` experts
    can have; 0 = not even one.

    A domain can hold each expert once for this purpose, so f is reachable if and only if the sum
    over domains of min(slots, num_keys) is at least f x num_keys.
    """
    capacity = capacities(topology, staging_slots)
    domain = domains(topology, staging_slots)
    num_domains = int(domain.max(initial=-1)) + 1
    held = np.bincount(domain[domain >= 0], capacity[domain >= 0], minlength=num_domains)
    total = int(np.minimum(held, num_keys).sum())
    return min(floor, num_domains, total // num_keys)


def uniform_slots(request: PolicyInput) -> int:
    """Slots that every layer gets on every usable rank of a uniform layout: what the smallest rank
    can give each layer, at most one an expert.
    """
    capacity = capacities(request.topology, request.staging_slots)
    usable = capacity[domains(request.topology, request.staging_slots) >= 0]
    least = int(usable.min()) if len(usable) else 0
    return min(least // request.spec.num_layers, request.spec.num_experts)


def reachable_uniform(request: PolicyInput) -> int:
    """`reachable_floor` of one layer of a uniform layout."""
    domain = domains(request.topology, request.staging_slots)
    own, experts = uniform_slots(request), request.spec.num_experts
    held = np.bincount(domain[domain >= 0], minlength=1) * own
    total = int(np.minimum(held, experts).sum())
    return min(request.floor, int((held > 0).sum()), total // experts)


def check_request(request: PolicyInput) -> int:
    """Refuse what no policy can plan for; returns the floor that can be reached (>= 1).

    Raises PolicyError naming the field, or the slots and bytes that are short.
    """
    spec, topology, layout = request.spec, request.topology, request.layout
    shape = (NUM_PHASES, spec.num_layers, spec.num_experts)
    if (layout.num_layers, layout.num_experts) != shape[1:]:
        raise PolicyError(
            f"layout is of {layout.num_layers} x {layout.num_experts} experts, the model has "
            f"{spec.num_layers} x {spec.num_experts}"
        )
    if layout.num_ranks != topology.num_ranks:
        raise PolicyError(f"layout has {layout.num_ranks} ranks, topology {topology.num_ranks}")
    _check_scenarios(request, shape)
    if request.floor < 1 or request.staging_slots < 0 or request.byte_price < 0:
        raise PolicyError(
            f"floor {request.floor} must be >= 1, staging_slots {request.staging_slots} and "
            f"byte_price {request.byte_price} >= 0"
        )
    for name, limit in (
        ("max_moves", request.max_moves),
        ("max_bytes", request.max_bytes),
        ("max_cross_node_bytes", request.max_cross_node_bytes),
    ):
        if limit is not None and limit < 0:
            raise PolicyError(f"{name} must be >= 0 or None, got {limit}")
    _check_batches(request)
    if request.uniform:
        return _check_uniform(request)
    reachable = reachable_floor(
        topology,
        num_keys=spec.num_keys,
        floor=request.floor,
        staging_slots=request.staging_slots,
    )
    if reachable < 1:
        have = int(capacities(topology, request.staging_slots).sum())
        short = spec.num_keys - have
        usable = sum(topology.usable(rank) for rank in range(topology.num_ranks))
        raise PolicyError(
            f"{usable} usable ranks can fill {have} slots, {spec.num_keys} experts need one each: "
            f"{short} slots ({short * spec.slot_bytes} bytes) are short; raise a budget, undrain "
            "or add a rank"
        )
    return reachable


def _check_batches(request: PolicyInput) -> None:
    tokens = request.batch_tokens
    if len(tokens) != NUM_PHASES or not all(0.0 <= t < TOKENS_MAX for t in tokens):
        raise PolicyError(
            f"batch_tokens must be {NUM_PHASES} values in [0, {TOKENS_MAX:g}), got {tokens}; 0 = "
            "unknown"
        )


def _check_uniform(request: PolicyInput) -> int:
    reachable = reachable_uniform(request)
    if reachable < 1:
        usable = sum(request.topology.usable(r) for r in range(request.topology.num_ranks))
        own, experts = uniform_slots(request), request.spec.num_experts
        raise PolicyError(
            f"{usable} usable ranks of {own} slots a layer, as many as the smallest can give each, "
            f"hold {usable * own} of a layer's {experts} experts: "
            f"{max(1, experts - usable * own)} slots a layer are short; raise the smallest budget, "
            "undrain or add a rank"
        )
    return reachable


def _check_scenarios(request: PolicyInput, shape: tuple[int, int, int]) -> None:
    scenarios, weights = request.scenarios, request.weights
    if scenarios.ndim != 4 or scenarios.shape[1:] != shape or len(scenarios) < 1:
        raise PolicyError(
            f"scenarios have shape {scenarios.shape}, want (1 or more, {shape[0]}, {shape[1]}, "
            f"{shape[2]}) [scenarios, phases, layers, experts]"
        )
    if not bool(np.all(np.isfinite(scenarios) & (scenarios >= 0))):
        raise PolicyError("scenarios must be finite and >= 0 pairs a second")
    if not float(scenarios.max(initial=0.0)) < RATE_MAX:
        raise PolicyError(
            f"scenarios must be below {RATE_MAX:g} pairs a second, got {float(scenarios.max()):g}"
        )
    if weights.shape != (len(scenarios),) or not bool(
        np.all(np.isfinite(weights) & (weights >= 0))
    ):
        raise PolicyError(
            f"weights must be {len(scenarios)} finite values >= 0, got shape {weights.shape}"
        )
    if abs(float(weights.sum()) - 1.0) > 1e-6:
        raise PolicyError(f"weights must sum to 1, got {float(weights.sum())}")
