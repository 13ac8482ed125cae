"""What is hottest, as tables: experts, ranks or layers, hottest first. Pure. Called by the top
command."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from math import isfinite
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.table import Table

from moe_serve.cli.figures import shown_bytes, shown_seconds
from moe_serve.cli.hotness import Hotness
from moe_serve.cli.output import columns
from moe_serve.documents.window import PhaseChoice
from moe_serve.rpc import placement_pb2 as pb

RANKS_SHOWN = 8
BOTH = "of both phases"
NOTHING_ASKED = "No expert was asked for in this window."

Row = dict[str, Any]


class Kind(StrEnum):
    """What `top` lists."""

    EXPERTS = "experts"
    RANKS = "ranks"
    LAYERS = "layers"


def top_rows(
    kind: Kind, hot: Hotness, placement: pb.GetPlacementResponse, limit: int | None
) -> list[Row]:
    """The hottest first, ties by lowest number; at most `limit` of them, None = all."""
    make = {Kind.EXPERTS: _experts, Kind.RANKS: _ranks, Kind.LAYERS: _layers}[kind]
    return make(hot, placement, limit)


def _experts(hot: Hotness, _: pb.GetPlacementResponse, limit: int | None) -> list[Row]:
    rates, shares, times = hot.rates, hot.shares, hot.times_fair_share
    places = hot.ranks_in_layer
    # Stable, so that of equal ones the lowest comes first.
    order = np.argsort(-hot.pairs.reshape(-1), kind="stable")[:limit]
    rows: list[Row] = []
    for key in order.tolist():
        layer, expert = divmod(key, hot.num_experts)
        rows.append(
            {
                "layer": layer,
                "expert": expert,
                "pairs": int(hot.pairs[layer, expert]),
                "pairs_per_s": float(rates[layer, expert]),
                "share": float(shares[layer, expert]),
                "times_fair_share": float(times[layer, expert]),
                "rank_in_layer": int(places[layer, expert]),
                "replicas": int(hot.replicas[layer, expert]),
                "ranks": list(hot.ranks_of.get((layer, expert), ())),
            }
        )
    return rows


def _ranks(hot: Hotness, placement: pb.GetPlacementResponse, limit: int | None) -> list[Row]:
    rates = hot.rank_rates
    rows: list[Row] = []
    for rank in placement.ranks:
        counted = rank.rank < len(rates)
        rows.append(
            {
                "rank": rank.rank,
                "node": rank.node,
                "state": rank.state,
                "pairs_per_s": float(rates[rank.rank]) if counted else 0.0,
                "busy": hot.busy(rank.rank),
                "backlog_s": rank.backlog_s,
                "slots_used": sum(slot.layer >= 0 for slot in rank.slots),
                "num_slots": rank.num_slots,
                "resident_bytes": rank.resident_bytes,
                "reserved_bytes": rank.reserved_bytes,
                "budget_bytes": rank.budget_bytes,
            }
        )
    return sorted(rows, key=lambda row: (-row["pairs_per_s"], row["rank"]))[:limit]


def _layers(hot: Hotness, _: pb.GetPlacementResponse, limit: int | None) -> list[Row]:
    rates, shares = hot.rates, hot.shares
    rows: list[Row] = []
    for layer in range(hot.num_layers if hot.num_experts else 0):
        hottest = int(hot.pairs[layer].argmax())
        told = layer < len(hot.imbalance) and isfinite(hot.imbalance[layer])
        rows.append(
            {
                "layer": layer,
                "pairs_per_s": float(rates[layer].sum()),
                "imbalance": float(hot.imbalance[layer]) if told else None,
                "hottest_expert": hottest if hot.pairs[layer].any() else None,
                "hottest_share": float(shares[layer, hottest]),
                "replicas": int(hot.replicas[layer].sum()),
            }
        )
    # Every layer gets the same tokens: what tells them apart is how evenly they are served.
    return sorted(rows, key=lambda row: (-(row["imbalance"] or 0.0), row["layer"]))[:limit]


def top_table(kind: Kind, rows: Sequence[Row]) -> Table:
    """The rows for people."""
    return {Kind.EXPERTS: _experts_table, Kind.RANKS: _ranks_table, Kind.LAYERS: _layers_table}[
        kind
    ](rows)


def _experts_table(rows: Sequence[Row]) -> Table:
    right = ("LAYER", "EXPERT", "PAIRS/S", "SHARE", "X FAIR", "REPLICAS")
    table = columns((*right, "RANKS"), right=right)
    for row in rows:
        table.add_row(
            str(row["layer"]),
            str(row["expert"]),
            f"{row['pairs_per_s']:.1f}",
            f"{row['share']:.1%}",
            f"{row['times_fair_share']:.2f}",
            str(row["replicas"]),
            _some(row["ranks"]),
        )
    return table


def _some(ranks: Sequence[int]) -> str:
    shown = ",".join(map(str, ranks[:RANKS_SHOWN])) or "-"
    return shown + (f" and {len(ranks) - RANKS_SHOWN} more" if len(ranks) > RANKS_SHOWN else "")


def _ranks_table(rows: Sequence[Row]) -> Table:
    right = ("RANK", "PAIRS/S", "BUSY", "BACKLOG", "SLOTS", "MEMORY", "BUDGET")
    table = columns((*right, "STATE", "NODE"), right=right)
    for row in rows:
        table.add_row(
            str(row["rank"]),
            f"{row['pairs_per_s']:.1f}",
            "-" if row["busy"] is None else f"{row['busy']:.0%}",
            shown_seconds(row["backlog_s"]),
            f"{row['slots_used']}/{row['num_slots']}",
            shown_bytes(row["resident_bytes"] + row["reserved_bytes"]),
            shown_bytes(row["budget_bytes"]),
            row["state"],
            row["node"],
        )
    return table


def _layers_table(rows: Sequence[Row]) -> Table:
    right = ("LAYER", "PAIRS/S", "IMBALANCE", "HOTTEST", "SHARE", "REPLICAS")
    table = columns(right, right=right)
    for row in rows:
        hottest = row["hottest_expert"]
        table.add_row(
            str(row["layer"]),
            f"{row['pairs_per_s']:.1f}",
            "-" if row["imbalance"] is None else f"{row['imbalance']:.2f}",
            "-" if hottest is None else f"E{hottest}",
            f"{row['hottest_share']:.1%}",
            str(row["replicas"]),
        )
    return table


def window_line(hot: Hotness, placement: pb.GetPlacementResponse, age_s: float) -> str:
    """Which window, how old, of which phase, and what is left out of it."""
    phase = "all phases" if hot.phase is PhaseChoice.ALL else hot.phase.value
    missing = f", without reports of {', '.join(hot.missing)}" if hot.missing else ""
    load = "" if hot.pairs.any() else " | no load in it"
    simulated = " | simulated" if placement.simulated else ""
    return (
        f"{placement.service_id} | {placement.state} | window {hot.window} of "
        f"{shown_seconds(hot.seconds)}, {shown_seconds(age_s)} old{missing} | {phase}{simulated}"
        f"{load}"
    )


def notes(kind: Kind, hot: Hotness, total: int, shown: int) -> list[RenderableType]:
    """What the table does not show of itself."""
    found: list[RenderableType] = []
    if hot.phase is not PhaseChoice.ALL and kind is Kind.RANKS:
        found.append(f"PAIRS/S are {BOTH}; BUSY is of {hot.phase.value}")
    if hot.phase is not PhaseChoice.ALL and kind is Kind.LAYERS:
        found.append(f"IMBALANCE is {BOTH}")
    if shown < total:
        found.append(f"{shown} of {total} {kind.value}; more with -n")
    return found


def top_plain(kind: Kind, hot: Hotness, rows: Sequence[Row]) -> dict[str, Any]:
    """The same for programs."""
    return {
        "kind": kind.value,
        "phase": hot.phase.value,
        "window": hot.window,
        "window_s": hot.seconds,
        "age_s": hot.age_s,
        "sources_missing": list(hot.missing),
        "rows": list(rows),
    }
