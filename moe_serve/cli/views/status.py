"""Health of a service as text: header, ranks, routers, moves, problems. Pure. Called by the status
command."""

from __future__ import annotations

from math import isfinite
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from moe_serve.cli.figures import (
    shown_bytes,
    shown_counts,
    shown_imbalance,
    shown_number,
    shown_seconds,
)
from moe_serve.cli.output import columns
from moe_serve.cli.plain import enum_word, plain
from moe_serve.cli.views.moves import moves_table
from moe_serve.documents.views import move_view, rank_view, router_view
from moe_serve.rpc import placement_pb2 as pb

UNDER_WAY = frozenset({"planned", "running"})
NOT_WELL = frozenset({"starting", "degraded"})
MISSING_SHOWN = 8
MOVES_SHOWN = 20


def degraded(placement: pb.GetPlacementResponse) -> bool:
    """Whether `status --check` fails: not started, an expert without a replica, or a problem
    named."""
    return bool(placement.state in NOT_WELL or placement.missing or placement.problems)


def status_parts(
    placement: pb.GetPlacementResponse, load: pb.GetLoadResponse | None
) -> list[RenderableType]:
    """Everything `status` shows. `load` is None before the first closed window."""
    parts: list[RenderableType] = [*_header(placement), _balance(placement, load), ""]
    parts += [_ranks(placement), "", _routers(placement)]
    moves = [move for move in placement.moves if enum_word(move, "state") in UNDER_WAY]
    if moves:
        parts += ["", f"Moves under way: {len(moves)}"]
        parts.append(moves_table(moves[:MOVES_SHOWN], states=True))
    if placement.problems or placement.missing:
        parts += ["", "Problems"]
        parts += [f"  ! {problem}" for problem in placement.problems]
        parts += _missing(placement)
    return parts


def _header(placement: pb.GetPlacementResponse) -> list[str]:
    marks = [placement.network]
    if placement.accepts_insecure:
        marks.append("INSECURE: gRPC without token and TLS, accepted by the operator")
    if placement.simulated:
        marks.append("simulated compute")
    return [
        f"Service {placement.service_id} | model {placement.model} {placement.weights_version} | "
        f"{placement.num_layers} layers x {placement.num_experts} experts, top-{placement.top_k}"
        f" | {' | '.join(marks)}",
        f"State {placement.state} | term {placement.term}, epoch {placement.epoch} "
        f"({placement.epochs_published} published) | policy {placement.policy} | "
        f"up {shown_seconds(placement.uptime_s)}",
    ]


def _balance(placement: pb.GetPlacementResponse, load: pb.GetLoadResponse | None) -> str:
    done = f"Moves done: {shown_counts(dict(placement.moves_done))}"
    if placement.replicas_replaced:
        done += f" ({placement.replicas_replaced} replicas removed to make room)"
    if placement.plans_stalled:
        done += f" | plans that stood still: {placement.plans_stalled}"
    if load is None:
        return f"Imbalance - (no closed window yet) | {done}"
    if not any(load.demand):
        return f"Imbalance - (no load in window {load.window}) | {done}"
    told = {layer: value for layer, value in enumerate(load.layer_imbalance) if isfinite(value)}
    worst = max(told, key=told.__getitem__, default=None)
    layer = "" if worst is None else f", worst layer {worst}: {told[worst]:.2f}"
    silent = ", ".join(load.sources_missing)
    missing = f", without reports of {silent}" if silent else ""
    return (
        f"Imbalance {shown_imbalance(load.balancedness)}{layer} (window {load.window}, "
        f"{shown_seconds(load.age_s)} old{missing}) | {done}"
    )


def _ranks(placement: pb.GetPlacementResponse) -> Table:
    table = columns(
        (
            *("RANK", "NODE", "STATE", "SLOTS", "RESIDENT", "BUDGET", "SCATTERED", "COPYING"),
            *("BACKLOG", "PID", "PROFILE"),
        ),
        right=(*("RANK", "SLOTS", "RESIDENT", "BUDGET", "SCATTERED", "COPYING", "BACKLOG", "PID"),),
    )
    for rank in placement.ranks:
        filled = sum(slot.layer >= 0 for slot in rank.slots)
        table.add_row(
            str(rank.rank),
            rank.node,
            rank.state,
            f"{filled}/{rank.num_slots}",
            shown_bytes(rank.resident_bytes + rank.reserved_bytes),
            shown_bytes(rank.budget_bytes),
            _scattered(rank),
            _copying(rank),
            shown_seconds(rank.backlog_s),
            str(rank.pid or "-"),
            rank.profile,
        )
    return table


def _scattered(rank: pb.Rank) -> str:
    """Share of the free slot memory that does not lie in its largest piece."""
    free = rank.memory.free_bytes
    return f"{1 - rank.memory.largest_free_run_bytes / free:.0%}" if free else "-"


def _copying(rank: pb.Rank) -> str:
    """Bytes that copies into the rank have brought, of those they will."""
    if not rank.copies:
        return "-"
    done = sum(copy.done_bytes for copy in rank.copies)
    return f"{shown_bytes(done)}/{shown_bytes(sum(copy.total_bytes for copy in rank.copies))}"


def _routers(placement: pb.GetPlacementResponse) -> Table:
    table = columns(
        ("ROUTER", "ADDRESS", "STATE", "EPOCH", "REQUESTS", "FAILED", "P50", "P99", "PID"),
        right=("EPOCH", "REQUESTS", "FAILED", "P50", "P99", "PID"),
    )
    for router in placement.routers:
        table.add_row(
            router.router,
            router.address,
            router.state,
            f"{router.applied_epoch}/{router.quiesced_epoch}",
            shown_number(router.counters.get("requests", 0.0), ".0f"),
            shown_number(router.counters.get("failed", 0.0), ".0f"),
            _quantile(router, "dispatch_p50_s"),
            _quantile(router, "dispatch_p99_s"),
            str(router.pid or "-"),
        )
    return table


def _quantile(router: pb.Router, name: str) -> str:
    # Reading a map of a message would add the key, so ask first.
    return shown_seconds(router.quantiles[name]) if name in router.quantiles else "-"


def _missing(placement: pb.GetPlacementResponse) -> list[str]:
    if not placement.missing:
        return []
    named = ", ".join(
        "L{} E{}".format(*divmod(key, placement.num_experts))
        for key in placement.missing[:MISSING_SHOWN]
    )
    more = " ..." if len(placement.missing) > MISSING_SHOWN else ""
    return [f"  ! without a replica ({len(placement.missing)}): {named}{more}"]


def status_plain(
    placement: pb.GetPlacementResponse, load: pb.GetLoadResponse | None
) -> dict[str, Any]:
    """The same for programs: the whole placement, and the figures of the newest window. Ranks,
    routers and moves are as everywhere; ranks and routers also have what only an operator sees:
    addresses, processes, slots one by one, counters."""
    shown = plain(placement)
    shown["ranks"] = [plain(rank) | rank_view(rank) for rank in placement.ranks]
    shown["routers"] = [plain(router) | router_view(router) for router in placement.routers]
    shown["moves"] = [move_view(move) for move in placement.moves]
    shown["degraded"] = degraded(placement)
    shown["load"] = None if load is None else plain(load)
    return shown
