"""A placement that an operator wants, as a layout: checked against what is there, or refused with
every reason.

Responsible for what must hold of a given placement, and for saying what follows from it that
nobody asked for. Plans nothing. Called by `compute_target` alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from placement.engine.floor import domain_spread
from placement.layout import ABSENT, EMPTY, ExpertLayout
from placement.policy.base import PolicyError, PolicyInput

Keys = Sequence[Sequence[int]]
"""Keys by rank, each at most once a rank."""

NAMED_MAX: Final = 4
"""Experts or layers that one sentence names; the others are counted."""
REASONS_MAX: Final = 8
"""Reasons that a refusal gives."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A placement that can be had. floor: failure domains that every expert has in it, at most the
    configured ones. notes: what follows from it, for people."""

    layout: ExpertLayout
    floor: int
    notes: tuple[str, ...]


def wanted_layout(target: Keys, request: PolicyInput) -> Wanted:
    """The placement as a layout of the request's topology.

    target: keys (`layer * num_experts + expert`) by rank, every rank of the topology once. Raises
    PolicyError with all that stands against it: other ranks than there are, keys that are none,
    experts nowhere, ranks that may hold nothing or less, and an uneven one where layouts are to be
    uniform. Fewer failure domains than the floor are no reason against it: they are said.
    """
    _check_form(target, request)
    reasons = [*_left_out(target, request), *_too_much(target, request)]
    if request.uniform:
        reasons.extend(_uneven(target, request))
    if reasons:
        more = len(reasons) - REASONS_MAX
        raise PolicyError(
            "; ".join(reasons[:REASONS_MAX]) + (f"; and {more} more reasons" if more > 0 else "")
        )
    layout = _layout(target, request)
    floor, notes = _floor(layout, request)
    return Wanted(layout, floor, notes)


def _check_form(target: Keys, request: PolicyInput) -> None:
    if len(target) != request.topology.num_ranks:
        raise PolicyError(
            f"the placement is of {len(target)} ranks, the service has "
            f"{request.topology.num_ranks}: name every rank, also those that are to hold nothing"
        )
    for rank, keys in enumerate(target):
        wrong = next((key for key in keys if not 0 <= key < request.spec.num_keys), None)
        if wrong is not None:
            raise PolicyError(
                f"rank {rank}: key {wrong} must lie in [0, {request.spec.num_keys}), layers x "
                "experts"
            )
        if len(set(keys)) != len(keys):
            raise PolicyError(f"rank {rank}: an expert is named twice; once is all a rank can hold")


def _left_out(target: Keys, request: PolicyInput) -> Iterator[str]:
    held = {key for keys in target for key in keys}
    lost = [key for key in range(request.spec.num_keys) if key not in held]
    if lost:
        yield (
            f"{_count(len(lost), 'expert')} would have no replica "
            f"({_experts(lost, request.spec.num_experts)})"
        )


def _too_much(target: Keys, request: PolicyInput) -> Iterator[str]:
    for spec, keys in zip(request.topology.ranks, target, strict=True):
        if not keys:
            continue
        wanted = f"{_count(len(keys), 'expert')} {'is' if len(keys) == 1 else 'are'} wanted on it"
        if not spec.alive:
            yield (
                f"rank {spec.rank} has no shard, and {wanted}: wait until it has joined, or give "
                "them to other ranks where it has left the service"
            )
        elif spec.draining:
            yield f"rank {spec.rank} is being emptied, and {wanted}: undrain it first"
        elif (room := spec.room(request.staging_slots)) < len(keys):
            short = len(keys) - room
            yield (
                f"rank {spec.rank} can hold {_count(room, 'expert')} ({spec.num_slots} slots, "
                f"{request.staging_slots} of them kept empty for copies), and {wanted}: "
                f"{_count(short, 'slot')} ({short * request.spec.slot_bytes} bytes) short, raise "
                "its budget"
            )


def _uneven(target: Keys, request: PolicyInput) -> Iterator[str]:
    """Layers that have more replicas on one usable rank than on another."""
    spec, topology = request.spec, request.topology
    usable = [rank for rank in range(topology.num_ranks) if topology.usable(rank)]
    counts = np.array(
        [
            np.bincount(
                np.asarray(target[rank], np.int64) // spec.num_experts, minlength=spec.num_layers
            )
            for rank in usable
        ],
        dtype=np.int64,
    ).reshape(len(usable), spec.num_layers)
    uneven = np.flatnonzero(counts.min(axis=0, initial=1 << 30) != counts.max(axis=0, initial=-1))
    if len(uneven) and usable:
        layer = int(uneven[0])
        least, most = int(counts[:, layer].argmin()), int(counts[:, layer].argmax())
        yield (
            f"rebalance.uniform asks for the same number of slots of a layer on each rank, and "
            f"{_count(len(uneven), 'layer')} would not have it (layer {layer}: "
            f"{int(counts[least, layer])} on rank {usable[least]}, {int(counts[most, layer])} on "
            f"rank {usable[most]})"
        )


def _layout(target: Keys, request: PolicyInput) -> ExpertLayout:
    """Which slot of a rank holds which expert is free: the planner compares sets."""
    topology, spec = request.topology, request.spec
    slots = np.full((topology.num_ranks, topology.max_slots), ABSENT, dtype=np.int32)
    for rank, keys in zip(topology.ranks, target, strict=True):
        if rank.alive:
            slots[rank.rank, : rank.num_slots] = EMPTY
        slots[rank.rank, : len(keys)] = sorted(keys)
    return ExpertLayout(slots, spec.num_layers, spec.num_experts)


def _floor(layout: ExpertLayout, request: PolicyInput) -> tuple[int, tuple[str, ...]]:
    spread = domain_spread(layout, request.topology)
    low = np.flatnonzero(spread < request.floor)
    if not len(low):
        return request.floor, ()
    note = (
        f"{_count(len(low), 'expert')} would lie in fewer than {request.floor} failure domains "
        f"({_experts(low.tolist(), layout.num_experts)}): repairs, which go on while automatic "
        "plans are paused, add replicas to them again"
    )
    return max(1, int(spread.min())), (note,)


def _experts(keys: Sequence[int], num_experts: int) -> str:
    named = [f"layer {k // num_experts} expert {k % num_experts}" for k in keys[:NAMED_MAX]]
    return ", ".join(named) + (" ..." if len(keys) > NAMED_MAX else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
