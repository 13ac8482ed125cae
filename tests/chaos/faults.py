"""What can be done to a running service: ends, pauses, cuts, damage. Chaos tests and the soak use
these and nothing else.

Parts are named as `Service.pids` names them: "rank 0", "router-1". Who lives is asked of Ray's own
table, so that a controller that is dead or stopped hinders nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moe_serve.controller.names import PartKind, parse
from moe_serve.shard.faults import NO_FAULTS, FaultPoints
from tests.chaos.history import Deeds
from tests.chaos.proxy import Proxy
from tests.service_cluster import Placement, Service, wait_until

CONTROLLER = "controller"
GONE_WAIT_S = 30.0
LIFE_WAIT_S = 180.0
ORDER_WAIT_S = 20.0


class Faults:
    """Actions on one service. `proxy`: the one its routers reach shards through, where it was
    deployed with one (`Drill.socks_proxy`). `deeds`: what was done, for `check_history`."""

    def __init__(
        self, service: Service, proxy: Proxy | None = None, deeds: Deeds | None = None
    ) -> None:
        self.service = service
        self.proxy = proxy
        self.deeds = Deeds() if deeds is None else deeds
        self._stopped: dict[int, float] = {}

    # ------------------------------------------------------------------------------- processes

    def actor_names(self) -> dict[str, str]:
        """Part -> name of its actor, of the newest life that Ray counts as alive."""
        found: dict[str, tuple[int, str]] = {}
        service = self.service.config.service
        for name in _alive_actors():
            part = parse(service, name)
            if part is not None:
                place = f"rank {part.place}" if part.kind is PartKind.SHARD else part.place
                found[place] = max(found.get(place, (-1, "")), (part.incarnation, name))
        return {place: name for place, (_, name) in sorted(found.items())}

    def pids(self) -> dict[str, int]:
        """Part -> process, of every shard and router that lives by Ray's word."""
        alive = _alive_actors()
        return {place: alive[name] for place, name in self.actor_names().items()}

    def pid(self, part: str) -> int:
        """Process of a part or of the controller. Fails where it does not live."""
        pid = self.service.controller_pid() if part == CONTROLLER else self.pids().get(part, 0)
        assert pid, f"{part} does not live"
        return pid

    def kill_part(self, part: str) -> int:
        """`kill -9`, and wait until the process is gone. Returns what its id was."""
        pid = self.pid(part)
        self.deeds.kill(pid)
        self._ended(pid)
        os.kill(pid, signal.SIGKILL)
        await_gone(pid)
        return pid

    def pause_part(self, part: str) -> int:
        """SIGSTOP: it is there, keeps its connections, and does nothing. Returns its process, for
        `resume`."""
        pid = self.pid(part)
        os.kill(pid, signal.SIGSTOP)
        self._stopped[pid] = time.monotonic()
        return pid

    def resume(self, pid: int) -> None:
        """SIGCONT; a process that has ended meanwhile is left alone."""
        self._ended(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def _ended(self, pid: int) -> None:
        """A pause is over."""
        since_s = self._stopped.pop(pid, None)
        if since_s is not None:
            self.deeds.paused.append((pid, since_s, time.monotonic()))

    @contextlib.contextmanager
    def paused(self, part: str) -> Iterator[int]:
        """Paused inside the context."""
        pid = self.pause_part(part)
        try:
            yield pid
        finally:
            self.resume(pid)

    def kill_controller(self) -> int:
        """`kill_part` of the controller."""
        return self.kill_part(CONTROLLER)

    def pause_controller(self) -> int:
        """`pause_part` of the controller."""
        return self.pause_part(CONTROLLER)

    def await_controller(self, term: int, before: int = 0) -> tuple[Placement, float]:
        """Wait until a controller of a higher term knows all parts and misses no expert. before:
        process of the last one. Returns what it says, and how many seconds it took."""
        began_s = time.monotonic()
        wait_until(
            "Ray has a controller again",
            lambda: self.service.controller_pid() not in (0, before),
            LIFE_WAIT_S,
        )
        self.service.close()
        found = self.service.wait(
            f"a controller of a term above {term} knows all parts",
            lambda p: (
                p.term > term and not p.missing and all(r.pid for r in (*p.ranks, *p.routers))
            ),
            LIFE_WAIT_S,
        )
        return found, time.monotonic() - began_s

    # ------------------------------------------------------------------------------- network

    def shard_address(self, part: str) -> str:
        """host:port of a shard's wire, as the controller knows it now."""
        rank = int(part.removeprefix("rank "))
        found = next(r for r in self.service.placement().ranks if r.rank == rank)
        return str(found.address).removeprefix("tcp://")

    def cut(self, part: str, *, there: bool = True, back: bool = True) -> str:
        """Part all routers from a shard: what goes to it, what comes back, or both. Returns the
        address that was cut, for `heal`."""
        assert self.proxy is not None, "deploy with Drill(socks_proxy=...)"
        address = self.shard_address(part)
        self.proxy.cut(address, there=there, back=back)
        return address

    def heal(self, address: str = "") -> None:
        """End cuts and delays."""
        if self.proxy is not None:
            self.proxy.heal(address)

    # ------------------------------------------------------------------------------- shard hooks

    def order_shard(self, part: str, points: FaultPoints = NO_FAULTS) -> None:
        """Order faults of a shard's compute and copies, in the place of those ordered before
        (`corrupt`, `oom-...`, `delay_compute_s`, `stop_copy_at`: see `moe_serve.shard.faults`)."""
        import ray

        from moe_serve.bootstrap.fleet import NAMESPACE

        name = self.actor_names().get(part)
        assert name is not None, f"{part} does not live"
        handle: Any = ray.get_actor(name, namespace=NAMESPACE)
        ray.get(handle.order_faults.remote(points), timeout=ORDER_WAIT_S)

    # ------------------------------------------------------------------------------- end

    def end_all(self) -> None:
        """Take back whatever may be taken back: pauses and cuts."""
        for pid in list(self._stopped):
            self.resume(pid)
        self.heal()


def _alive_actors() -> dict[str, int]:
    """Name -> process of every named actor that lives by Ray's word."""
    from ray._private.state import actors

    table: dict[str, dict[str, Any]] = actors()
    return {
        str(entry["Name"]): int(entry["Pid"])
        for entry in table.values()
        if entry["Name"] and entry["State"] == "ALIVE"
    }


def await_gone(pid: int) -> None:
    """Wait until a process is no more, or a zombie."""

    def gone() -> bool:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return True
        return stat.rsplit(")", 1)[1].split()[0] == "Z"

    wait_until(f"process {pid} is gone", gone, GONE_WAIT_S)
