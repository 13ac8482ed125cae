"""What the live router makes of a layout under work: loads and value of every layer, kept level.

Experts of a layer stand in order of load here, heaviest first: where the kernels must break a tie
between experts, the heavier wins, and ids decide only between equals. A *position* is an expert's
place in that order.

Responsible for holding the arrays that the kernels work on, in step with an `Occupancy`. Must
never choose a change. Called by the incremental policy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from placement.policy.leveled.kernels import (
    FloatArray,
    IntArray,
    Layer,
    Scratch,
    World,
    cheapest_drops,
    relevel,
    scratch_for,
)
from placement.policy.occupancy import Occupancy


class Leveled:
    """Loads of every layer under the levelled split, on every scenario.

    demand: float64 [scenarios, layers, experts], pairs a second. pair_s: float64 [ranks], seconds
    of a pair.

    value: float64 [layers], what the search lowers. slowest_s: float64 [layers], seconds a second
    of the slowest rank, weighted over scenarios: the objective is its sum. fair_s: float64
    [layers], the same if the load were even. victim_loss / victim: [layers, ranks], cheapest
    surplus replica of each layer on each rank and what it is worth.
    """

    def __init__(
        self,
        occupancy: Occupancy,
        demand: npt.NDArray[np.float64],
        weights: npt.NDArray[np.float64],
        pair_s: npt.NDArray[np.float64],
    ) -> None:
        scenarios, layers, experts = demand.shape
        ranks = len(pair_s)
        self._occupancy = occupancy
        self.world = World(
            weights=np.array(weights, dtype=np.float64),
            pair_s=np.array(pair_s, dtype=np.float64),
            domain=occupancy.domain,
            floor=occupancy.floor,
        )
        speed = float((1.0 / pair_s[occupancy.domain >= 0]).sum())
        mean = np.tensordot(self.world.weights, demand, axes=1)
        self._num_experts = int(experts)
        self._expert_at = np.argsort(-mean, axis=1, kind="stable")
        by_layer = np.take_along_axis(
            demand.transpose(1, 0, 2), self._expert_at[:, None, :], axis=2
        )
        by_layer = np.array(by_layer, dtype=np.float64, order="C")
        fair = by_layer.sum(axis=2) / speed
        self.fair_s: FloatArray = fair @ self.world.weights
        self.value: FloatArray = np.zeros(layers)
        self.slowest_s: FloatArray = np.zeros(layers)
        self.victim_loss: FloatArray = np.full((layers, ranks), np.inf)
        self.victim: IntArray = np.full((layers, ranks), -1, dtype=np.int64)
        self.scratch: Scratch = scratch_for(experts, ranks)
        self.layers = [
            Layer(
                demand=by_layer[layer],
                fair=fair[layer],
                host_rank=np.zeros((experts, ranks), dtype=np.int64),
                host_count=np.zeros(experts, dtype=np.int64),
                flow=np.zeros((scenarios, experts, ranks)),
                load=np.zeros((scenarios, ranks)),
            )
            for layer in range(layers)
        ]
        for layer in range(layers):
            self.refresh(layer)

    def refresh(self, layer: int) -> None:
        """Read the layer's hosts from the occupancy and level it from nothing.

        From nothing, so that the figures depend on the layout alone and never on the way to it:
        planning again from a plan's own result sees exactly what that plan saw last.
        """
        view = self.layers[layer]
        hosted = self._occupancy.hosts_of_layer(layer)[self._expert_at[layer]]
        position, rank = np.nonzero(hosted)
        view.host_count[:] = np.bincount(position, minlength=self._num_experts)
        starts = np.concatenate(([0], np.cumsum(view.host_count)[:-1]))
        view.host_rank[position, np.arange(len(position)) - starts[position]] = rank
        self.value[layer], self.slowest_s[layer] = relevel(view, self.world, self.scratch)
        cheapest_drops(
            view,
            self.world,
            self.scratch,
            float(self.value[layer]),
            self.victim_loss[layer],
            self.victim[layer],
        )

    def key(self, layer: int, position: int) -> int:
        """Key of the expert that stands at a position of a layer."""
        return layer * self._num_experts + int(self._expert_at[layer, position])

    def cheapest(self, rank: int, but_layer: int = -1) -> tuple[float, int, int]:
        """(value lost, layer, key) of the least useful surplus replica on the rank, -1 = none.

        but_layer: a layer to leave out.
        """
        loss = self.victim_loss[:, rank].copy()
        if but_layer >= 0:
            loss[but_layer] = np.inf
        layer = int(np.argmin(loss))
        if not np.isfinite(loss[layer]):
            return float("inf"), -1, -1
        return float(loss[layer]), layer, self.key(layer, int(self.victim[layer, rank]))

    def used(self, layer: int, position: int, rank: int) -> bool:
        """Whether any scenario sends pairs to that replica."""
        view = self.layers[layer]
        hosts = view.host_rank[position, : view.host_count[position]]
        return bool((view.flow[:, position, : len(hosts)][:, hosts == rank] > 0).any())

    def balance(self, layer: int) -> float:
        """Fair over slowest of a layer, in (0, 1]; 1 without load."""
        slowest = float(self.slowest_s[layer])
        return float(self.fair_s[layer]) / slowest if slowest > 0 else 1.0

    def mean_load(self, layer: int) -> FloatArray:
        """Seconds a second of each rank for a layer, weighted over scenarios: float64 [ranks]."""
        load: FloatArray = self.world.weights @ self.layers[layer].load
        return load
