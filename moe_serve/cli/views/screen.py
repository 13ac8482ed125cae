"""A screening as text: the verdict first, then what it was made from. Pure. Called by the screen
command."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import RenderableType
from rich.table import Table

from moe_serve.cli.figures import shown_bytes, shown_seconds
from moe_serve.cli.output import columns
from placement.replay import Screening

NO_PROMISE = (
    "This compares balance on recorded traffic, simulated: copies take no time, and no kernel, "
    "batch or network was run. It is no promise of speed; a trial measures that."
)
WORDS = {
    "recommend_trial": "a trial is recommended",
    "not_recommended_now": "not recommended now",
    "insufficient_evidence": "insufficient evidence",
}


def screen_parts(found: Screening) -> list[RenderableType]:
    """Verdict, reasons, figures of the later part, and what all this does not say."""
    blocks = ", ".join(f"{gain:.1%}" for gain in found.block_gains) or "none"
    return [
        f"Verdict: {found.verdict} ({WORDS[found.verdict]})",
        *(f"  - {reason}" for reason in found.reasons),
        "",
        f"Judged on the last {found.judged_windows} windows; plans were made from the "
        f"{found.first_windows} before them, the engine's also from what it had seen since",
        _table(found),
        f"No layout exceeds a balancedness of {found.bound:.3f} there",
        f"Gain of the engine by block of the later part: {blocks}; windows faster {found.better}, "
        f"slower {found.worse}",
        f"Its copies take {shown_seconds(found.copy_s)} one after another; it saves "
        f"{shown_seconds(found.saved_s)}",
        NO_PROMISE,
    ]


def _table(found: Screening) -> Table:
    right = ("BALANCEDNESS", "SLOWEST RANKS", "GAIN", "WRITES", "COPIED")
    table = columns(("LAYOUT", *right), right=right)
    for layout in found.layouts:
        known = layout.name in ("never moves", "foresight")
        table.add_row(
            layout.name,
            f"{layout.balancedness:.3f}",
            shown_seconds(layout.seconds),
            f"{layout.gain:.1%}",
            "-" if known else str(layout.slot_writes),
            "-" if known else shown_bytes(layout.copy_bytes),
        )
    return table


def screen_plain(found: Screening) -> dict[str, Any]:
    """The same for programs."""
    plain: dict[str, Any] = msgspec.to_builtins(found)
    return {**plain, "simulated": True, "note": NO_PROMISE}
