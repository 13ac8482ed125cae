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
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_serve.errors import InvalidArgument
from moe_serve.rpc import placement_pb2

Json = dict[str, Any]
Counts = npt.NDArray[np.int64]

CELLS_MAX = 4_194_304
"""Most cells (phases x layers x experts, or ranks x slots) that a page takes."""

UNKNOWN: Json = {"p50_s": None, "p99_s": None, "rows_per_s": None}
"""Speed of a window of which nothing is known."""
REPLICAS_MAX = 255
COPIES_MAX = 64
"""Running copies of one rank that are shown."""
EMPTY = -1
ABSENT = -2
LISTED = "LISTED"
_U16_MAX = 65_535

MOVE_KINDS = {
    int(placement_pb2.MOVE_KIND_REPLICATE): "replicate",
    int(placement_pb2.MOVE_KIND_MIGRATE): "migrate",
    int(placement_pb2.MOVE_KIND_EVICT): "evict",
}
MOVE_STATES = {
    int(placement_pb2.MOVE_STATE_PLANNED): "planned",
    int(placement_pb2.MOVE_STATE_RUNNING): "running",
    int(placement_pb2.MOVE_STATE_DONE): "done",
    int(placement_pb2.MOVE_STATE_ABORTED): "aborted",
}


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


def counts_of(field: str, data: bytes, shape: tuple[int, ...]) -> Counts:
    """int64 array of a message's bytes. Raises InvalidArgument naming the field."""
    cells = math.prod(shape)
    if min(shape) < 0 or cells > CELLS_MAX:
        raise InvalidArgument(f"{field}: {list(shape)} must be 0 to {CELLS_MAX} cells")
    if len(data) != 8 * cells:
        raise InvalidArgument(
            f"{field}: {list(shape)} int64 need {8 * cells} bytes, the controller sent {len(data)}"
        )
    counts = np.frombuffer(data, dtype="<i8").reshape(shape).astype(np.int64)
    if cells and counts.min() < 0:
        raise InvalidArgument(f"{field}: counts must not be negative")
    return counts


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
    demand = counts_of("demand", load.demand, (phases, layers, experts))
    executed = counts_of("executed", load.executed, (phases, layers, experts))
    rank_pairs = counts_of("rank_pairs", load.rank_pairs, (load.num_ranks, layers))
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
        "replicas": pack(listed_replicas(placement)) if placement is not None and fits else None,
        "demand_pairs": [int(n) for n in demand.sum(axis=(1, 2))],
        "executed_pairs": [int(n) for n in executed.sum(axis=(1, 2))],
        "busy_s": _busy(load),
        "balancedness": load.balancedness,
        "imbalance": load.imbalance,
        "layer_imbalance": list(load.layer_imbalance),
        "sources_missing": list(load.sources_missing),
        **speed,
    }


def _busy(load: placement_pb2.GetLoadResponse) -> list[float]:
    wanted = 8 * load.num_ranks * load.num_phases
    if len(load.rank_busy) != wanted:
        raise InvalidArgument(
            f"rank_busy: {load.num_ranks} ranks x {load.num_phases} phases need {wanted} bytes, "
            f"the controller sent {len(load.rank_busy)}"
        )
    busy = np.frombuffer(load.rank_busy, dtype="<f8").reshape(load.num_ranks, load.num_phases)
    return [float(s) for s in busy.sum(axis=1)]


def _shape_of(placement: placement_pb2.GetPlacementResponse) -> tuple[int, int]:
    layers, experts = placement.num_layers, placement.num_experts
    if min(layers, experts) < 0 or layers * experts > CELLS_MAX:
        raise InvalidArgument(f"placement: {layers} x {experts} must be 0 to {CELLS_MAX} cells")
    return layers, experts


def listed_replicas(placement: placement_pb2.GetPlacementResponse) -> npt.NDArray[np.uint8]:
    """Replicas in the routing table: u8 [layers, experts], at most 255."""
    layers, experts = _shape_of(placement)
    counts = np.zeros(layers * experts, dtype=np.int64)
    pairs = [
        slot.layer * experts + slot.expert
        for rank in placement.ranks
        for slot in rank.slots
        if slot.state == LISTED and 0 <= slot.layer < layers and 0 <= slot.expert < experts
    ]
    np.add.at(counts, np.array(pairs, dtype=np.int64), 1)
    return np.minimum(counts, REPLICAS_MAX).astype(np.uint8).reshape(layers, experts)


