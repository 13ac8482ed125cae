"""The planner as one function, with the arguments, shapes and results of the public EPLB function.

Responsible for `rebalance_experts`: for engines that dispatch by themselves and only want to know
which expert lies where. Must never keep anything between calls. Called by such engines, by
`placement.adapters` and by the benchmarks. Importable without Ray or torch.

Words. *Physical expert*: a slot; gpu g owns the slots `g * num_replicas / num_gpus` onwards, node n
the gpus `n * num_gpus / num_nodes` onwards. *Replica*: a physical expert of a logical one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from placement.eplb.arguments import check
from placement.eplb.errors import EplbError
from placement.eplb.plan import plan
from placement.eplb.tensors import IntArray, TensorLike, in_kind_of
from placement.scoring import Split


def rebalance_experts(
    weight: npt.ArrayLike | TensorLike,
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_gpus: int,
    *,
    current: npt.ArrayLike | TensorLike | None = None,
    history: npt.ArrayLike | TensorLike | None = None,
    max_moves: int | None = None,
) -> tuple[Any, Any, Any]:
    """(physical_to_logical, logical_to_physical, expert_count) for the load to come.

    weight: [layers, experts], load counted so far, in any unit. num_replicas: physical experts, a
    multiple of num_gpus and at least the number of experts. Result: int64 [layers, num_replicas];
    int64 [layers, experts, most replicas of any], physical experts ascending, padded with -1; int64
    [layers, experts]. numpy arrays for arrays and lists, torch tensors in host memory where
    `weight` is one.

    num_groups, num_nodes: as in the public function. Where num_groups divides by num_nodes, all
    replicas of the experts of a group lie on one node and every node has the same number of groups;
    elsewhere, and with one node, experts may lie anywhere.

    current: [layers, num_replicas], physical_to_logical as it is now, -1 where a slot holds nothing
    yet. The plan starts from it: a slot changes only where that takes at least 0.2% of an even
    gpu's load off the hottest gpu, nothing changes in a layer whose hottest gpu is within 2% of
    even, and the same load on the plan that came out changes nothing. Without it the plan starts
    from the public greedy and is never worse. max_moves: most slots of a layer that may change;
    without `current` there is nothing to count against and it is not used. Filling slots that hold
    nothing does not count. Where `current` keeps the hierarchical rule, groups move to other nodes
    only if all that this writes pays as above; where it breaks the rule, groups are packed anew and
    only numbered after `current`, which may need more writes than max_moves allows: an error.

    history: [intervals, layers, experts], load of equally long intervals of whatever length, oldest
    first; a forecast made of it then replaces `weight`, which speaks only for layers without any
    load in it.

    The plan is made for an engine that splits each batch by `placement.split.level`; engines that
    share an expert's tokens equally are planned for by `placement.adapters`.

    Five experts, six slots on three gpus, expert 0 the hottest, so it has the sixth slot and every
    gpu has 50 of the load:

    >>> physical, logical, count = rebalance_experts([[80, 42, 8, 10, 10]], 6, 1, 1, 3)
    >>> physical.tolist(), count.tolist()
    ([[1, 2, 0, 3, 0, 4]], [[2, 1, 1, 1, 1]])
    >>> logical.tolist()
    [[[2, 4], [0, -1], [1, -1], [3, -1], [5, -1]]]

    Now expert 1 gets hot. One slot may be written: slot 2, where expert 0 has a second replica.

    >>> weight = [[12, 120, 8, 9, 11]]
    >>> rebalance_experts(weight, 6, 1, 1, 3, current=physical, max_moves=1)[0].tolist()
    [[1, 2, 1, 3, 0, 4]]

    Raises EplbError naming argument, limit and next step.
    """
    problem = check(
        weight, (num_replicas, num_groups, num_nodes, num_gpus), current, history, max_moves
    )
    physical = plan(problem, "level")
    logical, count = inverse(physical, problem.load.shape[1])
    return (
        in_kind_of(weight, physical),
        in_kind_of(weight, logical),
        in_kind_of(weight, count),
    )


def inverse(physical_to_logical: IntArray, num_experts: int) -> tuple[IntArray, IntArray]:
    """(logical_to_physical, expert_count) of int64 [layers, replicas]: int64 [layers, experts,
    most replicas of any], physical experts ascending, padded with -1, and int64 [layers, experts].

    >>> inverse(np.array([[0, 1, 0]]), num_experts=2)[0].tolist()
    [[[0, 2], [1, -1]]]
    """
    num_layers, num_replicas = physical_to_logical.shape
    count = np.zeros((num_layers, num_experts), dtype=np.int64)
    layer = np.repeat(np.arange(num_layers), num_replicas)
    np.add.at(count, (layer, physical_to_logical.ravel()), 1)
    logical = np.full((num_layers, num_experts, int(count.max())), -1, dtype=np.int64)
    order = np.argsort(physical_to_logical, axis=1, kind="stable")
    expert = np.take_along_axis(physical_to_logical, order, axis=1)
    first = np.cumsum(count, axis=1) - count
    number = np.arange(num_replicas) - np.take_along_axis(first, expert, axis=1)
    logical[layer, expert.ravel(), number.ravel()] = order.ravel()
    return logical, count


__all__ = ["EplbError", "Split", "inverse", "rebalance_experts"]
