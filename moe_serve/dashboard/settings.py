"""Settings of the page, frozen: where its controller is, where it binds, its limits.

Responsible for refusing to bind where strangers could look. Must never read a file or an
environment variable. Called by `actor`, `feed`, `server`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moe_serve.errors import StartRefused
from moe_serve.rpc.options import is_loopback


@dataclass(frozen=True, slots=True)
class DashboardSettings:
    """Everything the page needs to start.

    admin_address: host:port of the controller's admin port. token: bearer token of role `read`, ""
    without authentication. tls_authority: PEM file to check the controller by, None without TLS.
    port 0 lets the system choose.
    """

    admin_address: str
    host: str = "127.0.0.1"
    port: int = 0
    token: str = ""
    tls_authority: Path | None = None
    node: str = ""
    """Where the page runs, as lines of its log say it."""
    clients_max: int = 64
    """Open event streams; one more is answered 503."""
    write_timeout_s: float = 30.0
    """A browser that takes nothing for so long is let go."""
    body_timeout_s: float = 5.0
    """A body that has not come by then is refused."""
    answers_kept_s: float = 1.0
    """An explanation is asked for again after so long, however many look at it."""
    publish_interval_s: float = 0.25
    """Between two placements sent to browsers, at least: a wave changes many slots at once."""
    status_interval_s: float = 1.0
    """Between two status messages; they also keep the stream alive."""
    connect_timeout_s: float = 5.0
    backoff_min_s: float = 0.25
    backoff_max_s: float = 5.0
    stale_windows: float = 3.0
    """Load older than so many windows is not live any more."""

    def __post_init__(self) -> None:
        """Raises StartRefused."""
        if not is_loopback(self.host):
            raise StartRefused(
                f"the page binds loopback only, got host {self.host!r}; "
                "use 127.0.0.1 and forward the port (ssh -L, kubectl port-forward)"
            )
        if not 0 <= self.port <= 65_535:
            raise StartRefused(f"the page's port must be 0 to 65535, got {self.port}")
        if ":" not in self.admin_address:
            raise StartRefused(f"admin address must be host:port, got {self.admin_address!r}")
