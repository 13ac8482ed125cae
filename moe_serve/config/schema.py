"""Fields of the service file, each with its meaning, unit and bounds.

Responsible for types and for rules between fields. Knows no file and no position (`load` adds
those). Unknown keys are errors. Used by the CLI and by `bootstrap`, which hand each part the small
struct it needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from placement.config import RebalanceConfig

_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*(B|KiB|MiB|GiB|TiB|KB|MB|GB|TB)?\s*$")
_UNITS = {
    None: 1,
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
BYTES_MAX = 1 << 60
"""Most bytes a size may say."""


def parse_bytes(value: Any) -> Any:
    """Bytes from an int or a string such as "64MiB". parse_bytes("1.5 KiB") is 1536. Other types
    are left to pydantic."""
    if not isinstance(value, str):
        return value
    match = _SIZE.match(value)
    if match is None:
        raise ValueError('want bytes as a number or a size such as "64MiB"')
    size = float(match[1]) * _UNITS[match[2]]
    if not size <= BYTES_MAX:
        raise ValueError(f"must be at most {BYTES_MAX} bytes")
    return int(size)


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0, le=BYTES_MAX)]
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
_ENDPOINT = r"^(https?://[A-Za-z0-9.\-_\[\]:]{1,253})?$"
Name = Annotated[str, Field(pattern=_NAME)]
PATTERN_WORDS = {
    _ENDPOINT: "want http://HOST:PORT or https://HOST:PORT of an OTLP collector, or nothing",
    _NAME: "want at most 63 of A-Z a-z 0-9 . _ - and the first one a letter or a digit",
}
"""What a pattern allows, in words, for whoever wrote something else."""
RULE_BROKEN = "rule_broken"
"""Type of a fault against a rule between fields; it stands at the field that is to be changed."""


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


def _rebalance_fields() -> dict[str, Any]:
    """Fields of the brain's RebalanceConfig with its bounds and defaults, so that neither is
    written twice."""
    fields: dict[str, Any] = {}
    hints = get_type_hints(RebalanceConfig, include_extras=True)
    defaults = RebalanceConfig()
    for name, hint in hints.items():
        kind, *metas = get_args(hint) or (hint,)
        bounds = {
            bound: getattr(meta, bound)
            for meta in metas
            if isinstance(meta, msgspec.Meta)
            for bound in ("gt", "ge", "lt", "le")
            if getattr(meta, bound) is not None
        }
        fields[name] = (Annotated[kind, Field(**bounds)], getattr(defaults, name))
    return fields


RebalanceSection: Any = create_model("RebalanceSection", __base__=_Section, **_rebalance_fields())
"""`rebalance:` section; `ServiceConfig.core_rebalance()` gives the brain's own struct."""


class ModelConfig(_Section):
    """Which model's experts are served."""

    name: Name
    """Model name that front ends send."""
    checkpoint: str
    """Folder of a Hugging Face checkpoint (safetensors), the same on every node, or
    `package:tiny_moe` for the model in this package. A relative path starts at the service file,
    like every path in it."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Serving dtype of the weights."""
    weights_version: Name = "v1"
    """Name of this set of weights; in every answer."""


class ProfileConfig(_Section):
    """Declared figures of a device; the cost model prices ranks by them."""

    name: Name
    flops_per_s: Annotated[float, Field(gt=0)]
    """Floating point operations a second in the serving dtype."""
    memory_bytes_per_s: Annotated[float, Field(gt=0)]
    """Bytes of weights a second the device reads."""
    copy_bytes_per_s: Annotated[float, Field(gt=0)]
    """Bytes a second of a copy into or out of the device."""
    overhead_s: Annotated[float, Field(ge=0)] = 0.0
    """Fixed seconds of one layer call."""


