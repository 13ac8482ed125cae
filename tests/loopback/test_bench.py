"""The load generator against a real gRPC server on loopback, and the command as a process."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_serve.bench import BenchLoad, BenchReport, run_bench, zipf_choices
from moe_serve.client import AsyncClient
from moe_serve.errors import ResourceExhausted
from tests.fakes.dispatch_service import fake_routers, threaded_router

TIMEOUT_S = 120


def _load(**changes: Any) -> BenchLoad:
    given = {
        "rate_per_s": 100.0,
        "callers": 0,
        "seconds": 0.5,
        "tokens": 4,
        "decode_share": 0.5,
        "warm_up_s": 0.0,
        "timeout_s": 30.0,
        "target_s": 60.0,
        "seed": 1,
    }
    return BenchLoad(**{**given, **changes})


async def _bench(address: str, **changes: Any) -> BenchReport:
    async with AsyncClient([address]) as client:
        spec = await client.spec()
        choices = zipf_choices(
            layers=spec.num_layers,
            experts=spec.num_experts,
            top_k=spec.top_k,
            tokens=4,
            exponent=1.0,
            seed=1,
        )
        return await run_bench(client, spec, _load(**changes), choices)


@pytest.mark.asyncio
async def test_every_request_arrives_and_is_answered() -> None:
    async with fake_routers(1) as (router,):
        found = await _bench(router.address)
        arrived = router.requests
    assert found.model == "marker"
    assert found.requests == found.answered == len(arrived) > 10
    assert {request.layer for request in arrived} == {0, 1}
    assert found.within_target == 1.0
    assert found.latency.p50_s > 0


@pytest.mark.asyncio
async def test_refusals_and_late_answers_stand_under_their_code() -> None:
    async with fake_routers(1) as (router,):
        router.behaviour.fail = lambda _: (
            ResourceExhausted("the queue is full") if len(router.requests) % 3 == 0 else None
        )
        router.behaviour.delay_s = lambda _: 30.0 if len(router.requests) % 3 == 1 else 0.0
        found = await _bench(router.address, timeout_s=1.0)
    assert set(found.errors) == {"DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"}
    assert found.answered == found.requests - sum(found.errors.values()) > 0


@pytest.mark.asyncio
async def test_a_slow_service_is_asked_as_often() -> None:
    """Open loop: the times do not depend on the answers."""
    async with fake_routers(1) as (router,):
        quick = await _bench(router.address)
        router.behaviour.delay_s = lambda _: 2.0
        slow = await _bench(router.address)
    assert slow.requests == quick.requests
    assert slow.latency.p50_s >= 2.0
    assert slow.in_flight_max > 10


def _cli(*args: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MOE_SERVE_")}
    return subprocess.run(
        [sys.executable, "-m", "moe_serve", "bench", *args],
        cwd=Path(__file__).parents[2],
        env=kept,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("more", [(), ("--closed", "2", "--shift", "0.1", "--slo-ms", "30000")])
def test_the_command_prints_figures_and_no_bar(more: tuple[str, ...]) -> None:
    with threaded_router() as router:
        done = _cli(router.address, "--seconds", "0.5", "--warm-up", "0.1", "-o", "json", *more)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["answered"] == found["requests"] > 0
    assert found["loop"] == ("closed" if more else "open")
    assert found["errors"] == {}


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_routers_that_the_service_names_elsewhere_are_refused_before_any_load() -> None:
    with threaded_router(peers=("10.1.2.3:4000",)) as router:
        done = _cli(router.address, "--seconds", "0.5")
        asked = len(router.requests)
    assert done.returncode == 2
    assert "10.1.2.3:4000 is not on this machine" in done.stderr
    assert asked == 0


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_nothing_answered_is_exit_1() -> None:
    fail: Callable[[Any], ResourceExhausted] = lambda _: ResourceExhausted("full")  # noqa: E731
    with threaded_router() as router:
        router.behaviour.fail = fail
        done = _cli(router.address, "--seconds", "0.3", "--warm-up", "0")
    assert done.returncode == 1
    assert "RESOURCE_EXHAUSTED" in done.stdout
