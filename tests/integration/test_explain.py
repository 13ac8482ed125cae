"""`moe-serve explain` on a running service: the planted cause is named, and no other; two at once
are both named; without any nothing is slow.

Compute is emulated, so that what a pair costs is known and no rank is slow for want of processors.
The same traffic runs all the time. While a cause is planted, every answer is looked at: one that
names something else fails at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from moe_serve.cli.app import app
from moe_serve.config import ServiceConfig
from moe_serve.controller.names import PartKind, PartName
from moe_serve.errors import Unavailable
from moe_serve.shard.faults import NO_FAULTS, FaultPoints
from tests.service_cluster import Service, service_config, wait_until
from tests.traffic import Arrays, Source, Traffic, Workload

pytestmark = pytest.mark.slow

LAYERS, EXPERTS, TOP_K, HIDDEN, INNER = 4, 32, 4, 128, 64
SLOTS = 40
"""32 of each rank hold every expert once; three ranks cannot hold them all, so that those of a lost
one are missing until it is back."""
ROWS = 6
PAIR_S = 0.002
SPAN_S = 4.0
WINDOWS_OUT_OF_SIGHT = 6
"""Load windows, of a second each, after which nothing of before is looked at any more."""
FOUND_WITHIN_S = 40.0
SLOW_S = 0.05
"""Longer that each batch of a slow rank takes: some four times as long as it should."""


@dataclass
class Mix:
    """What front ends ask for now; `hot`: every row wants expert 0."""

    hot: bool = False

    def make(self, rng: np.random.Generator) -> Arrays:
        hidden = rng.standard_normal((ROWS, HIDDEN)).astype(np.float32)
        if self.hot:
            others = rng.integers(1, EXPERTS, ROWS)
            ids = np.stack([np.zeros(ROWS, np.int64), others], axis=1).astype(np.int32)
        else:
            ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(ROWS)])
        gates = rng.random(ids.shape).astype(np.float32)
        return int(rng.integers(LAYERS)), hidden, ids.astype(np.int32), gates


def identity(_layer: int, hidden: Any, _ids: Any, gates: Any) -> Any:
    """The emulated backend's experts."""
    return gates.astype(np.float64).sum(axis=1)[:, None] * hidden.astype(np.float64)


def emulated(scratch: Path) -> ServiceConfig:
    """Single replicas and room for more; a copy may take long before it counts as hanging."""
    made = service_config(
        "explained",
        "package:tiny_moe",
        scratch / "state",
        slots=SLOTS,
        rebalance={"floor": 1, "first_policy": "incremental", "drain_wait_s": 1.0},
        # Four requests of a router at once.
        limits={"max_rows_in_flight": 4 * ROWS},
    ).model_dump(mode="json")
    for group in made["fleet"]["ranks"]:
        group["backend"] = "emulated"
    (profile,) = made["profiles"]
    profile |= {
        "flops_per_s": 6 * HIDDEN * INNER / PAIR_S,
        "memory_bytes_per_s": 1e12,
        "copy_bytes_per_s": 2e4,
    }
    return ServiceConfig.model_validate(made)


