"""What a plan's moves remove so that what they add fits: out of its steps, in words, for the wire.

Responsible for telling it; pure functions of what they are given. Must never keep or decide
anything. Called by book and views.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from moe_serve.rpc import placement_pb2 as pb


class Removed(NamedTuple):
    """A replica that a move takes off a rank so that what it adds fits there."""

    layer: int
    expert: int
    rank: int


def room_of(plan: Any) -> dict[int, tuple[Removed, ...]]:
    """By move of a plan (placement.planner's): what it removes beside its own expert's replica, in
    the order of the steps.

    Example: a plan that replicates expert 0 of layer 1 (move 7) to rank 2, which is full of others,
    and frees a slot there of expert 3 of layer 0 first, gives {7: ((0, 3, 2),)}.
    """
    own = {
        move.move_id: Removed(move.layer, move.expert, move.source_rank)
        for move in plan.moves
        if move.kind.value != "replicate"
    }
    room: dict[int, tuple[Removed, ...]] = {}
    for step in plan.steps:
        if step.kind.value != "remove":
            continue
        gone = Removed(step.layer, step.expert, step.slot.rank)
        if own.get(step.move_id) == gone:
            del own[step.move_id]
        else:
            room[step.move_id] = (*room.get(step.move_id, ()), gone)
    return room


def room_words(room: Iterable[Removed]) -> str:
    """ "layer 0 expert 3, layer 2 expert 1"."""
    return ", ".join(f"layer {one.layer} expert {one.expert}" for one in room)


def room_view(room: Iterable[Removed]) -> list[pb.Removed]:
    """The same for the wire."""
    return [pb.Removed(layer=one.layer, expert=one.expert, rank=one.rank) for one in room]
