"""What a load felt like, as text. Pure. Called by the bench command."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import RenderableType
from rich.table import Table

from moe_serve.bench import BenchReport, Latency
from moe_serve.cli.figures import shown_counts, shown_seconds
from moe_serve.cli.output import columns

LAGGED = 0.5
"""Share of the median latency above which the generator's own lag is pointed out."""


def bench_parts(found: BenchReport) -> list[RenderableType]:
    """Rates, latency by phase, goodput, errors, and how far the generator was the limit."""
    simulated = " | simulated compute" if found.simulated else ""
    parts: list[RenderableType] = [
        f"Model {found.model} | {found.loop} loop | {found.seconds:g} s{simulated}",
        f"Requests {found.requests} ({found.offered_per_s:.1f}/s), answered {found.answered} "
        f"({found.answered_per_s:.1f}/s), {found.rows_per_s:.1f} rows/s, at most "
        f"{found.in_flight_max} at once",
        f"Errors   {shown_counts(found.errors)}",
        _latency(found),
    ]
    if found.target_s is not None:
        within = "-" if found.within_target is None else f"{found.within_target:.2%}"
        parts.append(
            f"Goodput  {found.goodput_per_s:.1f}/s within {shown_seconds(found.target_s)}: "
            f"{within} of the requests"
        )
    if found.loop == "closed":
        parts.append("A caller waits for its answer: this is not the latency of others who ask")
    elif found.sent_late_p99_s > LAGGED * found.latency.p50_s > 0:
        parts.append(
            f"This program itself was {shown_seconds(found.sent_late_p99_s)} late (p99): it, or "
            "its machine, is part of what was measured"
        )
    return parts


def _latency(found: BenchReport) -> Table:
    right = ("ANSWERED", "MEAN", "P50", "P90", "P99", "P99.9", "MAX")
    table = columns(("LATENCY", *right), right=right)
    rows = {"all": found.latency, **(found.phases if len(found.phases) > 1 else {})}
    for name, latency in rows.items():
        table.add_row(name, str(latency.count), *_cells(latency))
    return table


def _cells(latency: Latency) -> list[str]:
    if not latency.count:
        return ["-"] * 6
    return [
        shown_seconds(value)
        for value in (
            latency.mean_s,
            latency.p50_s,
            latency.p90_s,
            latency.p99_s,
            latency.p999_s,
            latency.max_s,
        )
    ]


def bench_plain(found: BenchReport) -> dict[str, Any]:
    """The same for programs."""
    plain: dict[str, Any] = msgspec.to_builtins(found)
    return plain
