"""How good a layout is: the one place where balance, churn and coverage are defined.

Responsible for the figures that page, CLI, metrics, benchmarks and gates print. Must never
decide. Called by all of them.

Words and an example. *Rank load* is an array [ranks, layers] of pairs. Two layers on four ranks,
where every pair of a layer lands on the first rank: loads [[100, 100], [0, 0], [0, 0], [0, 0]].
The mean over *ranks* is 25 a layer, the maximum 100, so balancedness = (25 + 25) / (100 + 100) =
0.25, imbalance = 1 / 0.25 - 1 = 3, max_over_mean = 4. Heavy layers weigh more than light ones;
layers without load weigh nothing, and no load at all is balance 1.
"""

from __future__ import annotations

from itertools import combinations
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from placement.layout import ABSENT, ExpertLayout
from placement.split import level
from placement.topology import Topology

FloatArray = npt.NDArray[np.float64]
Split = Literal["level", "equal"]

_LEVEL_UNITS = 1 << 40
"""Whole units that a layer of fractional demand is cut into before it is levelled."""


def balancedness(loads: npt.ArrayLike) -> float:
    """Sum over layers of the mean over ranks / sum over layers of the maximum over ranks, in (0,
    1]; 1 without load.

    loads: [ranks, layers].

    >>> balancedness([[100, 100], [0, 0], [0, 0], [0, 0]])
    0.25
    """
    array = _loads(loads)
    worst = float(array.max(axis=0).sum())
    return float(array.mean(axis=0).sum()) / worst if worst > 0 else 1.0


def layer_balancedness(loads: npt.ArrayLike) -> FloatArray:
    """Mean / maximum over ranks of each layer: float64 [layers]; 1 for layers without load.

    >>> layer_balancedness([[3, 0], [1, 0]]).tolist()
    [0.6666666666666666, 1.0]
    """
    array = _loads(loads)
    worst = array.max(axis=0)
    return np.where(worst > 0, array.mean(axis=0) / np.where(worst > 0, worst, 1.0), 1.0)


def worst_layer(loads: npt.ArrayLike) -> tuple[int, float]:
    """(layer, its balancedness) of the worst layer, the lowest such layer."""
    each = layer_balancedness(loads)
    layer = int(np.argmin(each))
    return layer, float(each[layer])


def imbalance(loads: npt.ArrayLike) -> float:
    """1 / balancedness - 1: the share of time the ranks wait for the slowest; 0 is even."""
    return 1.0 / balancedness(loads) - 1.0


def max_over_mean(loads: npt.ArrayLike) -> FloatArray:
    """Maximum / mean over ranks of each layer: float64 [layers]; 1 for layers without load."""
    return 1.0 / layer_balancedness(loads)


def rank_load(layout: ExpertLayout, demand: npt.ArrayLike, split: Split = "level") -> FloatArray:
    """Pairs on each rank for each layer, as a split makes them of a layout: float64 [ranks,
    layers].

    demand: [layers, experts], pairs (whole or fractional, >= 0). split: "level" = the router's
    rule, "equal" = the same for every replica. Fractional demand is levelled in units of 2^-40 of
    its layer.

    >>> layout = ExpertLayout.from_rows([[0, 1], [1, 2]], num_layers=1, num_experts=3)
    >>> rank_load(layout, [[6, 4, 0]]).tolist(), rank_load(layout, [[6, 4, 0]], "equal").tolist()
    ([[6.0], [4.0]], [[8.0], [2.0]])

    Raises ValueError for another shape, negative or non-finite demand, and demand for an expert
    without a replica.
    """
    pairs = np.asarray(demand)
    if pairs.shape != (layout.num_layers, layout.num_experts):
        raise ValueError(
            f"demand has shape {pairs.shape}, the layout wants "
            f"({layout.num_layers}, {layout.num_experts})"
        )
    if not bool(np.all(np.isfinite(pairs) & (pairs >= 0))):
        raise ValueError("demand must be finite and >= 0")
    unserved = np.argwhere((pairs > 0) & (layout.replica_counts == 0))
    if len(unserved):
        layer, expert = unserved[0]
        raise ValueError(
            f"layer {layer} expert {expert} has demand but no replica; repair the layout first"
        )
    loads = np.zeros((layout.num_ranks, layout.num_layers), dtype=np.float64)
    for layer in range(layout.num_layers):
        expert, rank = layout.layer_slots(layer)
        if split == "equal":
            share = pairs[layer] / np.maximum(layout.replica_counts[layer], 1)
            np.add.at(loads[:, layer], rank, share[expert])
        else:
            loads[:, layer] = _leveled(expert, rank, pairs[layer], layout.num_ranks)
    return loads


