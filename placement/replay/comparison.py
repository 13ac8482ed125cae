"""Policies beside each other on one trace, and beside what could have been had.

Responsible for regret and the competitive ratio. Does no I/O and decides nothing. Called by the CLI
and benchmarks.

Two references. *Clairvoyant*: the incremental policy with the window's own counts as its forecast
and no limit on writes; regret of a window is the seconds lost against the best of it and of all
compared policies. *Offline optimum*: the cheapest path through all windows, where the instance is
small enough to compute it; otherwise the lower bound that every window is in balance and nothing is
written. Seconds are compute-bound: pairs x the rank's seconds a pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from placement.config import RebalanceConfig
from placement.layout import ExpertLayout
from placement.load import LoadWindow
from placement.policy import PolicyInput, propose
from placement.replay.executor import PerfectExecutor
from placement.replay.optimum import offline_optimum
from placement.replay.trace import (
    TraceFigures,
    even_parts,
    replay_trace,
    slowest_seconds,
    window_counts,
)
from placement.scoring import rank_load
from placement.topology import MoeSpec, Topology

WRITE_PRICES: Final = (0.005, 0.02, 0.05)
"""Price of one slot write, in units of max_over_mean of one layer and window."""

Reference = Literal["offline optimum", "lower bound"]


class CompetitiveRatio(msgspec.Struct, frozen=True, kw_only=True):
    """cost = sum over windows and layers of max_over_mean + write_price x slot writes; the
    reference's cost is counted alike."""

    write_price: float
    cost: float
    reference_cost: float
    ratio: float


class PolicyOutcome(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What one policy would have done. regret_s: seconds lost in each window against the best that
    was compared, copies not counted."""

    policy: str
    figures: TraceFigures
    regret_s: tuple[float, ...]
    regret_total_s: float
    competitive: tuple[CompetitiveRatio, ...]


class Comparison(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """All policies on the same windows. clairvoyant: balancedness of each window when it is known
    beforehand. reference: what competitive ratios divide by."""

    policies: tuple[PolicyOutcome, ...]
    clairvoyant: tuple[float, ...]
    clairvoyant_total: float
    reference: Reference


class Foresight(msgspec.Struct, frozen=True):
    """The clairvoyant's windows: seconds and balancedness of each, and balancedness of all from the
    first that is judged."""

    seconds: list[float]
    balancedness: list[float]
    total: float


def compare(
    windows: Sequence[LoadWindow],
    spec: MoeSpec,
    topology: Topology,
    config: RebalanceConfig,
    policies: Sequence[str],
) -> Comparison:
    """Replay the windows once for each policy (names in `POLICIES`, in the order wanted) and score
    all against the same references.

    Raises ValueError without a policy.
    """
    if not policies:
        raise ValueError("compare needs at least one policy")
    start = PerfectExecutor(spec, topology, config).engine.layout()
    foresight = clairvoyant(windows, start, spec, topology, config)
    runs = [
        replay_trace(windows, spec, topology, msgspec.structs.replace(config, policy=policy))
        for policy in policies
    ]
    best = [
        min(seen, *(run.windows[at].seconds for run in runs))
        for at, seen in enumerate(foresight.seconds)
    ]
    reference, floor = _reference(windows, start, topology, config)
    return Comparison(
        policies=tuple(
            _outcome(policy, run, best, floor) for policy, run in zip(policies, runs, strict=True)
        ),
        clairvoyant=tuple(foresight.balancedness),
        clairvoyant_total=foresight.total,
        reference=reference,
    )


def _outcome(
    policy: str, run: TraceFigures, best: Sequence[float], floor: Sequence[float]
) -> PolicyOutcome:
    regret = [window.seconds - least for window, least in zip(run.windows, best, strict=True)]
    served = sum(window.max_over_mean for window in run.windows)
    return PolicyOutcome(
        policy=policy,
        figures=run,
        regret_s=tuple(regret),
        regret_total_s=sum(regret),
        competitive=tuple(
            CompetitiveRatio(
                write_price=price,
                cost=served + price * run.slot_writes,
                reference_cost=least,
                ratio=(served + price * run.slot_writes) / least if least > 0 else 1.0,
            )
            for price, least in zip(WRITE_PRICES, floor, strict=True)
        ),
    )


def clairvoyant(
    windows: Sequence[LoadWindow],
    layout: ExpertLayout,
    spec: MoeSpec,
    topology: Topology,
    config: RebalanceConfig,
    judged_from: int = 0,
) -> Foresight:
    """What could be had by who knows each window beforehand and may write without limit. Windows
    before `judged_from` are gone through and left out of the total."""
    seconds: list[float] = []
    found: list[float] = []
    sums = np.zeros(2, dtype=np.float64)
    for at, window in enumerate(windows):
        request = PolicyInput(
            spec=spec,
            topology=topology,
            layout=layout,
            scenarios=window.demand.sum(axis=0, keepdims=True).astype(np.float64),
            weights=np.ones(1, dtype=np.float64),
            floor=config.floor,
            staging_slots=config.staging_slots,
            balance_enough=1.0,
        )
        layout = propose("incremental", request)
        load = rank_load(layout, window_counts(window))
        mean, worst = float(load.mean(axis=0).sum()), float(load.max(axis=0).sum())
        if at >= judged_from:
            sums += mean, worst
        seconds.append(slowest_seconds(load, spec, topology))
        found.append(mean / worst if worst > 0 else 1.0)
    return Foresight(seconds, found, float(sums[0] / sums[1]) if sums[1] > 0 else 1.0)


def _reference(
    windows: Sequence[LoadWindow], start: ExpertLayout, topology: Topology, config: RebalanceConfig
) -> tuple[Reference, tuple[float, ...]]:
    each = [window_counts(window) for window in windows]
    capacity = [
        max(rank.num_slots - config.staging_slots, 0) if rank.alive else 0
        for rank in topology.ranks
    ]
    stacked: npt.NDArray[np.int64] = np.array(
        [counts[0] for counts in each], dtype=np.int64
    ).reshape(len(each), start.num_experts)
    optimum = offline_optimum(start, capacity, stacked, WRITE_PRICES)
    if optimum is not None:
        return "offline optimum", optimum
    floor = sum(
        _least_max_over_mean(layer, topology.num_ranks) for counts in each for layer in counts
    )
    return "lower bound", (floor,) * len(WRITE_PRICES)


def _least_max_over_mean(layer: npt.NDArray[np.int64], num_ranks: int) -> float:
    mean, least = even_parts(layer[None, :], num_ranks)
    return least / mean if mean > 0 else 1.0
