"""Whether a soak kept every promise: what went wrong held against the faults that were active.

Responsible for the judgement and for its table. Looks at no service.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.soak.acts import Deed
from tests.soak.dice import Kind
from tests.soak.load import Failure
from tests.soak.slopes import COUNT_BAR, RSS_BAR, Growth


@dataclass(frozen=True, slots=True)
class Excused:
    """A failed call and the fault that excuses it."""

    failure: Failure
    deed: Deed


def judge_failures(
    failures: Iterable[Failure], deeds: Sequence[Deed]
) -> tuple[list[Excused], list[str]]:
    """Failures that an active fault excuses, and the others in words. A fault is active from its
    begin until the service has healed, and a call that was open then met it."""
    excused: list[Excused] = []
    guilty: list[str] = []
    for failure in failures:
        met = [
            deed
            for deed in deeds
            if deed.began_s <= failure.ended_s and failure.began_s <= deed.over_s
        ]
        why = next((deed for deed in met if failure.code in deed.act.may_fail), None)
        if why is not None:
            excused.append(Excused(failure, why))
            continue
        during = ", ".join(str(deed.act) for deed in met) or "no fault"
        guilty.append(
            f"{failure.code} at {failure.address} during {during}, after "
            f"{failure.ended_s - failure.began_s:.2f} s: {failure.text}"
        )
    return excused, guilty


def table_of_faults(deeds: Sequence[Deed], excused: Sequence[Excused]) -> str:
    """One row a kind: how often, seconds to heal, excused failures."""
    heals: dict[Kind, list[float]] = defaultdict(list)
    broken: Counter[Kind] = Counter()
    for deed in deeds:
        heals[deed.act.kind].append(deed.healed_s)
        broken[deed.act.kind] += bool(deed.violations)
    forgiven = Counter(one.deed.act.kind for one in excused)
    lines = [f"{'fault':22}{'times':>6}{'healed after s, median':>24}{'longest':>9}"]
    lines[0] += f"{'excused':>9}{'broken':>8}"
    for kind in Kind:
        took = sorted(heals[kind])
        middle, longest = (took[len(took) // 2], took[-1]) if took else (0.0, 0.0)
        lines.append(
            f"{kind.value:22}{len(took):>6}{middle:>24.1f}{longest:>9.1f}"
            f"{forgiven[kind]:>9}{broken[kind]:>8}"
        )
    return "\n".join(lines)


def table_of_growth(growths: Sequence[Growth], least_s: float) -> str:
    """One row a life of at least `least_s` seconds: what it gained, and what was judged."""
    lines = [
        f"growth of each process that lived {least_s:.0f} s (bars: memory {RSS_BAR:.0f} MB a 100 "
        f"moves, counts {COUNT_BAR:.0f}; lowest estimate in brackets):",
        f"{'part':12}{'life s':>8}{'moves':>7}{'MB':>8}{'MB/100 moves':>20}{'MB/h':>18}"
        f"{'fds':>5}{'threads':>9}{'tasks':>7}  judged",
    ]
    shown = [one for one in growths if one.seconds >= least_s]
    for one in sorted(shown, key=lambda growth: (growth.part, -growth.seconds)):
        rss = "-" if one.rss is None else f"{one.rss.value:.2f} [{one.rss.least:.2f}]"
        hourly = "-" if one.rss_per_h is None else f"{one.rss_per_h.value:.1f}"
        hourly += "" if one.rss_per_h is None else f" [{one.rss_per_h.least:.1f}]"
        counts = [one.counts.get(name) for name in ("fds", "threads", "tasks")]
        cells = ["-" if count is None else f"{count:+.0f}" for count in counts]
        lines.append(
            f"{one.part:12}{one.seconds:>8.0f}{one.moves:>7}{one.rss_mb:>8.0f}{rss:>20}{hourly:>18}"
            f"{cells[0]:>5}{cells[1]:>9}{cells[2]:>7}  {', '.join(one.judged) or 'nothing'}"
        )
    return "\n".join(lines)
