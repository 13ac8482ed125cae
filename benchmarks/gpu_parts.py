"""What `benchmarks.gpu` measures: numerics, ways to compute, copies while computing.

Responsible for the measurements; runs on any torch device, so that it can be rehearsed on a CPU.
Must never use the network or Ray. Called by `benchmarks.gpu`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from moe_serve.shard.compute.base import ExpertSpec
from moe_serve.shard.compute.torch_backend import TorchBackend
from moe_serve.shard.rows import from_float32, raw_dtype, to_float32

PATHS = ("loop", "grouped", "triton")
TOLERANCE = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 2e-2}
LEAST_ROUNDS = 5
MOST_ROUNDS = 300


@dataclass(frozen=True)
class Size:
    """Tokens, hidden size, intermediate size, experts, experts a token."""

    tokens: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int

    @property
    def label(self) -> str:
        """T,H,F,E,K."""
        return (
            f"{self.tokens},{self.hidden_size},{self.intermediate_size},"
            f"{self.num_experts},{self.top_k}"
        )


@dataclass(frozen=True)
class Batch:
    """A batch as `forward` takes it."""

    rows: np.ndarray[Any, Any]
    pair_row: np.ndarray[Any, Any]
    pair_slot: np.ndarray[Any, Any]
    pair_gate: np.ndarray[Any, Any]

    def through(self, backend: TorchBackend, out: np.ndarray[Any, Any]) -> None:
        """Compute it into `out`."""
        backend.forward(self.rows, self.pair_row, self.pair_slot, self.pair_gate, out)


def make_batch(size: Size, rng: np.random.Generator) -> Batch:
    """Random rows; each token's experts are drawn without repetition; gates add up to 1."""
    experts = np.argsort(rng.random((size.tokens, size.num_experts)), axis=1)[:, : size.top_k]
    gates = rng.random((size.tokens, size.top_k), dtype=np.float32)
    return Batch(
        rows=rng.standard_normal((size.tokens, size.hidden_size), dtype=np.float32),
        pair_row=np.repeat(np.arange(size.tokens, dtype=np.int32), size.top_k),
        pair_slot=experts.reshape(-1).astype(np.int32),
        pair_gate=(gates / gates.sum(axis=1, keepdims=True)).reshape(-1),
    )


def make_blobs(
    spec: ExpertSpec, count: int, rng: np.random.Generator
) -> list[np.ndarray[Any, Any]]:
    """Random experts in canonical form, values of a size that keeps products near 1."""
    scale = np.float32(spec.hidden_size**-0.5)
    return [
        from_float32(rng.standard_normal(spec.elements, dtype=np.float32) * scale, spec.dtype)
        .view(np.uint8)
        .copy()
        for _ in range(count)
    ]


def oracle(
    spec: ExpertSpec, blobs: list[np.ndarray[Any, Any]], batch: Batch
) -> np.ndarray[Any, Any]:
    """The batch in float64 on the host, with the weights as rounded to the serving dtype."""
    out = np.zeros(batch.rows.shape)
    for slot in np.unique(batch.pair_slot):
        values = to_float32(blobs[slot].view(raw_dtype(spec.dtype)), spec.dtype).astype(np.float64)
        pairs = np.flatnonzero(batch.pair_slot == slot)
        gate_up = values[: spec.gate_up_elements].reshape(spec.hidden_size, -1)
        down = values[spec.gate_up_elements :].reshape(spec.intermediate_size, -1)
        rows = batch.rows[batch.pair_row[pairs]].astype(np.float64)
        gate, up = np.split(rows @ gate_up, 2, axis=1)
        part = (gate / (1 + np.exp(-gate)) * up) @ down
        np.add.at(out, batch.pair_row[pairs], part * batch.pair_gate[pairs, None])
    return out


def build(spec: ExpertSpec, device: str, path: str, num_experts: int) -> TorchBackend | str:
    """A warm backend on a path, or why there is none."""
    slab_slots = num_experts if path == "grouped" else 1
    try:
        backend = TorchBackend(spec, device=device, path=path, slab_slots=slab_slots)
    except ValueError as refused:
        return str(refused)
    backend.warm_up()
    return backend


