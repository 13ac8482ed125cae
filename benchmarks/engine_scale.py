"""A service of DeepSeek-V3's shape around the production engine, without a cluster: ranks that do
what they are told at once, and a clock for the CPU that the engine itself took.

Responsible for spec, topology and answers. Must never decide. Called by `engine_fill` and
`stationary`.
"""

from __future__ import annotations

import time
from collections import deque

import msgspec

from placement.config import RebalanceConfig
from placement.engine import RebalanceEngine, compute_target
from placement.messages import events as ev
from placement.messages.effects import (
    AnyCommand,
    ComputeTarget,
    CopyExpert,
    Effects,
    PublishTable,
    ReleaseSlot,
    ReserveSlot,
    VerifyExpert,
)
from placement.messages.records import DecisionRecord
from placement.routing import RankAddress
from placement.topology import DeviceProfile, MoeSpec, RankSpec, Topology

ROUTER = "router0"
RANKS_PER_NODE = 8


def scale_spec(num_layers: int, num_experts: int) -> MoeSpec:
    """Experts of DeepSeek-V3's size in FP8: hidden 7168, intermediate 2048."""
    expert_bytes = 3 * 7168 * 2048
    return MoeSpec(
        model="synthetic",
        weights_version="1",
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=8,
        hidden_size=7168,
        intermediate_size=2048,
        expert_bytes=expert_bytes,
        slot_bytes=expert_bytes,
    )


def scale_topology(
    spec: MoeSpec, *, num_ranks: int, layer_slots: int, staging_slots: int
) -> Topology:
    """`layer_slots` physical experts a layer, spread over the ranks, and staging slots. Device
    figures are declared, not measured: 400 TFLOP/s, 3 TB/s, copies at 20 GB/s, 10 GB/s across
    nodes."""
    slots = spec.num_layers * layer_slots // num_ranks + staging_slots
    profile = DeviceProfile(
        name="declared", flops_per_s=4e14, memory_bytes_per_s=3e12, copy_bytes_per_s=2e10
    )
    ranks = tuple(
        RankSpec(
            rank=r,
            node=f"node{r // RANKS_PER_NODE}",
            failure_domain=f"node{r // RANKS_PER_NODE}",
            num_slots=slots,
            profile=profile.name,
        )
        for r in range(num_ranks)
    )
    return Topology(ranks=ranks, profiles=(profile,), cross_node_bytes_per_s=1e10)


class ScaleFleet:
    """Ranks and one router that answer at once, in the order they were asked.

    engine_cpu_s: CPU seconds inside `RebalanceEngine.step`; target_cpu_s: inside `compute_target`.
    """

    def __init__(self, spec: MoeSpec, topology: Topology, config: RebalanceConfig) -> None:
        self.spec, self.topology, self.config = spec, topology, config
        self.engine = RebalanceEngine(spec, topology, config, term=1, first_epoch=1, start_s=0.0)
        self.records: list[DecisionRecord] = []
        self.engine_cpu_s = self.target_cpu_s = 0.0
        self.steps = self.slot_writes = self.targets = 0
        self._next_tag = 0

    def join_all(self) -> None:
        """One router and every rank join: the first fill follows."""
        self.take(ev.RouterJoined(at_s=0.0, router=ROUTER, incarnation=1))
        for rank in self.topology.ranks:
            self.take(
                ev.RankJoined(
                    at_s=0.0,
                    rank=rank.rank,
                    node=rank.node,
                    failure_domain=rank.failure_domain,
                    profile=rank.profile,
                    num_slots=rank.num_slots,
                    address=RankAddress(rank=rank.rank, node=rank.node, address="", incarnation=1),
                )
            )

    def take(self, event: ev.AnyEvent) -> None:
        """Step the engine with the event and with every answer that follows from it."""
        waiting = deque([event])
        while waiting:
            effects = self._step(waiting.popleft())
            self.records.extend(effects.records)
            for command in effects.commands:
                waiting.extend(self._answers(command, event.at_s))

    def _step(self, event: ev.AnyEvent) -> Effects:
        began = time.process_time()
        effects = self.engine.step(event)
        self.engine_cpu_s += time.process_time() - began
        self.steps += 1
        return effects

    def _answers(self, command: AnyCommand, at_s: float) -> list[ev.AnyEvent]:
        match command:
            case ComputeTarget():
                began = time.process_time()
                answer = compute_target(command, self.config)
                self.target_cpu_s += time.process_time() - began
                self.targets += 1
                return [msgspec.structs.replace(answer, at_s=at_s)]
            case ReserveSlot():
                self._next_tag += 1
                tag = self._next_tag
                return [ev.SlotReserved(at_s=at_s, step_id=command.step_id, slot_tag=tag)]
            case CopyExpert():
                self.slot_writes += 1
                size = self.spec.expert_bytes
                step = command.step_id
                return [ev.ExpertCopied(at_s=at_s, step_id=step, copy_bytes=size, seconds=0.0)]
            case VerifyExpert():
                return [ev.ExpertVerified(at_s=at_s, step_id=command.step_id)]
            case ReleaseSlot():
                return [ev.SlotReleased(at_s=at_s, step_id=command.step_id)]
            case PublishTable():
                epoch = command.table.epoch
                return [
                    ev.TableApplied(at_s=at_s, router=ROUTER, epoch=epoch),
                    ev.TableQuiesced(at_s=at_s, router=ROUTER, epoch=epoch),
                ]
            case _:
                return []
