"""Tables of the placement benchmark: means and intervals over seeds, bars, verdicts.

Responsible for turning rows into text. Measures nothing and decides nothing. Called by `placement`.

Intervals are 95% of the mean over seeds, by Student's t; a single seed has none. A bar is *met*
where the mean is at or above it at a mean share of writes at or below the budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from benchmarks.environment import Environment
from benchmarks.placement_runs import ANY_LAYOUT, TABLE_SHARE, USUAL_SHARE, Row, ours
from benchmarks.placement_traces import CASES, ORDERS

T_95: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
"""Student's t, two-sided 95%, for 1, 2, ... degrees of freedom; beyond them 1.96."""

LATE_FROM: Final = 3
"""Scored windows that `late` leaves out: they are planned from one to three windows of history."""
ROUNDING: Final = 1e-12
"""Half widths below this are rounding of equal values."""


class Bar(NamedTuple):
    """What is promised: balance of windows and quarters, at most this share of slots written."""

    window: float
    quarter: float
    share: float


BARS: Final = {
    ("deepseek8", "mixed"): Bar(0.985, 0.960, 0.08),
    ("deepseek8", "blocks"): Bar(0.955, 0.940, 0.08),
    ("deepseek16", "mixed"): Bar(0.972, 0.930, 0.08),
    ("deepseek16", "blocks"): Bar(0.920, 0.893, 0.08),
    ("gptoss8", "mixed"): Bar(0.975, 0.905, 0.10),
    ("gptoss8", "blocks"): Bar(0.970, 0.905, 0.10),
    ("gptoss8", "labels"): Bar(0.970, 0.905, 0.10),
}


class Estimate(NamedTuple):
    """Mean over seeds and half the width of its 95% interval (0 for one seed)."""

    mean: float
    half: float

    def text(self, digits: int = 3) -> str:
        """`0.985 ± 0.002`, without the second part for one seed.

        >>> Estimate(0.98512, 0.0021).text(), Estimate(0.5, 0.0).text(2)
        ('0.985 ± 0.002', '0.50')
        """
        width = f" ± {self.half:.{digits}f}" if self.half > 0 else ""
        return f"{self.mean:.{digits}f}{width}"


def estimate(values: Iterable[float]) -> Estimate:
    """Mean and interval of one value a seed.

    >>> estimate([1.0, 2.0, 3.0])
    Estimate(mean=2.0, half=2.4843...)
    """
    sample = np.array(list(values), dtype=np.float64)
    if len(sample) < 2:
        return Estimate(float(sample.mean()), 0.0)
    quantile = T_95[len(sample) - 2] if len(sample) - 2 < len(T_95) else 1.96
    half = float(quantile * sample.std(ddof=1) / np.sqrt(len(sample)))
    return Estimate(float(sample.mean()), half if half > ROUNDING else 0.0)


class Summary(NamedTuple):
    """One planner on one case and order, over all seeds."""

    planner: str
    window: dict[str, Estimate]
    quarter: dict[str, Estimate]
    late: Estimate
    writes: Estimate
    writes_max: float
    forecast_ms: Estimate
    plan_ms: Estimate
    seeds: int
    passes: int

    def pair(self, split: str) -> str:
        """`window / quarter` under a split, or a dash."""
        if split not in self.window:
            return "-"
        return f"{self.window[split].text()} / {self.quarter[split].text()}"


Table = dict[tuple[str, str], list[Summary]]


def summarise(rows: Sequence[Row]) -> Table:
    """(case, order) -> summaries, in the order of CASES, ORDERS and first appearance."""
    groups: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in rows:
        groups.setdefault((row.case, row.order), {}).setdefault(row.planner, []).append(row)
    keys = [(case, order) for case in CASES for order in ORDERS if (case, order) in groups]
    return {key: [_summary(name, found) for name, found in groups[key].items()] for key in keys}


