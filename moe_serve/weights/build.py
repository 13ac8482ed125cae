"""Computes a manifest by reading every expert of a checkpoint once.

Responsible for: going through all experts on a few threads, in bounded memory, with progress.
Must never: write files (that is `manifest_cache`).
Called by: `manifest_cache`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from moe_serve.weights.checkpoint import Checkpoint
from moe_serve.weights.dtypes import ServingDtype
from moe_serve.weights.manifest import MANIFEST_FORMAT, ExpertDigest, Manifest

Progress = Callable[[int, int], None]
"""Called as progress(experts done, experts in all), from the caller's thread, after each expert."""

THREADS_MAX: Final = 32
"""Most reading threads; each holds one expert and one stored tensor."""


def build_manifest(
    checkpoint: Checkpoint,
    dtype: ServingDtype,
    progress: Progress | None = None,
    num_threads: int = 1,
) -> Manifest:
    """Read all experts and describe them in serving dtype `dtype`.

    Reading, hashing and transposing release the interpreter lock, so threads help where cores are
    free. Experts in flight never exceed twice `num_threads` (1..`THREADS_MAX`). The first faulty
    tensor raises its `WeightsError`; an exception from `progress` stops the work and is passed on.
    """
    assert 1 <= num_threads <= THREADS_MAX, f"num_threads {num_threads} not in 1..{THREADS_MAX}"
    spec = checkpoint.spec
    total = spec.num_layers * spec.num_experts
    entries: list[ExpertDigest] = []
    pending: deque[Future[ExpertDigest]] = deque()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="manifest") as pool:
        # Leaving by an exception waits for what is in flight, which is little.
        for number in range(total):
            layer, expert = divmod(number, spec.num_experts)
            pending.append(pool.submit(checkpoint.digest_expert, layer, expert, dtype))
            if len(pending) >= 2 * num_threads:
                _take(pending, entries, progress, total)
        while pending:
            _take(pending, entries, progress, total)
    return Manifest(
        format=MANIFEST_FORMAT,
        serving_dtype=dtype,
        num_layers=spec.num_layers,
        num_experts=spec.num_experts,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        expert_bytes=spec.expert_bytes(dtype),
        files=checkpoint.files,
        experts=tuple(entries),
    )


def _take(
    pending: deque[Future[ExpertDigest]],
    entries: list[ExpertDigest],
    progress: Progress | None,
    total: int,
) -> None:
    entries.append(pending.popleft().result())
    if progress is not None:
        progress(len(entries), total)
