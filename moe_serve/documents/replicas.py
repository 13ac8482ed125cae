"""Who holds which expert: every replica by rank and slot, and how many serve.

Responsible for that a replica counts once it is LISTED, which is: in the routing table. Called by
page and command line for every placement that they show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from moe_serve.documents.window import CELLS_MAX, Counts
from moe_serve.errors import InvalidArgument
from moe_serve.rpc import placement_pb2 as pb

LISTED = "LISTED"
EMPTY = -1
Holders = dict[tuple[int, int], list[tuple[int, int, str]]]
"""(rank, slot, state) of every replica by (layer, expert)."""
Ranks = Mapping[tuple[int, int], Sequence[int]]
"""Ranks of listed replicas by (layer, expert), lowest first; without those that have none."""


def shape_of(placement: pb.GetPlacementResponse) -> tuple[int, int]:
    """(layers, experts). Raises InvalidArgument where they are absurd."""
    layers, experts = placement.num_layers, placement.num_experts
    # A size beside one of zero is bounded too.
    if min(layers, experts) < 0 or max(1, layers) * max(1, experts) > CELLS_MAX:
        raise InvalidArgument(f"placement: {layers} x {experts} must be 0 to {CELLS_MAX} cells")
    return layers, experts


def pair_of(slot: pb.Slot, layers: int, experts: int) -> int:
    """layer * experts + expert of what a slot holds; EMPTY where that is nothing of the model."""
    fits = 0 <= slot.layer < layers and 0 <= slot.expert < experts
    return slot.layer * experts + slot.expert if fits else EMPTY


def replica_counts(placement: pb.GetPlacementResponse) -> Counts:
    """Replicas in the routing table: int64 [layers, experts]. Raises InvalidArgument."""
    layers, experts = shape_of(placement)
    counts = np.zeros(layers * experts, dtype=np.int64)
    pairs = (
        pair_of(slot, layers, experts)
        for rank in placement.ranks
        for slot in rank.slots
        if slot.state == LISTED
    )
    np.add.at(counts, np.array([pair for pair in pairs if pair != EMPTY], dtype=np.int64), 1)
    return counts.reshape(layers, experts)


def holders_of(placement: pb.GetPlacementResponse) -> Holders:
    """Every replica there is or is coming, by rank."""
    found: Holders = {}
    for rank in placement.ranks:
        for slot in rank.slots:
            if slot.layer >= 0 and slot.expert >= 0:
                here = found.setdefault((slot.layer, slot.expert), [])
                here.append((rank.rank, slot.index, slot.state))
    return found


def listed_ranks(holders: Holders) -> dict[tuple[int, int], tuple[int, ...]]:
    """Of every replica, those that serve."""
    found = {
        pair: tuple(rank for rank, _, state in held if state == LISTED)
        for pair, held in holders.items()
    }
    return {pair: ranks for pair, ranks in found.items() if ranks}
