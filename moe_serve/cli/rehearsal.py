"""What a replay runs on: a fleet for a trace, and the recorded one for a journal.

Responsible for turning files and options into the arguments of `placement.replay`; every figure
comes from there. Must never decide or score. Called by the replay command.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, get_origin, get_type_hints

import msgspec
import numpy as np
import numpy.typing as npt

from moe_serve.cli.recordings import Segment
from moe_serve.config import ServiceConfig
from moe_serve.errors import InvalidArgument
from placement.config import RebalanceConfig
from placement.engine import EngineState, RebalanceEngine, compute_target
from placement.load import LoadWindow
from placement.messages.codec import encode
from placement.messages.effects import ComputeTarget, Effects
from placement.messages.events import RankJoined, TargetFailed, WindowClosed
from placement.replay import recomputed
from placement.routing import RankAddress
from placement.scoring import balancedness
from placement.topology import DeviceProfile, MoeSpec, RankSpec, Topology

SPARE_SHARE = 0.25
"""Slots for replicas beyond the first, as a share of the experts, where no fleet is given."""
ELEMENT_BYTES = 4


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
    ids: npt.NDArray[np.integer[Any]],
    *,
    num_experts: int,
    num_ranks: int,
    num_slots: int,
    config: RebalanceConfig,
) -> Stage:
    """A declared fleet of equal ranks, one node each, for a trace. 0 experts = the greatest id + 1;
    0 slots = one replica of every expert, SPARE_SHARE more, and staging.

    Raises InvalidArgument where experts or slots are too few.
    """
    seen, price = int(ids.max()) + 1, DeclaredPrice()
    experts = num_experts or seen
    if experts < seen:
        raise InvalidArgument(f"--experts {experts}: the trace has expert {seen - 1}")
    keys = ids.shape[1] * experts
    slots = num_slots or ceil(keys * (1 + SPARE_SHARE) / num_ranks) + config.staging_slots
    short = keys - num_ranks * (slots - config.staging_slots)
    if short > 0:
        raise InvalidArgument(
            f"--ranks {num_ranks} --slots {slots}: {short} slots short of one replica of {keys} "
            f"experts and {config.staging_slots} staging slots a rank"
        )
    spec = MoeSpec(
        model="trace",
        weights_version="v1",
        num_layers=int(ids.shape[1]),
        num_experts=experts,
        top_k=int(ids.shape[2]),
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


def service_stage(ids: npt.NDArray[np.integer[Any]], service: ServiceConfig) -> Stage:
    """Model and fleet of a service file, for a trace of that model. Raises InvalidArgument,
    StartRefused."""
    from moe_serve.bootstrap.parts import moe_spec
    from moe_serve.bootstrap.size import rank_slots

    spec, _ = moe_spec(service)
    if ids.shape[1] != spec.num_layers or int(ids.max()) >= spec.num_experts:
        raise InvalidArgument(
            f"the trace has {ids.shape[1]} layers and expert ids up to {int(ids.max())}; model "
            f"{spec.model} has {spec.num_layers} layers of {spec.num_experts} experts"
        )
    group_of = service.fleet.group_of
    profiles = tuple(DeviceProfile(**one.model_dump()) for one in service.profiles)
    ranks = tuple(
        _rank(rank, rank_slots(service, rank, spec.slot_bytes), group_of(rank).profile)
        for rank in range(service.fleet.num_ranks)
    )
    return Stage(spec, Topology(ranks=ranks, profiles=profiles), service.core_rebalance())


def _rank(rank: int, num_slots: int, profile: str) -> RankSpec:
    name = f"rank-{rank}"
    return RankSpec(rank=rank, node=name, failure_domain=name, num_slots=num_slots, profile=profile)


def with_policy(stage: Stage, policy: str) -> Stage:
    """The same with another policy; "" changes nothing."""
    if not policy:
        return stage
    config = msgspec.structs.replace(stage.config, policy=policy)
    return Stage(stage.spec, stage.topology, config)


def check_start(stage: Stage) -> None:
    """Raise InvalidArgument, in the planner's words, where the policy gives no first layout on the
    fleet (an unknown name, too few slots)."""
    spec, topology, config = stage.spec, stage.topology, stage.config
    engine = RebalanceEngine(spec, topology, config, term=1, first_epoch=1, start_s=0.0)
    for rank in topology.ranks:
        address = RankAddress(rank=rank.rank, node=rank.node, address="", incarnation=1)
        joined = RankJoined(
            at_s=0.0,
            rank=rank.rank,
            node=rank.node,
            failure_domain=rank.failure_domain,
            profile=rank.profile,
            num_slots=rank.num_slots,
            address=address,
        )
        for command in engine.step(joined).commands:
            if isinstance(command, ComputeTarget):
                answer = compute_target(command, config)
                if isinstance(answer, TargetFailed):
                    raise InvalidArgument(f"no first layout: {answer.reason}")
                return


# -- journals ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SegmentCheck:
    """What came of stepping today's engine through a segment.

    reaches_next: its state then is the snapshot that opens the next segment; None for the newest
    segment of a term, which nothing follows. False: today's engine differs, or inputs were cut
    (a full disk or queue) before the next segment. targets_differ: recorded targets that today's
    policy and planner would not compute.
    """

    number: int
    events: int
    windows: int
    reaches_next: bool | None
    targets_differ: tuple[str, ...]


def check_segments(segments: Sequence[Segment]) -> list[SegmentCheck]:
    """Step every segment and compare it with what followed."""
    checks = []
    for at, segment in enumerate(segments):
        engine = RebalanceEngine.replayed(segment.snapshot)
        effects: list[Effects] = [engine.step(event) for event in segment.events]
        following = segments[at + 1] if at + 1 < len(segments) else None
        reaches = None
        if following is not None and _same_life(segment, following):
            reaches = _tree(encode(engine.snapshot())) == _tree(following.snapshot_bytes)
        checks.append(
            SegmentCheck(
                number=segment.number,
                events=len(segment.events),
                windows=sum(isinstance(event, WindowClosed) for event in segment.events),
                reaches_next=reaches,
                targets_differ=recomputed(segment.events, effects, segment.snapshot.config),
            )
        )
    return checks


def _tree(snapshot: bytes) -> Any:
    """A snapshot as plain values, its sets sorted: the order in which a set is written depends on
    how it came to be."""
    tree = msgspec.msgpack.decode(snapshot)
    for name, hint in get_type_hints(EngineState).items():
        if get_origin(hint) is set:
            tree["state"][name].sort()
    return tree


def _same_life(segment: Segment, following: Segment) -> bool:
    """A restarted controller has another term: its first snapshot follows from recovery, not from
    the events before it."""
    same_term = segment.snapshot.state.term == following.snapshot.state.term
    return same_term and following.number == segment.number + 1


def journal_stage(segments: Sequence[Segment]) -> Stage:
    """Model, fleet and settings as the oldest segment has them."""
    first = segments[0].snapshot
    topology = RebalanceEngine.replayed(first).topology()
    ranks = tuple(msgspec.structs.replace(r, alive=True, draining=False) for r in topology.ranks)
    return Stage(first.spec, msgspec.structs.replace(topology, ranks=ranks), first.config)


def journal_windows(segments: Sequence[Segment]) -> list[LoadWindow]:
    """Closed windows of all segments, in order."""
    return [
        event.window
        for segment in segments
        for event in segment.events
        if isinstance(event, WindowClosed)
    ]


def measured(window: LoadWindow) -> float | None:
    """Balancedness of the pairs that ranks reported in a window; None where none did."""
    if window.rank_pairs.size == 0 or not window.rank_pairs.any():
        return None
    return balancedness(window.rank_pairs)
