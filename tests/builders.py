"""Small models, topologies, layouts and windows for tests. Every default is as small as the rule
under test allows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from placement.layout import ExpertLayout, SlotId
from placement.load import LoadWindow
from placement.policy.base import PolicyInput
from placement.routing import RankAddress, RoutingTable, build_table
from placement.topology import NUM_PHASES, DeviceProfile, MoeSpec, RankSpec, Topology

PROFILE = DeviceProfile(
    name="small", flops_per_s=1e9, memory_bytes_per_s=1e9, copy_bytes_per_s=1e8, overhead_s=0.0
)


def make_spec(
    num_layers: int = 1,
    num_experts: int = 4,
    top_k: int = 2,
    expert_bytes: int = 1000,
    slot_bytes: int = 1000,
) -> MoeSpec:
    return MoeSpec(
        model="tiny",
        weights_version="v1",
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=8,
        intermediate_size=16,
        expert_bytes=expert_bytes,
        slot_bytes=slot_bytes,
    )


def make_topology(
    num_slots: Sequence[int], *, ranks_per_node: int = 2, **per_rank: Sequence[bool]
) -> Topology:
    """One rank an entry of `num_slots`; `alive=[...]` and `draining=[...]` by rank; a node is a
    failure domain."""
    ranks = tuple(
        RankSpec(
            rank=rank,
            node=f"node{rank // ranks_per_node}",
            failure_domain=f"node{rank // ranks_per_node}",
            num_slots=slots,
            profile=PROFILE.name,
            **{name: values[rank] for name, values in per_rank.items()},
        )
        for rank, slots in enumerate(num_slots)
    )
    return Topology(ranks=ranks, profiles=(PROFILE,), cross_node_bytes_per_s=5e7)


def make_layout(
    rows: Sequence[Sequence[int]], *, num_layers: int = 1, num_experts: int = 4
) -> ExpertLayout:
    return ExpertLayout.from_rows(rows, num_layers=num_layers, num_experts=num_experts)


def make_demand(
    spec: MoeSpec, hot: dict[int, float] | None = None, base: float = 1.0
) -> npt.NDArray[np.float64]:
    """Pairs [layers, experts]: `base` everywhere, `hot` by key."""
    demand = np.full(spec.num_keys, base, dtype=np.float64)
    for key, pairs in (hot or {}).items():
        demand[key] = pairs
    return demand.reshape(spec.num_layers, spec.num_experts)


def make_request(
    spec: MoeSpec,
    topology: Topology,
    layout: ExpertLayout,
    demand: npt.NDArray[np.float64] | None = None,
    **fields: object,
) -> PolicyInput:
    """One scenario, all of it in the prefill phase."""
    scenario = np.zeros((1, NUM_PHASES, spec.num_layers, spec.num_experts), dtype=np.float64)
    scenario[0, 0] = make_demand(spec) if demand is None else demand
    return PolicyInput(
        spec=spec,
        topology=topology,
        layout=layout,
        scenarios=scenario,
        weights=np.ones(1),
        **fields,  # type: ignore[arg-type]
    )


def make_window(
    spec: MoeSpec,
    demand: npt.NDArray[np.float64],
    *,
    index: int = 0,
    window_s: float = 2.0,
    num_ranks: int = 2,
    sub_windows: int = 4,
) -> LoadWindow:
    """A window of `demand` pairs [layers, experts], spread evenly over its sub-windows, all
    prefill."""
    counts = np.zeros((sub_windows, NUM_PHASES, spec.num_layers, spec.num_experts), dtype=np.int64)
    counts[:, 0] = (demand / sub_windows).astype(np.int64)
    return LoadWindow(
        index=index,
        start_s=index * window_s,
        end_s=(index + 1) * window_s,
        demand=counts,
        executed_pairs=counts.sum(axis=0),
        rank_pairs=np.zeros((num_ranks, spec.num_layers), dtype=np.int64),
        rank_busy_s=np.zeros((num_ranks, NUM_PHASES), dtype=np.float64),
    )


def make_address(rank: int, incarnation: int = 1) -> RankAddress:
    return RankAddress(
        rank=rank,
        node=f"node{rank // 2}",
        address=f"tcp://127.0.0.1:{5000 + rank}",
        incarnation=incarnation,
    )


def make_table(layout: ExpertLayout, *, term: int = 1, epoch: int = 1) -> RoutingTable:
    """Table of every filled slot; the tag of (rank, slot) is 100 * rank + slot + 1."""
    tags = {
        SlotId(rank, index): 100 * rank + index + 1
        for rank in range(layout.num_ranks)
        for index in range(layout.slots.shape[1])
    }
    return build_table(
        layout,
        tags,
        term=term,
        epoch=epoch,
        model="tiny",
        weights_version="v1",
        ranks=tuple(make_address(rank) for rank in range(layout.num_ranks)),
    )
