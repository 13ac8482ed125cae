"""Service file -> what each part is told: plain frozen settings, the same on every node and after
every restart.

Responsible for turning `ServiceConfig` into ShardSettings and RouterSettings. Starts nothing.
Called by the fleet (in the controller's process) and by `service`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from moe_serve.bootstrap.size import group_slots
from moe_serve.config import ServiceConfig
from moe_serve.config.schema import RankGroup
from moe_serve.errors import StartRefused
from moe_serve.ports import FILE_PLACE, RankPlace
from moe_serve.router.faults import ContributionFault
from moe_serve.router.settings import RouterSettings
from moe_serve.rpc.options import RpcLimits
from moe_serve.shard.compute.base import ExpertSpec
from moe_serve.shard.compute.build import backend_derived_bytes
from moe_serve.shard.settings import ShardSettings
from moe_serve.shard.work_queue import QueueLimits
from moe_serve.telemetry.traces import TraceSettings
from moe_serve.weights import Checkpoint, WeightsError
from moe_serve.wire.codec import forward_bytes_max
from moe_serve.wire.security import CurveKeys
from moe_serve.wire.sockets import WireOptions
from placement.cost import least_crossover, rank_seconds
from placement.roles.router_records import RouterRules
from placement.topology import DeviceProfile, MoeSpec

PACKAGE_PREFIX = "package:"
"""A checkpoint inside this package: `package:tiny_moe`."""


def checkpoint_folder(name: str) -> str:
    """Folder of a checkpoint as the service file names it. Raises StartRefused where it is not
    there."""
    if name.startswith(PACKAGE_PREFIX):
        inside = name.removeprefix(PACKAGE_PREFIX)
        if inside != "tiny_moe":
            raise StartRefused(f"checkpoint {name!r}: the package holds only package:tiny_moe")
        folder = Path(str(resources.files("moe_serve.demo").joinpath("tiny_moe")))
    else:
        folder = Path(name).expanduser()
    if not folder.is_dir():
        raise StartRefused(f"checkpoint {name!r} is not a folder on this machine")
    return str(folder)


def trace_settings(config: ServiceConfig) -> TraceSettings:
    """Where the spans of every part go."""
    return TraceSettings(config.telemetry.otlp_endpoint, config.telemetry.trace_share)


def moe_spec(config: ServiceConfig) -> tuple[MoeSpec, tuple[int, ...]]:
    """Spec of the served model, and the checkpoint layer of each MoE layer.

    A slot costs what the costliest backend of the fleet needs, so that any rank may hold any
    expert. Raises StartRefused naming what is wrong with the checkpoint.
    """
    model = config.model
    try:
        opened = Checkpoint.open(checkpoint_folder(model.checkpoint), model.name).spec
    except WeightsError as error:
        raise StartRefused(f"checkpoint {model.checkpoint}: {error}") from error
    expert = ExpertSpec(opened.hidden_size, opened.intermediate_size, model.dtype)
    derived = max(backend_derived_bytes(group.backend, expert) for group in config.fleet.ranks)
    spec = MoeSpec(
        model=model.name,
        weights_version=model.weights_version,
        num_layers=opened.num_layers,
        num_experts=opened.num_experts,
        top_k=opened.top_k,
        hidden_size=opened.hidden_size,
        intermediate_size=opened.intermediate_size,
        expert_bytes=expert.canonical_bytes,
        slot_bytes=expert.held_bytes + derived,
    )
    return spec, opened.layer_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsPlan:
    """Everything a part's settings are made from. Picklable; crosses only through actor
    constructors."""

    config: ServiceConfig
    spec: MoeSpec
    checkpoint_layers: tuple[int, ...]
    state_dir: str
    wire_keys: CurveKeys | None
    fault: ContributionFault | None = None
    """Deliberate fault of every router, for the demo's `--inject`."""
    history_dir: str = ""
    """Folder in which every part notes facts, for tests; "" = none does."""
    socks_proxy: str = ""
    """See `Drill.socks_proxy`."""

    def profile(self, name: str) -> DeviceProfile:
        """Declared device figures."""
        for profile in self.config.profiles:
            if profile.name == name:
                return DeviceProfile(**profile.model_dump())
        raise KeyError(f"profile {name!r} is not declared")

    def _rank_slowness(self) -> tuple[float, ...]:
        """How many times as long as the fastest device each rank's takes for a pair of an expert
        that it must read."""
        fleet, spec = self.config.fleet, self.spec
        ranks = [self.profile(fleet.group_of(rank).profile) for rank in range(fleet.num_ranks)]
        took_s = [float(rank_seconds(1.0, 1.0, spec, profile)) for profile in ranks]
        return tuple(one / min(took_s) for one in took_s)

    def _wire(self) -> WireOptions:
        """Of both ends of the connections between routers and shards: a request at its limit
        fits."""
        limit = self.config.limits.max_message_bytes
        longest = forward_bytes_max(limit, self.spec.hidden_size, self.spec.top_k)
        return WireOptions(message_bytes_max=longest)

    def group(self, rank: int, place: RankPlace) -> RankGroup:
        """Group that a rank's shard is made from. Raises StartRefused where the service file has it
        no more."""
        fleet = self.config.fleet
        if place.group < 0:
            return fleet.group_of(rank)
        if place.group >= len(fleet.ranks):
            raise StartRefused(
                f"rank {rank} was added from group {place.group}, and the service file has "
                f"{len(fleet.ranks)}; remove the rank, or give the group back"
            )
        return fleet.ranks[place.group]

    def shard_settings(
        self,
        rank: int,
        incarnation: int,
        *,
        node: str,
        failure_domain: str,
        host: str,
        place: RankPlace = FILE_PLACE,
    ) -> ShardSettings:
        """Settings of one shard incarnation on a node."""
        config = self.config
        group = self.group(rank, place)
        slots = group_slots(group, self.spec.slot_bytes)
        limits = config.limits
        return ShardSettings(
            rank=rank,
            incarnation=incarnation,
            node=node,
            failure_domain=failure_domain,
            profile=self.profile(group.profile),
            backend=group.backend,
            device=group.device,
            group=place.group,
            only_node=place.only_node,
            dtype=config.model.dtype,
            num_slots=slots,
            budget_bytes=slots * self.spec.slot_bytes,
            checkpoint=checkpoint_folder(config.model.checkpoint),
            manifest_dir=str(Path(self.state_dir) / "manifests"),
            model_name=self.spec.model,
            weights_version=self.spec.weights_version,
            host=host,
            client_keys=self.wire_keys,
            wire=self._wire(),
            queue=QueueLimits(rows_max=limits.max_queue_rows),
            copy_bytes_per_s=float(limits.copy_bytes_per_s),
            host_cache_dir=str(Path(self.state_dir) / "host_cache"),
            # On a shared folder it would be no node's own.
            host_cache_bytes=0 if config.state_dir_shared else limits.host_cache_bytes,
            ledger_rows_max=limits.ledger_rows_max,
            history_dir=self.history_dir,
            service=config.service,
            traces=trace_settings(config),
        )

    def router_settings(
        self, router: str, incarnation: int, *, node: str, host: str, port: int
    ) -> RouterSettings:
        """Settings of one router incarnation on a node. Router names end in their number."""
        config = self.config
        security = config.security
        profiles = [self.profile(group.profile) for group in config.fleet.ranks]
        return RouterSettings(
            router=router,
            router_number=int(router.rsplit("-", 1)[1]),
            incarnation=incarnation,
            spec=self.spec,
            node=node,
            host=host,
            port=port,
            checkpoint_layers=self.checkpoint_layers,
            simulated=any(group.backend == "emulated" for group in config.fleet.ranks),
            rules=RouterRules(
                memory_bound_pairs=least_crossover(self.spec, profiles),
                retry_share=config.limits.retry_share,
                hedge_share=config.limits.hedge_share,
                eject_share=config.limits.eject_share,
                rank_slowness=self._rank_slowness(),
            ),
            limits=RpcLimits(max_message_bytes=config.limits.max_message_bytes),
            max_open_rows=config.limits.max_rows_in_flight,
            ledger_entries=config.limits.ledger_rows_max,
            slow_request_s=config.log.slow_request_ms / 1000,
            service=config.service,
            traces=trace_settings(config),
            fault=self.fault,
            history_dir=self.history_dir,
            wire=replace(self._wire(), socks_proxy=self.socks_proxy),
            token_file=security.token_file,
            tls_certificate=security.tls_cert_file,
            tls_key=security.tls_key_file,
            accept_insecure=security.accept_insecure,
        )