def slot_arrays(placement: placement_pb2.GetPlacementResponse) -> Json:
    """Devices x slots: {"width", "pair" i32 [ranks, width], "state" u8 [ranks, width], "states"}.

    `state` is an index into `states`, the names of step states that occur; states[0] is "".
    """
    experts = _shape_of(placement)[1]
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
            filled = slot.layer >= 0 and slot.expert >= 0
            pair[row, slot.index] = slot.layer * experts + slot.expert if filled else EMPTY
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
        "missing": list(placement.missing),
        "replicas": pack(listed_replicas(placement)),
        "slots": slot_arrays(placement),
        "ranks": [rank_view(rank) for rank in placement.ranks],
        "routers": [
            {
                "router": router.router,
                "state": router.state,
                "applied_epoch": router.applied_epoch,
                "quiesced_epoch": router.quiesced_epoch,
            }
            for router in placement.routers
        ],
    }


def rank_view(rank: placement_pb2.Rank) -> Json:
    """One rank without its slots. Addresses stay out: a reader of the page needs none."""
    return {
        "rank": rank.rank,
        "node": rank.node,
        "failure_domain": rank.failure_domain,
        "state": rank.state,
        "num_slots": rank.num_slots,
        "budget_bytes": rank.budget_bytes,
        "resident_bytes": rank.resident_bytes,
        "reserved_bytes": rank.reserved_bytes,
        "backlog_s": rank.backlog_s,
        "profile": rank.profile,
        "memory": _memory(rank.memory) if rank.HasField("memory") else None,
        "copies": [
            {
                "step_id": copy.step_id,
                "slot": copy.slot,
                "layer": copy.layer,
                "expert": copy.expert,
                "source": copy.source,
                "done_bytes": copy.done_bytes,
                "total_bytes": copy.total_bytes,
                "seconds": copy.seconds,
            }
            for copy in rank.copies[:COPIES_MAX]
        ],
    }


def _memory(memory: placement_pb2.RankMemory) -> Json:
    return {
        "slab_bytes": memory.slab_bytes,
        "free_bytes": memory.free_bytes,
        "largest_free_run_bytes": memory.largest_free_run_bytes,
        "loaded_bytes": memory.loaded_bytes,
        "process_bytes": memory.process_bytes,
        "host_cache_bytes": memory.host_cache_bytes,
    }


def move_view(move: placement_pb2.Move) -> Json:
    """One move. Times are the controller's seconds, 0 = not yet."""
    return {
        "plan_id": move.plan_id,
        "move_id": move.move_id,
        "kind": MOVE_KINDS.get(int(move.kind), "unknown"),
        "state": MOVE_STATES.get(int(move.state), "unknown"),
        "layer": move.layer,
        "expert": move.expert,
        "source_rank": move.source_rank,
        "target_rank": move.target_rank,
        "copy_bytes": move.copy_bytes,
        "cross_node": move.cross_node,
        "reason": move.reason,
        "gain_s_per_s": move.gain_s_per_s,
        "started_at_s": move.started_at_s,
        "ended_at_s": move.ended_at_s,
    }


def record_view(record: placement_pb2.DecisionRecord, number: int) -> Json:
    """One decision. `n` is the page's own number, which `events?after=` and `Last-Event-ID` mean;
    `seq` is the controller's and may begin anew with it.
    """
    return {
        "n": number,
        "seq": record.seq,
        "wall_s": record.wall_time_s,
        "rule": record.rule,
        "outcome": record.outcome,
        "detail": record.detail,
        "plan_id": record.plan_id,
        "move_id": record.move_id,
        "numbers": dict(sorted(record.numbers.items())),
        "expected_gain_s_per_s": record.expected_gain_s_per_s,
        "realised_gain_s_per_s": record.realised_gain_s_per_s,
        "copy_bytes": record.copy_bytes,
        "refused": list(record.refused),
    }


def worst_layer(layer_imbalance: Iterable[float]) -> float:
    """Imbalance of the worst layer, 0 without layers."""
    return max(layer_imbalance, default=0.0)
