"""Our planner and its baselines, driven window by window as production drives them.

Responsible for turning closed windows into `PolicyInput` through the public forecast, and for the
CPU time of each part. Must never score. Called by `placement_runs`.

The way of a window: `observe` scores the forecasters on it, the history takes it in, `forecast`
gives scenarios, `propose` a layout. The first plan has no limit on writes, later ones the budget.
Slots of a rank are a pool over its layers; "8 ranks x 9" is 9 filled slots a layer on average and
one empty staging slot a rank.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.placement_score import Placement, from_layout
from benchmarks.placement_traces import Case
from placement.config import RebalanceConfig
from placement.forecast import ForecastState, forecast, initial_state, observe
from placement.layout import ExpertLayout
from placement.load import LoadHistory, LoadWindow
from placement.messages.events import WindowClosed
from placement.policy import PolicyInput, propose
from placement.replay import PerfectExecutor
from placement.topology import NUM_PHASES, DeviceProfile, MoeSpec, Phase, RankSpec, Topology

IntArray = npt.NDArray[np.int64]

WINDOW_S: Final = 2.0
RANKS_PER_NODE: Final = 8
STAGING_SLOTS: Final = 1
FAIR_BUSY: Final = 0.5
"""Share of the time a rank of an even fleet computes. It decides what a copy may cost, which only
the engine's gate asks.
"""
_EXPERT_BYTES: Final = 1 << 24


@dataclass(frozen=True)
class Planned:
    """A placement, and CPU seconds of this thread spent on forecast and on planning."""

    placement: Placement
    forecast_s: float
    plan_s: float


class Planner(Protocol):
    """One planner on one timeline."""

    def plan(self, window: IntArray, upcoming: IntArray) -> Planned:
        """Placement for the next window, after this one closed.

        window: int64 [quarters, layers, experts]. upcoming: the next window, for a clairvoyant.
        """
        ...


def spec_of(case: Case) -> MoeSpec:
    """The case's model. Sizes are round: every rank is alike, so only ratios matter here."""
    return MoeSpec(
        model=case.name,
        weights_version="trace",
        num_layers=case.layers,
        num_experts=case.experts,
        top_k=case.top_k,
        hidden_size=2048,
        intermediate_size=1408,
        expert_bytes=_EXPERT_BYTES,
        slot_bytes=_EXPERT_BYTES,
    )


def topology_of(case: Case) -> Topology:
    """Equal ranks, eight to a node, of the speed at which an even fleet is `FAIR_BUSY`."""
    pairs_per_s = case.window_tokens * case.top_k * case.layers / WINDOW_S
    flops_per_s = pairs_per_s * spec_of(case).flops_per_pair / case.ranks / FAIR_BUSY
    profile = DeviceProfile(
        name="equal", flops_per_s=flops_per_s, memory_bytes_per_s=1e12, copy_bytes_per_s=1e10
    )
    ranks = tuple(
        RankSpec(
            rank=rank,
            node=f"n{rank // RANKS_PER_NODE}",
            failure_domain=f"n{rank // RANKS_PER_NODE}",
            num_slots=case.layers * case.slots_per_rank + STAGING_SLOTS,
            profile=profile.name,
        )
        for rank in range(case.ranks)
    )
    return Topology(ranks=ranks, profiles=(profile,))


def closed_window(case: Case, counts: IntArray, index: int) -> LoadWindow:
    """A window as the load folder closes it; GPT-OSS is decode, the rest counts as prefill."""
    demand = np.zeros((len(counts), NUM_PHASES, case.layers, case.experts), dtype=np.int64)
    demand[:, Phase.DECODE if case.name.startswith("gptoss") else Phase.PREFILL] = counts
    return LoadWindow(
        index=index,
        start_s=index * WINDOW_S,
        end_s=(index + 1) * WINDOW_S,
        demand=demand,
        executed_pairs=demand.sum(axis=0),
        rank_pairs=np.zeros((0, case.layers), dtype=np.int64),
        rank_busy_s=np.zeros((0, NUM_PHASES), dtype=np.float64),
    )