def _leveled(
    expert: npt.NDArray[np.int64],
    rank: npt.NDArray[np.int64],
    pairs: npt.NDArray[np.generic],
    num_ranks: int,
) -> FloatArray:
    total = float(pairs.sum())
    if total <= 0:
        return np.zeros(num_ranks, dtype=np.float64)
    if pairs.dtype.kind in "iu":
        counts, unit = pairs.astype(np.int64), 1.0
    else:
        unit = total / _LEVEL_UNITS
        counts = np.rint(pairs.astype(np.float64) / unit).astype(np.int64)
    tokens = level(expert, rank, counts, num_ranks)
    loads = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(loads, rank, tokens)
    return loads.astype(np.float64) * unit


class Churn(NamedTuple):
    """What changes from one layout to another.

    slot_writes: slots that get another expert (each is one copy). slot_evictions: slots that only
    become empty. keys_added / keys_removed: (key, rank) pairs that appear / disappear, whatever
    their slot: a layout that only shuffles slots within ranks has writes but none of these.
    """

    slot_writes: int
    slot_evictions: int
    keys_added: int
    keys_removed: int


def churn(before: ExpertLayout, after: ExpertLayout) -> Churn:
    """Changes from `before` to `after`. Both have the same ranks and model; widths may differ (a
    budget changed).

    Raises ValueError for another number of ranks, layers or experts.
    """
    if (before.num_ranks, before.num_layers, before.num_experts) != (
        after.num_ranks,
        after.num_layers,
        after.num_experts,
    ):
        raise ValueError("churn needs two layouts of the same ranks, layers and experts")
    width = max(before.slots.shape[1], after.slots.shape[1])
    old, new = _widened(before, width), _widened(after, width)
    hosted_before, hosted_after = before.hosts > 0, after.hosts > 0
    return Churn(
        slot_writes=int(((old != new) & (new >= 0)).sum()),
        slot_evictions=int(((old >= 0) & (new < 0)).sum()),
        keys_added=int((hosted_after & ~hosted_before).sum()),
        keys_removed=int((hosted_before & ~hosted_after).sum()),
    )


class Coverage(NamedTuple):
    """What a loss of nodes leaves.

    share: smallest share of (layer, expert) keys that keep a replica, over all ways to
    lose that many nodes; nodes: the (first) worst way; keys_lost: keys without a replica then.
    """

    share: float
    keys_lost: int
    nodes: tuple[str, ...]


def coverage_after_loss(layout: ExpertLayout, topology: Topology, losses: int = 1) -> Coverage:
    """Worst coverage when `losses` live nodes are lost at once. Exhaustive: meant for 1 or 2.

    Raises ValueError where fewer live nodes exist than are lost.
    """
    nodes = sorted({spec.node for spec in topology.ranks if spec.alive})
    if not 0 <= losses <= len(nodes):
        raise ValueError(f"losses must lie in [0, {len(nodes)}] live nodes, got {losses}")
    on_node = np.stack(
        [
            (
                layout.hosts[:, [s.rank for s in topology.ranks if s.alive and s.node == node]] > 0
            ).any(axis=1)
            for node in nodes
        ],
        axis=1,
    )
    spread = on_node.sum(axis=1)
    worst = Coverage(share=2.0, keys_lost=-1, nodes=())
    for gone in combinations(range(len(nodes)), losses):
        lost = int((spread - on_node[:, list(gone)].sum(axis=1) == 0).sum())
        if lost > worst.keys_lost:
            worst = Coverage(1.0 - lost / layout.num_keys, lost, tuple(nodes[i] for i in gone))
    return worst


def _loads(loads: npt.ArrayLike) -> FloatArray:
    array = np.asarray(loads, dtype=np.float64)
    if array.ndim != 2 or array.shape[0] == 0:
        raise ValueError(
            f"loads must have shape [ranks, layers] with ranks >= 1, got {array.shape}"
        )
    return array


def _widened(layout: ExpertLayout, width: int) -> npt.NDArray[np.int32]:
    wide = np.full((layout.num_ranks, width), ABSENT, dtype=np.int32)
    wide[:, : layout.slots.shape[1]] = layout.slots
    return wide
