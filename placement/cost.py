"""Seconds: what a layer call costs a rank, and what a copy of an expert costs two of them.

Responsible for turning pairs, experts and bytes into seconds with the figures of a
`DeviceProfile`. Must never decide anything. Called by policies, the planner's gate, the simulator
and the emulated backend.

A rank's time for a layer call has two floors and the higher one counts:

- *compute-bound*: pairs x FLOPs of a pair / FLOP/s. Prefill and large batches; balance pairs.
- *memory-bound*: distinct experts read x bytes of an expert / memory bytes/s. Decode at small
  batches; balance experts.

Example. An expert of 8 MB, 4 MFLOP a pair, on a device of 1 TFLOP/s and 100 GB/s: reading it
takes 80 us, a pair takes 4 us, so an expert with fewer than 20 pairs (`crossover_pairs`) costs
what reading it costs.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from placement.topology import DeviceProfile, MoeSpec, Topology

FloatArray = npt.NDArray[np.float64]

CHECKPOINT: Final = -1
"""Source "rank" of a copy that comes from the checkpoint and not from a replica."""


class Regime(StrEnum):
    """What bounds a layer call."""

    COMPUTE = "compute"
    MEMORY = "memory"


def compute_seconds(pairs: npt.ArrayLike, spec: MoeSpec, profile: DeviceProfile) -> FloatArray:
    """Seconds of arithmetic for that many (token, expert) pairs; any shape."""
    return np.asarray(pairs, dtype=np.float64) * (spec.flops_per_pair / profile.flops_per_s)


def memory_seconds(
    experts_read: npt.ArrayLike, spec: MoeSpec, profile: DeviceProfile
) -> FloatArray:
    """Seconds of reading that many distinct experts once; any shape."""
    return np.asarray(experts_read, dtype=np.float64) * (
        spec.expert_bytes / profile.memory_bytes_per_s
    )


def rank_seconds(
    pairs: npt.ArrayLike, experts_read: npt.ArrayLike, spec: MoeSpec, profile: DeviceProfile
) -> FloatArray:
    """Seconds of one rank for one layer call: the higher floor plus the fixed overhead; 0 where
    there are no pairs.

    pairs, experts_read: same shape, for example [phases] or [calls].
    """
    work = np.maximum(
        compute_seconds(pairs, spec, profile), memory_seconds(experts_read, spec, profile)
    )
    return np.where(np.asarray(pairs) > 0, work + profile.overhead_s, 0.0)


def crossover_pairs(spec: MoeSpec, profile: DeviceProfile) -> float:
    """Pairs of one expert at which computing them takes as long as reading the expert."""
    return (spec.expert_bytes / profile.memory_bytes_per_s) / (
        spec.flops_per_pair / profile.flops_per_s
    )


def least_crossover(spec: MoeSpec, profiles: Iterable[DeviceProfile]) -> float:
    """`crossover_pairs` of the profile where it is lowest; 0 without profiles.

    Over ranks of different devices, a batch is taken as memory-bound only where it is on all.
    """
    return min((crossover_pairs(spec, profile) for profile in profiles), default=0.0)


def expected_experts(tokens: float, spec: MoeSpec) -> float:
    """Distinct experts a batch uses if every expert is equally likely: E (1 - (1 - k /
    E)^tokens).
    """
    missed: float = (1.0 - spec.top_k / spec.num_experts) ** tokens
    return spec.num_experts * (1.0 - missed)


def regime(tokens: float, spec: MoeSpec, profile: DeviceProfile) -> Regime:
    """What bounds a layer call of a batch of that many tokens (of either phase), all experts
    equally likely.

    The number of ranks falls out: pairs and experts are both shared among them.
    """
    if tokens <= 0:
        return Regime.MEMORY
    pairs_an_expert = tokens * spec.top_k / expected_experts(tokens, spec)
    return Regime.COMPUTE if pairs_an_expert >= crossover_pairs(spec, profile) else Regime.MEMORY


def pair_equivalents(
    demand: npt.ArrayLike, batch_tokens: float, spec: MoeSpec, profile: DeviceProfile
) -> FloatArray:
    """What a phase's demand costs, as the pairs a second that would take as long to compute.

    demand: [..., experts], pairs a second of layers (and scenarios). batch_tokens: tokens of a
    layer call, 0 = unknown. Compute-bound batches, and unknown ones, cost their pairs. In a
    memory-bound one an expert costs one reading in each call that uses it, however many pairs:
    calls a second x the chance that a batch uses it, 1 - (1 - its share of tokens)^tokens, x
    `crossover_pairs`.

    Example: 64 experts, top-2, 8 tokens a call, 100 calls a second. An expert that half of the
    tokens want is used in 99.6% of calls and costs 99.6 readings a second; one that a hundredth
    wants costs 7.7. Their pairs are 400 and 8.
    """
    pairs = np.asarray(demand, dtype=np.float64)
    if batch_tokens <= 0 or regime(batch_tokens, spec, profile) is Regime.COMPUTE:
        return pairs
    tokens = pairs.sum(axis=-1, keepdims=True) / spec.top_k
    share = np.minimum(np.divide(pairs, tokens, out=np.zeros_like(pairs), where=tokens > 0), 1.0)
    calls = tokens / batch_tokens
    readings: FloatArray = calls * (1.0 - (1.0 - share) ** batch_tokens)
    return readings * crossover_pairs(spec, profile)


def seconds_per_pair(spec: MoeSpec, topology: Topology) -> FloatArray:
    """Seconds of one pair on each rank, compute-bound: float64 [ranks]. Its inverse is the rank's
    speed.
    """
    return np.array(
        [
            spec.flops_per_pair / topology.profile_of(rank).flops_per_s
            for rank in range(topology.num_ranks)
        ],
        dtype=np.float64,
    )


def copy_seconds(copy_bytes: int, source: int, target: int, topology: Topology) -> float:
    """Seconds to copy that many bytes from one rank to another at the slowest part of the way.

    source: a rank, or CHECKPOINT, which is priced as another node. Within a rank or node only the
    devices' own copy rates count.
    """
    rates = [topology.profile_of(target).copy_bytes_per_s]
    if source != CHECKPOINT:
        rates.append(topology.profile_of(source).copy_bytes_per_s)
    if source == CHECKPOINT or topology.ranks[source].node != topology.ranks[target].node:
        rates.append(topology.cross_node_bytes_per_s)
    return copy_bytes / min(rates)
