"""Fleets in units of a window, and runners, which keep a layout and may change it between windows.

A fleet's seconds are set so that the figures of the gate can be read: a rank of mean load is busy
for the whole window, shared equally by the layers, and writing one slot costs `write_price` of the
time a layer takes of a window. Example: 26 layers, windows of 2 s, price 0.02: a layer takes 77 ms
of a window, a write costs 1.5 ms.

Responsible for driving public functions of `placement` window by window. Must never look at a
window before it is over (only `Clairvoyant` may, and says so). Called by the policy benchmarks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from placement.config import RebalanceConfig
from placement.forecast import forecast, initial_state, observe
from placement.layout import ExpertLayout
from placement.load import LoadHistory, LoadWindow
from placement.messages.events import WindowClosed
from placement.policy import PolicyInput, propose
from placement.replay import PerfectExecutor
from placement.scoring import churn
from placement.topology import (
    NUM_PHASES,
    DeviceProfile,
    MoeSpec,
    Phase,
    RankSpec,
    Topology,
)

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

WINDOW_S = RebalanceConfig().window_s
EXPERT_BYTES = 1 << 20
RANKS_PER_NODE = 8
UNLIMITED = 1_000_000


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """A model and the ranks it is placed on."""

    spec: MoeSpec
    topology: Topology

    @property
    def slots(self) -> int:
        """Slots that are filled, all layers."""
        return sum(rank.num_slots - 1 for rank in self.topology.ranks)


def make_fleet(
    *,
    layers: int,
    experts: int,
    top_k: int,
    ranks: int,
    slots_per_rank: int,
    pairs_per_layer: float,
    write_price: float,
) -> Fleet:
    """Fleet of equal ranks with one staging slot each.

    slots_per_rank: filled slots of a layer. pairs_per_layer: pairs of one layer in a window.
    write_price: cost of a slot write in shares of the time a layer takes of a window.
    """
    spec = MoeSpec(
        model="policies",
        weights_version="1",
        num_layers=layers,
        num_experts=experts,
        top_k=top_k,
        hidden_size=1,
        intermediate_size=1,
        expert_bytes=EXPERT_BYTES,
        slot_bytes=EXPERT_BYTES,
    )
    layer_s = WINDOW_S / layers
    profile = DeviceProfile(
        name="unit",
        flops_per_s=spec.flops_per_pair * (pairs_per_layer / ranks) / layer_s,
        memory_bytes_per_s=1e12,
        copy_bytes_per_s=EXPERT_BYTES / (write_price * layer_s),
    )
    topology = Topology(
        ranks=tuple(
            RankSpec(
                rank=rank,
                node=f"node{rank // RANKS_PER_NODE}",
                failure_domain=f"node{rank // RANKS_PER_NODE}",
                num_slots=slots_per_rank * layers + 1,
                profile=profile.name,
            )
            for rank in range(ranks)
        ),
        profiles=(profile,),
        cross_node_bytes_per_s=profile.copy_bytes_per_s,
    )
    return Fleet(spec=spec, topology=topology)


def load_window(fleet: Fleet, index: int, counts: IntArray) -> LoadWindow:
    """Closed window of counts int64 [quarters, layers, experts], all prefill."""
    demand = np.zeros((len(counts), NUM_PHASES, *counts.shape[1:]), dtype=np.int64)
    demand[:, Phase.PREFILL] = counts
    return LoadWindow(
        index=index,
        start_s=index * WINDOW_S,
        end_s=(index + 1) * WINDOW_S,
        demand=demand,
        executed_pairs=demand.sum(axis=0),
        rank_pairs=np.zeros((fleet.topology.num_ranks, fleet.spec.num_layers), dtype=np.int64),
        rank_busy_s=np.zeros((fleet.topology.num_ranks, NUM_PHASES), dtype=np.float64),
    )


def request_for(
    fleet: Fleet,
    layout: ExpertLayout,
    scenarios: FloatArray,
    weights: FloatArray | None = None,
    max_moves: int | None = None,
) -> PolicyInput:
    """What a policy sees. scenarios: float64 [n, layers, experts] (prefill) or [n, phases, layers,
    experts], pairs a second; weights: None = equal."""
    if scenarios.ndim == 3:
        both = np.zeros((len(scenarios), NUM_PHASES, *scenarios.shape[1:]), dtype=np.float64)
        both[:, Phase.PREFILL] = scenarios
        scenarios = both
    return PolicyInput(
        spec=fleet.spec,
        topology=fleet.topology,
        layout=layout,
        scenarios=scenarios,
        weights=np.full(len(scenarios), 1.0 / len(scenarios)) if weights is None else weights,
        max_moves=max_moves,
    )


def first_layout(fleet: Fleet) -> ExpertLayout:
    """The layout nobody planned, with which every runner starts."""
    empty = ExpertLayout.empty(
        fleet.topology, num_layers=fleet.spec.num_layers, num_experts=fleet.spec.num_experts
    )
    nothing = np.zeros((1, fleet.spec.num_layers, fleet.spec.num_experts))
    return propose("static", request_for(fleet, empty, nothing))


class Runner(Protocol):
    """Keeps a layout."""

    @property
    def layout(self) -> ExpertLayout:
        """What serves the next window."""
        ...

    def take(self, counts: IntArray) -> int:
        """See a window that is over, int64 [quarters, layers, experts]; slots written before the
        next."""
        ...


class Planned:
    """Base of runners that ask a policy: counts the writes by what ranks hold, not by slot."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.layout = first_layout(fleet)

    def adopt(self, target: ExpertLayout) -> int:
        """Serve with `target` from now on; (key, rank) pairs that had to be written."""
        writes = churn(self.layout, target).keys_added
        self.layout = target
        return writes


