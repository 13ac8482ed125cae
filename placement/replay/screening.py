"""Would placement help this traffic? Judged on windows that no plan had seen.

Responsible for three figures and a verdict with its reasons. It says what balance would have been;
it never says how much faster a service would be, for no kernel, batch or network was run. Does no
I/O. Called by the CLI.

The windows are cut in two. The *first part* is what a plan is made from; only the *later part* is
judged. Compared there, all under the router's split: the layout that never moves; the plan of the
first part, frozen; the engine going on through the later part, its writes counted; and a layout
that knew each window beforehand, which nobody has.

Gain is 1 - seconds / seconds of the layout that never moves, seconds being those of the slowest
rank of each layer, summed, compute-bound.

The verdict:

- *insufficient evidence*: too few windows or pairs to tell, or blocks of the later part disagree.
- *not recommended now*: not even foresight gains what is worth having; or the engine does not in
  any block, or nothing in all; or its copies cost more than they saved.
- *recommend trial*: the engine gains what is worth having over the later part, it gains in every
  block of it, and saved more than its copies cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from placement.config import RebalanceConfig
from placement.layout import ExpertLayout
from placement.load import LoadWindow
from placement.messages import events as ev
from placement.replay.comparison import clairvoyant
from placement.replay.executor import PerfectExecutor
from placement.replay.trace import even_parts, slowest_seconds, static_layout, window_counts
from placement.scoring import rank_load
from placement.topology import MoeSpec, Topology

Name = Literal["never moves", "first part's plan", "engine", "foresight"]
Verdict = Literal["recommend_trial", "not_recommended_now", "insufficient_evidence"]

JUDGED_MIN: Final = 8
"""Windows of the later part, at least: two a block."""
BLOCKS: Final = 4
"""Pieces of the later part, each judged by itself: a gain that only one of them shows is luck."""
PAIRS_MIN: Final = 20.0
"""Pairs of an expert over the later part, in the mean, at least: below it counts are mostly noise.
"""


class ScreenedLayout(msgspec.Struct, frozen=True, kw_only=True):
    """One way to place experts, over the later part. gain: against the layout that never moves.
    slot_writes, copy_bytes: made in the later part; of the frozen plan, made to get to it."""

    name: Name
    balancedness: float
    seconds: float
    gain: float
    slot_writes: int
    copy_bytes: int


class Screening(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict, why, and what it was made from. block_gains: the engine's in each block of the
    later part. better, worse: windows in which the engine's layout was faster or slower than the
    one that never moves. copy_s: what the copies would take one after another."""

    verdict: Verdict
    reasons: tuple[str, ...]
    first_windows: int
    judged_windows: int
    pairs_per_expert: float
    layouts: tuple[ScreenedLayout, ...]
    bound: float
    block_gains: tuple[float, ...]
    better: int
    worse: int
    saved_s: float
    copy_s: float
    worth: float


class _Scored(msgspec.Struct):
    """Seconds of each window, the sums that balancedness is the ratio of, and what was written."""

    seconds: list[float] = msgspec.field(default_factory=list)
    mean: float = 0.0
    worst: float = 0.0
    slot_writes: int = 0
    copy_bytes: int = 0

    def add(
        self,
        layout: ExpertLayout,
        counts: npt.NDArray[np.int64],
        spec: MoeSpec,
        topology: Topology,
    ) -> None:
        load = rank_load(layout, counts)
        self.mean += float(load.mean(axis=0).sum())
        self.worst += float(load.max(axis=0).sum())
        self.seconds.append(slowest_seconds(load, spec, topology))

    def row(self, name: Name, static_s: float) -> ScreenedLayout:
        return ScreenedLayout(
            name=name,
            balancedness=self.mean / self.worst if self.worst > 0 else 1.0,
            seconds=sum(self.seconds),
            gain=_gain(sum(self.seconds), static_s),
            slot_writes=self.slot_writes,
            copy_bytes=self.copy_bytes,
        )


class _Walked(msgspec.Struct):
    """What came of the windows: three layouts on the later part, its pairs, and the sums that its
    bound is the ratio of."""

    start: ExpertLayout
    never: _Scored = msgspec.field(default_factory=_Scored)
    plan: _Scored = msgspec.field(default_factory=_Scored)
    engine: _Scored = msgspec.field(default_factory=_Scored)
    pairs: int = 0
    bounds: npt.NDArray[np.float64] = msgspec.field(default_factory=lambda: np.zeros(2))


