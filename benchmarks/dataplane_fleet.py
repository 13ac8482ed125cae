"""A router and its shards as Ray actors, on a static layout, for the data path benchmark.

Responsible for starting, filling and ending the parts. Must never measure. Called by
`benchmarks.dataplane`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from benchmarks.dataplane_fanout import FanOut, remote_array_shard
from benchmarks.dataplane_model import MODEL, NO_TIME, VERSION, ModelSize
from benchmarks.environment import ROOT, THREAD_VARIABLES
from moe_serve.router.actor import RouterActor, RouterRemote
from moe_serve.router.settings import RouterSettings
from moe_serve.shard.actor import SHARD_ENV_VARS, RayShardPort
from moe_serve.shard.settings import ShardSettings
from moe_serve.weights.checkpoint import Checkpoint
from moe_serve.weights.manifest_cache import load_or_build
from placement.layout import ExpertLayout, SlotId
from placement.messages.codec import encode
from placement.messages.effects import CopyExpert, CopySource, ReserveSlot, VerifyExpert
from placement.messages.events import ExpertVerified, SlotReserved
from placement.routing import RankAddress, RoutingTable, build_table

NUM_SHARDS = 4
TERM = 1
INCARNATION = 1
COPY_TIMEOUT_S = 30.0
START_TIMEOUT_S = 120.0


def actor_environment() -> dict[str, str]:
    """What every measured process needs when it starts: malloc settings and one thread each."""
    return {
        **SHARD_ENV_VARS,
        **dict.fromkeys(THREAD_VARIABLES, "1"),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }


@dataclass(frozen=True)
class Fleet:
    """Running parts. `fan_out` is the driver of part (a); `router` is the address of the router."""

    size: ModelSize
    checkpoint: Path
    manifests: Path
    router: str
    fan_out: Any
    shards: tuple[Any, ...]
    actors: tuple[Any, ...]

    def compute_s(self) -> float:
        """Seconds of compute of all shards so far."""
        reports = ray.get([shard.report.remote(0) for shard in self.shards])
        return sum(float(report.counters["compute_s"]) for report in reports)


@contextmanager
def running_fleet(checkpoint: Path, manifests: Path, size: ModelSize) -> Iterator[Fleet]:
    """Shards holding the checkpoint's experts, expert e on rank e mod NUM_SHARDS, and a router."""
    load_or_build(Checkpoint.open(checkpoint, MODEL), "float32", manifests)  # once, not in each
    options = {"num_cpus": 0, "runtime_env": {"env_vars": actor_environment()}}
    kind = remote_array_shard().options(**options)
    shards = tuple(
        kind.remote(_shard_settings(rank, checkpoint, manifests, size))
        for rank in range(NUM_SHARDS)
    )
    settings = RouterSettings(
        router="router-0", router_number=0, incarnation=INCARNATION, spec=size.spec()
    )
    # Ray's own types know nothing of `options` on a class of ours.
    router_kind: Any = ray.remote(RouterActor)
    fan_out_kind: Any = ray.remote(FanOut)
    router = router_kind.options(**options).remote(settings)
    fan_out = fan_out_kind.options(**options).remote(settings, list(shards))
    actors = (*shards, router, fan_out)
    try:
        ports = [RayShardPort(shard, START_TIMEOUT_S) for shard in shards]
        table = asyncio.run(_fill(ports, size))
        address = asyncio.run(_start_router(router, table))
        ray.get(fan_out.install.remote(encode(table)), timeout=START_TIMEOUT_S)
        yield Fleet(size, checkpoint, manifests, address, fan_out, shards, actors)
    finally:
        for actor in actors:
            ray.kill(actor, no_restart=True)


def _shard_settings(rank: int, checkpoint: Path, manifests: Path, size: ModelSize) -> ShardSettings:
    num_slots = -(-size.num_experts // NUM_SHARDS)
    return ShardSettings(
        rank=rank,
        incarnation=INCARNATION,
        node="here",
        failure_domain="here",
        profile=NO_TIME,
        backend=size.backend,
        num_slots=num_slots,
        budget_bytes=num_slots * size.expert.held_bytes,
        checkpoint=str(checkpoint),
        manifest_dir=str(manifests),
        model_name=MODEL,
        weights_version=VERSION,
    )


async def _fill(ports: list[RayShardPort], size: ModelSize) -> RoutingTable:
    """Load every expert and give the table of it to the shards."""
    placed = [
        (expert % NUM_SHARDS, expert // NUM_SHARDS, expert) for expert in range(size.num_experts)
    ]
    tags: dict[SlotId, int] = {}

    async def load(rank: int) -> RankAddress:
        for at, slot, expert in placed:
            if at == rank:
                tags[SlotId(rank, slot)] = await _add(ports[rank], rank, slot, expert)
        return (await ports[rank].describe()).address

    addresses = await asyncio.gather(*(load(rank) for rank in range(NUM_SHARDS)))
    rows = [[expert for at, _, expert in placed if at == rank] for rank in range(NUM_SHARDS)]
    table = build_table(
        ExpertLayout.from_rows(rows, num_layers=1, num_experts=size.num_experts),
        tags,
        term=TERM,
        epoch=1,
        model=MODEL,
        weights_version=VERSION,
        ranks=tuple(addresses),
    )
    await asyncio.gather(*(port.install_table(table) for port in ports))
    return table


async def _add(port: RayShardPort, rank: int, slot: int, expert: int) -> int:
    where = {"step_id": expert + 1, "rank": rank, "incarnation": INCARNATION, "slot": slot}
    reserved = await port.execute(
        TERM, ReserveSlot(layer=0, expert=expert, weights_version=VERSION, **where)
    )
    assert isinstance(reserved, SlotReserved), reserved
    tag = reserved.slot_tag
    await port.execute(
        TERM,
        CopyExpert(
            slot_tag=tag,
            layer=0,
            expert=expert,
            source=CopySource(rank=-1),
            timeout_s=COPY_TIMEOUT_S,
            **where,
        ),
    )
    verified = await port.execute(TERM, VerifyExpert(slot_tag=tag, **where))
    assert isinstance(verified, ExpertVerified), verified
    return tag


async def _start_router(handle: Any, table: RoutingTable) -> str:
    router = RouterRemote(handle)
    info = await router.start()
    await router.install_table(table, [info.grpc_address])
    return info.grpc_address
