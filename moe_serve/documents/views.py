"""Moves, decisions, ranks and routers as small objects.

Responsible for the names and words in them. Called by page and command line, and by the larger
documents here.
"""

from __future__ import annotations

from typing import Any

from moe_serve.rpc import placement_pb2 as pb

Json = dict[str, Any]

COPIES_MAX = 64
"""Running copies of one rank that are shown."""
MOVE_KINDS = {
    int(pb.MOVE_KIND_REPLICATE): "replicate",
    int(pb.MOVE_KIND_MIGRATE): "migrate",
    int(pb.MOVE_KIND_EVICT): "evict",
}
MOVE_STATES = {
    int(pb.MOVE_STATE_PLANNED): "planned",
    int(pb.MOVE_STATE_RUNNING): "running",
    int(pb.MOVE_STATE_DONE): "done",
    int(pb.MOVE_STATE_ABORTED): "aborted",
}


def move_view(move: pb.Move) -> Json:
    """One move. Times are the controller's seconds, 0 = not yet. room: replicas that leave so that
    what it adds fits."""
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
        "room": [
            {"layer": gone.layer, "expert": gone.expert, "rank": gone.rank} for gone in move.room
        ],
    }


def record_view(record: pb.DecisionRecord, number: int | None = None) -> Json:
    """One decision. `seq` is the controller's number and may begin anew with it.

    number: the page's own, which `events?after=` and `Last-Event-ID` mean; the view has it as `n`,
    and has none where nobody counts.
    """
    counted = {} if number is None else {"n": number}
    return counted | {
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


def rank_view(rank: pb.Rank) -> Json:
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


def _memory(memory: pb.RankMemory) -> Json:
    return {
        "slab_bytes": memory.slab_bytes,
        "free_bytes": memory.free_bytes,
        "largest_free_run_bytes": memory.largest_free_run_bytes,
        "loaded_bytes": memory.loaded_bytes,
        "process_bytes": memory.process_bytes,
        "host_cache_bytes": memory.host_cache_bytes,
    }


def router_view(router: pb.Router) -> Json:
    """One router: which table it routes by. No address here either."""
    return {
        "router": router.router,
        "state": router.state,
        "applied_epoch": router.applied_epoch,
        "quiesced_epoch": router.quiesced_epoch,
    }
