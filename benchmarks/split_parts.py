"""What is measured of the splitter: its optimum, its time, the rows that pair choice saves, and
activated experts.

Responsible for figures as plain dictionaries. Must never print. Called by `benchmarks.split`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from benchmarks.split_cases import Case, packed_ranks
from benchmarks.split_proof import Oracle
from placement.split import (
    CompiledLayer,
    assign_pairs,
    count_ids,
    rank_loads,
    split_activated,
    split_counts,
)
from placement.split.kernels import split_batch

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
SIZES = (16, 64, 256, 1024, 4096)
REPEATS = 3
"""Each batch is timed so often; its first and its best time are both reported."""


def optimum(case: Case, layers: list[CompiledLayer], seed: int, lp_batches: int) -> dict[str, Any]:
    """Every batch of every size: is the maximum the least one, by flow and, on some, by LP?

    Every other batch has a backlog of up to twice the mean load of a rank.
    """
    rng = np.random.default_rng(seed)
    proved = activated = by_lp = 0
    wrong: list[str] = []
    for number, layer in enumerate(layers):
        oracle = Oracle(layer)
        for tokens in SIZES:
            batches = case.batches(number, tokens)
            lp_every = max(1, len(batches) * len(layers) // lp_batches)
            for at, ids in enumerate(batches):
                counts = count_ids(ids, None, case.num_experts)
                backlog = np.zeros(case.num_ranks, np.int64)
                if at % 2 == 1:
                    backlog = rng.integers(0, 2 * ids.size // case.num_ranks + 1, case.num_ranks)
                where = f"layer {number}, {tokens} tokens, batch {at}"
                reached = int(_maximum(layer, split_counts(layer, counts, backlog, at), backlog))
                if not oracle.is_least(counts, backlog, reached):
                    wrong.append(f"{where}: {reached} pairs are not the least maximum")
                proved += 1
                if at % lp_every == 0:
                    by_lp += 1
                    if oracle.lp_optimum(counts, backlog) != reached:
                        wrong.append(f"{where}: {reached} pairs, HiGHS says otherwise")
                reads = (split_activated(layer, counts, None, at) > 0).astype(np.int64)
                worst = int(rank_loads(layer, reads).max())
                ones, none = np.minimum(counts, 1), np.zeros(case.num_ranks, np.int64)
                if reads.sum() != ones.sum() or not oracle.is_least(ones, none, worst):
                    wrong.append(f"{where}: {worst} experts are not the least maximum")
                activated += 1
    return {"proved": proved, "by_lp": by_lp, "activated_proved": activated, "wrong": wrong}


def latency(case: Case, layers: list[CompiledLayer], lp_batches: int) -> list[dict[str, Any]]:
    """Microseconds of a split: through the Python face, of the kernel alone, and of HiGHS."""
    rows = []
    for tokens in SIZES:
        face, kernel, lp = [], [], []
        for number, layer in enumerate(layers):
            oracle = Oracle(layer)
            batches = case.batches(number, tokens)
            lp_every = max(1, len(batches) * len(layers) // lp_batches)
            for at, ids in enumerate(batches):
                counts = count_ids(ids, None, case.num_experts)
                backlog = np.zeros(case.num_ranks, np.int64)
                quotas = np.empty(layer.num_replicas, np.int64)
                face.append(_times_us(_face(layer, counts, at)))
                kernel.append(_times_us(_kernel(layer, counts, backlog, at, quotas)))
                if at % lp_every == 0:
                    lp.append(_times_us(_lp(oracle, counts, backlog), repeats=1))
        row: dict[str, Any] = {"tokens": tokens, "batches": len(face)}
        for name, times in (("face", face), ("kernel", kernel), ("highs", lp)):
            array = np.array(times)
            for way, seen in (("first", array[:, 0]), ("best", array.min(axis=1))):
                row[f"{name}_{way}_p50_us"] = float(np.median(seen))
                row[f"{name}_{way}_p99_us"] = float(np.percentile(seen, 99))
        row["highs_over_face"] = row["highs_best_p50_us"] / row["face_best_p50_us"]
        rows.append(row)
    return rows


def pair_choice(case: Case, layers: list[CompiledLayer], tokens: int, most: int) -> dict[str, Any]:
    """Rows (token, rank) saved against quotas alone, and microseconds a token."""
    alone = exact = roomy = 0
    times: dict[str, list[float]] = {"exact": [], "roomy": []}
    for number, layer in enumerate(layers):
        for at, ids in enumerate(case.batches(number, tokens)[:most]):
            counts = count_ids(ids, None, case.num_experts)
            quotas = split_counts(layer, counts, None, at)
            loads = rank_loads(layer, quotas)
            room = loads.max() - loads
            by_quota = np.empty(ids.shape, np.int32)
            largest_quota(ids, quotas.copy(), layer.replica_ptr, by_quota)
            alone += rows_sent(by_quota, layer.replica_rank, case.num_ranks)
            choice = assign_pairs(layer, ids, None, quotas, at)
            exact += rows_sent(choice, layer.replica_rank, case.num_ranks)
            choice = assign_pairs(layer, ids, None, quotas, at, room)
            roomy += rows_sent(choice, layer.replica_rank, case.num_ranks)
            served = np.bincount(layer.replica_rank[choice].ravel(), minlength=case.num_ranks)
            assert served.max() == loads.max(), "room raised the maximum"
            for name, given in (("exact", None), ("roomy", room)):
                run = _pairs(layer, ids, quotas, at, given)
                times[name].append(min(_times_us(run)) / tokens)
    return {
        "tokens": tokens,
        "rows_alone": alone,
        "saved_exact": 1 - exact / alone,
        "saved_roomy": 1 - roomy / alone,
        "exact_us_a_token": float(np.median(times["exact"])),
        "roomy_us_a_token": float(np.median(times["roomy"])),
    }


def activated(
    case: Case, layers: list[CompiledLayer], tokens: int, packed: Int64s | None = None
) -> dict[str, Any]:
    """Experts that the worst rank reads, mean over batches: ours, all replicas in use, and a layout
    without replicas (`packed_ranks` unless given).
    """
    without = packed_ranks(case) if packed is None else packed
    ours, even, single = [], [], []
    for number, layer in enumerate(layers):
        for at, ids in enumerate(case.batches(number, tokens)):
            counts = count_ids(ids, None, case.num_experts)
            quotas = split_activated(layer, counts, None, at)
            ours.append(rank_loads(layer, (quotas > 0).astype(np.int64)).max())
            used = np.zeros(layer.num_replicas, np.int64)
            spread(counts, layer.replica_ptr, used)
            even.append(rank_loads(layer, used).max())
            active = without[number][counts > 0]
            single.append(np.bincount(active, minlength=case.num_ranks).max())
    means = {name: float(np.mean(v)) for name, v in (("ours", ours), ("even", even))}
    base = float(np.mean(single))
    return {
        "tokens": tokens,
        "experts_without_replicas": base,
        "experts_ours": means["ours"],
        "experts_even": means["even"],
        "ours_over_without": means["ours"] / base,
        "even_over_without": means["even"] / base,
        "mean_of_ratios": float(np.mean(np.array(ours) / np.array(single))),
    }


@njit(cache=True, nogil=True)
def largest_quota(ids: Int32s, left: Int64s, replica_ptr: Int64s, chosen: Int32s) -> None:
    """Pair choice by quota alone: always the replica with most quota left."""
    for token in range(ids.shape[0]):
        for k in range(ids.shape[1]):
            expert = ids[token, k]
            best = replica_ptr[expert]
            for replica in range(replica_ptr[expert], replica_ptr[expert + 1]):
                if left[replica] > left[best]:
                    best = replica
            left[best] -= 1
            chosen[token, k] = best


@njit(cache=True, nogil=True)
def rows_sent(chosen: Int32s, replica_rank: Int64s, num_ranks: int) -> int:
    """Rows (token, rank) that a choice sends."""
    rows = 0
    seen = np.full(num_ranks, -1, np.int64)
    for token in range(chosen.shape[0]):
        for k in range(chosen.shape[1]):
            rank = replica_rank[chosen[token, k]]
            if seen[rank] != token:
                seen[rank] = token
                rows += 1
    return rows


@njit(cache=True, nogil=True)
def spread(counts: Int64s, replica_ptr: Int64s, used: Int64s) -> None:
    """Mark the replicas that read their expert when tokens are shared evenly."""
    for expert in range(counts.shape[0]):
        first = replica_ptr[expert]
        for replica in range(first, min(replica_ptr[expert + 1], first + counts[expert])):
            used[replica] = 1


def _maximum(layer: CompiledLayer, quotas: Int64s, backlog: Int64s) -> int:
    return int(rank_loads(layer, quotas, backlog).max())


def _times_us(run: Callable[[], object], repeats: int = REPEATS) -> list[float]:
    times = []
    for _ in range(repeats):
        begun_s = time.perf_counter()
        run()
        times.append((time.perf_counter() - begun_s) * 1e6)
    return times


def _face(layer: CompiledLayer, counts: Int64s, tie_offset: int) -> Callable[[], object]:
    return lambda: split_counts(layer, counts, None, tie_offset)


def _kernel(
    layer: CompiledLayer, counts: Int64s, backlog: Int64s, tie_offset: int, quotas: Int64s
) -> Callable[[], object]:
    return lambda: split_batch(
        counts,
        backlog,
        tie_offset,
        False,
        layer.host_ptr,
        layer.host_rank,
        layer.host_expert,
        layer.host_replica_ptr,
        layer.shared,
        layer.rank_host_ptr,
        layer.rank_host,
        layer.first_slot,
        quotas,
    )


def _lp(oracle: Oracle, counts: Int64s, backlog: Int64s) -> Callable[[], object]:
    return lambda: oracle.lp_maximum(counts, backlog)


def _pairs(
    layer: CompiledLayer, ids: Int32s, quotas: Int64s, tie_offset: int, room: Int64s | None
) -> Callable[[], object]:
    return lambda: assign_pairs(layer, ids, None, quotas, tie_offset, room)