class RankGroup(_Section):
    """`count` ranks alike. Ranks are numbered over all groups in file order."""

    count: Annotated[int, Field(ge=1, le=4096)] = 1
    """Ranks in the group."""
    budget: Bytes | None = None
    """Bytes of expert slots a rank may use (number or "12GiB"). Exactly one of budget and slots."""
    slots: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Slots a rank has, staging slots included. Exactly one of budget and slots."""
    backend: Literal["numpy", "torch", "emulated"] = "numpy"
    """Compute backend."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the torch backend."""
    profile: Name
    """A name under `profiles`."""
    node_labels: dict[str, str] = {}
    """Ray label selector of the nodes these ranks may be placed on."""
    failure_domain_label: str = ""
    """Node label whose value is the failure domain; empty = the node itself."""
    num_cpus: Annotated[float, Field(ge=0)] = 0.0
    """CPUs Ray sets aside for a rank."""
    num_gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs Ray sets aside for a rank."""

    @model_validator(mode="after")
    def _one_size(self) -> RankGroup:
        if (self.budget is None) == (self.slots is None):
            raise ValueError("give exactly one of budget and slots")
        return self


class FleetConfig(_Section):
    """Ranks and routers."""

    ranks: Annotated[list[RankGroup], Field(min_length=1, max_length=64)]
    """Groups of ranks."""
    routers: Annotated[int, Field(ge=1, le=64)] = 1
    """Router actors."""
    router_node_labels: dict[str, str] = {}
    """Ray label selector of the nodes routers may be placed on."""

    @property
    def num_ranks(self) -> int:
        """Ranks over all groups."""
        return sum(group.count for group in self.ranks)

    def group_of(self, rank: int) -> RankGroup:
        """Group a rank belongs to."""
        for group in self.ranks:
            if rank < group.count:
                return group
            rank -= group.count
        raise KeyError("rank outside the fleet")


class LimitsConfig(_Section):
    """Maximum of everything that could grow."""

    max_message_bytes: Bytes = 64 << 20
    """gRPC and wire message, both ways."""
    max_rows_in_flight: Annotated[int, Field(ge=1)] = 65_536
    """Rows a router has in work; further requests wait, and above 512 waiting it answers
    RESOURCE_EXHAUSTED."""
    max_queue_rows: Annotated[int, Field(ge=1)] = 65_536
    """Rows a shard queues before it refuses."""
    copy_bytes_per_s: Bytes = 200 << 20
    """Token bucket of copies into a shard."""
    retry_share: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Retries of a router, as a share of its calls over ten seconds (ten are always allowed) and of
    those open at once (three are)."""
    hedge_share: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Calls a router sends a second time, to another node, once they are older than 95% of recent
    calls took: a share of its calls. 0 = never."""
    eject_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Shards a router leaves alone at once for their own faults, or because they are far slower
    than the others: a share of them, but one always."""
    host_cache_bytes: Bytes = 256 << 20
    """Bytes of experts that each node keeps under the state directory, ready to serve, beside what
    the shards hold; 0 = none. With `state_dir_shared` there is none."""
    ledger_rows_max: Annotated[int, Field(ge=0, le=50_000_000)] = 0
    """Contributions each part keeps for an outside audit; 0 = none."""


class PortsConfig(_Section):
    """Listening ports; 0 lets the operating system choose."""

    grpc: Annotated[int, Field(ge=0, le=65_535)] = 0
    """First router; the next routers take the next ports."""
    admin: Annotated[int, Field(ge=0, le=65_535)] = 0
    """Controller's PlacementService."""
    dashboard: Annotated[int, Field(ge=0, le=65_535)] = 0
    """Page."""
    metrics: Annotated[int, Field(ge=0, le=65_535)] | None = None
    """`/metrics` of the controller, for a Prometheus that does not scrape Ray; without a number
    there is none."""


class SecurityConfig(_Section):
    """Files with secrets. Needed with `network: cluster` unless insecure access is accepted in so
    many words."""

    token_file: Path | None = None
    """YAML-free text: one `role token` a line (dispatch, read, admin); up to two live tokens a
    role; mode 0600."""
    tls_cert_file: Path | None = None
    """PEM certificate chain of the gRPC servers."""
    tls_key_file: Path | None = None
    """PEM private key, mode 0600."""
    tls_ca_file: Path | None = None
    """PEM root that clients check the servers against."""
    accept_insecure: bool = False
    """True = the operator accepts gRPC without token and TLS; shown by status."""

    @property
    def complete(self) -> bool:
        """Token and TLS files are all named."""
        return None not in (self.token_file, self.tls_cert_file, self.tls_key_file)


class MetricsConfig(_Section):
    """What is told of the service in numbers, through Ray's exporter and at `ports.metrics`."""

    per_expert: bool = False
    """True = demand by layer and expert too, at `ports.metrics` alone, which it needs: one series
    for each expert that was ever asked for, up to 14,848 of 58 layers x 256 experts."""


class LogConfig(_Section):
    """What parts write into their logs, beside what went wrong."""

    slow_request_ms: Annotated[float, Field(ge=0, le=3_600_000)] = 0.0
    """A request that takes a router longer has a line with its id, where its time went by stage and
    the rank that came last; one in a tenth of a second at most. 0 = none has."""


