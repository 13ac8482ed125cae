"""A replay as a table: balancedness of each window for three layouts, and what was written. Pure.
Called by the replay command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import RenderableType

from moe_serve.cli.figures import shown_bytes, shown_counts, shown_imbalance
from moe_serve.cli.output import columns
from moe_serve.cli.rehearsal import SegmentCheck, Stage
from placement.replay import TraceFigures

MEASURED = "MEASURED"
NOT_REACHED = (
    "NO: today's engine differs from the one that wrote this, or inputs were cut there (a full "
    "disk or queue)"
)
HEADERS = ("WINDOW", "PAIRS", "STATIC", "LEVELED", "SERVED", "MOVES", "WRITES", "COPIED", "EPOCH")


def stage_line(stage: Stage, source: str) -> str:
    """On what it is replayed. The fleet is declared and copies take no time: simulated."""
    spec, ranks = stage.spec, stage.topology.ranks
    slots = sorted({rank.num_slots for rank in ranks})
    return (
        f"{source}: {spec.num_layers} layers x {spec.num_experts} experts, top-{spec.top_k} | "
        f"{len(ranks)} ranks of {'/'.join(map(str, slots))} slots "
        f"({stage.config.staging_slots} staging) | experts of {shown_bytes(spec.expert_bytes)} | "
        f"policy {stage.config.policy} | simulated: copies take no time"
    )


def figures_parts(
    figures: TraceFigures, measured: Sequence[float | None] | None
) -> list[RenderableType]:
    """The table and its totals. `measured`: what ranks reported then, of a journal."""
    headers = HEADERS if measured is None else (*HEADERS, MEASURED)
    table = columns(headers, right=headers)
    for at, window in enumerate(figures.windows):
        cells = [
            str(window.index),
            str(window.pairs),
            f"{window.static:.3f}",
            f"{window.static_leveled:.3f}",
            f"{window.served:.3f}",
            str(window.moves),
            str(window.slot_writes),
            shown_bytes(window.copy_bytes),
            str(window.epoch),
        ]
        if measured is not None:
            value = measured[at]
            cells.append("-" if value is None else f"{value:.3f}")
        table.add_row(*cells)
    return [
        table,
        f"Balancedness over all windows: static {figures.static:.3f}, static leveled "
        f"{figures.static_leveled:.3f}, served {figures.served:.3f}",
        f"Imbalance: static {shown_imbalance(figures.static)}, static leveled "
        f"{shown_imbalance(figures.static_leveled)}, served {shown_imbalance(figures.served)}",
        f"Moves: {shown_counts(figures.moves)}; {figures.slot_writes} slot writes, "
        f"{shown_bytes(figures.copy_bytes)} copied",
        f"Decisions: {shown_counts(Counter(figures.records))}",
    ]


def checks_parts(checks: Sequence[SegmentCheck]) -> list[RenderableType]:
    """Whether today's engine does with recorded events what the recording's did."""
    table = columns(
        ("SEGMENT", "EVENTS", "WINDOWS", "SAME STATE", "OTHER TARGETS"),
        right=("SEGMENT", "EVENTS", "WINDOWS", "OTHER TARGETS"),
    )
    for check in checks:
        same = {True: "yes", False: "NO", None: "nothing follows"}[check.reaches_next]
        table.add_row(
            str(check.number),
            str(check.events),
            str(check.windows),
            same,
            str(len(check.targets_differ)),
        )
    broken = any(check.reaches_next is False for check in checks)
    return [table, *([NOT_REACHED] if broken else []), ""]


def replay_plain(
    figures: TraceFigures | None,
    measured: Sequence[float | None] | None,
    checks: Sequence[SegmentCheck],
) -> dict[str, Any]:
    """The same for programs."""
    return {
        "figures": None if figures is None else msgspec.to_builtins(figures),
        "measured": measured,
        "segments": msgspec.to_builtins(list(checks)),
        "simulated": True,
    }
