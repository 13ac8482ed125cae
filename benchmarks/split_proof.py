"""The least maximum of a split, found by other people's solvers: two oracles for ours.

*Flow*: tokens flow from experts over their hosts to ranks, and each rank takes at most a bound less
its backlog. If all tokens get through at a bound and not at one less, that bound is the optimum. A
split in hand is the first half; scipy's maximum flow answers the second so fast that every batch
can be proved. *LP*: HiGHS minimises the maximum over fractions; rounded up, that is the optimum in
whole tokens. It is how the split is done exactly elsewhere.

Responsible for these oracles. Must never call our splitter. Called by `benchmarks.split` and by
tests.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from placement.split import CompiledLayer

Int64s = npt.NDArray[np.int64]
FLOW_MAX = (1 << 31) - 1
"""Largest capacity that scipy's maximum flow takes."""
ROUNDING = 1e-6
"""HiGHS's own tolerance: a maximum this little above a whole number is that number."""


class Oracle:
    """Both oracles for one layer."""

    def __init__(self, layer: CompiledLayer) -> None:
        self._layer = layer
        experts, ranks = layer.num_experts, layer.num_ranks
        # Nodes: source 0, experts, ranks, sink. Edges in order of their first node.
        degree = np.diff(layer.host_ptr)
        first_rank = 1 + experts
        self._ends = np.concatenate(
            (
                1 + np.arange(experts),
                first_rank + layer.host_rank,
                np.full(ranks, first_rank + ranks),
            )
        ).astype(np.int32)
        starts = np.concatenate(([experts], degree, np.ones(ranks), [0]))
        self._ptr = np.concatenate(([0], np.cumsum(starts))).astype(np.int32)
        served = csr_array(
            (np.ones(len(layer.host_rank)), np.arange(len(layer.host_rank)), layer.host_ptr),
            shape=(experts, len(layer.host_rank)),
        )
        order = np.argsort(layer.host_rank, kind="stable")
        per_rank = np.concatenate(([0], np.cumsum(np.bincount(layer.host_rank, minlength=ranks))))
        loaded = csr_array((np.ones(len(order)), order, per_rank), shape=(ranks, len(order)))
        last = csr_array(np.full((ranks, 1), -1.0))
        none = csr_array((experts, 1))
        self._served = csr_array(_beside(served, none))
        self._loaded = csr_array(_beside(loaded, last))
        self._cost = np.zeros(len(order) + 1)
        self._cost[-1] = 1.0

    def passes(self, counts: Int64s, backlog: Int64s, bound: int) -> bool:
        """Whether all tokens fit with no rank above the bound, its backlog included."""
        if int(backlog.max(initial=0)) > bound:
            return False
        layer = self._layer
        capacity = np.concatenate((counts, counts[layer.host_expert], bound - backlog))
        assert int(capacity.max(initial=0)) <= FLOW_MAX, "too large for scipy's maximum flow"
        nodes = len(self._ptr) - 1
        graph = csr_array((capacity.astype(np.int32), self._ends, self._ptr), shape=(nodes, nodes))
        sent = maximum_flow(graph, 0, nodes - 1).flow_value
        return int(sent) == int(counts.sum())

    def is_least(self, counts: Int64s, backlog: Int64s, reached: int) -> bool:
        """Whether a maximum that some split reaches is the least one."""
        return not self.passes(counts, backlog, reached - 1)

    def lp_maximum(self, counts: Int64s, backlog: Int64s) -> float:
        """The least maximum in fractions of tokens, by HiGHS."""
        answer = linprog(
            self._cost,
            A_ub=self._loaded,
            b_ub=-backlog,
            A_eq=self._served,
            b_eq=counts,
            bounds=(0, None),
            method="highs",
        )
        assert answer.status == 0, answer.message
        return float(answer.fun)

    def lp_optimum(self, counts: Int64s, backlog: Int64s) -> int:
        """The least maximum in whole tokens: the LP's, rounded up."""
        fraction = self.lp_maximum(counts, backlog)
        return math.ceil(fraction - ROUNDING * max(1.0, fraction))


def _beside(left: csr_array, right: csr_array) -> csr_array:
    from scipy.sparse import hstack

    return hstack([left, right], format="csr")
