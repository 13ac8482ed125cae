"""The production engine over closed windows: what it would have served, written and moved.

Responsible for driving and for scoring each window on the layout that stood when it began. Does no
I/O. Called by the CLI, benchmarks and `comparison`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from placement.config import RebalanceConfig
from placement.cost import seconds_per_pair
from placement.layout import ExpertLayout
from placement.load import LoadWindow
from placement.messages import events as ev
from placement.policy import PolicyInput, propose
from placement.replay.executor import PerfectExecutor
from placement.scoring import max_over_mean, rank_load
from placement.topology import NUM_PHASES, MoeSpec, Topology

FloatArray = npt.NDArray[np.float64]


class WindowFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One window of a trace: balancedness on the window's own counts, and what was written in it.

    static, static_leveled: the layout that never moves, split equally and by our split. equal,
    served: the engine's layout as it was when the window began, split equally and by our split.
    bound: what no layout and no split exceeds, in whole pairs. seconds: of the slowest rank of each
    layer, summed, compute-bound, under our split. max_over_mean: summed over layers, under our
    split.
    """

    index: int
    pairs: int
    static: float
    static_leveled: float
    equal: float
    served: float
    bound: float
    seconds: float
    max_over_mean: float
    slot_writes: int
    copy_bytes: int
    moves: int
    epoch: int


class TraceFigures(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """All windows, and totals: balancedness over all windows is the ratio of sums, as in
    `scoring`."""

    windows: tuple[WindowFigures, ...]
    static: float
    static_leveled: float
    equal: float
    served: float
    bound: float
    seconds: float
    slot_writes: int
    copy_bytes: int
    moves: dict[str, int]
    records: tuple[str, ...]
    """Rule of every decision record, in order."""


def replay_trace(
    windows: Sequence[LoadWindow], spec: MoeSpec, topology: Topology, config: RebalanceConfig
) -> TraceFigures:
    """Run the production engine over closed windows with an executor that is perfect and takes no
    time.

    A plan decided at the end of a window is in place when the next begins, so no window is scored
    on its own knowledge.
    """
    runner = PerfectExecutor(spec, topology, config)
    static = static_layout(spec, topology, config)
    figures: list[WindowFigures] = []
    sums = np.zeros((5, 2), dtype=np.float64)
    for window in windows:
        counts = window_counts(window)
        served = runner.engine.layout()
        load = rank_load(served, counts)
        parts = np.array(
            [
                _mean_and_max(rank_load(static, counts, "equal")),
                _mean_and_max(rank_load(static, counts)),
                _mean_and_max(rank_load(served, counts, "equal")),
                _mean_and_max(load),
                even_parts(counts, topology.num_ranks),
            ]
        )
        sums += parts
        before = runner.totals()
        runner.take(ev.WindowClosed(at_s=window.end_s, window=window))
        writes, copied, moves = np.subtract(runner.totals(), before).tolist()
        ratio = _ratios(parts)
        figures.append(
            WindowFigures(
                index=window.index,
                pairs=int(counts.sum()),
                static=ratio[0],
                static_leveled=ratio[1],
                equal=ratio[2],
                served=ratio[3],
                bound=ratio[4],
                seconds=slowest_seconds(load, spec, topology),
                max_over_mean=float(max_over_mean(load).sum()),
                slot_writes=writes,
                copy_bytes=copied,
                moves=moves,
                epoch=runner.engine.state.epoch,
            )
        )
    return _totals(figures, _ratios(sums), runner)


def window_counts(window: LoadWindow) -> npt.NDArray[np.int64]:
    """Pairs of a window over both phases: int64 [layers, experts]."""
    counts: npt.NDArray[np.int64] = window.demand.sum(axis=(0, 1), dtype=np.int64)
    return counts


def even_parts(counts: npt.NDArray[np.int64], num_ranks: int) -> tuple[float, float]:
    """(sum over layers of the mean over ranks, the same of the least possible maximum): no layout
    and no split goes below the mean, and pairs are whole.

    >>> even_parts(np.array([[3, 2], [4, 4]]), num_ranks=2)
    (6.5, 7.0)
    """
    layer = counts.sum(axis=1)
    return float(layer.sum()) / num_ranks, float((-(-layer // num_ranks)).sum())


def slowest_seconds(load: FloatArray, spec: MoeSpec, topology: Topology) -> float:
    """Seconds of the slowest rank of each layer, summed over layers, compute-bound. load: pairs
    [ranks, layers]."""
    each = load * seconds_per_pair(spec, topology)[:, None]
    return float(each.max(axis=0).sum())


def static_layout(spec: MoeSpec, topology: Topology, config: RebalanceConfig) -> ExpertLayout:
    """The layout that never moves: contiguous, extras in turn, in the same slots."""
    request = PolicyInput(
        spec=spec,
        topology=topology,
        layout=ExpertLayout.empty(
            topology, num_layers=spec.num_layers, num_experts=spec.num_experts
        ),
        scenarios=np.zeros((1, NUM_PHASES, spec.num_layers, spec.num_experts), dtype=np.float64),
        weights=np.ones(1, dtype=np.float64),
        staging_slots=config.staging_slots,
    )
    return propose("static", request)


def _mean_and_max(load: FloatArray) -> tuple[float, float]:
    return float(load.mean(axis=0).sum()), float(load.max(axis=0).sum())


def _ratios(parts: FloatArray) -> list[float]:
    """Mean / maximum of each row of [rows, 2]; 1 without load."""
    return [mean / worst if worst > 0 else 1.0 for mean, worst in parts.tolist()]


def _totals(
    figures: Sequence[WindowFigures], ratio: Sequence[float], runner: PerfectExecutor
) -> TraceFigures:
    return TraceFigures(
        windows=tuple(figures),
        static=ratio[0],
        static_leveled=ratio[1],
        equal=ratio[2],
        served=ratio[3],
        bound=ratio[4],
        seconds=sum(f.seconds for f in figures),
        slot_writes=sum(f.slot_writes for f in figures),
        copy_bytes=sum(f.copy_bytes for f in figures),
        moves={
            k: n - runner.fill_moves.get(k, 0) for k, n in runner.engine.state.moves_done.items()
        },
        records=tuple(record.rule for record in runner.records),
    )