@dataclass
class Rig:
    """The service, its steady traffic, and the one way to ask."""

    service: Service
    mix: Mix
    home: list[list[int]] = field(default_factory=list)
    """Keys by rank as they were filled first."""
    ordered: set[int] = field(default_factory=set)
    disturbed: bool = False
    """Something was planted before."""

    def ask(self) -> tuple[int, dict[str, Any]]:
        """Exit code and answer of the command."""
        address = self.service.deployed.admin_address
        args = ["explain", "--address", address, "--seconds", f"{SPAN_S:g}", "-o", "json"]
        result = CliRunner().invoke(app, args)
        assert result.stdout, (result.exit_code, result.stderr, result.exception)
        return result.exit_code, json.loads(result.stdout)

    def verdict(self) -> str:
        """nothing_slow, slow or idle."""
        code, answer = self.ask()
        assert code == 0, answer
        assert (answer["verdict"] == "slow") == bool(answer["causes"]), answer
        assert all(cause["text"] and cause["next_step"] for cause in answer["causes"])
        return str(answer["verdict"])

    def window(self) -> int:
        """Number of the newest closed window, waiting for the first of a new controller."""
        found: list[int] = []

        def closed() -> bool:
            with contextlib.suppress(Unavailable):
                found[:] = [self.service.admin.load().window]
            return bool(found)

        wait_until("a window closes", closed)
        return found[0]

    def calm(self) -> None:
        """Wait until what was planted before is out of sight, and nothing is slow."""
        if self.disturbed:
            first = self.window() + WINDOWS_OUT_OF_SIGHT
            wait_until("what was planted is out of sight", lambda: self.window() >= first)
        self.disturbed = True
        self.until(lambda: self.verdict() == "nothing_slow", "nothing is slow")

    def names(self, *planted: str) -> dict[str, dict[str, Any]]:
        """Wait until exactly the planted causes are named; any other fails at once."""
        want = set(planted)
        answers: list[dict[str, Any]] = []

        def found() -> bool:
            _, answer = self.ask()
            answers[:] = [answer]
            kinds = {cause["kind"] for cause in answer["causes"]}
            assert kinds <= want, f"planted {sorted(want)}, named {answer['causes']}"
            return kinds == want

        self.until(found, f"{sorted(want)} named", lambda: answers)
        return {cause["kind"]: cause for cause in answers[0]["causes"]}

    def until(
        self, holds: Callable[[], bool], what: str, seen: Callable[[], object] = tuple
    ) -> None:
        began_s = time.monotonic()
        while not holds():
            waited_s = time.monotonic() - began_s
            assert waited_s < FOUND_WITHIN_S, f"not in {FOUND_WITHIN_S} s: {what}; {seen()}"
            time.sleep(0.3)
        print(f"{what} after {time.monotonic() - began_s:.1f} s")

    def order(self, rank: int, points: FaultPoints) -> None:
        """Order faults of a shard."""
        import ray

        from moe_serve.bootstrap.fleet import NAMESPACE

        life = self.service.placement().ranks[rank].incarnation
        name = str(PartName(self.service.config.service, PartKind.SHARD, str(rank), life))
        handle: Any = ray.get_actor(name, namespace=NAMESPACE)
        ray.get(handle.order_faults.remote(points), timeout=30.0)
        self.ordered.add(rank)

    def go_home(self) -> None:
        """Put every expert where it was filled first."""
        service = self.service
        service.wait_quiet(60.0)
        if keys_by_rank(service) == self.home:
            return
        plan = service.admin.plan_to("", self.home).plan
        service.admin.apply_plan(plan.plan_id, validate_only=False)
        wait_until("every expert is where it was", lambda: keys_by_rank(service) == self.home)
        service.wait_quiet(60.0)

    def undo(self) -> None:
        """Take every order back, and what was moved."""
        self.mix.hot = False
        for rank in sorted(self.ordered):
            self.order(rank, NO_FAULTS)
        self.ordered.clear()
        self.go_home()


@pytest.fixture(scope="module")
def running_rig(deploy_service: Any, scratch: Path) -> Iterator[Rig]:
    service: Service = deploy_service(emulated(scratch))
    service.admin.pause("causes are planted")
    service.wait_quiet(120.0)
    mix = Mix()
    sources = [Source(address, stream=False, pause_s=0.02) for address in service.routers]
    with Traffic(sources, Workload(mix.make, identity)):
        yield Rig(service, mix, keys_by_rank(service))


@pytest.fixture
def rig(running_rig: Rig) -> Iterator[Rig]:
    """The module's rig, with nothing slow before the test."""
    running_rig.calm()
    yield running_rig
    running_rig.undo()


