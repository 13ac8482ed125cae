"""What a trace is replayed on: a model, a fleet and settings, declared or from a service file.

Responsible for turning traces and options into the arguments of `placement.replay`, and for the
limits of both; every figure comes from there. Must never decide or score. Called by the replay
command.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

import msgspec

from moe_serve.cli.recordings import CountTrace, TokenTrace
from moe_serve.config import ServiceConfig
from moe_serve.errors import InvalidArgument
from placement.config import RebalanceConfig
from placement.engine import RebalanceEngine, compute_target
from placement.load import LoadWindow
from placement.messages.effects import ComputeTarget
from placement.messages.events import TargetFailed
from placement.replay import count_windows, ranks_joined, trace_windows
from placement.topology import NUM_PHASES, DeviceProfile, MoeSpec, Phase, RankSpec, Topology

Trace = TokenTrace | CountTrace

SPARE_SHARE = 0.25
"""Slots for replicas beyond the first, as a share of the experts, where no fleet is given."""
ELEMENT_BYTES = 4
FREE_BYTES_PER_S = 1e18
"""A copy at this rate takes no time that a gate would see."""
HOSTS_MAX = 1 << 26
"""Experts, or slots, x ranks: a layout keeps a number for each."""
WINDOW_CELLS_MAX = 1 << 28
"""Counts of all windows of a trace of tokens: 2 GiB."""


@dataclass(frozen=True, slots=True)
class DeclaredPrice:
    """What experts and devices cost where no service file says so: those of the tiny model."""

    hidden_size: int = 128
    intermediate_size: int = 64
    flops_per_s: float = 2e8
    memory_bytes_per_s: float = 2e9
    copy_bytes_per_s: float = 4e6

    @property
    def expert_bytes(self) -> int:
        """Canonical bytes of an expert: three matrices in float32."""
        return 3 * self.hidden_size * self.intermediate_size * ELEMENT_BYTES


@dataclass(frozen=True, slots=True)
class Stage:
    """A model, a fleet and settings to replay on."""

    spec: MoeSpec
    topology: Topology
    config: RebalanceConfig


def trace_stage(
    trace: Trace,
    *,
    num_experts: int,
    num_ranks: int,
    num_slots: int,
    top_k: int,
    config: RebalanceConfig,
) -> Stage:
    """A declared fleet of equal ranks, one node each, for a trace. 0 experts = those of the trace;
    0 slots = one replica of every expert, SPARE_SHARE more, and staging. top_k: of a trace of
    counts.

    Raises InvalidArgument where experts or slots are too few, or the fleet is too large.
    """
    price = DeclaredPrice()
    experts = _experts(trace, num_experts)
    keys = trace.num_layers * experts
    slots = num_slots or ceil(keys * (1 + SPARE_SHARE) / num_ranks) + config.staging_slots
    if max(keys, slots) * num_ranks > HOSTS_MAX:
        raise InvalidArgument(
            f"--ranks {num_ranks}: {keys} experts and {slots} slots x {num_ranks} ranks are more "
            f"than {HOSTS_MAX}; give fewer ranks or slots"
        )
    short = keys - num_ranks * (slots - config.staging_slots)
    if short > 0:
        raise InvalidArgument(
            f"--ranks {num_ranks} --slots {slots}: {short} slots short of one replica of {keys} "
            f"experts and {config.staging_slots} staging slots a rank; give more slots or ranks"
        )
    spec = MoeSpec(
        model="trace",
        weights_version="v1",
        num_layers=trace.num_layers,
        num_experts=experts,
        top_k=trace.ids.shape[2] if isinstance(trace, TokenTrace) else min(top_k, experts),
        hidden_size=price.hidden_size,
        intermediate_size=price.intermediate_size,
        expert_bytes=price.expert_bytes,
        slot_bytes=price.expert_bytes,
    )
    profile = DeviceProfile(
        name="declared",
        flops_per_s=price.flops_per_s,
        memory_bytes_per_s=price.memory_bytes_per_s,
        copy_bytes_per_s=price.copy_bytes_per_s,
    )
    ranks = tuple(_rank(rank, slots, profile.name) for rank in range(num_ranks))
    return Stage(spec, Topology(ranks=ranks, profiles=(profile,)), config)


def _experts(trace: Trace, asked: int) -> int:
    seen = trace.num_experts
    if isinstance(trace, CountTrace) and asked not in (0, seen):
        raise InvalidArgument(f"--experts {asked}: the trace counts {seen}; leave the option out")
    if asked and asked < seen:
        raise InvalidArgument(
            f"--experts {asked}: the trace has expert {seen - 1}; give at least {seen}, or leave "
            "the option out"
        )
    return asked or seen


def service_stage(trace: Trace, service: ServiceConfig) -> Stage:
    """Model and fleet of a service file, for a trace of that model. Raises InvalidArgument,
    StartRefused."""
    from moe_serve.bootstrap.parts import moe_spec
    from moe_serve.bootstrap.size import rank_slots

    spec, _ = moe_spec(service)
    layers, experts = trace.num_layers, trace.num_experts
    fits = experts <= spec.num_experts
    if isinstance(trace, CountTrace):
        fits = experts == spec.num_experts
    if layers != spec.num_layers or not fits:
        raise InvalidArgument(
            f"the trace has {layers} layers and {experts} experts; model "
            f"{spec.model} has {spec.num_layers} layers of {spec.num_experts} experts; give the "
            "file of the model that was recorded, or leave --file out"
        )
    group_of = service.fleet.group_of
    profiles = tuple(DeviceProfile(**one.model_dump()) for one in service.profiles)
    ranks = tuple(
        _rank(rank, rank_slots(service, rank, spec.slot_bytes), group_of(rank).profile)
        for rank in range(service.fleet.num_ranks)
    )
    return Stage(spec, Topology(ranks=ranks, profiles=profiles), service.core_rebalance())


def staged_windows(
    trace: Trace, stage: Stage, *, window_tokens: int, phase: Phase
) -> tuple[list[LoadWindow], Stage]:
    """A trace cut into windows, and the stage with the sub-windows that they have.

    phase: of tokens whose phase was not recorded. Raises InvalidArgument where the trace is less
    than a window, or the windows are too many.
    """
    spec, config = stage.spec, stage.config
    if isinstance(trace, TokenTrace):
        tokens = len(trace.ids)
        number = tokens // window_tokens
        if number * config.sub_windows * NUM_PHASES * spec.num_keys > WINDOW_CELLS_MAX:
            raise InvalidArgument(
                f"--window-tokens {window_tokens}: {number} windows of {spec.num_keys} experts are "
                f"more than {WINDOW_CELLS_MAX} counts; give larger windows"
            )
        windows = trace_windows(
            trace.ids,
            spec,
            window_tokens=window_tokens,
            window_s=config.window_s,
            sub_windows=config.sub_windows,
            phase=phase if trace.phase is None else trace.phase,
        )
    else:
        tokens = int(trace.counts.sum(axis=2).max(axis=1).sum()) // spec.top_k
        windows = count_windows(
            trace.counts,
            spec,
            window_tokens=window_tokens,
            window_s=config.window_s,
            sub_windows=config.sub_windows,
            phase=phase,
        )
    if not windows:
        raise InvalidArgument(
            f"{tokens} tokens are less than one window of {window_tokens}; give smaller windows "
            "with --window-tokens"
        )
    parts = int(windows[0].demand.shape[0])
    return windows, replace(stage, config=msgspec.structs.replace(config, sub_windows=parts))


def _rank(rank: int, num_slots: int, profile: str) -> RankSpec:
    name = f"rank-{rank}"
    return RankSpec(rank=rank, node=name, failure_domain=name, num_slots=num_slots, profile=profile)


def with_limits(stage: Stage, *, max_moves: int | None, free_copies: bool = False) -> Stage:
    """The same with another limit on a plan's slot writes (None: as it is), and with copies that
    the gate takes for free."""
    config, topology = stage.config, stage.topology
    if max_moves is not None:
        config = msgspec.structs.replace(config, max_moves=max_moves)
    if free_copies:
        topology = msgspec.structs.replace(
            topology,
            profiles=tuple(
                msgspec.structs.replace(profile, copy_bytes_per_s=FREE_BYTES_PER_S)
                for profile in topology.profiles
            ),
            cross_node_bytes_per_s=FREE_BYTES_PER_S,
        )
    return replace(stage, config=config, topology=topology)


def check_policies(stage: Stage, policies: Sequence[str]) -> None:
    """Raise InvalidArgument, in the planner's words, where a policy gives no first layout on the
    fleet (an unknown name, too few slots)."""
    for policy in policies:
        _check_start(replace(stage, config=msgspec.structs.replace(stage.config, policy=policy)))


def _check_start(stage: Stage) -> None:
    spec, topology, config = stage.spec, stage.topology, stage.config
    engine = RebalanceEngine(spec, topology, config, term=1, first_epoch=1, start_s=0.0)
    for joined in ranks_joined(topology):
        for command in engine.step(joined).commands:
            if isinstance(command, ComputeTarget):
                answer = compute_target(command, config)
                if isinstance(answer, TargetFailed):
                    raise InvalidArgument(f"no first layout: {answer.reason}")
                return
