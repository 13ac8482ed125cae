"""The registry: every metric there is, with its labels and the values they may have.

Responsible for names, units and limits. Must never hold a sample. Read by `Metrics`, by the
dashboard and alert rules that are generated from it, and by the reference.

Naming: `moe_serve_` + what + unit (`_seconds`, `_bytes`, `_ratio`), counters end in `_total`; one
base unit; two labels never say the same thing. Figures are measurements where they can be: balance
is told as balancedness = mean / maximum over ranks; imbalance is 1 / balancedness - 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from moe_serve.stage_counts import STAGE_BOUNDS_S, STAGES
from moe_serve.telemetry.spec import Kind, MetricSpec, Scale, Size, metric

SERIES_MAX: Final = 2000
"""Series of all metrics together but those to be asked for, with every bucket counted, at the most
of everything."""
DEFAULT_SIZE: Final = Size(layers=58, ranks=32, routers=2, nodes=4, experts=256)
DEFAULT_SERIES_MAX: Final = 900
"""Series at `DEFAULT_SIZE`."""
MOVE_SECONDS: Final = (0.1, 0.5, 2.0, 10.0, 60.0, 300.0)
SOLVE_SECONDS: Final = (0.01, 0.1, 1.0, 10.0)
STAGE_SECONDS: Final = tuple(STAGE_BOUNDS_S[at] for at in (3, 5, 7, 9, 11, 14))
"""Of the bounds that routers count by, those that are told: 0.8 ms to 1.6 s."""

PHASES: Final = ("prefill", "decode")
PLAN_OUTCOMES: Final = ("done", "aborted", "kept", "stale", "failed")
VERDICTS: Final = (
    "in_balance",
    "out_of_balance",
    "cooldown",
    "nothing_better",
    "paused",
    "plan_running",
    "target_outstanding",
    "not_ready",
    "no_load",
)
"""What a closed window came to: rules of decision records."""
MOVE_KINDS: Final = ("replicate", "migrate", "evict")
SLOT_USES: Final = ("empty", "taken", "verified", "listed", "leaving", "orphan", "parked")
MEMORY_USES: Final = ("used", "reserved", "free")
RANK_STATUSES: Final = ("expected", "live", "restored", "lost", "removed")
REQUEST_OUTCOMES: Final = ("served", "failed", "refused", "rejected")
PAIR_FATES: Final = ("sent", "served", "retried", "hedged", "stale", "refused", "lost")

_C, _G, _H, _B = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM, Kind.BUCKETS
_LAYER, _RANK, _ROUTER = Scale.LAYERS, Scale.RANKS, Scale.ROUTERS
_LOAD = "a window with demand closed"
_PLAN = "a plan was computed"
_MOVED = "a move ended"

DROPPED: Final = metric(
    "series_dropped_total",
    _C,
    "Samples dropped because their metric had its most series.",
    when="a fleet is larger than the registry's limits",
)
_CONTROLLER: Final = (
    DROPPED,
    metric(
        "build_info",
        _G,
        "1, labelled with version and model.",
        version=Scale.BUILDS,
        model=Scale.BUILDS,
    ),
    metric("term", _G, "Number of the controller."),
    metric("epoch", _G, "Number of the newest routing table."),
    metric("window_seconds", _G, "Length of the window that closed last."),
    metric("window_closed_timestamp_seconds", _G, "Unix time at which the last window closed."),
    metric("windows_total", _C, "Closed windows by what they came to.", verdict=VERDICTS),
    metric("rebalancing", _G, "1 while a plan runs."),
    metric("paused", _G, "1 while automatic plans are off."),
    metric("rebalance_stalled", _G, "1 while a plan stands still, or was aborted for it lately."),
    metric("plans_stalled_total", _C, "Plans that stood still.", when="a plan stood still"),
    metric("ranks", _G, "Ranks by their status.", status=RANK_STATUSES),
    metric("slots", _G, "Slots of all ranks by use.", state=SLOT_USES),
)
_BALANCE: Final = (
    metric(
        "experts",
        _G,
        "Experts by whether a replica is listed.",
        state=("listed", "missing"),
    ),
    metric(
        "balancedness_ratio",
        _G,
        "Mean / maximum over ranks of the newest window's pairs, over all layers, in (0, 1].",
        when=_LOAD,
    ),
    metric(
        "layer_imbalance_ratio",
        _G,
        "Maximum / mean over ranks of a layer's pairs, less 1: 0 is even.",
        when=_LOAD,
        layer=_LAYER,
    ),
    metric(
        "layer_hottest_expert_share_ratio",
        _G,
        "Share of a layer's demand in the newest window that its hottest expert had.",
        when=_LOAD,
        layer=_LAYER,
    ),
    metric("layer_pairs_total", _C, "Demand: rows x k.", layer=_LAYER, phase=PHASES),
    metric("layer_replicas", _G, "Listed replicas of a layer.", layer=_LAYER),
)
_RANKS: Final = (
    metric("rank_pairs_total", _C, "Pairs executed.", rank=_RANK, phase=PHASES),
    metric("rank_busy_seconds_total", _C, "Seconds of compute.", rank=_RANK),
    metric("rank_backlog_seconds", _G, "Seconds of queued work.", rank=_RANK),
    metric(
        "rank_memory_bytes",
        _G,
        "Budget of the slots: used by experts, reserved for copies that run, free.",
        rank=_RANK,
        use=MEMORY_USES,
    ),
    metric(
        "rank_fragmentation_ratio",
        _G,
        "Share of free slot memory outside its largest piece.",
        rank=_RANK,
    ),
    metric(
        "rank_report_age_seconds",
        _G,
        "Since the shard last answered, when the window closed; a lost rank's goes on.",
        rank=_RANK,
    ),
    metric(
        "rank_sub_calls_total",
        _C,
        "Sub-calls that were answered and served something.",
        when="a request was answered",
        rank=_RANK,
    ),
    metric(
        "rank_wire_seconds_total",
        _C,
        "Seconds of these on the way there and back, beside queue and compute of the shard.",
        when="a request was answered",
        rank=_RANK,
    ),
)
_PLANS: Final = (
    metric(
        "plans_total",
        _C,
        "Computed plans by the policy asked and by what became of them; kept: not worth its cost.",
        when=_PLAN,
        policy=Scale.POLICIES,
        outcome=PLAN_OUTCOMES,
    ),
    metric("plan_solve_seconds", _H, "Time a plan took to compute.", buckets=SOLVE_SECONDS),
    metric(
        "plan_imbalance_ratio",
        _G,
        "Imbalance without and with the last plan that was weighed, as it predicts it.",
        when=_PLAN,
        moment=("before", "after"),
    ),
    metric(
        "plan_gain_ratio",
        _G,
        "Seconds of waiting saved in each second by the last plan that was measured.",
        when="a plan ended and a window with load closed",
        figure=("expected", "realised"),
    ),
    metric(
        "forecast_error_ratio",
        _G,
        "Balance lost by forecasting: 1 - the score of what layers follow, their mean.",
        when="three windows with demand closed",
        phase=PHASES,
    ),
    metric(
        "moves_total",
        _C,
        "Moves that ended.",
        when=_MOVED,
        kind=MOVE_KINDS,
        outcome=("done", "aborted"),
    ),
    metric("moves_under_way", _G, "Moves not ended yet."),
    metric("move_seconds", _H, "From its start to its end.", buckets=MOVE_SECONDS, when=_MOVED),
    metric(
        "copy_bytes_total",
        _C,
        "Bytes of experts that moves copied.",
        when=_MOVED,
        kind=("replicate", "migrate"),
    ),
)
_COPIES: Final = (
    metric("copying_bytes", _G, "Still to come in the copies that run now."),
    metric(
        "copied_bytes_total",
        _C,
        "Bytes of experts that shards took in, in whatever plan, by where they came from.",
        source=("rank", "host_cache", "checkpoint"),
    ),
    metric("copy_seconds_total", _C, "Seconds that these took, waits included."),
    metric(
        "copy_wait_seconds_total",
        _C,
        "Seconds that limits.copy_bytes_per_s held copies back, also those that failed.",
    ),
    metric(
        "host_cache_bytes",
        _G,
        "Of a node's cache of experts.",
        node=Scale.NODES,
    ),
)
_DISPATCH: Final = (
    metric(
        "stage_seconds",
        _B,
        "Where the time of answered requests went.",
        buckets=STAGE_SECONDS,
        when="a request was answered",
        phase=PHASES,
        stage=STAGES,
    ),
    metric(
        "requests_total",
        _C,
        "By how they ended; refused: malformed, rejected: they got no permit.",
        router=_ROUTER,
        outcome=REQUEST_OUTCOMES,
    ),
    metric("rows_total", _C, "Rows of answered requests.", router=_ROUTER),
    metric("pairs_total", _C, "What became of pairs.", router=_ROUTER, fate=PAIR_FATES),
    metric(
        "ejections_total",
        _C,
        "Shards left alone for failing or being far too slow.",
        when="a shard fails",
        router=_ROUTER,
    ),
    metric(
        "request_seconds",
        _G,
        "Whole request, of those answered between two reports.",
        when="a request was answered",
        router=_ROUTER,
        quantile=("p50", "p99"),
    ),
    metric("requests_in_flight", _G, "In work now.", router=_ROUTER),
    metric("requests_waiting", _G, "Waiting for a permit now.", router=_ROUTER),
    metric(
        "loop_lag_seconds",
        _G,
        "Greatest lag of the event loop between two reports.",
        router=_ROUTER,
    ),
)
EXPERT_PAIRS: Final = metric(
    "expert_pairs_total",
    _C,
    "Demand by expert. Only with `metrics.per_expert: true`, and only at `ports.metrics`.",
    opt_in=True,
    when="metrics.per_expert is true and a window with demand closed",
    layer=_LAYER,
    expert=Scale.EXPERTS,
)
TOPICS: Final[Mapping[str, tuple[MetricSpec, ...]]] = MappingProxyType(
    {
        "Controller": _CONTROLLER,
        "Balance": _BALANCE,
        "Ranks": _RANKS,
        "Plans and moves": _PLANS,
        "Copies": _COPIES,
        "Dispatch": _DISPATCH,
        "To be asked for": (EXPERT_PAIRS,),
    }
)
"""Every metric by topic, in the order of the reference."""
METRICS: Final[Mapping[str, MetricSpec]] = MappingProxyType(
    {spec.name: spec for topic in TOPICS.values() for spec in topic}
)
"""Every metric there is, by name."""


def series_at(size: Size, *, per_expert: bool = False) -> int:
    """Series of a service of this size."""
    return sum(spec.series(size) for spec in METRICS.values() if per_expert or not spec.opt_in)
