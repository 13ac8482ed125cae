"""The controller dies at every edge of a move, before and after its journal write, one point a
term: the next one goes on, and nobody else notices.

Experts are moved by draining one rank after another, and copies are aborted by lowering a budget,
until the point of the term has fired. In between the controller is killed at rest. After each:
a higher term, the same processes of all parts, no expert missing; whenever it is calm no byte is
held for nothing; no call has failed, and every output was right.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_serve.bootstrap.drill import Drill
from moe_serve.bootstrap.local_ray import LocalRay
from moe_serve.bootstrap.service import deploy
from moe_serve.errors import MoeServeError, StartRefused
from placement.messages.history import Began
from tests.chaos.faults import Faults
from tests.chaos.history import check_history, read_history
from tests.chaos.marker_service import WORKLOAD, await_calm, both_ways, marker_config, orphan_bytes
from tests.service_cluster import Service, part_pids, router_totals, running
from tests.traffic import Traffic

POINTS = tuple(
    f"{when}:{step}"
    for step in (
        "add:reserved",
        "add:copying",
        "add:verified",
        "add:listed",
        "add:aborting",
        "remove:unlisted",
        "remove:acked",
        "remove:drained",
        "remove:released",
        "publish",
    )
    for when in ("before", "after")
)
RANKS, SLOTS = 4, 8
RECOVERED_BAR_S = 5.0
FIRE_WAIT_S = 240.0
POLL_S = 0.02


@pytest.fixture(scope="module")
def service(
    ray_cluster: LocalRay, tmp_path_factory: pytest.TempPathFactory, history: Path
) -> Iterator[Service]:
    config = marker_config(tmp_path_factory.mktemp("killed"), "killed", slots=SLOTS, floor=1)
    # Nobody dies in term 1, which fills the ranks.
    with running(config, drill=Drill(fail_points=("", *POINTS)), history_dir=history) as deployed:
        # Only what is asked for moves; the pause has to survive as well.
        deployed.admin.pause("the test moves experts itself")
        yield deployed


class Mover:
    """Moves experts about, whether or not the controller lives to hear of it."""

    def __init__(self, service: Service, budget_bytes: int) -> None:
        self._service = service
        self._budget_bytes = budget_bytes
        self._ranks = itertools.cycle(range(RANKS))
        self._rank = -1

    def until_dead(self, pid: int, point: str) -> None:
        """Move until the process has ended."""
        deadline_s = time.monotonic() + FIRE_WAIT_S
        while os.path.exists(f"/proc/{pid}"):
            assert time.monotonic() < deadline_s, f"{point} was not reached"
            # What the controller did not live to answer is asked again.
            with contextlib.suppress(MoeServeError):
                self._step(pid, point)
            self._service.close()

    def rest(self) -> None:
        """Let every rank hold replicas again, with all of its budget."""
        for rank in range(RANKS):
            self._service.admin.undrain(rank)
            self._service.admin.set_budget(rank, self._budget_bytes)

    def _step(self, pid: int, point: str) -> None:
        """Empty the next rank."""
        admin = self._service.admin
        self.rest()
        self._rank = next(self._ranks)
        admin.drain(self._rank)
        while os.path.exists(f"/proc/{pid}"):
            placement = self._service.placement()
            slots = placement.ranks[self._rank].slots
            copying = any(s.state == "COPYING" for r in placement.ranks for s in r.slots)
            if copying and "aborting" in point:
                # Steps of a plan that is cancelled are aborted while they copy.
                less = self._budget_bytes - placement.slot_bytes
                admin.set_budget((self._rank + 1) % RANKS, less)
                return
            if all(slot.layer < 0 for slot in slots):
                return
            time.sleep(POLL_S)


@pytest.mark.timeout(600)
def test_a_controller_killed_at_any_edge_of_a_move_touches_nothing_else(
    service: Service, history: Path
) -> None:
    start = service.wait_quiet()
    parts, term = part_pids(start), start.term
    faults = Faults(service)
    mover = Mover(service, int(start.ranks[0].budget_bytes))
    # The n-th is where the controller of the n-th term from now on ends.
    ends = ("at rest", *POINTS)
    took_s: list[float] = []
    with Traffic(both_ways(service), WORKLOAD) as traffic:
        while term < start.term + len(ends):
            point, pid = ends[term - start.term], service.controller_pid()
            if point == "at rest":
                faults.kill_controller()
            else:
                mover.until_dead(pid, point)
            found, seconds = faults.await_controller(term, pid)
            # The next one may have come to its own point while it went on with the last one's work.
            deaths = found.term - term
            took_s.append(seconds / deaths)
            passed = ends[term - start.term : found.term - start.term]
            print(f"{', '.join(passed)}: term {found.term} after {seconds:.1f} s")
            assert part_pids(found) == parts, point
            term = found.term
        mover.rest()
        end = await_calm(service)
        traffic.more(20)
    totals = router_totals(end, ("requests", "failed", "retried_pairs", "stale_pairs"))
    print(
        f"kill points: {len(POINTS)} and one at rest; next controller after {max(took_s):.1f} s at "
        f"most, median {sorted(took_s)[len(took_s) // 2]:.1f} s (bar {RECOVERED_BAR_S:g} s); "
        f"{traffic.requests} requests ({traffic.per_s:.0f}/s), "
        f"{traffic.failed} failed, slowest {traffic.slowest_s:.2f} s; moves "
        f"{dict(end.moves_done)}; orphan bytes {orphan_bytes(end)}; routers {totals}"
    )
    assert traffic.failures == []
    assert totals["failed"] == 0
    assert end.term == start.term + len(POINTS) + 1
    assert part_pids(end) == parts
    assert orphan_bytes(end) == 0
    facts = read_history(history)
    # Every controller but the last was killed, most of them at a point of their own.
    lives = [f for f in facts if isinstance(f, Began) and f.place == "controller"]
    for began in lives[:-1]:
        faults.deeds.killed.setdefault(began.pid, began.at_s)
    assert check_history(facts, faults.deeds) == []


def test_a_controller_that_dies_while_it_starts_leaves_nothing(
    ray_cluster: LocalRay, tmp_path: Path
) -> None:
    from moe_serve.bootstrap.fleet import actor_names

    config = marker_config(tmp_path, "stillborn", slots=SLOTS, floor=1)
    with pytest.raises(StartRefused, match="while it starts") as refused:
        deploy(config, drill=Drill(fail_points=("after:add:copying",)))
    assert "\n" not in refused.value.message
    assert actor_names("stillborn") == []