class Still(Planned):
    """Never moves."""

    def take(self, counts: IntArray) -> int:
        """Nothing is learnt."""
        return 0


class Periodic(Planned):
    """A planner that forgets the live layout, every so many windows on the sum of all since; its
    first plan comes after the first window."""

    def __init__(self, fleet: Fleet, policy: str, every: int) -> None:
        super().__init__(fleet)
        self._policy, self._every = policy, every
        self._seen: list[IntArray] = []
        self._windows = 0

    def take(self, counts: IntArray) -> int:
        """Plan when the period is over."""
        self._seen.append(counts.sum(axis=0))
        self._windows += 1
        if self._windows != 1 and self._windows % self._every:
            return 0
        total = np.sum(self._seen, axis=0)[None] / (len(self._seen) * WINDOW_S)
        self._seen = []
        return self.adopt(propose(self._policy, request_for(self.fleet, self.layout, total)))


class Forecasting(Planned):
    """`incremental` on the production forecast after every window, without the gate."""

    def __init__(self, fleet: Fleet, max_moves: int, windows_kept: int = 8) -> None:
        super().__init__(fleet)
        spec = fleet.spec
        self._state = initial_state(
            num_phases=NUM_PHASES, num_layers=spec.num_layers, num_experts=spec.num_experts
        )
        self._history = LoadHistory(kept=windows_kept)
        self._max_moves: int | None = max_moves
        self._windows = 0

    def take(self, counts: IntArray) -> int:
        """Observe, forecast, propose; the first plan may write what it wants."""
        window = load_window(self.fleet, self._windows, counts)
        self._state = observe(self._state, self._history, window, self.fleet.topology.num_ranks)
        self._history = self._history.with_window(window)
        self._windows += 1
        found = forecast(self._state, self._history)
        limit = self._max_moves if self._windows > 1 else None
        request = request_for(self.fleet, self.layout, found.demand, found.weights, limit)
        return self.adopt(propose("incremental", request))


class Clairvoyant(Planned):
    """`incremental` with the true next window as its only scenario, or its quarters: the worth of a
    perfect forecast at the same budget. No layer counts as balanced enough. Not a policy: it must
    be told what comes."""

    def __init__(
        self, fleet: Fleet, max_moves: int, coming: IntArray, *, by_quarters: bool = False
    ) -> None:
        super().__init__(fleet)
        self._coming, self._max_moves, self._by_quarters = coming, max_moves, by_quarters
        self._windows = 0

    def take(self, counts: IntArray) -> int:
        """Plan for the window after this one; the first plan may write what it wants."""
        self._windows += 1
        if self._windows >= len(self._coming):
            return 0
        quarters = self._coming[self._windows]
        truth = quarters if self._by_quarters else quarters.sum(axis=0)[None]
        limit = self._max_moves if self._windows > 1 else None
        request = request_for(
            self.fleet, self.layout, truth * (len(truth) / WINDOW_S), max_moves=limit
        )
        return self.adopt(
            propose("incremental", msgspec.structs.replace(request, balance_enough=1.0))
        )


class Learned(Planned):
    """A policy that sees the last quarters of windows as its scenarios, oldest first, after every
    window."""

    def __init__(
        self,
        fleet: Fleet,
        policy: Callable[[PolicyInput], ExpertLayout],
        max_moves: int,
        quarters_kept: int,
    ) -> None:
        super().__init__(fleet)
        self._policy, self._max_moves, self._kept = policy, max_moves, quarters_kept
        self._quarters: list[IntArray] = []
        self._windows = 0

    def take(self, counts: IntArray) -> int:
        """Propose; the first plan may write what it wants."""
        self._quarters = [*self._quarters, *counts][-self._kept :]
        self._windows += 1
        rates: FloatArray = np.stack(self._quarters).astype(np.float64) * (len(counts) / WINDOW_S)
        limit = self._max_moves if self._windows > 1 else None
        return self.adopt(
            self._policy(request_for(self.fleet, self.layout, rates, max_moves=limit))
        )


class Production:
    """The production engine, trigger and gate included, with an executor that takes no time."""

    def __init__(self, fleet: Fleet, config: RebalanceConfig) -> None:
        self._fleet = fleet
        self._executor = PerfectExecutor(fleet.spec, fleet.topology, config)
        self._windows = 0

    @property
    def layout(self) -> ExpertLayout:
        """What the engine has listed."""
        return self._executor.engine.layout()

    @property
    def rules(self) -> list[str]:
        """Rules of all decision records so far."""
        return [record.rule for record in self._executor.records]

    def take(self, counts: IntArray) -> int:
        """Close the window; a plan it starts is done before the next."""
        before = self._executor.slot_writes
        window = load_window(self._fleet, self._windows, counts)
        self._windows += 1
        self._executor.take(WindowClosed(at_s=window.end_s, window=window))
        return self._executor.slot_writes - before
