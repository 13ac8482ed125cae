"""The service that the soak runs: six shards on three nodes, two routers, a controller that moves
experts by itself, marker weights.

Responsible for the cluster and the service file. Nothing is left of them at the end.
"""

from __future__ import annotations

from pathlib import Path

from moe_serve.config import ServiceConfig
from tests.marker_checkpoint import write_marker_checkpoint
from tests.soak.dice import NODE_RANKS, ROUTERS

SERVICE = "soak"
EXPERTS, HIDDEN = 16, 32
SLOTS = 18
"""64 replicas are the floor of two; four ranks hold them, each with a staging slot, when a node is
lost."""
COPY_BYTES_PER_S = 100_000
"""An expert of 12 KiB takes an eighth of a second: time enough to be hit."""


def soak_config(folder: Path) -> ServiceConfig:
    """The service file, with a checkpoint written into `folder`."""
    checkpoint = write_marker_checkpoint(folder / "marker", experts=EXPERTS, hidden=HIDDEN)
    ranks = [
        {
            "count": len(held),
            "slots": SLOTS,
            "profile": "declared",
            "node_labels": {"moe.node": node},
            "failure_domain_label": "moe.node",
        }
        for node, held in NODE_RANKS.items()
    ]
    return ServiceConfig.model_validate(
        {
            "service": SERVICE,
            "model": {"name": SERVICE, "checkpoint": str(checkpoint)},
            "fleet": {
                "routers": ROUTERS,
                "ranks": ranks,
                "router_node_labels": {"moe.node": "a"},
            },
            # Slow arithmetic and fast copies: a move pays for itself soon.
            "profiles": [
                {
                    "name": "declared",
                    "flops_per_s": 2e7,
                    "memory_bytes_per_s": 2e8,
                    "copy_bytes_per_s": 1e8,
                }
            ],
            "rebalance": {"window_s": 1.0, "cooldown_s": 2.0, "drain_wait_s": 2.0, "floor": 2},
            "limits": {"copy_bytes_per_s": COPY_BYTES_PER_S},
            "state_dir": folder / "state",
            "dashboard": False,
        }
    )
