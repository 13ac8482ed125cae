"""A fleet that changes while it serves: a rank leaves, ranks join, every part is replaced.

Marker weights, so that an answer of a wrong expert shows; traffic through both routers, unary and
stream, all the time; not one call may fail.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_serve.cli.rolling import Clock, PartGroup, Roll
from moe_serve.config import ServiceConfig
from moe_serve.errors import FailedPrecondition, MoeServeError
from tests.cli_process import Shell
from tests.doc_blocks import Block, marked
from tests.marker_checkpoint import (
    EXPERTS,
    LAYERS,
    TOP_K,
    marker_oracle,
    marker_rows,
    write_marker_checkpoint,
)
from tests.page_shell import PageShell
from tests.service_cluster import Placement, Service, part_pids, service_config, wait_until
from tests.traffic import Source, Traffic, Workload, draw

THIS = "tests/integration/test_elastic.py"
OPERATE = "docs/how-to/operate.md"
MAINTENANCE = "Maintenance of a machine"
FLEET = "A fleet that grows and shrinks"
VERSION = "A new version, part by part"
SLOTS = 18
"""One rank can hold all 16 experts, so that two on a node can do without either."""
KEYS = LAYERS * EXPERTS

WORKLOAD = Workload(
    lambda rng: draw(rng, marker_rows, layers=LAYERS, experts=EXPERTS, top_k=TOP_K), marker_oracle
)


@pytest.fixture(scope="module")
def checkpoint(scratch: Path) -> Path:
    return write_marker_checkpoint(scratch / "marker")


@pytest.fixture(scope="module")
def service(deploy_service: Any, scratch: Path, checkpoint: Path) -> Service:
    config = service_config(
        "elastic",
        str(checkpoint),
        scratch / "state",
        slots=SLOTS,
        rebalance={"drain_wait_s": 1.0, "floor": 2},
    )
    deployed: Service = deploy_service(one_rank_fewer(config))
    return deployed


def one_rank_fewer(config: ServiceConfig) -> ServiceConfig:
    """Two ranks on node a, one on node b: a part less to start and to replace."""
    first, second = config.fleet.ranks
    ranks = [first, second.model_copy(update={"count": 1})]
    return config.model_copy(update={"fleet": config.fleet.model_copy(update={"ranks": ranks})})


@contextlib.contextmanager
def traffic_through(service: Service) -> Iterator[Traffic]:
    sources = [Source(a, stream) for a in service.routers for stream in (False, True)]
    with Traffic(sources, WORKLOAD) as traffic:
        yield traffic
        traffic.more(20)
    print(f"{traffic.requests} calls, {traffic.failed} failed, slowest {traffic.slowest_s:.2f} s")
    assert traffic.failures == []


def state(placement: Placement, rank: int) -> str:
    return placement.ranks[rank].state if rank < len(placement.ranks) else "absent"


def held(placement: Placement, rank: int) -> int:
    return sum(slot.state == "LISTED" for slot in placement.ranks[rank].slots)


def domains(placement: Placement) -> int:
    """Failure domains of the expert that has the fewest."""
    found: dict[tuple[int, int], set[str]] = {}
    for rank in placement.ranks:
        for slot in rank.slots:
            if slot.state == "LISTED":
                found.setdefault((slot.layer, slot.expert), set()).add(rank.failure_domain)
    return min((len(where) for where in found.values()), default=0) if len(found) == KEYS else 0


def looking(service: Service, floors: list[int]) -> Clock:
    """A clock that looks at the floor each time it is asked to wait."""

    def sleep(seconds: float) -> None:
        with contextlib.suppress(MoeServeError):  # between two controllers nobody says
            floors.append(domains(service.placement()))
        time.sleep(seconds)

    return Clock(sleep=sleep)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def have_on_b(service: Service, count: int) -> Placement:
    """So many ranks on node b, whatever the test before has left, and nothing that moves."""
    found = [r.rank for r in service.wait_quiet().ranks if (r.node, r.state) == ("b", "up")]
    for rank in found[count:]:
        service.admin.remove_rank(rank, False)
    for _ in range(count - len(found)):
        service.admin.add_rank(1, "b", None)

    def there(placement: Placement) -> bool:
        states = [r.state for r in placement.ranks if r.node == "b" and r.state != "removed"]
        return states == ["up"] * count

    service.wait(f"{count} ranks are on node b", there)
    return service.wait_quiet()


def settled(placement: Placement) -> bool:
    return placement.state in ("steady", "moving", "planning") and not placement.missing


def page(section: str, word: str = "run") -> Block:
    """A section's block of the page on how to operate, by its mark."""
    (block,) = [b for b in marked(OPERATE, THIS, word) if b.section == section]
    return block


def test_every_block_of_how_to_operate_is_in_a_test_below() -> None:
    assert [block.section for block in marked(OPERATE, THIS)] == [MAINTENANCE]
    assert [block.section for block in marked(OPERATE, THIS, "slow")] == [FLEET, VERSION]


def said_by(service: Service, scratch: Path, words: list[str], **places: str) -> str:
    """What a command of the page says. `places`: what stands for its words in capitals."""
    shell = Shell(scratch / "user", extra={"MOE_SERVE_ADDRESS": service.deployed.admin_address})
    return PageShell(shell, scratch / "files", places).command(words)


