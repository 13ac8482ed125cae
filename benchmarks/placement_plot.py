"""The picture of the placement benchmark: balance against slots written, one panel a case.

Responsible for an SVG file without a plotting library, so that the same rows give the same bytes.
Called by `placement`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

from benchmarks.placement_report import Summary, Table
from benchmarks.placement_runs import ANY_LAYOUT
from benchmarks.placement_traces import CASES

PANEL_WIDTH: Final = 330
PANEL_HEIGHT: Final = 250
COLUMNS: Final = 3
LEFT, RIGHT, TOP, BOTTOM = 46, 20, 34, 40
HEAD: Final = 56
HIGHEST_FLOOR: Final = 0.7
"""A panel's lower edge is at or below this balance; what lies lower is drawn on the edge."""
WRITE_TICKS: Final = (0.0, 0.01, 0.04, 0.10, 0.25, 0.50, 1.0)
_LEGEND: Final = (
    ("ours", "our planner, our split, by budget"),
    ("seer", "the same with a perfect forecast"),
    ("peer", "peers, our split"),
    ("shipped", "peers as shipped (equal split)"),
    ("still", "static, our split"),
)
_STYLE: Final = (
    "text{font:11px sans-serif;fill:#222}.t{font-weight:bold;font-size:12px}"
    ".a{stroke:#999;fill:none}.g{stroke:#e4e4e4;fill:none}"
    ".ours{stroke:#0b63c4;fill:#0b63c4}.quarter{stroke-dasharray:4 3}"
    ".seer{stroke:#0b63c4;fill:#fff}.peer{stroke:#c4480b;fill:#c4480b}"
    ".shipped{stroke:#c4480b;fill:#fff}.still{stroke:#666;fill:#666}"
    ".line{fill:none;stroke-width:1.8}"
)


class _Panel(NamedTuple):
    """Where a panel lies and what balance its lower edge is."""

    x: float
    y: float
    lowest: float

    def at(self, share: float, balance: float) -> tuple[float, float]:
        """Place of a point. Writes are drawn on a square-root scale: small shares matter most."""
        wide, high = PANEL_WIDTH - LEFT - RIGHT, PANEL_HEIGHT - TOP - BOTTOM
        up = (balance - self.lowest) / (1.0 - self.lowest)
        return self.x + LEFT + wide * share**0.5, self.y + TOP + high * (1.0 - up)


def picture(table: Table) -> str:
    """SVG text of all panels, in the table's order."""
    panels = len(table)
    rows = -(-panels // COLUMNS)
    width, height = COLUMNS * PANEL_WIDTH, HEAD + rows * PANEL_HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">',
        "<title>Balance against slots written a window</title>",
        f"<style>{_STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        '<text class="t" x="12" y="18">Balance of the next window (solid; quarters dashed) '
        "against share of slots written a window; points on a lower edge lie below it</text>",
        *_legend(),
    ]
    for number, (key, summaries) in enumerate(table.items()):
        column, row = number % COLUMNS, number // COLUMNS
        parts += _panel(key, summaries, column * PANEL_WIDTH, HEAD + row * PANEL_HEIGHT)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend() -> list[str]:
    parts, x = [], 12.0
    for kind, label in _LEGEND:
        parts.append(_mark(kind, x + 5, 36))
        parts.append(f'<text x="{x + 14:.0f}" y="40">{escape(label)}</text>')
        x += 32 + 6.0 * len(label)
    return parts


def _panel(key: tuple[str, str], summaries: Sequence[Summary], x: float, y: float) -> list[str]:
    drawn = [s for s in summaries if s.planner != ANY_LAYOUT]
    least = min(
        min(s.window["level"].mean, s.quarter["level"].mean) for s in drawn if s.planner != "static"
    )
    panel = _Panel(x, y, min(HIGHEST_FLOOR, int(least * 20) / 20))
    parts = [
        f'<text class="t" x="{x + LEFT:.0f}" y="{y + 22:.0f}">'
        f"{escape(CASES[key[0]].title)}, {key[1]}</text>",
        *_axes(panel),
    ]
    mine = sorted(
        (s for s in drawn if s.planner.startswith("incremental")), key=lambda s: s.writes.mean
    )
    for quarter in (False, True):
        points = [
            panel.at(s.writes.mean, (s.quarter if quarter else s.window)["level"].mean)
            for s in mine
        ]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        dashed = " quarter" if quarter else ""
        parts.append(f'<polyline class="ours line{dashed}" style="fill:none" points="{path}"/>')
        parts += [] if quarter else [_mark("ours", *point) for point in points]
    for s in drawn:
        for kind, split in _kinds(s.planner):
            balance = max(s.window[split].mean, panel.lowest)
            parts.append(_mark(kind, *panel.at(s.writes.mean, balance)))
    return parts


def _kinds(planner: str) -> tuple[tuple[str, str], ...]:
    if planner.startswith("clairvoyant"):
        return (("seer", "level"),)
    if planner.startswith(("DeepSeek", "vLLM")):
        return (("peer", "level"), ("shipped", "equal"))
    return (("still", "level"),) if planner == "static" else ()


def _axes(panel: _Panel) -> list[str]:
    parts = []
    left, bottom = panel.at(0.0, panel.lowest)
    right, top = panel.at(1.0, 1.0)
    steps = round((1.0 - panel.lowest) / 0.05)
    for step in range(steps + 1):
        value = panel.lowest + step * 0.05
        y = panel.at(0.0, value)[1]
        parts.append(
            f'<line class="g" x1="{left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(
            f'<text x="{left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>'
        )
    for share in WRITE_TICKS:
        x = panel.at(share, panel.lowest)[0]
        parts.append(
            f'<line class="g" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>'
        )
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 15:.1f}" text-anchor="middle">{share:.0%}</text>'
        )
    parts.append(f'<path class="a" d="M{left:.1f} {top:.1f}V{bottom:.1f}H{right:.1f}"/>')
    return parts


def _mark(kind: str, x: float, y: float) -> str:
    if kind in ("peer", "shipped"):
        return f'<rect class="{kind}" x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7"/>'
    if kind == "seer":
        return f'<path class="seer" d="M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z"/>'
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'
