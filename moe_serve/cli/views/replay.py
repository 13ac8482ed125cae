"""A replay as tables: balancedness of each window, and what each policy wrote, lost and cost. Pure.
Called by the replay command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import RenderableType
from rich.table import Table

from moe_serve.cli.charts import Panel, Series
from moe_serve.cli.figures import shown_bytes, shown_counts, shown_seconds
from moe_serve.cli.output import columns
from moe_serve.cli.rehearsal import SegmentCheck, Stage
from placement.replay import Comparison, PolicyOutcome

MEASURED = "MEASURED"
NOT_REACHED = (
    "NO: today's engine differs from the one that wrote this, or inputs were cut there (a full "
    "disk or queue)"
)
HEADERS = (
    "WINDOW",
    "PAIRS",
    "STATIC",
    "LEVELED",
    "EQUAL",
    "SERVED",
    "BEST",
    "BOUND",
    "REGRET",
    "MOVES",
    "WRITES",
    "COPIED",
    "EPOCH",
)
TOTALS = ("POLICY", "EQUAL", "SERVED", "BEST", "BOUND", "MOVES", "WRITES", "COPIED", "REGRET")
REFERENCES = {
    "offline optimum": "the offline optimum",
    "lower bound": "a lower bound (every window in balance, no write): the instance is too large "
    "for the offline optimum",
}


def stage_line(stage: Stage, source: str, policies: Sequence[str]) -> str:
    """On what it is replayed. The fleet is declared and copies take no time: simulated."""
    spec, ranks = stage.spec, stage.topology.ranks
    slots = sorted({rank.num_slots for rank in ranks})
    return (
        f"{source}: {spec.num_layers} layers x {spec.num_experts} experts, top-{spec.top_k} | "
        f"{len(ranks)} ranks of {'/'.join(map(str, slots))} slots "
        f"({stage.config.staging_slots} staging) | experts of {shown_bytes(spec.expert_bytes)} | "
        f"policy {', '.join(policies)} | simulated: copies take no time"
    )


def comparison_parts(
    found: Comparison, measured: Sequence[float | None] | None
) -> list[RenderableType]:
    """The windows and the totals. `measured`: what ranks reported then, of a journal."""
    first = found.policies[0].figures
    if not first.windows:
        return ["No window is recorded: nothing to score."]
    one = len(found.policies) == 1
    windows = _windows_of_one(found, measured) if one else _windows_of_all(found, measured)
    return [
        windows,
        "",
        _totals(found),
        f"The layout that never moves: {first.static:.3f} split equally, "
        f"{first.static_leveled:.3f} under our split",
        f"RATIO: (sum of max/mean + price x writes) / the same of {REFERENCES[found.reference]}",
        *(
            f"{outcome.policy}: {shown_counts(outcome.figures.moves)}; decisions: "
            f"{shown_counts(Counter(outcome.figures.records))}"
            for outcome in found.policies
        ),
    ]


def _windows_of_one(found: Comparison, measured: Sequence[float | None] | None) -> Table:
    outcome = found.policies[0]
    headers = HEADERS if measured is None else (*HEADERS, MEASURED)
    table = columns(headers, right=headers)
    for at, window in enumerate(outcome.figures.windows):
        cells = [
            str(window.index),
            str(window.pairs),
            f"{window.static:.3f}",
            f"{window.static_leveled:.3f}",
            f"{window.equal:.3f}",
            f"{window.served:.3f}",
            f"{found.clairvoyant[at]:.3f}",
            f"{window.bound:.3f}",
            shown_seconds(outcome.regret_s[at]),
            str(window.moves),
            str(window.slot_writes),
            shown_bytes(window.copy_bytes),
            str(window.epoch),
        ]
        table.add_row(*cells, *_measured(measured, at))
    return table


def _windows_of_all(found: Comparison, measured: Sequence[float | None] | None) -> Table:
    """SERVED of each policy, under its name."""
    names = [outcome.policy.upper() for outcome in found.policies]
    names = [f"SERVED {name}" if name in ("STATIC", "BEST", "BOUND") else name for name in names]
    headers = ["WINDOW", "PAIRS", "STATIC", "LEVELED", *names, "BEST", "BOUND"]
    headers += [] if measured is None else [MEASURED]
    table = columns(headers, right=headers)
    for at, window in enumerate(found.policies[0].figures.windows):
        served = [outcome.figures.windows[at].served for outcome in found.policies]
        cells = [window.static, window.static_leveled, *served, found.clairvoyant[at], window.bound]
        table.add_row(
            str(window.index),
            str(window.pairs),
            *(f"{cell:.3f}" for cell in cells),
            *_measured(measured, at),
        )
    return table


def _measured(measured: Sequence[float | None] | None, at: int) -> list[str]:
    if measured is None:
        return []
    value = measured[at]
    return ["-" if value is None else f"{value:.3f}"]


def _totals(found: Comparison) -> Table:
    """Over all windows, a line a policy."""
    prices = [f"RATIO {one.write_price:g}" for one in found.policies[0].competitive]
    table = columns((*TOTALS, *prices), right=(*TOTALS[1:], *prices))
    for outcome in found.policies:
        figures = outcome.figures
        table.add_row(
            outcome.policy,
            f"{figures.equal:.3f}",
            f"{figures.served:.3f}",
            f"{found.clairvoyant_total:.3f}",
            f"{figures.bound:.3f}",
            str(sum(figures.moves.values())),
            str(figures.slot_writes),
            shown_bytes(figures.copy_bytes),
            _regret(outcome),
            *(f"{one.ratio:.3f}" for one in outcome.competitive),
        )
    return table


def _regret(outcome: PolicyOutcome) -> str:
    """Seconds, and their share of the least that was possible."""
    least = outcome.figures.seconds - outcome.regret_total_s
    share = outcome.regret_total_s / least if least > 0 else 0.0
    return f"{shown_seconds(outcome.regret_total_s)} ({share:.1%})"


def checks_parts(checks: Sequence[SegmentCheck]) -> list[RenderableType]:
    """Whether today's engine does with recorded events what the recording's did; nothing without
    segments."""
    if not checks:
        return []
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
    found: Comparison,
    measured: Sequence[float | None] | None,
    checks: Sequence[SegmentCheck],
) -> dict[str, Any]:
    """The same for programs."""
    return {
        **msgspec.to_builtins(found),
        "measured": measured,
        "segments": msgspec.to_builtins(list(checks)),
        "simulated": True,
    }


def replay_panels(
    found: Comparison, measured: Sequence[float | None] | None
) -> tuple[Panel, Panel]:
    """What is drawn: balancedness by window, and slot writes by window."""
    first = found.policies[0].figures
    lines = [
        Series("static, equal split", [window.static for window in first.windows]),
        *(
            Series(outcome.policy, [window.served for window in outcome.figures.windows])
            for outcome in found.policies
        ),
        Series("best with foresight", list(found.clairvoyant)),
    ]
    if measured is not None:
        lines.append(Series("measured", list(measured)))
    writes = [
        Series(outcome.policy, [float(window.slot_writes) for window in outcome.figures.windows])
        for outcome in found.policies
    ]
    return (
        Panel("balancedness by window (simulated)", lines, top=1.0),
        Panel("slot writes by window", writes, bottom=0.0),
    )