def numerics(size: Size, device: str, dtype: str, seed: int) -> Iterator[dict[str, Any]]:
    """Error of each path against float64, relative to the largest value, and the other checks."""
    rng = np.random.default_rng(seed)
    spec = ExpertSpec(size.hidden_size, size.intermediate_size, dtype)
    blobs = make_blobs(spec, size.num_experts, rng)
    batch = make_batch(size, rng)
    expected = oracle(spec, blobs, batch)
    for path in PATHS:
        result: dict[str, Any] = {"size": size.label, "dtype": dtype, "path": path}
        backend = build(spec, device, path, size.num_experts)
        if isinstance(backend, str):
            yield {**result, "not_possible": backend}
            continue
        for slot, blob in enumerate(blobs):
            backend.load_slot(slot, blob)
        out = np.empty_like(batch.rows)
        again = np.empty_like(batch.rows)
        batch.through(backend, out)
        batch.through(backend, again)
        poisoned = Batch(batch.rows.copy(), batch.pair_row, batch.pair_slot, batch.pair_gate)
        poisoned.rows[0] = np.nan
        beside = np.empty_like(batch.rows)
        poisoned.through(backend, beside)
        error = float(np.abs(out - expected).max() / np.abs(expected).max())
        read_back = all(
            np.array_equal(backend.canonical_bytes(slot), blob) for slot, blob in enumerate(blobs)
        )
        checks = {
            "within_tolerance": error <= TOLERANCE[dtype],
            "same_bits_again": out.tobytes() == again.tobytes(),
            "nan_stays_in_its_row": bool(np.array_equal(beside[1:], out[1:])),
            "bytes_read_back": read_back,
        }
        yield {**result, "error": error, **checks, "passed": all(checks.values())}


def plain_loop(
    spec: ExpertSpec, blobs: list[np.ndarray[Any, Any]], batch: Batch, size: Size, device: str
) -> Callable[[np.ndarray[Any, Any]], None]:
    """The loop model code has, on the device, rows up and result down like the backend."""
    split, hidden, inner = spec.gate_up_elements, size.hidden_size, size.intermediate_size
    torch_dtype = {
        "float32": torch.float32,
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
    }[spec.dtype]
    weights = []
    for blob in blobs:
        values = torch.from_numpy(blob).view(torch_dtype).to(device)
        gate_up = values[:split].view(hidden, 2 * inner).T.contiguous()
        weights.append((gate_up, values[split:].view(inner, hidden).T.contiguous()))
    host_rows = torch.from_numpy(batch.rows)
    experts = torch.from_numpy(batch.pair_slot).view(size.tokens, size.top_k).to(device)
    gates = torch.from_numpy(batch.pair_gate).view(size.tokens, size.top_k).to(device)

    def run(out: np.ndarray[Any, Any]) -> None:
        with torch.inference_mode():
            rows = host_rows.to(device).to(torch_dtype)
            total = torch.zeros(rows.shape, dtype=torch.float32, device=device)
            for expert in experts.unique().tolist():
                token, position = torch.where(experts == expert)
                gate_up, down = weights[expert]
                gate, up = F.linear(rows.index_select(0, token), gate_up).chunk(2, dim=1)
                part = F.linear(F.silu(gate) * up, down)
                total.index_add_(0, token, part.float() * gates[token, position, None])
            np.copyto(out, total.cpu().numpy())

    return run


def ways(
    size: Size, device: str, dtype: str, seed: int, budget_s: float
) -> Iterator[dict[str, Any]]:
    """Step seconds of each path and ratio to the plain loop, interleaved, transfers included."""
    rng = np.random.default_rng(seed)
    spec = ExpertSpec(size.hidden_size, size.intermediate_size, dtype)
    # A few different experts, loaded many times: what is measured is memory, not their values.
    few = make_blobs(spec, min(4, size.num_experts), rng)
    blobs = [few[slot % len(few)] for slot in range(size.num_experts)]
    batch = make_batch(size, rng)
    out = np.empty_like(batch.rows)
    loop = plain_loop(spec, blobs, batch, size, device)
    runs: dict[str, Callable[[], None]] = {"plain loop": lambda: loop(out)}
    for path in PATHS:
        backend = build(spec, device, path, size.num_experts)
        if isinstance(backend, str):
            yield {"size": size.label, "dtype": dtype, "path": path, "not_possible": backend}
            continue
        for slot, blob in enumerate(blobs):
            backend.load_slot(slot, blob)
        runs[path] = lambda backend=backend: batch.through(backend, out)
    seconds = interleaved(runs, budget_s)
    flops = size.tokens * size.top_k * spec.flops_per_pair
    touched_bytes = int(np.unique(batch.pair_slot).size) * spec.canonical_bytes
    for name, own in seconds.items():
        yield {
            "size": size.label,
            "dtype": dtype,
            "path": name,
            "rounds": len(own),
            "median_s": median(own),
            **ratio_of(seconds["plain loop"], own, "speedup"),
            "tflop_per_s": flops / median(own) / 1e12,
            "weight_bytes_per_s": touched_bytes / median(own),
        }


