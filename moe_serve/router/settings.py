"""Settings of one router, frozen: what it is, what it serves, its limits. Made by bootstrap from
the checked service file.

Responsible for refusing what cannot be served safely. Must never read a file or an environment
variable. Called by `actor`, `service`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from moe_serve.errors import StartRefused
from moe_serve.router.faults import ContributionFault
from moe_serve.rpc.options import RpcLimits, is_loopback
from moe_serve.telemetry.traces import TraceSettings
from moe_serve.wire.sockets import WireOptions
from placement.roles.router_records import RouterRules
from placement.topology import MoeSpec


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Everything a router needs to start.

    host, port: where to bind; port 0 lets the system choose. advertise_host: what others are told,
    "" = host. checkpoint_layers: checkpoint layer of each MoE layer, () = 0..num_layers-1.
    """

    router: str
    router_number: int
    incarnation: int
    spec: MoeSpec
    node: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    advertise_host: str = ""
    checkpoint_layers: tuple[int, ...] = ()
    simulated: bool = False
    rules: RouterRules = field(default_factory=RouterRules)
    limits: RpcLimits = field(default_factory=RpcLimits)
    default_timeout_s: float = 30.0
    """Deadline of a request that names none."""
    max_open_requests: int = 512
    """Requests in work at once; further ones wait."""
    max_open_rows: int = 65_536
    """Rows in work at once, except of a request alone; further ones wait."""
    max_waiting_requests: int = 512
    """Requests that wait for room, each until its deadline; above it RESOURCE_EXHAUSTED."""
    max_stream_items: int = 64
    """Items of one stream in work or waiting to be read; above it the stream is read no further."""
    offload_bytes: int = 65_536
    """Gather, split and combine above this size run in a worker thread."""
    demand_sub_window_s: float = 0.5
    ledger_entries: int = 0
    """Entries of the combined ledger; 0 = off."""
    slow_request_s: float = 0.0
    """Requests that take longer have a line in the log; 0 = none have."""
    service: str = ""
    """Name of the service, for its spans."""
    traces: TraceSettings = field(default_factory=TraceSettings)
    """Where spans go."""
    fault: ContributionFault | None = None
    wire: WireOptions = field(default_factory=WireOptions)
    """Of the connections to shards."""
    history_dir: str = ""
    """Folder of the history, for tests: facts are noted there (`telemetry.fact_log`); "" = none
    are."""
    token_file: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    accept_insecure: bool = False
    """Bind beyond loopback without tokens and TLS; status shows it."""

    def __post_init__(self) -> None:
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
                f"router {self.router} will not listen on {self.host} without "
                f"{' and '.join(missing)}; give them, bind 127.0.0.1, or accept the risk explicitly"
            )

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the port."""
        return is_loopback(self.host)