def screen(
    windows: Sequence[LoadWindow],
    spec: MoeSpec,
    topology: Topology,
    config: RebalanceConfig,
    *,
    first_share: float = 0.5,
    worth: float = 0.05,
) -> Screening:
    """Judge the later part of the windows.

    first_share: of the windows, in (0, 1), that plans are made from. worth: the gain that is worth
    a trial, in (0, 1). Raises ValueError for others.
    """
    if not 0 < first_share < 1 or not 0 < worth < 1:
        raise ValueError(f"first_share {first_share} and worth {worth} must lie in (0, 1)")
    first = int(len(windows) * first_share)
    seen = _walk(windows, spec, topology, config, first)
    known = clairvoyant(windows, seen.start, spec, topology, config, judged_from=first)
    static_s, rate = sum(seen.never.seconds), min(p.copy_bytes_per_s for p in topology.profiles)
    later_s = sum(known.seconds[first:])
    layouts = (
        seen.never.row("never moves", static_s),
        seen.plan.row("first part's plan", static_s),
        seen.engine.row("engine", static_s),
        ScreenedLayout(
            name="foresight",
            balancedness=known.total,
            seconds=later_s,
            gain=_gain(later_s, static_s),
            slot_writes=0,
            copy_bytes=0,
        ),
    )
    pairs_of_windows = list(zip(seen.engine.seconds, seen.never.seconds, strict=True))
    found = Screening(
        verdict="insufficient_evidence",
        reasons=(),
        first_windows=first,
        judged_windows=len(windows) - first,
        pairs_per_expert=seen.pairs / spec.num_keys,
        layouts=layouts,
        bound=float(seen.bounds[0] / seen.bounds[1]) if seen.bounds[1] > 0 else 1.0,
        block_gains=_block_gains(seen.engine.seconds, seen.never.seconds),
        better=sum(engine < never for engine, never in pairs_of_windows),
        worse=sum(engine > never for engine, never in pairs_of_windows),
        saved_s=static_s - sum(seen.engine.seconds),
        copy_s=seen.engine.copy_bytes / rate,
        worth=worth,
    )
    verdict, reasons = _judge(found)
    return msgspec.structs.replace(found, verdict=verdict, reasons=reasons)


def _walk(
    windows: Sequence[LoadWindow],
    spec: MoeSpec,
    topology: Topology,
    config: RebalanceConfig,
    first: int,
) -> _Walked:
    """Run the engine through all windows, and score three layouts on those from `first` on."""
    static = static_layout(spec, topology, config)
    runner = PerfectExecutor(spec, topology, config)
    start = frozen = runner.engine.layout()
    walked = _Walked(start)
    before = runner.totals()
    for at, window in enumerate(windows):
        if at == first:
            frozen, before = runner.engine.layout(), runner.totals()
        if at >= first:
            counts = window_counts(window)
            walked.pairs += int(counts.sum())
            walked.bounds += even_parts(counts, topology.num_ranks)
            for scored, layout in (
                (walked.never, static),
                (walked.plan, frozen),
                (walked.engine, runner.engine.layout()),
            ):
                scored.add(layout, counts, spec, topology)
        runner.take(ev.WindowClosed(at_s=window.end_s, window=window))
    writes, copied, _ = runner.totals()
    walked.plan.slot_writes, walked.plan.copy_bytes = before[:2]
    walked.engine.slot_writes, walked.engine.copy_bytes = writes - before[0], copied - before[1]
    return walked


def _gain(seconds: float, static_s: float) -> float:
    return 1.0 - seconds / static_s if static_s > 0 else 0.0


def _block_gains(engine_s: Sequence[float], never_s: Sequence[float]) -> tuple[float, ...]:
    ends = [len(never_s) * block // BLOCKS for block in range(BLOCKS + 1)]
    return tuple(
        _gain(sum(engine_s[low:high]), sum(never_s[low:high]))
        for low, high in pairwise(ends)
        if high > low
    )


def _judge(found: Screening) -> tuple[Verdict, tuple[str, ...]]:
    """The rules of the verdict, in their order."""
    thin = _thin(found)
    if thin:
        return "insufficient_evidence", thin
    _, _, engine, foresight = found.layouts
    if foresight.gain < found.worth:
        return "not_recommended_now", (
            f"a layout that knew every window would gain {foresight.gain:.1%}, less than the "
            f"{found.worth:.1%} that is worth a trial: the load is even as it is, or no layout "
            "evens it",
        )
    most, least = max(found.block_gains), min(found.block_gains)
    if most < found.worth or engine.gain <= 0:
        return "not_recommended_now", (
            f"the engine gains {engine.gain:.1%} over the later part, at most {most:.1%} in a "
            f"block of it; {found.worth:.1%} is worth a trial. Foresight would gain "
            f"{foresight.gain:.1%}: what is hot changes faster than a plan can follow",
        )
    if found.saved_s <= found.copy_s:
        return "not_recommended_now", (
            f"its copies would take {found.copy_s:.3g} s one after another, no less than the "
            f"{found.saved_s:.3g} s they save",
        )
    if engine.gain < found.worth or least <= 0:
        return "insufficient_evidence", (
            f"blocks of the later part disagree: gains from {least:.1%} to {most:.1%}, "
            f"{engine.gain:.1%} in all; record longer",
        )
    return "recommend_trial", (
        f"the engine gains {engine.gain:.1%} on windows no plan had seen, from {least:.1%} to "
        f"{most:.1%} by block, and is faster in {found.better} of {found.judged_windows} windows",
        f"it saves {found.saved_s:.3g} s for copies of {found.copy_s:.3g} s",
    )


def _thin(found: Screening) -> tuple[str, ...]:
    reasons = []
    if found.first_windows < 1:
        reasons.append("no window is left to make a plan from; record longer")
    if found.judged_windows < JUDGED_MIN:
        reasons.append(
            f"{found.judged_windows} windows to judge on, at least {JUDGED_MIN} are needed; record "
            "longer, or take smaller windows"
        )
    if found.pairs_per_expert < PAIRS_MIN:
        reasons.append(
            f"{found.pairs_per_expert:.1f} pairs an expert over the later part, at least "
            f"{PAIRS_MIN:g} are needed; record more traffic"
        )
    return tuple(reasons)