class TelemetryConfig(_Section):
    """Traces. Who sends a W3C `traceparent` decides by its flag which of its requests have
    spans."""

    otlp_endpoint: Annotated[str, Field(pattern=_ENDPOINT)] = ""
    """Collector that takes OTLP over gRPC, as http://HOST:4317 (in the open) or https://HOST:4317;
    empty = no spans. Needs `pip install 'moe-serve[otel]'` on every node."""
    trace_share: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of the requests without a `traceparent` that have spans."""


class ServiceConfig(_Section):
    """One service: one model, its fleet and how it is run."""

    service: Name
    """Service id: prefix of every actor name and of the journal."""
    model: ModelConfig
    fleet: FleetConfig
    profiles: Annotated[list[ProfileConfig], Field(min_length=1, max_length=64)]
    network: Literal["loopback", "cluster"] = "loopback"
    """loopback: everything on 127.0.0.1 of one machine. cluster: node addresses, CURVE on the wire,
    TLS and tokens."""
    security: SecurityConfig = SecurityConfig()
    rebalance: RebalanceSection = Field(default_factory=RebalanceSection)
    """How the controller decides; fields of placement.config.RebalanceConfig."""
    limits: LimitsConfig = LimitsConfig()
    ports: PortsConfig = PortsConfig()
    state_dir: Path | None = None
    """Folder of journal and manifest cache; empty = a folder of the service id under the user's
    state directory."""
    state_dir_shared: bool = False
    """True = every node sees the same state_dir."""
    dashboard: bool = True
    """Run the page."""
    log: LogConfig = LogConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    metrics: MetricsConfig = MetricsConfig()

    def core_rebalance(self) -> RebalanceConfig:
        """The `rebalance` section as the brain's struct."""
        return RebalanceConfig(**self.rebalance.model_dump())

    def rooted(self, folder: Path) -> ServiceConfig:
        """The same service with every relative path taken from `folder`, the service file's:
        parts on other machines, and commands run elsewhere, must mean the same files."""

        def under(path: Path | None) -> Path | None:
            return None if path is None else folder.resolve() / path.expanduser()

        security, model = self.security, self.model
        paths = ("token_file", "tls_cert_file", "tls_key_file", "tls_ca_file")
        checkpoint = model.checkpoint
        if not checkpoint.startswith(("package:", "~")):
            checkpoint = str(under(Path(checkpoint)))
        return self.model_copy(
            update={
                "model": model.model_copy(update={"checkpoint": checkpoint}),
                "security": security.model_copy(
                    update={name: under(getattr(security, name)) for name in paths}
                ),
                "state_dir": under(self.state_dir),
            }
        )

    @model_validator(mode="after")
    def _consistent(self) -> ServiceConfig:
        broken = [*self._profile_faults(), *self._network_faults(), *self._metrics_faults()]
        if broken:
            raise ValidationError.from_exception_data(type(self).__name__, broken)
        return self

    def _profile_faults(self) -> Iterator[InitErrorDetails]:
        names = [profile.name for profile in self.profiles]
        for number, name in enumerate(names):
            if name in names[:number]:
                yield _broken(("profiles", number, "name"), name, f"two profiles are named {name}")
        for number, group in enumerate(self.fleet.ranks):
            if group.profile not in names:
                yield _broken(
                    ("fleet", "ranks", number, "profile"),
                    group.profile,
                    f"{group.profile!r} is not under profiles ({sorted(set(names))})",
                )

    def _network_faults(self) -> Iterator[InitErrorDetails]:
        if self.network == "cluster" and not (
            self.security.complete or self.security.accept_insecure
        ):
            yield _broken(
                ("network",),
                self.network,
                "cluster needs security.token_file, tls_cert_file and tls_key_file, "
                "or accept_insecure: true (--i-accept-insecure)",
            )

    def _metrics_faults(self) -> Iterator[InitErrorDetails]:
        if self.metrics.per_expert and self.ports.metrics is None:
            yield _broken(
                ("metrics", "per_expert"),
                "true",
                "single experts are told at ports.metrics alone: give it a port, 0 = any free one",
            )


def _broken(loc: tuple[int | str, ...], value: str, problem: str) -> InitErrorDetails:
    # As a value of the template: pydantic would read braces in the problem itself.
    kind = PydanticCustomError(RULE_BROKEN, "{problem}", {"problem": problem})
    return InitErrorDetails(type=kind, loc=loc, input=value)
