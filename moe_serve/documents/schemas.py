"""Shapes of the documents, as JSON schema (the dialect of OpenAPI 3.1).

No object may have a property that is not named. Tests hold the page's answers and what commands
print against these, in both directions.

Responsible for saying what a document is. Must never be asked before one goes out. Called by the
page's own schemas, its endpoints, and tests.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
DATE: Schema = {"type": "number", "description": "seconds since the Unix epoch"}
BYTES: Schema = {"type": "integer", "description": "bytes"}
FAR_BYTES: Schema = {
    "type": "integer",
    "description": "bytes that come from another node or from the checkpoint",
}


def packed(about: str) -> Schema:
    """An array as base64 of its little-endian bytes, row-major."""
    return {"type": "string", "contentEncoding": "base64", "description": about}


def made(_optional: tuple[str, ...] = (), /, **properties: Schema) -> Schema:
    """An object of exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in _optional],
        "additionalProperties": False,
    }


def many(items: Schema, most: int | None = None) -> Schema:
    """A list."""
    return {"type": "array", "items": items} | ({} if most is None else {"maxItems": most})


def maybe(schema: Schema) -> Schema:
    """Or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def by_name(schema: Schema) -> Schema:
    """An object of any names."""
    return {"type": "object", "additionalProperties": schema}


SLOTS = made(
    width=COUNT,
    pair=packed("i32 [ranks, width]: layer * experts + expert, -1 empty, -2 absent"),
    state=packed("u8 [ranks, width]: index into states"),
    states=many(TEXT),
)
MOVE = made(
    plan_id=TEXT,
    move_id=INTEGER,
    kind={"enum": ["replicate", "migrate", "evict", "unknown"]},
    state={"enum": ["planned", "running", "done", "aborted", "dropped", "unknown"]},
    layer=INTEGER,
    expert=INTEGER,
    source_rank=INTEGER,
    target_rank=INTEGER,
    copy_bytes=BYTES,
    cross_node=FLAG | {"description": "comes from another node or from the checkpoint"},
    reason=TEXT,
    gain_s_per_s=NUMBER,
    started_at_s=NUMBER,
    ended_at_s=NUMBER,
    room=many(made(layer=INTEGER, expert=INTEGER, rank=INTEGER)),
    plan_expected_gain_s_per_s=maybe(NUMBER),
    realised_gain_s_per_s=maybe({"type": "number", "description": "of the whole plan"}),
    started_wall_s=maybe(DATE),
    ended_wall_s=maybe(DATE),
)
BARE_MOVE = made(
    (
        "plan_expected_gain_s_per_s",
        "realised_gain_s_per_s",
        "started_wall_s",
        "ended_wall_s",
    ),
    **MOVE["properties"],
)
"""A move as the controller tells it, without dates and what its plan brought."""
RECORD = made(
    ("n",),
    n={
        "type": "integer",
        "minimum": 0,
        "description": "the page's number, in its list and stream of decisions",
    },
    seq=INTEGER,
    wall_s=DATE,
    rule=TEXT,
    outcome=TEXT,
    detail=TEXT,
    plan_id=TEXT,
    move_id=INTEGER,
    numbers=by_name(NUMBER),
    expected_gain_s_per_s=NUMBER,
    realised_gain_s_per_s=NUMBER,
    copy_bytes=BYTES,
    refused=many(TEXT),
)
_COPY = made(
    step_id=INTEGER,
    slot=INTEGER,
    layer=INTEGER,
    expert=INTEGER,
    source=TEXT,
    done_bytes=BYTES,
    total_bytes=BYTES,
    seconds=NUMBER,
)
RANK = made(
    rank=INTEGER,
    node=TEXT,
    failure_domain=TEXT,
    state=TEXT,
    num_slots=COUNT,
    budget_bytes=BYTES,
    resident_bytes=BYTES,
    reserved_bytes=BYTES,
    backlog_s=NUMBER,
    profile=TEXT,
    memory=maybe(
        made(
            slab_bytes=BYTES,
            free_bytes=BYTES,
            largest_free_run_bytes=BYTES,
            loaded_bytes=BYTES,
            process_bytes=BYTES,
            host_cache_bytes=BYTES,
        )
    ),
    copies=many(_COPY),
)
ROUTER = made(router=TEXT, state=TEXT, applied_epoch=INTEGER, quiesced_epoch=INTEGER)
PLAN = made(
    plan=maybe(
        made(
            plan_id=TEXT,
            state={"enum": ["computed", "running", "done", "aborted", "dropped", "unknown"]},
            moves=many(BARE_MOVE),
            copy_bytes=BYTES,
            cross_node_bytes=FAR_BYTES,
            cost_s=maybe(NUMBER),
            gain_s_per_s=NUMBER,
            balancedness_before=maybe(NUMBER),
            balancedness_after=maybe(NUMBER),
            refused=many(TEXT),
            records=many(RECORD),
        )
    ),
    layers=COUNT,
    experts=COUNT,
    before=maybe(made(slots=SLOTS)),
    after=maybe(made(slots=SLOTS)),
    replicas_before=maybe(packed("u8 [layers, experts]")),
    replicas_after=maybe(packed("u8 [layers, experts]")),
    copy_bytes=BYTES,
    cross_node_bytes=FAR_BYTES,
    balancedness_before=maybe(NUMBER),
    balancedness_after=maybe(NUMBER),
    measured_before=maybe(NUMBER),
    measured_after=maybe(NUMBER),
)
EXPLAIN = made(
    ("reason",),
    verdict={"enum": ["nothing_slow", "slow", "idle"]},
    causes=many(
        made(
            kind=TEXT,
            share=NUMBER,
            text=TEXT,
            next_step=TEXT,
            rank=INTEGER,
            layer=INTEGER,
            expert=INTEGER,
            evidence=by_name(NUMBER),
        )
    ),
    stages=many(
        made(
            phase=TEXT,
            stage=TEXT,
            requests=COUNT,
            seconds=NUMBER,
            p50_s=NUMBER,
            p99_s=NUMBER,
            buckets=many(COUNT),
        )
    ),
    ranks=many(
        made(
            rank=INTEGER,
            sub_calls=COUNT,
            last=COUNT,
            late_s=NUMBER,
            wire_s=NUMBER,
            wait_s=NUMBER,
            compute_s=NUMBER,
            pairs=COUNT,
            slowness=NUMBER,
        )
    ),
    bounds_s=many(NUMBER),
    seconds=NUMBER,
    age_s=NUMBER,
    requests=COUNT,
    mean_s=NUMBER,
    p99_s=NUMBER,
    newest=maybe(RECORD),
    wall_s=DATE,
    last_answer_age_s=maybe(
        {"type": "number", "description": "since the controller answered last; null = never"}
    ),
    reason={"type": "string", "description": "why there is no answer, where there is none"},
)
EXPERT = made(
    layer=COUNT,
    expert=COUNT,
    window=INTEGER,
    wall_s=DATE,
    pairs=COUNT,
    share={"type": "number", "minimum": 0, "maximum": 1},
    fair_share=NUMBER,
    rank_in_layer={"type": "integer", "minimum": 1},
    experts=COUNT,
    by_phase=by_name(COUNT),
    replicas=many(made(rank=INTEGER, slot=INTEGER, state=TEXT, node=TEXT)),
    history=made(wall_s=many(DATE), pairs_per_s=many(NUMBER)),
    moves=many(MOVE),
)
