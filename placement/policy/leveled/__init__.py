"""What the live router makes of a layout under work: loads and value of every layer, kept level.

Experts of a layer stand in order of load here, heaviest first: where the kernels must break a tie
between experts, the heavier wins, and ids decide only between equals. A *position* is an expert's
place in that order.

Responsible for holding the arrays that the kernels work on, in step with an `Occupancy`. Must
never choose a change. Called by the incremental policy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from placement.policy.leveled.drops.kernels import cheapest_drops
from placement.policy.leveled.kernels import (
    FloatArray,
    IntArray,
    Layer,
    Scratch,
    World,
    level_all,
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
    [layers], the same if the load were even.

    Flows and loads are kept of one layer at a time: `view` lends them, `relevel` fills them.
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
        self.expert_at: IntArray = np.argsort(-mean, axis=1, kind="stable")
        self._demand = np.ascontiguousarray(
            np.take_along_axis(demand.transpose(1, 0, 2), self.expert_at[:, None, :], axis=2)
        )
        self._fair = np.ascontiguousarray(self._demand.sum(axis=2) / speed)
        self.fair_s: FloatArray = self._fair @ self.world.weights
        self.value: FloatArray = np.zeros(layers)
        self.slowest_s: FloatArray = np.zeros(layers)
        self.scratch: Scratch = scratch_for(experts, ranks)
        self._host_rank: IntArray = np.zeros((layers, experts, ranks), dtype=np.int64)
        self._host_count: IntArray = np.zeros((layers, experts), dtype=np.int64)
        # One column more: rows a power of two apart would share cache lines of one set.
        self._flow: FloatArray = np.zeros((scenarios, experts, ranks + 1))
        self._load: FloatArray = np.zeros((scenarios, ranks))
        self._victim_loss: FloatArray = np.full((layers, ranks), np.inf)
        self._victim: IntArray = np.full((layers, ranks), -1, dtype=np.int64)
        self._victims_known = np.zeros(layers, dtype=np.bool_)
        for layer in range(layers):
            self._read_hosts(layer)
        level_all(
            self._demand,
            self._fair,
            self._host_rank,
            self._host_count,
            self.view(0),
            self.world,
            self.scratch,
            self.value,
            self.slowest_s,
        )

    def view(self, layer: int) -> Layer:
        """A layer's arrays. Its flows and loads are those of the layer levelled last."""
        return Layer(
            demand=self._demand[layer],
            fair=self._fair[layer],
            host_rank=self._host_rank[layer],
            host_count=self._host_count[layer],
            flow=self._flow,
            load=self._load,
        )

    def refresh(self, layer: int) -> None:
        """Read the layer's hosts from the occupancy and level it from nothing.

        From nothing, so that the figures depend on the layout alone and never on the way to it:
        planning again from a plan's own result sees exactly what that plan saw last.
        """
        self._read_hosts(layer)
        found = relevel(self.view(layer), self.world, self.scratch)
        self.value[layer], self.slowest_s[layer] = found

    def settle(self, layer: int, value: float, slowest_s: float) -> None:
        """Take over the figures of hosts that the search has changed in the layer's view, and the
        occupancy with them.
        """
        self.value[layer], self.slowest_s[layer] = value, slowest_s
        self._victims_known[layer] = False

    def key(self, layer: int, position: int) -> int:
        """Key of the expert that stands at a position of a layer."""
        return layer * self._num_experts + int(self.expert_at[layer, position])

    @property
    def victim_loss(self) -> FloatArray:
        """Most that the cheapest surplus replica of each layer on each rank can be worth: float64
        [layers, ranks]; inf where there is none.
        """
        for layer in np.nonzero(~self._victims_known)[0]:
            view = self.view(int(layer))
            relevel(view, self.world, self.scratch)
            cheapest_drops(
                view, self.world, self.scratch, self._victim_loss[layer], self._victim[layer]
            )
            self._victims_known[layer] = True
        return self._victim_loss

    def cheapest(
        self, rank: int, but_layers: Sequence[int] = (), layer: int = -1
    ) -> tuple[float, int, int]:
        """(value lost, layer, key) of the least useful surplus replica on the rank, key -1 = none.

        but_layers: layers to leave out. layer: the only one to look at.
        """
        loss = self.victim_loss[:, rank].copy()
        loss[list(but_layers)] = np.inf
        found = layer if layer >= 0 else int(np.argmin(loss))
        if not np.isfinite(loss[found]):
            return float("inf"), -1, -1
        return float(loss[found]), found, self.key(found, int(self._victim[found, rank]))

    def balance(self, layer: int) -> float:
        """Fair over slowest of a layer, in (0, 1]; 1 without load."""
        slowest = float(self.slowest_s[layer])
        return float(self.fair_s[layer]) / slowest if slowest > 0 else 1.0

    def _read_hosts(self, layer: int) -> None:
        hosted = self._occupancy.hosts_of_layer(layer)[self.expert_at[layer]]
        position, rank = np.nonzero(hosted)
        count = np.bincount(position, minlength=self._num_experts)
        starts = np.concatenate(([0], np.cumsum(count)[:-1]))
        self._host_count[layer] = count
        self._host_rank[layer, position, np.arange(len(position)) - starts[position]] = rank
        self._victims_known[layer] = False
