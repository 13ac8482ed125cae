"""What the incremental policy thinks of repairs: losses under the levelled split, and how strained
a rank is.

Responsible for the `Judge` of its repairs. Must never change an occupancy. Called by
`incremental`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from placement.policy.leveled import Leveled
from placement.policy.occupancy import Occupancy

FloatArray = npt.NDArray[np.float64]


class LeveledJudge:
    """Judge of repairs.

    A first fill places every key, so strain is kept up to date by single changes: seconds a second
    of each rank in each layer if replicas of an expert shared its pairs evenly.

    mean: float64 [layers, experts], pairs a second.
    """

    def __init__(self, occupancy: Occupancy, leveled: Leveled, mean: FloatArray) -> None:
        self._num_experts = occupancy.num_experts
        self._occupancy = occupancy
        self._leveled = leveled
        self._mean = mean.reshape(-1)
        self._pair_s = leveled.world.pair_s
        self._stale: set[int] = set()
        self._load: FloatArray = np.zeros((0, 0))
        self._ranks_of: list[npt.NDArray[np.int64]] = []

    def _ready(self) -> None:
        """Look at every host, once, where a repair is needed at all."""
        if self._ranks_of:
            return
        occupancy = self._occupancy
        hosted = np.stack(
            [occupancy.hosts_of_layer(layer) for layer in range(occupancy.num_layers)]
        )
        mean = self._mean.reshape(occupancy.num_layers, -1)
        each = mean / np.maximum(hosted.sum(axis=2), 1)
        self._load = np.einsum("le,ler->lr", each, hosted.astype(np.float64)) * self._pair_s
        self._ranks_of = [np.nonzero(row)[0] for row in hosted.reshape(len(self._mean), -1)]

    def cheapest(self, rank: int, layer: int) -> tuple[float, int] | None:
        """Least value lost, then lowest layer."""
        self._settle()
        alone = int((self._occupancy.pools == self._occupancy.pools[layer]).sum()) == 1
        loss, _, key = self._leveled.cheapest(rank, layer=layer if alone else -1)
        return (loss, key) if key >= 0 else None

    def strain(self, key: int, rank: int) -> float:
        """Seconds a second of the rank in the key's layer with a share of the key."""
        self._ready()
        share = float(self._mean[key]) / (len(self._ranks_of[key]) + 1)
        load = float(self._load[key // self._num_experts, rank])
        return load + share * float(self._pair_s[rank])

    def changed(self, key: int) -> None:
        """Take the key's new hosts in."""
        layer, expert = divmod(key, self._num_experts)
        self._stale.add(layer)
        if not self._ranks_of:
            return
        load, pairs = self._load[layer], float(self._mean[key])
        before = self._ranks_of[key]
        if len(before):
            load[before] -= pairs / len(before) * self._pair_s[before]
        after = np.nonzero(self._occupancy.hosts_of_layer(layer)[expert])[0]
        if len(after):
            load[after] += pairs / len(after) * self._pair_s[after]
        self._ranks_of[key] = after

    def finish(self) -> None:
        """Level what changed: repairs are over."""
        self._settle()

    def _settle(self) -> None:
        for layer in sorted(self._stale):
            self._leveled.refresh(layer)
        self._stale.clear()
