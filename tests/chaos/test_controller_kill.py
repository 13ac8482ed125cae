"""The controller is killed five times while experts move and calls are served: nothing else
notices.

Once between the commit of a removal and the table that follows from it, twice while a copy runs,
once at rest, once as soon as the next controller answers. Parts keep their processes, no call
fails, every drain that was begun is finished by a later controller, and so is a new one.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_serve.bootstrap.local_ray import LocalRay
from moe_serve.bootstrap.service import deploy
from moe_serve.config import ServiceConfig
from moe_serve.errors import MoeServeError, StartRefused
from tests.marker_checkpoint import (
    EXPERTS,
    LAYERS,
    TOP_K,
    marker_oracle,
    marker_rows,
    write_marker_checkpoint,
)
from tests.service_cluster import (
    Placement,
    Service,
    part_pids,
    router_totals,
    running,
    service_config,
    wait_until,
)
from tests.traffic import Source, Traffic, Workload, draw

COPY_BYTES_PER_S = 1024
"""An expert of 768 bytes takes three quarters of a second: time enough to be caught copying."""
BETWEEN_JOURNAL_AND_PUBLISH = "after:remove:unlisted"
"""The removal is committed, its table is not sent yet."""
RESTART_WAIT_S = 90.0
REQUESTS_PER_S = 20.0

WORKLOAD = Workload(
    lambda rng: draw(rng, marker_rows, layers=LAYERS, experts=EXPERTS, top_k=TOP_K), marker_oracle
)


def killed_config(scratch: Path, service: str) -> ServiceConfig:
    checkpoint = write_marker_checkpoint(scratch / "marker")
    return service_config(
        service,
        str(checkpoint),
        scratch / service,
        slots=8,
        rebalance={"drain_wait_s": 1.0, "floor": 1},
        limits={"copy_bytes_per_s": COPY_BYTES_PER_S},
    )


@pytest.fixture(scope="module")
def service(ray_cluster: LocalRay, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    config = killed_config(tmp_path_factory.mktemp("killed"), "killed")
    with running(config, fail_point=BETWEEN_JOURNAL_AND_PUBLISH) as deployed:
        # Only what is asked for moves; the pause has to survive as well.
        deployed.admin.pause("the test moves experts itself")
        yield deployed


class Killer:
    """Ends controllers as `kill -9` does, and checks after each that nothing else changed."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._parts = service.pids()
        self._pid = service.controller_pid()
        self._term = service.placement().term
        self.restarts_s: list[float] = []
        assert self._pid > 0
        assert all(self._parts.values())

    def kill(self) -> None:
        """Kill the controller that lives now and wait for the next one."""
        os.kill(self._pid, signal.SIGKILL)
        self.await_next()

    def await_next(self) -> None:
        """The next controller answers in a higher term, and all parts are the same processes."""
        began_s = time.monotonic()
        before = self._pid
        self._pid = wait_until(
            "Ray restarted the controller",
            lambda: (pid := self._service.controller_pid()) not in (0, before) and pid,
            RESTART_WAIT_S,
        )
        self._service.close()
        found = self._service.wait(
            "the next controller knows all parts",
            lambda p: p.term > self._term and 0 not in part_pids(p).values() and not p.missing,
            RESTART_WAIT_S,
        )
        self.restarts_s.append(time.monotonic() - began_s)
        self._term = found.term
        assert part_pids(found) == self._parts

    def dies_by_itself(self) -> None:
        """Wait until the fail point has ended the controller."""
        wait_until(
            "the controller reached its fail point",
            lambda: not os.path.exists(f"/proc/{self._pid}"),
            RESTART_WAIT_S,
        )


def await_copying(service: Service) -> None:
    """A copy of the running plan is on its way."""

    def copying() -> bool:
        try:
            return any(step.state == "COPYING" for step in service.admin.steps())
        except MoeServeError:
            return False

    wait_until("a step is in COPYING", copying)


def await_empty(service: Service, rank: int) -> Placement:
    """A drained rank holds nothing any more, and nothing else moves."""

    def empty(placement: Placement) -> bool:
        left = [slot for slot in placement.ranks[rank].slots if slot.layer >= 0]
        return not left and placement.state == "paused"

    return service.wait(f"rank {rank} is empty", empty, 90.0)


def test_five_kills_of_the_controller_touch_nothing_else(service: Service) -> None:
    start = service.wait_quiet()
    killer = Killer(service)
    both = [Source(a, stream) for a in service.routers for stream in (False, True)]
    with Traffic(both, WORKLOAD) as traffic:
        service.admin.drain(0)
        killer.dies_by_itself()
        killer.await_next()
        await_empty(service, 0)
        for rank in (1, 2):
            service.admin.undrain(rank - 1)
            service.admin.drain(rank)
            await_copying(service)
            killer.kill()
            await_empty(service, rank)
        killer.kill()
        killer.kill()
        service.admin.undrain(2)
        before = service.wait_quiet()
        service.admin.drain(3)
        end = await_empty(service, 3)
        service.admin.undrain(3)
        traffic.more(20)
    done = int(end.moves_done["migrate"]) - int(before.moves_done["migrate"])
    totals = router_totals(service.wait_quiet(), ("requests", "failed", "retried_pairs"))
    print(
        f"controller kills: {len(killer.restarts_s)}, next one after "
        f"{[round(s, 1) for s in killer.restarts_s]} s; {traffic.requests} requests "
        f"({traffic.per_s:.0f}/s), {traffic.failed} failed, slowest {traffic.slowest_s:.2f} s; "
        f"moves {dict(start.moves_done)} -> {dict(end.moves_done)}, {done} in the last term "
        f"{end.term}; routers {totals}"
    )
    assert len(killer.restarts_s) == 5
    assert traffic.failures == []
    assert traffic.per_s >= REQUESTS_PER_S
    assert totals["failed"] == 0
    assert done >= 1
    assert part_pids(end) == part_pids(start)


def test_a_controller_that_dies_while_it_starts_leaves_nothing(
    ray_cluster: LocalRay, tmp_path: Path
) -> None:
    from moe_serve.bootstrap.fleet import actor_names

    config = killed_config(tmp_path, "stillborn")
    with pytest.raises(StartRefused, match="while it starts") as refused:
        deploy(config, fail_point="after:add:copying")
    assert "\n" not in refused.value.message
    assert actor_names("stillborn") == []
