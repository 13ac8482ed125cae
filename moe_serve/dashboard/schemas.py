"""Shapes of what only the page tells, as JSON schema (the dialect of OpenAPI 3.1): errors, its own
state and history, packed arrays, sessions. The shared documents have theirs in `documents.schemas`.

Written by hand beside nothing else: a test asks every endpoint and compares what it answers with
what stands here, in both directions, since no object may have a property that is not named.

Responsible for saying what an answer is. Must never be asked before an answer goes out. Called by
the handlers' endpoints and `openapi`.
"""

from __future__ import annotations

from moe_serve.documents.schemas import (
    BYTES,
    COUNT,
    DATE,
    FLAG,
    INTEGER,
    MOVE,
    NUMBER,
    RANK,
    RECORD,
    ROUTER,
    SLOTS,
    TEXT,
    Schema,
    by_name,
    made,
    many,
    maybe,
    packed,
)

ERROR = made(
    error=made(
        ("field",),
        code=TEXT,
        message=TEXT,
        field={"type": "string", "description": "what is wrong in the request"},
        next_step=TEXT,
    )
)
_COUNTS = made(
    scale={"type": "number", "exclusiveMinimum": 0},
    data=packed("u16; the count is number * scale"),
)
_SPEED = {
    "p50_s": maybe({"type": "number", "description": "of the routers' medians, by requests"}),
    "p99_s": maybe({"type": "number", "description": "of the slowest router"}),
    "rows_per_s": maybe(
        {"type": "number", "description": "rows of layer calls: a token is one in each layer"}
    ),
}
FRAME = made(
    ("before_plan",),
    seq=COUNT,
    window=INTEGER,
    start_s=NUMBER,
    end_s=NUMBER,
    wall_s=DATE,
    model=TEXT,
    term=INTEGER,
    epoch=INTEGER,
    phases=COUNT,
    layers=COUNT,
    experts=COUNT,
    ranks=COUNT,
    load=_COUNTS,
    rank_pairs=_COUNTS,
    replicas=maybe(packed("u8 [layers, experts]; null before the first placement")),
    demand_pairs=many(COUNT),
    executed_pairs=many(COUNT),
    busy_s=many(NUMBER),
    balancedness=NUMBER,
    imbalance=NUMBER,
    layer_imbalance=many(NUMBER),
    sources_missing=many(TEXT),
    **_SPEED,
    before_plan={"type": "string", "description": "the plan that began after this window"},
)
PLACEMENT = made(
    seq=COUNT,
    wall_s=DATE,
    service_id=TEXT,
    model=TEXT,
    weights_version=TEXT,
    layers=COUNT,
    experts=COUNT,
    top_k=INTEGER,
    slot_bytes=BYTES,
    term=INTEGER,
    epoch=INTEGER,
    epochs_published=INTEGER,
    state=TEXT,
    problems=many(TEXT),
    policy=TEXT,
    network=TEXT,
    accepts_insecure=FLAG,
    simulated=FLAG,
    uptime_s=NUMBER,
    moves_done=by_name(COUNT),
    replicas_replaced=COUNT | {"description": "removed by finished moves to make room"},
    missing=many(COUNT),
    replicas=packed("u8 [layers, experts]"),
    slots=SLOTS,
    ranks=many(RANK),
    routers=many(ROUTER),
    moves=many(MOVE),
)
STATUS = made(
    connection={"enum": ["connecting", "live", "stale", "away"]},
    message=TEXT,
    since_wall_s=DATE,
    wall_s=DATE,
    data_age_s=maybe(NUMBER),
    window_s=NUMBER,
    stale_after_s=NUMBER,
    state=TEXT,
    problems=many(TEXT),
)
HISTORY = made(
    points=many(
        made(
            wall_s=DATE,
            window=INTEGER,
            imbalance=NUMBER,
            worst_layer=NUMBER,
            **_SPEED,
        )
    ),
    marks=many(
        made(
            wall_s=DATE,
            plan_id=TEXT,
            rule=TEXT,
            detail=TEXT,
            moves=COUNT,
            expected_gain_s_per_s=maybe(NUMBER),
            realised_gain_s_per_s=maybe(NUMBER),
        )
    ),
)
EVENTS = made(life=TEXT, last=COUNT, records=many(RECORD))
MOVES = made(life=TEXT, version=COUNT, moves=many(MOVE))
SESSION = made(
    ("csrf", "expires_in_s"),
    operator=FLAG,
    needs_token=FLAG,
    csrf={"type": "string", "description": "send it as X-CSRF-Token with each command"},
    expires_in_s=NUMBER,
)
COMMANDED = made(message=TEXT, plan_id=maybe(TEXT))
OPENAPI: Schema = {"type": "object", "required": ["openapi", "info", "paths"]}
