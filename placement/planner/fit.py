"""What is left of a layout when ranks have fewer slots, drain or are lost: the layout a policy may
start from.

Responsible for choosing which replicas a smaller budget costs, and for saying how many bytes are
missing where the floor cannot be held. Moves nothing and adds nothing. Called by `compute_target`
and by the engine's admin requests.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from placement.layout import ABSENT, EMPTY, ExpertLayout
from placement.topology import MoeSpec, Topology


def fit(
    layout: ExpertLayout, topology: Topology, demand: npt.NDArray[np.float64], *, staging_slots: int
) -> ExpertLayout:
    """`layout` cut to the topology's shape: draining and lost ranks hold nothing, others at most
    slots - staging.

    demand: float64 [layers, experts]. A rank over its limit first gives up duplicates on itself,
    then replicas that save least: those of the smallest demand / (replicas x (replicas - 1)), the
    extra load each remaining replica would take; last replicas go last, for a policy must place
    them elsewhere. Ties by lowest key. Kept replicas stay in their slots where these still exist,
    and go to the lowest empty ones otherwise (on paper only).
    """
    slots = np.full((topology.num_ranks, topology.max_slots), ABSENT, dtype=np.int32)
    counts = layout.replica_counts.reshape(-1).copy()
    flat = demand.reshape(-1)
    for spec in topology.ranks:
        held = (
            [int(k) for k in layout.slots[spec.rank] if k >= 0]
            if spec.rank < layout.num_ranks
            else []
        )
        if not spec.alive:
            for key in held:
                counts[key] -= 1
            continue
        slots[spec.rank, : spec.num_slots] = EMPTY
        room = 0 if spec.draining else spec.room(staging_slots)
        keep = _keep(held, room, counts, flat)
        _place(slots[spec.rank], layout.slots[spec.rank].tolist(), keep, spec.num_slots)
    return ExpertLayout(slots, layout.num_layers, layout.num_experts)


def _keep(
    held: list[int], room: int, counts: npt.NDArray[np.int64], demand: npt.NDArray[np.float64]
) -> set[int]:
    keep = set(held)
    for key in held:
        counts[key] -= 1
    for key in keep:
        counts[key] += 1
    while len(keep) > room:

        def worth(key: int) -> tuple[bool, float, int]:
            n = int(counts[key])
            return n <= 1, float(demand[key]) / (n * (n - 1)) if n > 1 else float(demand[key]), key

        least = min(keep, key=worth)
        keep.discard(least)
        counts[least] -= 1
    return keep


def _place(row: npt.NDArray[np.int32], old: list[int], keep: set[int], num_slots: int) -> None:
    left = set(keep)
    for index, key in enumerate(old[:num_slots]):
        if key in left:
            row[index] = key
            left.discard(key)
    empty = [i for i in range(num_slots) if row[i] == EMPTY]
    for index, key in zip(empty, sorted(left), strict=False):
        row[index] = key


def missing_slots(topology: Topology, *, num_keys: int, floor: int, staging_slots: int) -> int:
    """Slots that are short to hold every expert in `floor` failure domains; 0 where they suffice.

    A domain can serve an expert once for the floor, so a domain counts at most `num_keys` slots.
    With fewer domains than the floor, the number of domains is asked for.
    """
    room: dict[str, int] = {}
    for spec in topology.ranks:
        if topology.usable(spec.rank):
            slots = min(num_keys, spec.room(staging_slots))
            room[spec.failure_domain] = room.get(spec.failure_domain, 0) + slots
    want = num_keys * max(1, min(floor, len(room)))
    return max(0, want - sum(min(num_keys, n) for n in room.values()))


def missing_uniform(topology: Topology, spec: MoeSpec, *, floor: int, staging_slots: int) -> int:
    """`missing_slots` where every layer has as many slots on each usable rank: over ranks, what
    each lacks of its part of every layer."""
    room = [r.room(staging_slots) for r in topology.ranks if topology.usable(r.rank)]
    want = max(1, floor) * spec.num_experts
    if not room:
        return want * spec.num_layers
    own = -(-want // len(room))
    return sum(max(0, own * spec.num_layers - slots) for slots in room)


def reachable_floor(topology: Topology, *, num_keys: int, floor: int, staging_slots: int) -> int:
    """Largest floor, up to `floor`, that the topology's slots can hold; 0 where not even one
    replica each fits."""
    for wanted in range(floor, 0, -1):
        domains = {r.failure_domain for r in topology.ranks if topology.usable(r.rank)}
        if wanted <= max(1, len(domains)) and not missing_slots(
            topology, num_keys=num_keys, floor=wanted, staging_slots=staging_slots
        ):
            return wanted
    return 0
