"""Expert computation, measured: the plain loop over experts, each backend, and the peak they could
reach.

Responsible for cases, interleaved rounds and ratios. Must never report a variant whose output is
wrong. Called by `benchmarks.compute` after it has set the threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from moe_serve.shard.compute.base import ComputeBackend, ExpertSpec
from moe_serve.shard.compute.numpy_backend import NumpyBackend
from moe_serve.shard.compute.torch_backend import TorchBackend

BASELINE = "plain loop"
LEAST_ROUNDS = 3
MOST_ROUNDS = 200
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """One size: tokens, hidden size, intermediate size, experts, experts a token."""

    tokens: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int

    @property
    def flops(self) -> int:
        """Floating point operations of a batch."""
        return self.tokens * self.top_k * 6 * self.hidden_size * self.intermediate_size

    @property
    def label(self) -> str:
        """T,H,F,E,K as the table shows it."""
        return (
            f"{self.tokens},{self.hidden_size},{self.intermediate_size},"
            f"{self.num_experts},{self.top_k}"
        )


@dataclass(frozen=True)
class Batch:
    """Rows and routing of a case, and its experts in canonical form."""

    rows: np.ndarray[Any, np.dtype[np.float32]]
    experts: np.ndarray[Any, np.dtype[np.int64]]
    gates: np.ndarray[Any, np.dtype[np.float32]]
    blobs: list[np.ndarray[Any, np.dtype[np.uint8]]]


@dataclass(frozen=True)
class Result:
    """A variant on a case. `speedup`: median over rounds of baseline seconds / its seconds."""

    variant: str
    rounds: int
    best_s: float
    speedup: float
    speedup_low: float
    speedup_high: float
    """Quartiles of the same ratios."""

    gflop_per_s: float
    share_of_peak: float
    error: float
    """Largest difference from float64, relative to the largest value."""


def make_batch(case: Case, rng: np.random.Generator) -> Batch:
    """Random rows and weights; each token's experts are drawn without repetition."""
    spec = ExpertSpec(case.hidden_size, case.intermediate_size)
    experts = np.argsort(rng.random((case.tokens, case.num_experts)), axis=1)[:, : case.top_k]
    gates = rng.random((case.tokens, case.top_k), dtype=np.float32)
    scale = np.float32(case.hidden_size**-0.5)
    return Batch(
        rows=rng.standard_normal((case.tokens, case.hidden_size), dtype=np.float32),
        experts=experts,
        gates=gates / gates.sum(axis=1, keepdims=True),
        blobs=[
            (rng.standard_normal(spec.elements, dtype=np.float32) * scale).view(np.uint8)
            for _ in range(case.num_experts)
        ],
    )


def plain_loop(case: Case, batch: Batch) -> Callable[[], np.ndarray[Any, Any]]:
    """The loop model code has: where, index_select, linear, index_add for each expert.

    Weights are stored [out, in], as checkpoints have them.
    """
    hidden, inner = case.hidden_size, case.intermediate_size
    rows, gates = torch.from_numpy(batch.rows), torch.from_numpy(batch.gates)
    experts = torch.from_numpy(batch.experts)
    weights = []
    for blob in batch.blobs:
        values = torch.from_numpy(blob).view(torch.float32)
        gate_up = values[: hidden * 2 * inner].view(hidden, 2 * inner).T.contiguous()
        down = values[hidden * 2 * inner :].view(inner, hidden).T.contiguous()
        weights.append((gate_up, down))

    def run() -> np.ndarray[Any, Any]:
        with torch.inference_mode():
            out = torch.zeros_like(rows)
            for expert in experts.unique().tolist():
                token, position = torch.where(experts == expert)
                gate_up, down = weights[expert]
                gate, up = F.linear(rows.index_select(0, token), gate_up).chunk(2, dim=1)
                part = F.linear(F.silu(gate) * up, down)
                out.index_add_(0, token, part * gates[token, position, None])
            return out.numpy()

    return run


def through(backend: ComputeBackend, batch: Batch) -> Callable[[], np.ndarray[Any, Any]]:
    """The batch through a warm backend that holds all experts, slot = expert."""
    backend.warm_up()
    for slot, blob in enumerate(batch.blobs):
        backend.load_slot(slot, blob)
    tokens, top_k = batch.experts.shape
    pair_row = np.repeat(np.arange(tokens, dtype=np.int32), top_k)
    pair_slot = batch.experts.reshape(-1).astype(np.int32)
    pair_gate = batch.gates.reshape(-1)
    out = np.empty_like(batch.rows)

    def run() -> np.ndarray[Any, Any]:
        backend.forward(batch.rows, pair_row, pair_slot, pair_gate, out)
        return out

    return run


