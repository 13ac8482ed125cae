"""Stationary traffic, 200 windows: what the engine writes after it has converged, and what a window
costs it in CPU.

    python -m benchmarks.stationary

Bars: 0 writes after convergence; at most 5 ms CPU a window at 58 layers x 256 experts on 32 ranks.
Each layer has a fixed popularity (Zipf, by a permutation of its own); each quarter of a window
draws its pairs from it, popularity disturbed by lognormal noise. Ranks are simulated and answer at
once. Converged: the first `--warm-up` windows are over.

Responsible for this traffic and these figures. Must never assert an absolute time.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter

import numpy as np
import numpy.typing as npt

from benchmarks.engine_scale import ScaleFleet, scale_spec, scale_topology
from benchmarks.environment import record
from placement.config import RebalanceConfig
from placement.load import LoadWindow
from placement.messages import events as ev
from placement.topology import NUM_PHASES, MoeSpec

SUB_WINDOWS = 4
DECODE_SHARE = 0.25


def main() -> None:
    """Run once and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=58)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--layer-slots", type=int, default=288)
    parser.add_argument("--windows", type=int, default=200)
    parser.add_argument("--warm-up", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=500_000, help="tokens a window")
    parser.add_argument("--skew", type=float, default=0.5, help="exponent of the popularity")
    parser.add_argument("--noise", type=float, default=0.1, help="lognormal sigma of popularity")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    environment = record("stationary", seed=given.seed)
    figures = run(given)
    print(json.dumps({"environment": environment.as_dict(), "figures": figures}, indent=1))


def run(given: argparse.Namespace) -> dict[str, object]:
    """Warm up, then `windows` windows; figures of the latter."""
    spec = scale_spec(given.layers, given.experts)
    slots = given.layers * given.layer_slots
    config = RebalanceConfig(sub_windows=SUB_WINDOWS, max_moves=slots // 25)
    topology = scale_topology(
        spec,
        num_ranks=given.ranks,
        layer_slots=given.layer_slots,
        staging_slots=config.staging_slots,
    )
    fleet = ScaleFleet(spec, topology, config)
    fleet.join_all()
    traffic = Traffic(spec, given.tokens, given.skew, given.noise, given.seed)
    warm, told = _windows(fleet, traffic, given.warm_up, 0), len(fleet.records)
    filled, targets = fleet.slot_writes, fleet.targets
    windows = _windows(fleet, traffic, given.windows, given.warm_up)
    rules = Counter(r.rule for r in fleet.records[told:])
    worst = [
        r.numbers["worst_balancedness"]
        for r in fleet.records[told:]
        if "worst_balancedness" in r.numbers
    ]
    quiet = [w for w in windows if not w[1]]
    return {
        "simulated": True,
        "writes_in_warm_up": sum(w[1] for w in warm),
        "last_window_with_a_write": max((i for i, w in enumerate(warm) if w[1]), default=-1),
        "writes_after": fleet.slot_writes - filled,
        "targets_after": fleet.targets - targets,
        "rules_after": dict(sorted(rules.items())),
        "worst_layer_balance_min": min(worst, default=None),
        "engine_cpu_ms_a_window": _spread([1e3 * w[0] for w in quiet]),
        "warm_up_engine_cpu_ms_a_window": _spread([1e3 * w[0] for w in warm]),
        "policy_and_planner_cpu_s": round(fleet.target_cpu_s, 2),
    }


def _spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    mean = round(float(np.mean(values)), 3)
    p50, p99 = (round(float(np.quantile(values, q)), 3) for q in (0.5, 0.99))
    return {"mean": mean, "p50": p50, "p99": p99}


def _windows(
    fleet: ScaleFleet, traffic: Traffic, count: int, first: int
) -> list[tuple[float, int]]:
    """(CPU seconds in the engine, slots written) of each window."""
    found = []
    for index in range(first, first + count):
        window = traffic.window(index, fleet.config.window_s, fleet.topology.num_ranks)
        cpu_s, writes = fleet.engine_cpu_s, fleet.slot_writes
        fleet.take(ev.WindowClosed(at_s=window.end_s, window=window))
        found.append((fleet.engine_cpu_s - cpu_s, fleet.slot_writes - writes))
    return found


class Traffic:
    """Demand that stays: the same popularity in every window, noise anew in every quarter."""

    def __init__(self, spec: MoeSpec, tokens: int, skew: float, noise: float, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._noise = noise
        shape = (spec.num_layers, spec.num_experts)
        popularity = np.arange(1, spec.num_experts + 1, dtype=np.float64) ** -skew
        rows = [self._random.permutation(popularity / popularity.sum()) for _ in range(shape[0])]
        share = np.array([1.0 - DECODE_SHARE, DECODE_SHARE])[:, None, None]
        self._mean = share * np.stack(rows)[None] * (tokens * spec.top_k / SUB_WINDOWS)

    def window(self, index: int, window_s: float, num_ranks: int) -> LoadWindow:
        """The window that opens at `index` window lengths."""
        shape = (SUB_WINDOWS, *self._mean.shape)
        disturbed = self._mean * np.exp(self._noise * self._random.standard_normal(shape))
        demand: npt.NDArray[np.int64] = self._random.poisson(disturbed)
        layers = demand.shape[2]
        return LoadWindow(
            index=index,
            start_s=index * window_s,
            end_s=(index + 1) * window_s,
            demand=demand,
            executed_pairs=demand.sum(axis=0),
            rank_pairs=np.zeros((num_ranks, layers), dtype=np.int64),
            rank_busy_s=np.zeros((num_ranks, NUM_PHASES), dtype=np.float64),
        )


if __name__ == "__main__":
    main()