@contextmanager
def many_calls(rig: Rig) -> Iterator[None]:
    """Far more open calls than the routers take."""
    sources = [
        Source(address, stream=False, open_calls=16, pause_s=0.0) for address in rig.service.routers
    ]
    with Traffic(sources, Workload(rig.mix.make, identity)):
        yield


def test_nothing_planted_is_nothing_slow(rig: Rig) -> None:
    slowest: list[float] = []
    for _ in range(20):
        code, answer = rig.ask()
        assert (code, answer["verdict"], answer["causes"]) == (0, "nothing_slow", [])
        slowest.append(max(part["slowness"] for part in answer["ranks"]))
        time.sleep(0.3)
    print(f"nothing planted: a rank seemed up to {max(slowest):.2f} x as slow as the others")


def test_a_hot_expert(rig: Rig) -> None:
    rig.mix.hot = True
    cause = rig.names("hot_expert")["hot_expert"]
    assert cause["expert"] == 0
    assert cause["evidence"]["replicas"] == 1.0


def test_a_slow_rank(rig: Rig) -> None:
    rig.order(2, FaultPoints(delay_compute_s=SLOW_S))
    cause = rig.names("slow_rank")["slow_rank"]
    assert cause["rank"] == 2


def test_overload(rig: Rig) -> None:
    with many_calls(rig):
        cause = rig.names("overload")["overload"]
    assert cause["evidence"]["queue_share"] > 0.2


def test_a_copy(rig: Rig) -> None:
    plan = rig.service.admin.plan_to("", one_more(rig.service, rank=1)).plan
    assert len(plan.moves) == 1, plan
    rig.order(1, FaultPoints(delay_copy_s=15.0, delay_compute_s=SLOW_S))
    rig.service.admin.apply_plan(plan.plan_id, validate_only=False)
    cause = rig.names("copy")["copy"]
    assert cause["rank"] == 1
    assert cause["evidence"]["target_rank"] == 1.0


def one_more(service: Service, rank: int) -> list[list[int]]:
    """Keys by rank as they are, and one more on this rank, not that of a hot expert."""
    held = keys_by_rank(service)
    held[rank].append(next(key for key in held[0] if key not in held[rank] and key % EXPERTS))
    return [sorted(keys) for keys in held]


def test_two_at_once(rig: Rig) -> None:
    hot = ranks_of_expert(rig.service, 0)
    rank = next(rank for rank in range(4) if rank not in hot)
    rig.mix.hot = True
    # Not so slow that the other one is nothing beside it.
    rig.order(rank, FaultPoints(delay_compute_s=SLOW_S / 2))
    found = rig.names("hot_expert", "slow_rank")
    assert found["slow_rank"]["rank"] == rank
    assert found["hot_expert"]["rank"] in hot


def keys_by_rank(service: Service) -> list[list[int]]:
    """What is listed."""
    return [
        sorted(s.layer * EXPERTS + s.expert for s in one.slots if s.state == "LISTED")
        for one in service.placement().ranks
    ]


def ranks_of_expert(service: Service, expert: int) -> set[int]:
    """Where it is, in whatever layer."""
    return {
        one.rank
        for one in service.placement().ranks
        for slot in one.slots
        if slot.state == "LISTED" and slot.expert == expert
    }


def test_a_cold_start(rig: Rig) -> None:
    shard = rig.service.placement().ranks[3]
    os.kill(shard.pid, signal.SIGKILL)
    rig.names("cold_start")
    rig.service.wait("rank 3 serves again", lambda p: not p.missing and p.ranks[3].state == "up")
    # Its experts were put where there was room, which is no even placement: see `undo`.


def test_the_controller_away(rig: Rig) -> None:
    pid, term = rig.service.controller_pid(), rig.service.placement().term
    os.kill(pid, signal.SIGKILL)
    code, answer = rig.ask()
    assert code == 3
    assert [cause["kind"] for cause in answer["causes"]] == ["controller_away"]
    rig.service.wait("a controller again", lambda p: p.term > term and p.state != "starting")
    rig.calm()