def oracle(case: Case, batch: Batch) -> np.ndarray[Any, Any]:
    """The batch in float64, pair by pair."""
    out = np.zeros(batch.rows.shape)
    split = case.hidden_size * 2 * case.intermediate_size
    for expert in np.unique(batch.experts):
        values = batch.blobs[expert].view(np.float32).astype(np.float64)
        token, position = np.nonzero(batch.experts == expert)
        gate_up = values[:split].reshape(case.hidden_size, 2 * case.intermediate_size)
        gate, up = np.split(batch.rows[token].astype(np.float64) @ gate_up, 2, axis=1)
        down = values[split:].reshape(case.intermediate_size, case.hidden_size)
        part = (gate / (1 + np.exp(-gate)) * up) @ down
        out[token] += part * batch.gates[token, position, None]
    return out


def variants(case: Case, batch: Batch) -> dict[str, Callable[[], np.ndarray[Any, Any]]]:
    """What a case compares, the baseline first and once more as its own control.

    Each has weights of its own: shared ones would be found in the caches twice as often.
    """
    spec = ExpertSpec(case.hidden_size, case.intermediate_size)
    found = {
        BASELINE: plain_loop(case, batch),
        "plain loop (control)": plain_loop(case, batch),
        "numpy": through(NumpyBackend(spec), batch),
        "torch loop": through(TorchBackend(spec, path="loop"), batch),
    }
    if hasattr(F, "grouped_mm"):
        grouped = TorchBackend(spec, path="grouped", slab_slots=case.num_experts)
        found["torch grouped"] = through(grouped, batch)
    return found


def measure_peak(size: int, rounds: int = 5) -> dict[str, float]:
    """Best GFLOP/s of a square float32 product, by library."""
    left = np.ones((size, size), np.float32)
    out = np.empty_like(left)
    torch_left = torch.from_numpy(left)
    best_s = {"numpy": float("inf"), "torch": float("inf")}
    for _ in range(rounds):
        for name, product in (
            ("numpy", lambda: np.matmul(left, left, out=out)),
            ("torch", lambda: torch_left @ torch_left),
        ):
            best_s[name] = min(best_s[name], _seconds(product)[0])
    return {name: 2 * size**3 / seconds / 1e9 for name, seconds in best_s.items()}


def measure(case: Case, seed: int, peak_gflop_per_s: float, budget_s: float) -> list[Result]:
    """Rounds of all variants, interleaved and in turning order, for about `budget_s`.

    Raises:
        AssertionError: a variant's output differs from float64 by more than TOLERANCE.
    """
    rng = np.random.default_rng(seed)
    batch = make_batch(case, rng)
    runs = variants(case, batch)
    expected = oracle(case, batch)
    errors = {}
    for name, run in runs.items():
        errors[name] = float(np.abs(run() - expected).max() / np.abs(expected).max())
        assert errors[name] <= TOLERANCE, f"{name} on {case.label}: error {errors[name]:.2e}"
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    end_s = time.perf_counter() + budget_s
    for turn in range(MOST_ROUNDS):
        if turn >= LEAST_ROUNDS and time.perf_counter() > end_s:
            break
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            seconds[name].append(_seconds(runs[name])[0])
    return [_result(name, seconds, case.flops, peak_gflop_per_s, errors[name]) for name in names]


def _result(
    name: str, seconds: dict[str, list[float]], flops: int, peak_gflop_per_s: float, error: float
) -> Result:
    ratios = [base / own for base, own in zip(seconds[BASELINE], seconds[name], strict=True)]
    low, _, high = quantiles(ratios, n=4)
    best_s = min(seconds[name])
    gflop_per_s = flops / best_s / 1e9
    return Result(
        variant=name,
        rounds=len(ratios),
        best_s=best_s,
        speedup=median(ratios),
        speedup_low=low,
        speedup_high=high,
        gflop_per_s=gflop_per_s,
        share_of_peak=gflop_per_s / peak_gflop_per_s,
        error=error,
    )


def _seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    """Thread seconds of a call: on a shared machine they do not count what others ran meanwhile."""
    begun_s = time.thread_time()
    value = run()
    return max(time.thread_time() - begun_s, 1e-9), value
