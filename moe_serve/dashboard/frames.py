"""What browsers get: load and placement as small JSON documents with packed arrays.

An array travels as base64 of little-endian bytes, row-major. Load is u16 with a scale: the value is
`number * scale`. Replica counts are u8. Slots are i32: `layer * num_experts + expert`, -1 empty, -2
absent (ranks differ in size, the array does not).

Example: demand [[0, 3], [70000, 1]] has the scale 70000 / 65535, the numbers 0, 3, 65535, 1. What
is not zero never becomes 0: cold and untouched look different on the page.

Responsible for the form of documents and for refusing arrays that do not fit their declared shape.
Must never read a clock or judge what is stale. Called by `feed`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_serve.documents.replicas import EMPTY, pair_of, replica_counts, shape_of
from moe_serve.documents.views import Json, rank_view, router_view
from moe_serve.documents.window import CELLS_MAX, Counts, busy_of, counts_of
from moe_serve.errors import InvalidArgument
from moe_serve.rpc import placement_pb2

UNKNOWN: Json = {"p50_s": None, "p99_s": None, "rows_per_s": None}
"""Speed of a window of which nothing is known."""
REPLICAS_MAX = 255
ABSENT = -2
_U16_MAX = 65_535


def pack(array: npt.NDArray[Any]) -> str:
    """base64 of an array's little-endian bytes, row-major."""
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return base64.b64encode(little.tobytes()).decode("ascii")


def pack_counts(counts: Counts) -> Json:
    """Counts (not negative, any shape) as {"scale", "data"}: u16 numbers and the worth of one.

    Off by at most half a scale, and by a whole one where the count is smaller than that.

    >>> pack_counts(np.array([0, 2, 65535]))["scale"]
    1.0
    """
    top = int(counts.max(initial=0))
    scale = max(1.0, top / _U16_MAX)
    units = np.rint(counts / scale).astype(np.int64)
    units = np.where(counts > 0, np.clip(units, 1, _U16_MAX), 0)
    return {"scale": scale, "data": pack(units.astype(np.uint16))}


def load_frame(
    load: placement_pb2.GetLoadResponse,
    placement: placement_pb2.GetPlacementResponse | None,
    *,
    seq: int,
    wall_s: float,
    speed: Json = UNKNOWN,
) -> Json:
    """Document of one closed window.

    wall_s: when the window closed, in seconds since the Unix epoch; `wall_s - end_s` turns the
    controller's seconds (those of moves) into dates. `load` is demand [phases, layers, experts] in
    pairs; `rank_pairs` executed pairs [ranks, layers]; `busy_s` seconds of compute [ranks].
    `replicas` is null before the first placement. speed: what `Traffic.take` said. Raises
    InvalidArgument where arrays do not fit.
    """
    phases, layers, experts = load.num_phases, load.num_layers, load.num_experts
    demand, executed = counts_of(load, "demand"), counts_of(load, "executed")
    rank_pairs = counts_of(load, "rank_pairs")
    fits = placement is not None and (placement.num_layers, placement.num_experts) == (
        layers,
        experts,
    )
    return {
        "seq": seq,
        "window": load.window,
        "start_s": load.start_s,
        "end_s": load.end_s,
        "wall_s": wall_s,
        "model": placement.model if placement is not None else "",
        "term": placement.term if placement is not None else 0,
        "epoch": placement.epoch if placement is not None else 0,
        "phases": phases,
        "layers": layers,
        "experts": experts,
        "ranks": load.num_ranks,
        "load": pack_counts(demand),
        "rank_pairs": pack_counts(rank_pairs),
        "replicas": _replicas(placement) if placement is not None and fits else None,
        "demand_pairs": [int(n) for n in demand.sum(axis=(1, 2))],
        "executed_pairs": [int(n) for n in executed.sum(axis=(1, 2))],
        "busy_s": [float(s) for s in busy_of(load).sum(axis=1)],
        "balancedness": load.balancedness,
        "imbalance": load.imbalance,
        "layer_imbalance": list(load.layer_imbalance),
        "sources_missing": list(load.sources_missing),
        **speed,
    }


def _replicas(placement: placement_pb2.GetPlacementResponse) -> str:
    return pack(np.minimum(replica_counts(placement), REPLICAS_MAX).astype(np.uint8))


def slot_arrays(placement: placement_pb2.GetPlacementResponse) -> Json:
    """Devices x slots: {"width", "pair" i32 [ranks, width], "state" u8 [ranks, width], "states"}.

    `state` is an index into `states`, the names of step states that occur; states[0] is "".
    """
    layers, experts = shape_of(placement)
    ranks = placement.ranks
    width = max((rank.num_slots for rank in ranks), default=0)
    width = max(
        [width, *(slot.index + 1 for rank in ranks for slot in rank.slots if slot.index >= 0)]
    )
    if width * len(ranks) > CELLS_MAX:
        raise InvalidArgument(f"placement: {len(ranks)} ranks x {width} slots are too many")
    pair = np.full((len(ranks), width), ABSENT, dtype=np.int32)
    state = np.zeros((len(ranks), width), dtype=np.uint8)
    names = {"": 0}
    for row, rank in enumerate(ranks):
        pair[row, : max(0, rank.num_slots)] = EMPTY
        for slot in rank.slots:
            if slot.index < 0:
                continue
            pair[row, slot.index] = pair_of(slot, layers, experts)
            if len(names) < 256:
                state[row, slot.index] = names.setdefault(slot.state, len(names))
    return {"width": width, "pair": pack(pair), "state": pack(state), "states": list(names)}


def placement_document(
    placement: placement_pb2.GetPlacementResponse, *, seq: int, wall_s: float
) -> Json:
    """Document of who is where, without moves. wall_s: when it arrived, since the Unix epoch.

    Raises InvalidArgument where sizes are absurd.
    """
    return {
        "seq": seq,
        "wall_s": wall_s,
        "service_id": placement.service_id,
        "model": placement.model,
        "weights_version": placement.weights_version,
        "layers": placement.num_layers,
        "experts": placement.num_experts,
        "top_k": placement.top_k,
        "slot_bytes": placement.slot_bytes,
        "term": placement.term,
        "epoch": placement.epoch,
        "epochs_published": placement.epochs_published,
        "state": placement.state,
        "problems": list(placement.problems),
        "policy": placement.policy,
        "network": placement.network,
        "accepts_insecure": placement.accepts_insecure,
        "simulated": placement.simulated,
        "uptime_s": placement.uptime_s,
        "moves_done": {kind: int(n) for kind, n in sorted(placement.moves_done.items())},
        "replicas_replaced": placement.replicas_replaced,
        "missing": list(placement.missing),
        "replicas": _replicas(placement),
        "slots": slot_arrays(placement),
        "ranks": [rank_view(rank) for rank in placement.ranks],
        "routers": [router_view(router) for router in placement.routers],
    }


def worst_layer(layer_imbalance: Iterable[float]) -> float:
    """Imbalance of the worst layer, 0 without layers."""
    return max(layer_imbalance, default=0.0)
