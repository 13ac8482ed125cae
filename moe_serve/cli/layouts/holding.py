"""What a service holds, as far as a file of it can say, and by which numbers engines call layers.

Responsible for these facts alone. Called by the reader and the writer of files.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from moe_serve.documents.replicas import EMPTY, LISTED, pair_of, shape_of
from moe_serve.errors import InvalidArgument
from moe_serve.rpc import placement_pb2 as pb
from placement.adapters.counts import LAYERS_MAX


class LayoutFormat(StrEnum):
    """Who reads such a file."""

    OWN = "moe-serve"
    SGLANG = "sglang"
    VLLM = "vllm"
    TRTLLM = "trtllm"


@dataclass(frozen=True, slots=True)
class Holding:
    """What a service holds: its model, and keys by rank in the order of slots, of the ranks that
    have not left (`ranks`) and of all (`num_ranks`)."""

    model: str
    weights_version: str
    num_layers: int
    num_experts: int
    num_ranks: int
    ranks: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]


def holding_of(placement: pb.GetPlacementResponse) -> Holding:
    """What is listed now. Raises InvalidArgument where the model's size is absurd."""
    layers, experts = shape_of(placement)
    ranks = [rank for rank in placement.ranks if rank.state != "removed"]
    return Holding(
        model=placement.model,
        weights_version=placement.weights_version,
        num_layers=layers,
        num_experts=experts,
        num_ranks=len(placement.ranks),
        ranks=tuple(rank.rank for rank in ranks),
        rows=tuple(
            tuple(
                pair
                for slot in sorted(rank.slots, key=lambda slot: slot.index)
                if slot.state == LISTED and (pair := pair_of(slot, layers, experts)) != EMPTY
            )
            for rank in ranks
        ),
    )


def parse_layers(text: str, num_layers: int) -> tuple[int, ...] | None:
    """Numbers of the MoE layers in the model, as "3-60" or "1,3,5-8"; "" = not said.

    Raises InvalidArgument.
    """
    if not text.strip():
        return None
    found: list[int] = []
    for part in text.split(","):
        low, dash, high = (word.strip() for word in part.partition("-"))
        if not low.isdecimal() or (dash and not high.isdecimal()) or len(low + high) > 18:
            raise InvalidArgument(
                f"--layers: {part.strip()[:40]!r} is neither a number nor a range"
            )
        first, last = int(low), int(high or low)
        if not 0 <= last - first < LAYERS_MAX:
            raise InvalidArgument(
                f"--layers: {part.strip()} is no range of 1 to {LAYERS_MAX} layers"
            )
        found.extend(range(first, last + 1))
        if len(found) > LAYERS_MAX:
            raise InvalidArgument(f"--layers names more than {LAYERS_MAX} layers")
    if found != sorted(set(found)):
        raise InvalidArgument("--layers must name each layer once, ascending")
    if len(found) != num_layers:
        raise InvalidArgument(
            f"--layers names {len(found)} layers, the service has {num_layers} MoE layers"
        )
    return tuple(found)
