"""A local Ray cluster of two logical nodes, and services deployed on it, for tests.

Ray is imported late: it reads the mode of its token authentication when it is imported.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from moe_serve.bootstrap.drill import NO_DRILL, Drill
from moe_serve.bootstrap.local_ray import LocalRay, ensure_auth, start_local_ray, stop_local_ray
from moe_serve.bootstrap.service import Deployed, connected, deploy, undeploy
from moe_serve.cli.admin import AdminTarget, GrpcAdmin
from moe_serve.config import ServiceConfig
from moe_serve.errors import MoeServeError
from moe_serve.rpc import placement_pb2 as pb

NODES = ({"moe.node": "a"}, {"moe.node": "b"})
NODES_WAIT_S = 240.0
READY_WAIT_S = 150.0
POLL_S = 0.1

Placement = pb.GetPlacementResponse
Locations = dict[tuple[int, int], list[tuple[int, int]]]


@contextlib.contextmanager
def local_cluster() -> Iterator[LocalRay]:
    """Two logical nodes of this machine, token authentication on, this process as their driver.
    Nothing is left of them."""
    folder = Path(tempfile.mkdtemp(prefix="moe-"))
    try:
        ensure_auth(folder)
        cluster = start_local_ray(folder / "r", labels=NODES)
        try:
            with connected(cluster.address):
                _wait_for_nodes()
                yield cluster
        finally:
            stop_local_ray(cluster.pids, cluster.temp_dir)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for_nodes() -> None:
    from moe_serve.bootstrap.fleet import alive_nodes

    wait_until(
        "both logical nodes are alive", lambda: len(alive_nodes()) == len(NODES), NODES_WAIT_S
    )


def wait_until(what: str, holds: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """The first true value of a condition. Fails, naming it, where it does not come in time."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := holds()):
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(POLL_S)
    return found


def service_config(
    service: str,
    checkpoint: str,
    state_dir: Path,
    *,
    slots: int,
    rebalance: Mapping[str, Any] | None = None,
    limits: Mapping[str, Any] | None = None,
    routers: int = 2,
    nodes: Sequence[Mapping[str, str]] = NODES,
    router_node: str = "",
) -> ServiceConfig:
    """Two CPU ranks on each logical node of `nodes`, which is a failure domain; no page.
    router_node: where the routers are, "" = anywhere."""
    ranks = [
        {
            "count": 2,
            "slots": slots,
            "profile": "declared",
            "node_labels": dict(labels),
            "failure_domain_label": "moe.node",
        }
        for labels in nodes
    ]
    return ServiceConfig.model_validate(
        {
            "service": service,
            "model": {"name": service, "checkpoint": checkpoint},
            "fleet": {
                "routers": routers,
                "router_node_labels": {"moe.node": router_node} if router_node else {},
                "ranks": ranks,
            },
            # Slow arithmetic and fast copies: a move pays for itself soon.
            "profiles": [
                {
                    "name": "declared",
                    "flops_per_s": 2e7,
                    "memory_bytes_per_s": 2e8,
                    "copy_bytes_per_s": 1e8,
                }
            ],
            "rebalance": {"window_s": 1.0, "cooldown_s": 1.0, **(rebalance or {})},
            "limits": dict(limits or {}),
            "state_dir": state_dir,
            "dashboard": False,
        }
    )


@dataclass
class Service:
    """A service that is ready, its admin port and its parts."""

    config: ServiceConfig
    deployed: Deployed
    _admin: GrpcAdmin | None = field(default=None, init=False)

    @property
    def routers(self) -> tuple[str, ...]:
        return self.deployed.router_addresses

    @property
    def admin(self) -> GrpcAdmin:
        """A client of the controller that lives now."""
        if self._admin is None:
            self._admin = GrpcAdmin(AdminTarget(self.deployed.admin_address))
        return self._admin

    def placement(self) -> Placement:
        return self.admin.placement()

    def wait(
        self, what: str, holds: Callable[[Placement], Any], timeout_s: float = 60.0
    ) -> Placement:
        """The first placement for which it holds, whether or not a controller is there all the
        time."""
        seen: list[Placement] = []

        def look() -> bool:
            try:
                seen[:] = [self.placement()]
            except MoeServeError:
                self.close()  # a fresh channel connects at once, an old one backs off
                return False
            return bool(holds(seen[0]))

        try:
            wait_until(what, look, timeout_s)
        except AssertionError as error:
            state = [(p.state, list(p.problems), len(p.missing)) for p in seen]
            raise AssertionError(f"{error}; last seen: {state}") from None
        return seen[0]

    def wait_quiet(self, timeout_s: float = 60.0) -> Placement:
        """Wait until nothing moves and nothing is wrong."""
        return self.wait(
            "nothing moves, nothing is wrong",
            lambda p: p.state in ("steady", "paused") and not p.problems and not p.missing,
            timeout_s,
        )

    def pids(self) -> dict[str, int]:
        """Process of every shard and router."""
        return part_pids(self.placement())

    def controller_pid(self) -> int:
        """Process of the controller that lives now, 0 between two."""
        from moe_serve.bootstrap.fleet import controller_name

        return actor_pid(controller_name(self.config.service))

    def close(self) -> None:
        if self._admin is not None:
            self._admin.close()
            self._admin = None


def part_pids(placement: Placement) -> dict[str, int]:
    ranks = {f"rank {rank.rank}": rank.pid for rank in placement.ranks}
    return ranks | {router.router: router.pid for router in placement.routers}


def actor_pid(name: str) -> int:
    """Process of a live actor by Ray's own table, 0 where none lives."""
    from ray._private.state import actors

    table: dict[str, dict[str, Any]] = actors()
    alive = [entry for entry in table.values() if entry["Name"] == name]
    return next((int(entry["Pid"]) for entry in alive if entry["State"] == "ALIVE"), 0)


def locations(placement: Placement) -> Locations:
    """(layer, expert) -> sorted (rank, slot) of its listed replicas."""
    found: Locations = {}
    for rank in placement.ranks:
        for slot in rank.slots:
            if slot.state == "LISTED":
                found.setdefault((slot.layer, slot.expert), []).append((rank.rank, slot.index))
    return {key: sorted(places) for key, places in sorted(found.items())}


def router_totals(placement: Placement, names: Sequence[str]) -> dict[str, float]:
    """Counters of all routers added up."""
    return {
        name: sum(router.counters.get(name, 0.0) for router in placement.routers) for name in names
    }


@contextlib.contextmanager
def running(
    config: ServiceConfig, *, drill: Drill = NO_DRILL, history_dir: Path | str = ""
) -> Iterator[Service]:
    """A deployed service, taken down at the end. The cluster must be connected. history_dir: folder
    in which its processes note facts, for `tests.chaos.history`; "" = they note none."""
    began_s = time.monotonic()
    deployed = deploy(config, wait_s=READY_WAIT_S, drill=drill, history_dir=str(history_dir))
    print(f"\n{config.service}: ready after {time.monotonic() - began_s:.1f} s")
    service = Service(config, deployed)
    try:
        yield service
    finally:
        service.close()
        undeploy(config.service)


def stub_channel(address: str) -> grpc.Channel:
    """A plain channel to a router or the admin port."""
    return grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