def bar_lines(table: Table) -> list[str]:
    """Markdown table: bars, what was measured, best peers, clairvoyant."""
    lines = [
        "| case | bar: window / quarter, writes | ours, our split | writes | verdict "
        "| ours after 3 windows | best peer, our split | best peer as shipped "
        "| clairvoyant, same budget |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for key, bar in BARS.items():
        found = {summary.planner: summary for summary in table.get(key, [])}
        mine = found.get(ours(bar.share))
        if mine is None:
            continue
        peers = [s for s in found.values() if _is_peer(s.planner)]
        seer = found.get(f"clairvoyant {bar.share:.0%}")
        lines.append(
            f"| {CASES[key[0]].title}, {key[1]} | {bar.window:.3f} / {bar.quarter:.3f}, "
            f"{bar.share:.0%} | {mine.pair('level')} | {_percent(mine.writes.mean)} | "
            f"{verdict(mine, bar)} | {mine.late.text()} | "
            f"{_best(peers, 'level')} | {_best(peers, 'equal')} | "
            f"{seer.pair('level') if seer else '-'} |"
        )
    return lines


def verdict(mine: Summary, bar: Bar) -> str:
    """`met`, or what is short."""
    short = [
        f"{name} {got - want:+.3f}"
        for name, got, want in (
            ("window", mine.window["level"].mean, bar.window),
            ("quarter", mine.quarter["level"].mean, bar.quarter),
        )
        if got < want
    ]
    if mine.writes.mean > bar.share:
        short.append(f"writes {_percent(mine.writes.mean)}")
    return "**missed**: " + ", ".join(short) if short else "met"


def case_lines(key: tuple[str, str], summaries: Sequence[Summary]) -> list[str]:
    """Markdown table of every planner on one case and order."""
    case, order = key
    seeds = max(summary.seeds for summary in summaries)
    passes = max(summary.passes for summary in summaries)
    lines = [
        f"### {CASES[case].title}, {order}",
        "",
        f"{seeds} seed{'s' if seeds > 1 else ''}, windows of {CASES[case].window_tokens} tokens"
        + ("" if CASES[case].file else ", simulated demand")
        + (f", requests gone through {passes} times" if passes > 1 else "")
        + ".",
        "",
        "| planner | equal split | our split | any split (LP) | slots written a window "
        "(most) | CPU ms a layer: forecast + plan |",
        "|---|---|---|---|---|---|",
    ]
    for s in summaries:
        if s.planner == ANY_LAYOUT:
            lines.append(f"| {s.planner} | - | - | {s.pair('bound')} | - | - |")
            continue
        lines.append(
            f"| {s.planner} | {s.pair('equal')} | {s.pair('level')} | {s.pair('bound')} | "
            f"{_percent(s.writes.mean)} ({_percent(s.writes_max)}) | "
            f"{s.forecast_ms.mean:.2f} + {s.plan_ms.mean:.2f} |"
        )
    return lines


def cpu_lines(table: Table) -> list[str]:
    """Markdown table: planning CPU a layer of ours and of the peers, same run, mixed traffic."""
    names: list[str] = []
    for summaries in table.values():
        for s in summaries:
            wanted = _is_peer(s.planner) and "sum8" not in s.planner
            if wanted and s.planner not in names:
                names.append(s.planner)
    head = ["case", "ours: forecast + plan", *names]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for (case, order), summaries in table.items():
        found = {s.planner: s for s in summaries}
        mine = found.get(ours(TABLE_SHARE.get(case, USUAL_SHARE)))
        if order != "mixed" or mine is None:
            continue
        cells = [f"{found[n].plan_ms.text(2)}" if n in found else "-" for n in names]
        lines.append(
            f"| {CASES[case].title} | {mine.forecast_ms.text(2)} + {mine.plan_ms.text(2)} | "
            + " | ".join(cells)
            + " |"
        )
    return lines


def document(
    rows: Sequence[Row], environment: Environment, sources: Sequence[str], command: str
) -> str:
    """The page of the documentation, in Markdown."""
    table = summarise(rows)
    seeds = sorted({row.seed for row in rows})
    lines = [
        "# Placement: balance against slots written",
        "",
        "Generated by `python -m benchmarks.placement --docs` (`make peers bench-placement`, with "
        "`MOE_SERVE_DATA` naming the recorded traces); do not edit.",
        "",
        "A planner sees the windows that have closed; its placement is scored on the next one, "
        "out of sample. Balance = mean over layers of mean / maximum rank load, of the whole "
        "window / of its quarters; 1 is even. Three splits of an expert's tokens over its "
        "replicas: *equal*, as published planners assume; *ours*, the integer optimum the router "
        "runs; *any split*, the linear programme's optimum for that placement. Writes: replicas "
        "on a rank that were not there before, after the first plan, as a share of all slots; the "
        "order of slots within a rank is free for everybody.",
        "",
        "`mixed`: requests in a seeded order. `blocks`: the same, grouped by domain, so that the "
        "mixture flips a few times. `labels`: grouped by the trace's own label, one request "
        "each in GPT-OSS. `shifting`: domains swell and fade. Percentages behind our "
        "planner's name are its budget. *Clairvoyant* is our planner with the same budget that "
        "plans for the window to come: what a perfect forecast would give. Peers plan anew after "
        "every window, on the last window or on the sum of the last eight, globally (one node, "
        "one group). The DeepSeek-V3 scale (58 x 256) is simulated demand with the traces' skew, "
        "drift and variation; the others are recorded.",
        "",
        *(f"    {line.strip()}" for line in environment.lines()),
        f"    seeds {', '.join(map(str, seeds))}",
        f"    {command}",
        *(f"    {line}" for line in sources),
        "",
        "![Balance against slots written, by case](../images/placement.svg)",
        "",
        "## Bars",
        "",
        "*After 3 windows* leaves out the first three scored windows (window balance only): they "
        "are planned from one, two and three windows of history, whatever plans.",
        "",
        *bar_lines(table),
        "",
        "## CPU of a plan",
        "",
        "Milliseconds of one thread a layer, mean over plans after the first, all in this run.",
        "",
        *cpu_lines(table),
        "",
        "## Every planner",
        "",
    ]
    for key, summaries in table.items():
        lines += [*case_lines(key, summaries), ""]
    return "\n".join(lines).rstrip() + "\n"


def _summary(name: str, rows: Sequence[Row]) -> Summary:
    splits = list(rows[0].window)
    return Summary(
        planner=name,
        window={split: estimate(row.window[split] for row in rows) for split in splits},
        quarter={split: estimate(row.quarter[split] for row in rows) for split in splits},
        late=estimate(float(np.mean(row.by_window[_late(row) :])) for row in rows),
        writes=estimate(row.writes_share for row in rows),
        writes_max=max(row.writes_share_max for row in rows),
        forecast_ms=estimate(row.forecast_ms for row in rows),
        plan_ms=estimate(row.plan_ms for row in rows),
        seeds=len({row.seed for row in rows}),
        passes=max(row.passes for row in rows),
    )


def _late(row: Row) -> int:
    return LATE_FROM if len(row.by_window) > LATE_FROM else 0


def _is_peer(planner: str) -> bool:
    return planner.startswith(("DeepSeek", "vLLM"))


def _best(peers: Sequence[Summary], split: str) -> str:
    if not peers:
        return "absent"
    best = max(peers, key=lambda s: s.window[split].mean)
    return (
        f"{best.planner}: {best.window[split].mean:.3f} / {best.quarter[split].mean:.3f} "
        f"at {_percent(best.writes.mean)}"
    )


def _percent(share: float) -> str:
    return f"{share * 100:.1f}%"
