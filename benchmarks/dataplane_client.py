"""The public API measured from a front end's process: stream against unary, and the whole path
against computing in that process.

Responsible for alternating blocks in one process. Must never time an output it has not compared.
Called in a process of its own by `benchmarks.dataplane`, which has set threads and malloc.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.dataplane_model import MODEL, NO_TIME, ModelSize, TokenBatch
from moe_serve.client import AsyncClient
from moe_serve.shard.compute.build import build_backend
from moe_serve.shard.served_model import CheckpointSource
from moe_serve.weights.checkpoint import Checkpoint
from moe_serve.weights.manifest_cache import load_or_build
from placement.topology import Phase

TOLERANCE = 1e-5
WARM_CALLS = 10

Run = Callable[[], Awaitable[np.ndarray]]


@dataclass(frozen=True)
class PathTimes:
    """Median seconds of a call in each block, by path. `calls`: requests that went to the router.

    `local_s` is of the size's own backend in the front end's process; of "emulated" it is how long
    the identity takes, no more.
    """

    local_s: list[float]
    stream_s: list[float]
    unary_s: list[float]
    calls: int


def measure_paths(
    router: str,
    checkpoint: Path,
    manifests: Path,
    size: ModelSize,
    batch: TokenBatch,
    blocks: int,
    calls_a_block: int,
) -> PathTimes:
    """Blocks of all three paths in turning order. Raises AssertionError where an output differs."""
    local = _local(checkpoint, manifests, size, batch)
    return asyncio.run(_measure(router, local, batch, blocks, calls_a_block))


async def _measure(
    router: str, local: Callable[[], np.ndarray], batch: TokenBatch, blocks: int, calls: int
) -> PathTimes:
    async with (
        AsyncClient([router], stream=True) as one,
        AsyncClient([router], stream=False) as two,
    ):

        async def in_process() -> np.ndarray:
            return local()

        def through(client: AsyncClient) -> Run:
            async def run() -> np.ndarray:
                return await client.forward(
                    0, batch.hidden, batch.ids, batch.gates, phase=Phase.DECODE
                )

            return run

        runs: tuple[Run, ...] = (in_process, through(one), through(two))
        expected = local().copy()
        for run in runs:
            for _ in range(WARM_CALLS):
                output = await run()
            error = float(np.abs(output - expected).max() / np.abs(expected).max())
            assert error <= TOLERANCE, f"output differs from the local one by {error:.1e}"
        times: tuple[list[float], ...] = ([], [], [])
        for block in range(blocks):
            for turn in range(len(runs)):
                which = (block + turn) % len(runs)
                times[which].append(await _block(runs[which], calls))
        return PathTimes(*times, calls=2 * blocks * calls)


async def _block(run: Run, calls: int) -> float:
    seconds = []
    for _ in range(calls):
        began_s = time.perf_counter()
        await run()
        seconds.append(time.perf_counter() - began_s)
    return median(seconds)


def _local(
    checkpoint: Path, manifests: Path, size: ModelSize, batch: TokenBatch
) -> Callable[[], np.ndarray]:
    """The batch through a backend in this process that holds every expert, slot = expert."""
    opened = Checkpoint.open(checkpoint, MODEL)
    source = CheckpointSource(opened, load_or_build(opened, "float32", manifests))
    backend = build_backend(size.backend, size.expert, profile=NO_TIME)
    for expert in range(size.num_experts):
        blob = np.empty(size.expert.canonical_bytes, np.uint8)
        source.read_into(0, expert, blob.data)
        backend.load_slot(expert, blob)
    backend.warm_up()
    tokens, top_k = batch.ids.shape
    pair_row = np.repeat(np.arange(tokens, dtype=np.int32), top_k)
    pair_slot, pair_gate = batch.ids.reshape(-1), batch.gates.reshape(-1)
    out = np.empty_like(batch.hidden)

    def run() -> np.ndarray:
        backend.forward(batch.hidden, pair_row, pair_slot, pair_gate, out)
        return out

    return run
