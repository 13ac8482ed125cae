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


LOCAL, STREAM, UNARY = "local", "stream", "unary"
EDGE_STREAM, EDGE_UNARY = "edge stream", "edge unary"
ALL_PATHS = (LOCAL, STREAM, UNARY, EDGE_STREAM, EDGE_UNARY)
"""In this process; through router and shards; and requests of the same bytes with no valid row,
which the router checks and answers with zeros by itself."""


@dataclass(frozen=True)
class PathTimes:
    """Median seconds of a call in each block, by path. `requests`: how many reached the shards."""

    seconds: dict[str, list[float]]
    requests: int


@dataclass(frozen=True)
class PathsJob:
    """What a front end measures: which batch, on which paths, in how many blocks of how many
    calls."""

    router: str
    checkpoint: Path
    manifests: Path
    size: ModelSize
    batch: TokenBatch
    paths: tuple[str, ...]
    blocks: int
    calls_a_block: int


def measure_paths(job: PathsJob) -> PathTimes:
    """Blocks of all paths in turning order. Raises AssertionError where an output differs."""
    return asyncio.run(_measure(job, _local(job)))


async def _measure(job: PathsJob, local: Callable[[], np.ndarray]) -> PathTimes:
    batch = job.batch
    none_valid = np.zeros(len(batch.hidden), np.bool_)

    async def in_process() -> np.ndarray:
        return local()

    def through(client: AsyncClient, row_valid: np.ndarray | None = None) -> Run:
        async def run() -> np.ndarray:
            return await client.forward(
                0,
                batch.hidden,
                batch.ids,
                batch.gates,
                phase=Phase.DECODE,
                row_valid=row_valid,
            )

        return run

    async with (
        AsyncClient([job.router], stream=True) as stream,
        AsyncClient([job.router], stream=False) as unary,
    ):
        every: dict[str, Run] = {
            LOCAL: in_process,
            STREAM: through(stream),
            UNARY: through(unary),
            EDGE_STREAM: through(stream, none_valid),
            EDGE_UNARY: through(unary, none_valid),
        }
        runs = {name: every[name] for name in job.paths}
        expected = local().copy()
        requests = 0
        for name, run in runs.items():
            await _warm(run, np.zeros_like(expected) if "edge" in name else expected)
            requests += WARM_CALLS * (name in (STREAM, UNARY))
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        names = list(runs)
        for block in range(job.blocks):
            start = block % len(names)
            for name in names[start:] + names[:start]:
                seconds[name].append(await _block(runs[name], job.calls_a_block))
                requests += job.calls_a_block * (name in (STREAM, UNARY))
        return PathTimes(seconds, requests)


async def _warm(run: Run, expected: np.ndarray) -> None:
    """First calls, which also show that the output is right."""
    for _ in range(WARM_CALLS):
        output = await run()
    error = float(np.abs(output - expected).max() / max(np.abs(expected).max(), 1.0))
    assert error <= TOLERANCE, f"output differs from the local one by {error:.1e}"


async def _block(run: Run, calls: int) -> float:
    seconds = []
    for _ in range(calls):
        began_s = time.perf_counter()
        await run()
        seconds.append(time.perf_counter() - began_s)
    return median(seconds)


def _local(job: PathsJob) -> Callable[[], np.ndarray]:
    """The batch through a backend in this process that holds every expert, slot = expert."""
    size, batch = job.size, job.batch
    opened = Checkpoint.open(job.checkpoint, MODEL)
    source = CheckpointSource(opened, load_or_build(opened, "float32", job.manifests))
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
