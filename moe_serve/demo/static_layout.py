"""The static placement the demo compares with: contiguous experts with round-robin extras in the
same slots."""

from __future__ import annotations

import numpy as np

from moe_serve.bootstrap.size import rank_slots
from moe_serve.config import ServiceConfig
from placement.layout import ExpertLayout
from placement.policy import propose
from placement.policy.base import PolicyInput
from placement.topology import NUM_PHASES, DeviceProfile, MoeSpec, RankSpec, Topology


def static_layout(config: ServiceConfig, spec: MoeSpec) -> ExpertLayout:
    """Layout of policy `static` over the fleet of a service file."""
    profiles = tuple(DeviceProfile(**p.model_dump()) for p in config.profiles)
    topology = Topology(
        ranks=tuple(
            RankSpec(
                rank=rank,
                node=str(rank),
                failure_domain=str(rank),
                num_slots=rank_slots(config, rank, spec.slot_bytes),
                profile=config.fleet.group_of(rank).profile,
            )
            for rank in range(config.fleet.num_ranks)
        ),
        profiles=profiles,
    )
    request = PolicyInput(
        spec=spec,
        topology=topology,
        layout=ExpertLayout.empty(
            topology, num_layers=spec.num_layers, num_experts=spec.num_experts
        ),
        scenarios=np.zeros((1, NUM_PHASES, spec.num_layers, spec.num_experts)),
        weights=np.ones(1),
        staging_slots=config.core_rebalance().staging_slots,
    )
    return propose("static", request)
