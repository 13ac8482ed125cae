"""Windows of load from a trace: expert ids of tokens, or counts of forward passes.

Responsible for cutting; no token is counted twice and the order is kept. Reads no file. Called by
the CLI and benchmarks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from placement.load import LoadWindow
from placement.topology import NUM_PHASES, MoeSpec, Phase

Counts = npt.NDArray[np.int64]


def trace_windows(
    ids: npt.NDArray[np.integer],
    spec: MoeSpec,
    *,
    window_tokens: int,
    window_s: float,
    sub_windows: int,
    phase: npt.NDArray[np.integer] | Phase = Phase.PREFILL,
) -> list[LoadWindow]:
    """Windows of `window_tokens` tokens each from expert ids [tokens, layers, top_k] in request
    order.

    phase: of every token [tokens], or of all of them. A last window that is not full is left out.
    Raises ValueError for other shapes, ids or phases.
    """
    if ids.ndim != 3 or ids.shape[1] != spec.num_layers:
        raise ValueError(f"ids must be [tokens, {spec.num_layers}, top_k], got {ids.shape}")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= spec.num_experts):
        raise ValueError(f"ids must lie in [0, {spec.num_experts}), got {ids.min()}..{ids.max()}")
    phases = np.broadcast_to(np.asarray(phase), ids.shape[:1])
    if phases.size and (int(phases.min()) < 0 or int(phases.max()) >= NUM_PHASES):
        raise ValueError(
            f"phases must lie in [0, {NUM_PHASES}), got {phases.min()}..{phases.max()}"
        )
    windows = []
    layer = np.arange(spec.num_layers)[None, :, None] * spec.num_experts
    for index in range(ids.shape[0] // window_tokens):
        span = slice(index * window_tokens, (index + 1) * window_tokens)
        keys = ids[span].astype(np.int64) + layer
        keys += phases[span].astype(np.int64)[:, None, None] * spec.num_keys
        demand = np.stack(
            [
                np.bincount(part.reshape(-1), minlength=NUM_PHASES * spec.num_keys)
                for part in np.array_split(keys, sub_windows)
            ]
        )
        windows.append(_window(index, demand, spec, window_s))
    return windows


def count_windows(
    counts: Counts,
    spec: MoeSpec,
    *,
    window_tokens: int,
    window_s: float,
    sub_windows: int,
    phase: Phase = Phase.PREFILL,
) -> list[LoadWindow]:
    """Windows of at least `window_tokens` tokens each from counts [steps, layers, experts] in order
    of time.

    A step is what was counted together, such as a forward pass; it is never cut. Its tokens are the
    pairs of its busiest layer / top_k. A last window that is not full is left out. Windows with
    fewer steps than `sub_windows` make all have fewer parts: see `demand.shape[0]`. Raises
    ValueError for another shape.
    """
    if counts.ndim != 3 or counts.shape[1:] != (spec.num_layers, spec.num_experts):
        raise ValueError(
            f"counts must be [steps, {spec.num_layers}, {spec.num_experts}], got {counts.shape}"
        )
    cuts = _cuts(counts.sum(axis=2).max(axis=1, initial=0), window_tokens * spec.top_k)
    parts = min([sub_windows, *(end - start for start, end in cuts)])
    windows = []
    for index, (start, end) in enumerate(cuts):
        demand = np.zeros((parts, NUM_PHASES, spec.num_keys), dtype=np.int64)
        for part, piece in enumerate(np.array_split(counts[start:end], parts)):
            demand[part, phase] = piece.sum(axis=0).reshape(-1)
        windows.append(_window(index, demand, spec, window_s))
    return windows


def _cuts(pairs: Counts, window_pairs: int) -> list[tuple[int, int]]:
    cuts, start, held = [], 0, 0
    for step, found in enumerate(pairs.tolist()):
        held += found
        if held >= window_pairs:
            cuts.append((start, step + 1))
            start, held = step + 1, 0
    return cuts


def _window(index: int, demand: Counts, spec: MoeSpec, window_s: float) -> LoadWindow:
    demand = demand.reshape(-1, NUM_PHASES, spec.num_layers, spec.num_experts)
    return LoadWindow(
        index=index,
        start_s=index * window_s,
        end_s=(index + 1) * window_s,
        demand=demand,
        executed_pairs=demand.sum(axis=0),
        rank_pairs=np.zeros((0, spec.num_layers), dtype=np.int64),
        rank_busy_s=np.zeros((0, NUM_PHASES), dtype=np.float64),
    )