def copies(size: Size, device: str, dtype: str, seed: int, budget_s: float) -> list[dict[str, Any]]:
    """Step seconds while another thread copies weights, divided by those without, interleaved.

    Kinds: `load_slot` (canonical bytes from the host's pages to the device), `read_slot` (back, as
    the copy server does), `device to device` (a replica on the same device, on its own stream).
    """
    rng = np.random.default_rng(seed)
    spec = ExpertSpec(size.hidden_size, size.intermediate_size, dtype)
    backend = build(spec, device, "auto", size.num_experts)
    assert not isinstance(backend, str), backend
    blob = make_blobs(spec, 1, rng)[0]
    for slot in range(size.num_experts + 1):
        backend.load_slot(slot, blob)
    batch = make_batch(size, rng)
    out = np.empty_like(batch.rows)
    spare = size.num_experts
    kinds: dict[str, Callable[[], object]] = {
        "load_slot": lambda: backend.load_slot(spare, blob),
        "read_slot": lambda: backend.canonical_bytes(spare),
        "device to device": _device_copy(device, spec.canonical_bytes),
    }
    results = []
    for kind, copy in kinds.items():
        alone: list[float] = []
        during: list[float] = []
        copied, copy_s = 0, 0.0
        end_s = time.perf_counter() + budget_s / len(kinds)
        while len(during) < LEAST_ROUNDS * 4 or time.perf_counter() < end_s:
            alone += [_timed(lambda: batch.through(backend, out)) for _ in range(4)]
            with copying(copy) as count:
                begun_s = time.perf_counter()
                during += [_timed(lambda: batch.through(backend, out)) for _ in range(4)]
                copy_s += time.perf_counter() - begun_s
                copied += count[0]
        results.append(
            {
                "size": size.label,
                "dtype": dtype,
                "copy": kind,
                "path": backend.path,
                "steps": len(during),
                "alone_median_s": median(alone),
                "during_median_s": median(during),
                **ratio_of(during, alone, "slowdown"),
                "copy_bytes_per_s": copied * spec.canonical_bytes / copy_s,
            }
        )
    return results


@contextmanager
def copying(copy: Callable[[], object]) -> Iterator[list[int]]:
    """Repeat a copy in a thread meanwhile; yields [copies done so far]. A failed copy is raised
    here.
    """
    stop = threading.Event()
    count = [0]
    failed: list[Exception] = []

    def work() -> None:
        try:
            while not stop.is_set():
                copy()
                count[0] += 1
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=work, name="copies")
    thread.start()
    try:
        yield count
    finally:
        stop.set()
        thread.join()
    if failed:
        raise failed[0]


def interleaved(runs: dict[str, Callable[[], None]], budget_s: float) -> dict[str, list[float]]:
    """Seconds of each run, round by round in turning order, after one round that is not counted."""
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    end_s = time.perf_counter() + budget_s
    for turn in range(MOST_ROUNDS):
        if turn >= LEAST_ROUNDS and time.perf_counter() > end_s:
            break
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            seconds[name].append(_timed(runs[name]))
    return seconds


def ratio_of(above: list[float], below: list[float], name: str) -> dict[str, float]:
    """Median and quartiles of the ratios of paired figures."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    low, middle, high = quantiles(ratios, n=4)
    return {name: middle, f"{name}_low": low, f"{name}_high": high}


def _device_copy(device: str, num_bytes: int) -> Callable[[], object]:
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    if source.device.type != "cuda":
        return lambda: target.copy_(source)
    stream = torch.cuda.Stream(device)

    def copy() -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        stream.synchronize()

    return copy


def _timed(run: Callable[[], None]) -> float:
    """Wall seconds; `run` waits for the device itself, because its result is on the host."""
    begun_s = time.perf_counter()
    run()
    return time.perf_counter() - begun_s
