"""The published greedy (DeepSeek's EPLB), as a baseline: replicate the hottest, pack the heaviest
first.

Responsible for doing what that algorithm does, hierarchical and global, written here in plain
numpy; and for turning its matrix into a layout of slot pools. It plans for equal shares among
replicas, forgets the live placement, and ignores `max_moves` and `max_bytes`: that is the point
of the comparison.

Words in this file are the matrix code's own. `phy2log` [layers, replicas]: expert of each
physical place, places in order of rank. `log2phy` [layers, experts, most replicas]: places of
each expert, -1 padded. `logcnt` [layers, experts]: replicas. Example: 12 experts, 16 replicas on
8 ranks: 2 places a rank, 4 experts have a second replica.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from placement.layout import ExpertLayout
from placement.policy.base import PolicyError, PolicyInput
from placement.policy.feasibility import check_request
from placement.policy.occupancy import Occupancy
from placement.policy.repair import EvenJudge, repair

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


def eplb_matrix(
    weight: npt.ArrayLike, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[IntArray, IntArray, IntArray]:
    """(phy2log, log2phy, logcnt) of the greedy for `weight` [layers, experts].

    Hierarchical where the groups divide over the nodes: groups to nodes, replicas inside a node,
    places to its ranks. Else global: the same with one group and one node.

    Raises PolicyError where the counts do not divide as the algorithm needs.
    """
    load = np.asarray(weight, dtype=np.float64)
    if load.ndim != 2:
        raise PolicyError(f"weight has shape {load.shape}, want [layers, experts]")
    if num_groups % num_nodes != 0:
        num_groups, num_nodes = 1, 1
    num_experts = load.shape[1]
    for name, total, parts in (
        ("experts", num_experts, num_groups),
        ("replicas", num_replicas, num_gpus),
        ("gpus", num_gpus, num_nodes),
        ("replicas", num_replicas, num_nodes),
    ):
        if parts < 1 or total % parts != 0:
            raise PolicyError(f"{total} {name} do not divide by {parts}; eplb needs even counts")
    if num_replicas < num_experts:
        raise PolicyError(f"{num_replicas} replicas cannot hold {num_experts} experts")
    phy2log, place_rank, logcnt = _hierarchical(load, num_replicas, num_groups, num_nodes, num_gpus)
    log2phy = np.full((*load.shape, int(logcnt.max())), -1, dtype=np.int64)
    layer = np.arange(len(load))[:, None]
    log2phy[layer, phy2log, place_rank] = np.arange(num_replicas)
    return phy2log, log2phy, logcnt


def balanced_packing(weight: FloatArray, num_packs: int) -> tuple[IntArray, IntArray]:
    """Heaviest first, each into the lightest pack that has room; all packs get the same number.

    weight: [rows, items]. Returns (pack of each item, its place in the pack), both [rows, items].
    """
    rows, items = weight.shape
    per_pack = items // num_packs
    pack = np.zeros((rows, items), dtype=np.int64)
    place = np.zeros((rows, items), dtype=np.int64)
    if per_pack == 1:
        pack[:] = np.arange(items)
        return pack, place
    for row in range(rows):
        heavy = np.zeros(num_packs)
        size = np.zeros(num_packs, dtype=np.int64)
        for item in np.argsort(-weight[row], kind="stable"):
            target = int(np.argmin(np.where(size < per_pack, heavy, np.inf)))
            pack[row, item], place[row, item] = target, size[target]
            heavy[target] += weight[row, item]
            size[target] += 1
    return pack, place


def replicate_experts(weight: FloatArray, num_replicas: int) -> tuple[IntArray, IntArray, IntArray]:
    """Give each further place to the expert with the most load a replica.

    weight: [rows, experts]. Returns (expert of each place [rows, replicas], number of that
    replica among the expert's, replicas of each expert [rows, experts]).
    """
    rows, experts = weight.shape
    expert_of = np.tile(np.arange(num_replicas, dtype=np.int64), (rows, 1))
    number = np.zeros((rows, num_replicas), dtype=np.int64)
    count = np.ones((rows, experts), dtype=np.int64)
    each = np.arange(rows)
    for place in range(experts, num_replicas):
        hottest = np.argmax(weight / count, axis=1)
        expert_of[:, place] = hottest
        number[:, place] = count[each, hottest]
        count[each, hottest] += 1
    return expert_of, number, count


def _hierarchical(
    load: FloatArray, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[IntArray, IntArray, IntArray]:
    layers, experts = load.shape
    group_size = experts // num_groups
    # 1. groups to nodes: `middle` numbers the experts node by node
    group_load = load.reshape(layers, num_groups, group_size).sum(axis=2)
    node, place = balanced_packing(group_load, num_nodes)
    first = (node * (num_groups // num_nodes) + place) * group_size
    log2mid = (first[:, :, None] + np.arange(group_size)).reshape(layers, experts)
    mid2log = _inverse(log2mid)
    # 2. replicas inside each node
    per_node = experts // num_nodes
    mid_load = np.take_along_axis(load, mid2log, axis=1).reshape(-1, per_node)
    phy2mid, number, midcnt = replicate_experts(mid_load, num_replicas // num_nodes)
    # 3. places to the ranks of the node
    place_load = np.take_along_axis(mid_load / midcnt, phy2mid, axis=1)
    rank, seat = balanced_packing(place_load, num_gpus // num_nodes)
    seated2phy = _inverse(rank * (num_replicas // num_gpus) + seat)
    seated2mid = np.take_along_axis(phy2mid, seated2phy, axis=1).reshape(layers, num_nodes, -1)
    seated2mid += (np.arange(num_nodes) * per_node)[None, :, None]
    phy2log = np.take_along_axis(mid2log, seated2mid.reshape(layers, -1), axis=1)
    seated_number = np.take_along_axis(number, seated2phy, axis=1).reshape(layers, -1)
    logcnt = np.take_along_axis(midcnt.reshape(layers, -1), log2mid, axis=1)
    return phy2log, seated_number, logcnt


def _inverse(permutation: IntArray) -> IntArray:
    inverse = np.empty_like(permutation)
    np.put_along_axis(inverse, permutation, np.arange(permutation.shape[1])[None, :], axis=1)
    return inverse


def propose_eplb(request: PolicyInput, num_groups: int = 1) -> ExpertLayout:
    """The greedy on the weighted mean of the scenarios, in slot pools.

    Every usable rank gets the same number of places in a layer (what the smallest rank has,
    spread over the layers); slots beyond that stay empty. Two replicas of an expert on one rank,
    which the greedy allows and a layout forbids, are repaired by an exchange with another rank,
    else by giving the place to the expert with the most load a replica. num_groups: expert groups
    of the model; hierarchical where they divide over the nodes of the usable ranks.

    Raises PolicyError where the smallest rank's slots times the number of ranks cannot hold a
    layer.
    """
    floor = check_request(request)
    occupancy = Occupancy(request, floor, keep_live=False)
    load = np.tensordot(request.weights, request.scenarios.sum(axis=1), axes=1)
    usable = np.nonzero(occupancy.domain >= 0)[0]
    ranks = sorted((int(r) for r in usable), key=lambda r: (request.topology.ranks[r].node, r))
    nodes = [request.topology.ranks[rank].node for rank in ranks]
    num_nodes = len(set(nodes))
    if len({nodes.count(node) for node in nodes}) > 1:
        num_nodes = num_groups + 1  # nodes of different size: global
    filled, layers = int(occupancy.capacity[ranks].min()), request.spec.num_layers
    for layer in range(layers):
        places = filled // layers + (layer < filled % layers)
        if places * len(ranks) < request.spec.num_experts:
            raise PolicyError(
                f"layer {layer}: eplb needs equal ranks, {len(ranks)} of {places} slots (the "
                f"smallest rank's share) are {request.spec.num_experts - places * len(ranks)} short"
            )
        places = min(places, request.spec.num_experts)
        # without load the greedy would give every further place to expert 0
        weight = load[layer] if load[layer].any() else np.ones_like(load[layer])
        matrix, _, _ = eplb_matrix(
            weight[None], places * len(ranks), num_groups, num_nodes, len(ranks)
        )
        hierarchical = num_groups % num_nodes == 0
        rows = repair_duplicates(
            matrix[0].reshape(len(ranks), places), weight, num_nodes if hierarchical else 1
        )
        for rank, row in zip(ranks, rows, strict=True):
            for expert in row:
                occupancy.add(layer * request.spec.num_experts + int(expert), rank)
    judge = EvenJudge(occupancy, load.reshape(-1))
    repair(occupancy, judge, list(range(load.size)))
    return occupancy.to_layout()


def repair_duplicates(places: IntArray, weight: FloatArray, num_nodes: int = 1) -> IntArray:
    """The same places [ranks, places a rank] with no expert twice on a rank, every one somewhere.

    A second replica is exchanged with the place of another rank of its node whose load is nearest,
    if both ranks then lack duplicates of what they get; if there is none, its place goes to the
    expert with the most load a replica that the rank lacks, one of the node where there is one.
    """
    fixed = places.copy()
    share = weight / np.maximum(np.bincount(fixed.ravel(), minlength=len(weight)), 1)
    per_node = len(fixed) // num_nodes
    for rank in range(len(fixed)):
        first = rank // per_node * per_node
        node = fixed[first : first + per_node]  # a view: exchanges write through
        seen: set[int] = set()
        for seat in range(fixed.shape[1]):
            if int(fixed[rank, seat]) in seen and not _exchange(node, rank - first, seat, share):
                fixed[rank, seat] = _hottest_lacking(fixed, node, rank, weight)
            seen.add(int(fixed[rank, seat]))
    return fixed


def _exchange(node: IntArray, rank: int, seat: int, share: FloatArray) -> bool:
    expert, here = int(node[rank, seat]), set(node[rank].tolist())
    found = [
        (abs(float(share[node[other, place]] - share[expert])), other, place)
        for other in range(len(node))
        if expert not in node[other]
        for place in range(node.shape[1])
        if int(node[other, place]) not in here
    ]
    if not found:
        return False
    _, other, place = min(found)
    node[rank, seat], node[other, place] = node[other, place], expert
    return True


def _hottest_lacking(fixed: IntArray, node: IntArray, rank: int, weight: FloatArray) -> int:
    heat = weight / np.maximum(np.bincount(fixed.ravel(), minlength=len(weight)), 1)
    here = set(fixed[rank].tolist())
    inside = [int(expert) for expert in np.unique(node) if int(expert) not in here]
    lacking = inside or [expert for expert in range(len(weight)) if expert not in here]
    return max(lacking, key=lambda expert: (float(heat[expert]), -expert))
