"""Which node of a Ray cluster a part goes to, and what a node must be able to hold.

Responsible for one rule of choice, used by the fleet when it creates a part and by the preflight
when it adds up what each machine will need. Pure: asks no cluster. Called by `fleet`, `preflight`
and `service`.

Worked example: four ranks without labels on nodes a and b are placed a, b, a, b; each machine must
hold two budgets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_serve.bootstrap.size import rank_slots
from moe_serve.config import ServiceConfig
from moe_serve.errors import StartRefused
from moe_serve.telemetry.logs import NODE_LABEL

_SHOWN_MAX = 8
"""Labels, and names, of nodes that a refusal names at most."""


@dataclass(frozen=True, slots=True)
class RayNode:
    """One alive node as Ray lists it. `node` is its name in our tables."""

    node: str
    node_id: str
    ip: str
    labels: dict[str, str]


def node_of(info: Mapping[str, Any]) -> RayNode:
    """Ours from one entry of `ray.nodes()`."""
    labels = dict(info.get("Labels") or {})
    node_id = str(info["NodeID"])
    return RayNode(
        labels.get(NODE_LABEL, node_id[:12]), node_id, str(info["NodeManagerAddress"]), labels
    )


def choose_node(
    nodes: Sequence[RayNode],
    labels: Mapping[str, str],
    held: Mapping[str, int],
    *,
    what: str,
    draining: Collection[str] = (),
    only_node: str = "",
) -> RayNode:
    """The matching node with the fewest parts of this kind, ties to the lowest id.

    Args:
        nodes: alive nodes.
        labels: what the node must carry.
        held: node id -> parts of this kind it has; absent = none.
        what: the part, for the refusal ("rank 3", "router").
        draining: ids of nodes that take nothing new.
        only_node: name of the only node that will do, "" = any.

    Raises:
        StartRefused: no node matches.
    """
    fitting = [
        node
        for node in nodes
        if node.node_id not in draining
        and only_node in ("", node.node)
        and all(node.labels.get(key) == value for key, value in labels.items())
    ]
    if not fitting:
        # Ray's own labels (ids, accelerators) are long and say nothing about a missing one.
        carried = sorted(
            {
                f"{key}={value}"
                for node in nodes
                for key, value in node.labels.items()
                if not key.startswith("ray.io/")
            }
        )
        shown = ", ".join(carried[:_SHOWN_MAX]) or "none"
        named = f"no node named {only_node!r} that takes parts," if only_node else "no node"
        known = ", ".join(sorted(node.node for node in nodes)[:_SHOWN_MAX])
        way_out = (
            f", named {known}; bring that node up, or remove {what} and add one elsewhere"
            if only_node
            else ""
        )
        raise StartRefused(
            f"{named} with labels {dict(labels)} for {what}; the cluster has {len(nodes)} alive "
            f"nodes ({len(draining)} draining) with labels {shown}{way_out}"
        )
    return min(fitting, key=lambda node: (held.get(node.node_id, 0), node.node_id))


def needed_bytes(
    config: ServiceConfig, nodes: Sequence[RayNode], slot_bytes: int
) -> dict[str, int]:
    """Node id -> bytes of memory that the ranks expected on its machine take for slots.

    Nodes of one address are one machine and share its memory, so each has the sum of all. Ranks on
    a GPU keep their slots there and count nothing. Raises StartRefused where a part has no node.
    """
    held: Counter[str] = Counter()
    machine: Counter[str] = Counter()
    for rank in range(config.fleet.num_ranks):
        group = config.fleet.group_of(rank)
        node = choose_node(nodes, group.node_labels, held, what=f"rank {rank}")
        held[node.node_id] += 1
        if group.device == "cpu":
            machine[node.ip] += rank_slots(config, rank, slot_bytes) * slot_bytes
    choose_node(nodes, config.fleet.router_node_labels, {}, what="the routers")
    return {node.node_id: machine[node.ip] for node in nodes}
