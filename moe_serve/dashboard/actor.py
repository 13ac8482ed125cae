"""The Ray face of the page: it starts, it has a URL, it stops.

`DashboardActor` becomes a detached actor by `ray.remote(DashboardActor).options(...)` in bootstrap.
The page begins with the constructor, so that Ray's restart has it too, and runs in a thread of its
own beside Ray's.

Responsible for this translation only. Must never hold state beside the server.
"""

from __future__ import annotations

from pathlib import Path

from moe_serve.dashboard.server import DashboardThread
from moe_serve.dashboard.settings import DashboardSettings
from moe_serve.telemetry.sink import actor_lines, this_node


class DashboardActor:
    """The page in an actor process.

    admin_address: host:port of the controller's admin port. token: bearer token of role `read`, ""
    without authentication. tls_authority: path of a PEM file, "" without TLS. Raises StartRefused
    for a host that is not loopback.
    """

    def __init__(
        self,
        admin_address: str,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str = "",
        tls_authority: str = "",
    ) -> None:
        actor_lines(part="page")
        self._page = DashboardThread(
            DashboardSettings(
                admin_address=admin_address,
                host=host,
                port=port,
                token=token,
                tls_authority=Path(tls_authority) if tls_authority else None,
                node=this_node(),
            )
        )

    def start(self) -> str:
        """URL of the page. Calling it again gives the same answer. Raises StartRefused."""
        return self._page.url()

    def stop(self) -> None:
        """End the page; the actor itself is killed by the caller."""
        self._page.stop()
