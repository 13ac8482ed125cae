"""Evidence from numbers: a small fleet whose every second is computed here, with causes planted.

Each call asks every rank for its experts of one layer; what the routers would have counted is
counted. Times are those of the cost model, times what is planted, times noise.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from moe_serve.explain import Evidence, RankFacts, Slice
from moe_serve.stage_counts import STAGE_BOUNDS_S, STAGES, StageCounts
from placement.topology import NUM_PHASES, DeviceProfile, MoeSpec

PROFILE = DeviceProfile(
    name="even", flops_per_s=1e9, memory_bytes_per_s=1e12, copy_bytes_per_s=1e9, overhead_s=1e-5
)
EXPERTS, LAYERS, RANKS = 8, 2, 4
PAIR_S = 1e-3


def make_spec() -> MoeSpec:
    return MoeSpec(
        model="even",
        weights_version="v1",
        num_layers=LAYERS,
        num_experts=EXPERTS,
        top_k=2,
        hidden_size=100,
        intermediate_size=1666,
        expert_bytes=1000,
        slot_bytes=1000,
    )


@dataclass
class World:
    """What is planted. `machine`: everything takes so many times as long. `noise`: the same of each
    rank. `hot`: pairs of (layer, expert) over those of the others. `slow`: of a rank. `copies`: in
    which slices, by (source, target), and how much slower `copying` makes both. `queue_s`, and
    `other_s` in cold slices: of each request. `scale`: of every second, profiles too."""

    calls: int = 100
    slices: int = 8
    pairs: int = 4
    machine: float = 1.0
    noise: Sequence[float] = (1.0,) * RANKS
    hot: Mapping[tuple[int, int], float] = field(default_factory=dict)
    weights: Sequence[float] = (1.0,) * EXPERTS
    slow: Mapping[int, float] = field(default_factory=dict)
    copies: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)
    copying: float = 1.0
    queue_s: float = 0.0
    waiting: int = 0
    refused: int = 0
    cold: Mapping[int, Sequence[int]] = field(default_factory=dict)
    cold_slow: float = 1.0
    cold_other_s: float = 0.0
    missing_now: int = 0
    open_requests: int = 2
    failed: int = 0
    spare_slots: int = 8
    wanted_memory: tuple[str, ...] = ()
    memory_errors: Mapping[int, int] = field(default_factory=dict)
    wait_share: float = 0.1
    busy: float = 0.3
    scale: float = 1.0
    read_s: float = 1e-9
    """Of one expert, by the cost model."""
    seed: int = 1
    chance: bool = False
    """Pairs are drawn, as those of independent rows are."""
    replicas: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Expert -> ranks that hold it, where not only its own."""

    def hosts_of(self, expert: int) -> Sequence[int]:
        return self.replicas.get(expert, (expert * RANKS // EXPERTS,))

    def evidence(self) -> Evidence:
        rng = np.random.default_rng(self.seed)
        spec = make_spec()
        pair_s = float(spec.flops_per_pair) / PROFILE.flops_per_s
        assert abs(pair_s / PAIR_S - 1.0) < 0.01, pair_s
        profile = DeviceProfile(
            name="even",
            flops_per_s=PROFILE.flops_per_s / self.scale,
            memory_bytes_per_s=spec.expert_bytes / self.read_s / self.scale,
            copy_bytes_per_s=PROFILE.copy_bytes_per_s / self.scale,
            overhead_s=PROFILE.overhead_s * self.scale,
        )
        hosts = np.zeros((spec.num_keys, RANKS), np.bool_)
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                hosts[spec.key(layer, expert), list(self.hosts_of(expert))] = True
        return Evidence(
            spec=spec,
            slices=tuple(self._slice(n, rng) for n in range(self.slices)),
            ranks=tuple(
                RankFacts(r, profile, memory_errors=self.memory_errors.get(r, 0))
                for r in range(RANKS)
            ),
            hosts=hosts,
            open_requests=self.open_requests,
            waiting_requests=self.waiting,
            spare_slots=self.spare_slots,
            wanted_memory=self.wanted_memory,
        )

    def _slice(self, number: int, rng: np.random.Generator) -> Slice:
        expert_pairs = np.zeros((LAYERS, EXPERTS), np.int64)
        rank_pairs = np.zeros((RANKS, LAYERS), np.int64)
        counted = Counted()
        calls = self.calls // LAYERS
        copies = tuple(self.copies.get(number, ()))
        busy_ranks = {rank for pair in copies for rank in pair}
        cold = frozenset(self.cold.get(number, ()))
        for layer in range(LAYERS):
            weight = np.array(self.weights) * [
                self.hot.get((layer, expert), 1.0) for expert in range(EXPERTS)
            ]
            a_call = np.rint(self.pairs * weight).astype(np.int64)
            on_rank = np.zeros(RANKS)
            for expert in range(EXPERTS):
                held = list(self.hosts_of(expert))
                on_rank[held] += a_call[expert] / len(held)
            expert_pairs[layer] = rng.poisson(a_call * calls) if self.chance else a_call * calls
            for expert in range(EXPERTS):
                held = list(self.hosts_of(expert))
                rank_pairs[held, layer] += expert_pairs[layer, expert] // len(held)
            times = self.machine * np.array(self.noise)
            for rank in range(RANKS):
                times[rank] *= self.slow.get(rank, 1.0)
                times[rank] *= self.copying if rank in busy_ranks else 1.0
                times[rank] *= self.cold_slow if rank in cold else 1.0
            chance = rng.uniform(0.9, 1.1, (calls, RANKS))
            compute_s = (on_rank * PAIR_S + PROFILE.overhead_s) * times * chance * self.scale
            other_s = (0.2 * PAIR_S + (self.cold_other_s if cold else 0.0)) * self.scale
            counted.add(
                compute_s,
                wait_s=compute_s * self.wait_share,
                pairs=np.rint(on_rank).astype(np.int64),
                queue_s=self.queue_s * self.scale,
                wire_s=0.5 * PAIR_S * self.machine * self.scale,
                other_s=other_s * self.machine,
            )
        newest = number == self.slices - 1
        length_s = 2.0 * self.scale
        return Slice(
            start_s=number * length_s,
            end_s=(number + 1) * length_s,
            stages=counted.stages(),
            rank_pairs=rank_pairs,
            expert_pairs=expert_pairs,
            busy_s=np.full(RANKS, self.busy * length_s),
            batches=np.full(RANKS, calls * LAYERS, np.int64),
            copies=copies,
            cold=cold,
            missing=self.missing_now if newest else 0,
            failed=self.failed if newest else 0,
            refused=self.refused if newest else 0,
        )


class Counted:
    """What routers would have counted of calls that each ask all ranks at once."""

    def __init__(self) -> None:
        self.requests = np.zeros((NUM_PHASES, len(STAGES), len(STAGE_BOUNDS_S) + 1), np.int64)
        self.seconds = np.zeros((NUM_PHASES, len(STAGES)))
        self.ints = {name: np.zeros(RANKS, np.int64) for name in ("sub_calls", "pairs", "last")}
        names = ("late_s", "wire_s", "wait_s", "compute_s")
        self.floats = {name: np.zeros(RANKS) for name in names}

    def add(
        self,
        compute_s: np.ndarray,
        *,
        wait_s: np.ndarray,
        pairs: np.ndarray,
        queue_s: float,
        wire_s: float,
        other_s: float,
    ) -> None:
        took_s = compute_s + wait_s + wire_s
        for row, took in enumerate(took_s):
            order = np.argsort(took, kind="stable")
            last = int(order[-1])
            parts = (
                queue_s,
                0.0,
                wire_s,
                float(wait_s[row, last]),
                float(compute_s[row, last]),
                0.0,
                other_s,
            )
            for stage, part_s in enumerate(parts):
                self.requests[row % NUM_PHASES, stage, bisect_left(STAGE_BOUNDS_S, part_s)] += 1
                self.seconds[row % NUM_PHASES, stage] += part_s
            self.ints["last"][last] += 1
            self.floats["late_s"][last] += took[last] - took[order[-2]]
        self.ints["sub_calls"] += len(took_s)
        self.ints["pairs"] += pairs * len(took_s)
        self.floats["wire_s"] += wire_s * len(took_s)
        self.floats["wait_s"] += wait_s.sum(axis=0)
        self.floats["compute_s"] += compute_s.sum(axis=0)

    def stages(self) -> StageCounts:
        return StageCounts(requests=self.requests, seconds=self.seconds, **self.ints, **self.floats)
