"""The hierarchical rule: the experts of a group lie on one node.

Responsible for reading which node has which groups, and for giving a plan from nothing the numbers
of nodes, gpus and slots under which least of the live placement is written anew. Must never look at
load. Called by `placement.eplb.plan`.

The rule is the public function's: where `num_groups` divides by `num_nodes`, groups are consecutive
expert ids of equal number, gpus of a node are consecutive too, and every node has
`num_groups / num_nodes` whole groups. Example: 8 experts in 4 groups on 2 nodes of 2 gpus: groups
{0, 1} {2, 3} {4, 5} {6, 7}; a node has two of them, all their replicas included.
"""

from __future__ import annotations

import numpy as np

from placement.eplb.arguments import Counts
from placement.eplb.tensors import IntArray


def nodes_of_experts(rows: IntArray, counts: Counts, num_experts: int) -> IntArray | None:
    """Node of each expert: int64 [experts]; None where a group is on several nodes, or a node has
    more groups than its share.

    rows: int64 [gpus, slots], -1 where a slot holds nothing.
    """
    node_of_slot = np.repeat(np.arange(counts.num_nodes), rows.size // counts.num_nodes)
    group = rows.ravel() // (num_experts // counts.num_groups)
    filled = rows.ravel() >= 0
    on = np.zeros((counts.num_groups, counts.num_nodes), dtype=np.int64)
    np.add.at(on, (group[filled], node_of_slot[filled]), 1)
    share = counts.num_groups // counts.num_nodes
    if ((on > 0).sum(axis=1) != 1).any() or ((on > 0).sum(axis=0) != share).any():
        return None
    return np.repeat(np.argmax(on, axis=1), num_experts // counts.num_groups).astype(np.int64)


def aligned(target: IntArray, live: IntArray, num_nodes: int) -> IntArray:
    """`target` with its nodes, the gpus of each and the slots of each numbered so that it differs
    from `live` in few slots. Both int64 [gpus, slots], -1 where a slot holds nothing.

    Nodes are alike, and so are the gpus of a node: only who shares one counts. The pair with most
    experts in common is matched first, the lowest numbers where that is equal.
    """
    num_gpus, slots = target.shape
    per_node = num_gpus // num_nodes
    wanted = target.reshape(num_nodes, per_node, slots)
    there = live.reshape(num_nodes, per_node, slots)
    matched = np.empty_like(wanted)
    for node, source in enumerate(_matching(there.reshape(num_nodes, -1), wanted)):
        for gpu, origin in enumerate(_matching(there[node], wanted[source])):
            matched[node, gpu] = _in_slots(wanted[source, origin], there[node, gpu])
    return matched.reshape(num_gpus, slots)


def _matching(live: IntArray, target: IntArray) -> list[int]:
    """For each row of `live` the row of `target` it is matched with."""
    rows = target.reshape(len(target), -1)
    size = int(max(live.max(), rows.max())) + 1
    held = np.stack([np.bincount(row[row >= 0], minlength=size) for row in live])
    asked = np.stack([np.bincount(row, minlength=size) for row in rows])
    common = np.minimum(held[:, None], asked[None]).sum(axis=2)
    found = [-1] * len(live)
    for _ in range(len(live)):
        here, there = divmod(int(np.argmax(common)), len(live))
        found[here] = there
        common[here], common[:, there] = -1, -1
    return found


def _in_slots(wanted: IntArray, live: IntArray) -> IntArray:
    """The experts of a gpu, each that stays in the slot where it is."""
    waiting = wanted.tolist()
    row = np.full(len(wanted), -1, dtype=np.int64)
    for slot, expert in enumerate(live.tolist()):
        if expert in waiting:
            row[slot] = expert
            waiting.remove(expert)
    row[row < 0] = waiting
    return row
