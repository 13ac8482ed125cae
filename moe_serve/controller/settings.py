"""Settings of the controller, frozen and picklable: what is served, what is expected, where state
lies.

Responsible for refusing what cannot be served safely. Must never read a file, an environment
variable or Ray. Made by bootstrap, handed to the actor as a constructor argument, so Ray's restart
has it too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from moe_serve.errors import StartRefused
from moe_serve.rpc.options import RpcLimits, is_loopback
from placement.config import RebalanceConfig
from placement.topology import DeviceProfile, MoeSpec, RankSpec, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedRank:
    """One rank the fleet will be asked to create. `node` and `failure_domain` are guesses until the
    shard has answered: where it runs is Ray's choice."""

    rank: int
    profile: str
    num_slots: int
    budget_bytes: int
    node: str = ""
    failure_domain: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankKind:
    """A group of the service file, of which ranks may be added: what each of them is like."""

    profile: str
    num_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisionLimits:
    """How often parts are asked, and how long they may be silent. Seconds."""

    report_s: float = 0.25
    """Between two reports of one part."""
    probe_s: float = 1.0
    """Between two probes through a shard's compute path."""
    call_timeout_s: float = 2.0
    """Longest wait for a report or probe."""
    nodes_s: float = 1.0
    """Between two looks at the cluster's nodes (drains, deaths)."""
    create_attempt_pause_s: float = 1.0
    """Wait before a part that would not start is tried again; doubles up to 30 s."""
    end_within_s: float = 600.0
    """How long a part that must not live on is tried to be ended, with the same pauses; then a
    person is told."""
    strangers_s: float = 10.0
    """Between two looks for parts that came to life though their creation was given up."""
    create_at_once: int = 8
    """Parts being started at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalLimits:
    """What the journal keeps."""

    snapshot_every: int = 1000
    """Transitions after which a snapshot follows."""
    segment_bytes: int = 8 << 20
    """Bytes of inputs after which a new segment begins."""
    inputs_bytes_max: int = 256 << 20
    """Bytes of inputs kept; whole old segments go first."""
    inputs_age_max_s: float = 7 * 86_400.0
    """Age (driver time) at which a whole segment goes."""
    state_bytes_max: int = 0
    """Greatest size of the state log; 0 = what the disk takes. Reaching it counts as a full
    disk."""
    queue_max: int = 4096
    """Inputs that may wait to be written. Beyond it the tail of the inputs log is cut, which costs
    replay and no safety."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """Everything the controller needs to start.

    Raises StartRefused where ranks, profiles or network cannot be served.
    """

    service_id: str
    """Prefix of every actor name and of the journal."""
    spec: MoeSpec
    """Shape of the model's routed experts."""
    config: RebalanceConfig
    """How placement is decided."""
    ranks: tuple[ExpectedRank, ...]
    """Ranks 0..n-1 that the service file names, in order. Operators may add others and remove any:
    the engine's state says which there are."""
    profiles: tuple[DeviceProfile, ...]
    """Device figures that ranks name."""
    groups: tuple[RankKind, ...] = ()
    """Groups of the service file in their order; () = no rank may be added."""
    num_routers: int = 1
    """Routers named router-0..router-(n-1)."""
    cross_node_bytes_per_s: float = 1e9
    """Bytes a second of a copy between nodes, for prices."""
    state_dir: Path
    """Folder of the journal."""
    state_dir_shared: bool = False
    """True = every node sees the same state_dir, so a controller elsewhere may trust the
    journal."""
    node: str = ""
    """Node that the controller runs on, as lines of its log say it."""
    host: str = "127.0.0.1"
    """IP address the admin port binds; "" = the Ray node's own."""
    admin_port: int = 0
    """Port of PlacementService; 0 lets the system choose."""
    metrics_port: int | None = None
    """Port of `/metrics`; 0 lets the system choose, None = there is none."""
    metrics_per_expert: bool = False
    """Metrics have demand by expert too."""
    advertise_host: str = ""
    """What others are told, "" = host."""
    network: str = "loopback"
    """loopback | cluster, as status shows it."""
    simulated: bool = False
    """Compute times come from the cost model; shown everywhere."""
    token_file: Path | None = None
    """Tokens of the admin port; None = no authentication."""
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    accept_insecure: bool = False
    """Bind beyond loopback without tokens and TLS; status shows it."""
    limits: RpcLimits = field(default_factory=RpcLimits)
    supervision: SupervisionLimits = field(default_factory=SupervisionLimits)
    journal: JournalLimits = field(default_factory=JournalLimits)
    records_kept: int = 4096
    """Decision records kept for people."""
    moves_kept: int = 512
    """Moves kept for people."""
    watchers_max: int = 64
    """Open Watch streams."""
    restarts_max: int = 5
    """Restarts within `restarts_within_s` after which the controller starts paused."""
    restarts_within_s: float = 600.0
    fail_points: tuple[str, ...] = ()
    """For tests, the n-th for the controller of term n, "" = none: `before:KIND:STATE` or
    `after:KIND:STATE` ends the process before or after the commit of the first transition into that
    state (`after:add:copying`), `before:publish` or `after:publish` around sending a table that
    followed a transition."""
    history_dir: str = ""
    """Folder of the history, for tests: facts are noted there (`telemetry.fact_log`); "" = none
    are."""

    def __post_init__(self) -> None:
        if [r.rank for r in self.ranks] != list(range(len(self.ranks))) or not self.ranks:
            raise StartRefused("ranks must be 0..n-1 in order, at least one; check fleet.ranks")
        known = {profile.name for profile in self.profiles}
        named = {r.profile for r in self.ranks} | {group.profile for group in self.groups}
        unknown = sorted(named - known)
        if unknown:
            raise StartRefused(f"ranks name device profiles {unknown}, which are not declared")
        if self.num_routers < 1:
            raise StartRefused(f"num_routers {self.num_routers} must be >= 1")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise StartRefused("TLS needs both a certificate and a key file")
        if self.loopback or self.accept_insecure:
            return
        missing = [
            name
            for name, given in (("a token file", self.token_file), ("TLS files", self.tls_key))
            if given is None
        ]
        if missing:
            raise StartRefused(
                f"the admin port will not listen on {self.host or 'the node address'} without "
                f"{' and '.join(missing)}; give them, bind 127.0.0.1, or accept the risk explicitly"
            )

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the admin port."""
        return is_loopback(self.host)

    @property
    def routers(self) -> tuple[str, ...]:
        """Names of the routers."""
        return tuple(f"router-{number}" for number in range(self.num_routers))

    def topology(self) -> Topology:
        """Ranks as they are expected, before any has answered."""
        return Topology(
            ranks=tuple(
                RankSpec(
                    rank=r.rank,
                    node=r.node or f"rank-{r.rank}",
                    failure_domain=r.failure_domain or r.node or f"rank-{r.rank}",
                    num_slots=r.num_slots,
                    profile=r.profile,
                )
                for r in self.ranks
            ),
            profiles=self.profiles,
            cross_node_bytes_per_s=self.cross_node_bytes_per_s,
        )