def test_a_rank_leaves_and_comes_back_and_another_joins(service: Service, scratch: Path) -> None:
    start = have_on_b(service, 1)
    new = len(start.ranks)
    with pytest.raises(FailedPrecondition, match=r"1 failure domain\(s\) instead of 2"):
        service.admin.remove_rank(2, False)  # the only one on node b
    with traffic_through(service):
        began_s = time.monotonic()
        service.admin.remove_rank(1, False)
        left = service.wait("rank 1 has left", lambda p: state(p, 1) == "removed" and settled(p))
        wait_until("its process has ended", lambda: not alive(start.ranks[1].pid))
        print(f"rank 1 left in {time.monotonic() - began_s:.1f} s")
        assert [held(left, rank) for rank in range(3)] == [KEYS, 0, KEYS]

        os.kill(service.controller_pid(), signal.SIGKILL)
        after = service.wait(
            "a new controller knows it", lambda p: p.term > start.term and settled(p)
        )
        here = [rank for rank in range(new) if state(after, rank) != "removed"]
        assert here == [0, 2]
        assert after.ranks[0].pid == start.ranks[0].pid

        began_s = time.monotonic()
        assert service.admin.add_rank(0, "", 1).rank == 1
        assert service.admin.add_rank(0, "b", None).rank == new
    # Node b is not in group 0: nobody can start it there, and that is said.
    service.wait(
        "the wrong place is named",
        lambda p: any(f"rank {new} does not start" in x for x in p.problems),
    )
    service.admin.remove_rank(new, False)
    with traffic_through(service):
        assert service.admin.add_rank(1, "b", None).rank == new + 1
        joined = service.wait(
            "both are up", lambda p: state(p, 1) == state(p, new + 1) == "up" and not p.problems
        )
        print(f"ranks 1 and {new + 1} joined in {time.monotonic() - began_s:.1f} s")
        assert [r.node for r in joined.ranks[:3]] == ["a", "a", "b"]
        assert joined.ranks[new + 1].node == "b"
        assert joined.ranks[1].incarnation > start.ranks[1].incarnation
        drain, undrain = page(MAINTENANCE).commands
        said_by(service, scratch, drain, RANK="2")
        service.wait(
            "the new rank holds node b's share", lambda p: held(p, new + 1) == KEYS and settled(p)
        )
        said_by(service, scratch, undrain, RANK="2")
    service.wait_quiet()


def test_every_part_is_replaced_and_a_roll_that_fails_leaves_the_rest_serving(
    service: Service, checkpoint: Path
) -> None:
    before = have_on_b(service, 2)
    ranks = [rank.rank for rank in before.ranks if rank.state == "up"]
    lines: list[str] = []
    with traffic_through(service):
        began_s = time.monotonic()
        floors: list[int] = []
        roll = Roll(service.admin, lines.append, wait_s=120.0, clock=looking(service, floors))
        roll.run()
        print(f"floors seen: {sorted(set(floors))}, {len(floors)} looks")
        assert floors
        assert min(floors) == 2
        print(f"{len(roll.replaced)} parts replaced in {time.monotonic() - began_s:.1f} s")
        print(*lines, sep="\n")
    after = service.placement()
    assert roll.replaced == [*(f"rank {n}" for n in ranks), "router-0", "router-1", "controller"]
    assert after.term == before.term + 1
    assert [r.address for r in after.routers] == [r.address for r in before.routers]
    old, new = part_pids(before), part_pids(after)
    assert not [name for name in roll.replaced[:-1] if old[name] == new[name]]
    assert not [pid for name, pid in old.items() if pid and alive(pid)]

    away = checkpoint.rename(checkpoint.with_name("away"))
    with traffic_through(service):
        roll = Roll(service.admin, lines.append, wait_s=120.0)
        with pytest.raises(FailedPrecondition, match=r"stopped at rank 0: .* is not a folder"):
            roll.run([PartGroup.RANKS])
        stopped = service.placement()
        assert roll.replaced == []
        assert not stopped.missing
        untouched = {n: pid for n, pid in part_pids(stopped).items() if n != "rank 0"}
        assert untouched == {n: pid for n, pid in new.items() if n != "rank 0"}
        assert any("rank 0 does not start" in problem for problem in stopped.problems)
    away.rename(checkpoint)
    service.wait("rank 0 is back by itself", lambda p: state(p, 0) == "up" and not p.problems)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_fleet_grows_shrinks_and_rolls_as_the_page_says(service: Service, scratch: Path) -> None:
    start = have_on_b(service, 1)
    new, node = len(start.ranks), start.ranks[0].node
    grow, on_group, on_node, shrink, again = page(FLEET, "slow").commands
    with traffic_through(service):
        for count, words in enumerate((grow, on_group, on_node)):
            assert f"rank {new + count}" in said_by(service, scratch, words, NODE=node)
        nodes = service.wait(
            "three joined", lambda p: all(state(p, new + n) == "up" for n in range(3))
        )
        assert [nodes.ranks[new + n].node for n in range(3)] == ["a", "b", node]
        said_by(service, scratch, shrink, RANK=str(new))
        service.wait("it has left", lambda p: state(p, new) == "removed" and settled(p))
        said_by(service, scratch, again, RANK=str(new))
        service.wait("it is back", lambda p: state(p, new) == "up" and settled(p))
        for words in page(VERSION, "slow").commands:
            assert "controller" in said_by(service, scratch, words)
        for count in range(3):
            service.admin.remove_rank(new + count, True)
            service.wait("it left", lambda p, n=new + count: state(p, n) == "removed")
    service.wait_quiet()