class PolicyPlanner:
    """A policy of ours, asked after every window.

    share: slots of all layers that a plan after the first may write, None = all. clairvoyant:
    plans for the quarters of the window that comes, instead of the forecast. balance_enough: as in
    `RebalanceConfig`, None = its default, as in production.
    """

    def __init__(
        self,
        case: Case,
        policy: str,
        share: float | None = None,
        *,
        clairvoyant: bool = False,
        balance_enough: float | None = None,
    ) -> None:
        self._case, self._policy, self._clairvoyant = case, policy, clairvoyant
        self._config = RebalanceConfig()
        if balance_enough is not None:
            self._config = RebalanceConfig(balance_enough=balance_enough)
        self._max_moves = None if share is None else int(share * case.slots * case.layers)
        self._spec, self._topology = spec_of(case), topology_of(case)
        self._history = LoadHistory(kept=self._config.windows_kept)
        self._state: ForecastState = initial_state(
            num_phases=NUM_PHASES, num_layers=case.layers, num_experts=case.experts
        )
        self._seen = 0
        self._layout: ExpertLayout = propose("static", self._request(*self._nothing()))

    def plan(self, window: IntArray, upcoming: IntArray) -> Planned:
        """See `Planner`."""
        began_s = time.thread_time()
        closed = closed_window(self._case, window, self._seen)
        self._state = observe(self._state, self._history, closed, self._case.ranks)
        self._history = self._history.with_window(closed)
        if self._clairvoyant:
            scenarios = closed_window(self._case, upcoming, 0).demand.astype(np.float64)
            weights = np.full(len(scenarios), 1.0 / len(scenarios))
        else:
            found = forecast(self._state, self._history)
            scenarios, weights = found.demand, found.weights
        between_s = time.thread_time()
        limit = None if self._seen == 0 else self._max_moves
        self._layout = propose(self._policy, self._request(scenarios, weights, limit))
        self._seen += 1
        ended_s = time.thread_time()
        return Planned(from_layout(self._layout), between_s - began_s, ended_s - between_s)

    def _nothing(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        self._layout = ExpertLayout.empty(
            self._topology, num_layers=self._case.layers, num_experts=self._case.experts
        )
        shape = (1, NUM_PHASES, self._case.layers, self._case.experts)
        return np.zeros(shape, dtype=np.float64), np.ones(1, dtype=np.float64)

    def _request(
        self,
        scenarios: npt.NDArray[np.float64],
        weights: npt.NDArray[np.float64],
        max_moves: int | None = None,
    ) -> PolicyInput:
        return PolicyInput(
            spec=self._spec,
            topology=self._topology,
            layout=self._layout,
            scenarios=scenarios,
            weights=weights,
            staging_slots=STAGING_SLOTS,
            max_moves=max_moves,
            balance_enough=self._config.balance_enough,
        )


class EnginePlanner:
    """The whole engine: trigger, gate, policy, order of steps, with an executor that takes no time.

    Its first plan has the budget of every other, and a window in which the gate stays shut moves
    nothing.
    """

    def __init__(self, case: Case, share: float) -> None:
        self._case = case
        config = RebalanceConfig(
            cooldown_s=0.0, max_moves=int(share * case.slots * case.layers), window_s=WINDOW_S
        )
        self._executor = PerfectExecutor(spec_of(case), topology_of(case), config)
        self._seen = 0

    def plan(self, window: IntArray, upcoming: IntArray) -> Planned:
        """See `Planner`. All CPU time counts as planning."""
        del upcoming
        began_s = time.thread_time()
        closed = closed_window(self._case, window, self._seen)
        self._executor.take(WindowClosed(at_s=closed.end_s, window=closed))
        self._seen += 1
        spent_s = time.thread_time() - began_s
        return Planned(from_layout(self._executor.engine.layout()), 0.0, spent_s)
