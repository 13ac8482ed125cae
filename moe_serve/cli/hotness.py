"""What is hot, as arrays: a load window and a placement as `top` and `heat` need them. Pure.

Responsible for taking the bytes of a window apart and for rates, shares and replicas. Called by
the commands top and heat.

Words: *pairs* are tokens x chosen experts (demand). *Share* is of the pairs of the expert's layer.
*Fair share* is 1 / experts of a layer: an expert at 3 x fair share gets three times what it would
if all were asked for alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_serve.errors import InvalidArgument
from moe_serve.rpc import placement_pb2 as pb
from placement.topology import Phase

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
LISTED = "LISTED"
BYTES_A_CELL = 8


class PhaseChoice(StrEnum):
    """Which tokens count."""

    ALL = "all"
    PREFILL = "prefill"
    DECODE = "decode"


_ONLY = {PhaseChoice.PREFILL: Phase.PREFILL, PhaseChoice.DECODE: Phase.DECODE}


@dataclass(frozen=True, slots=True, eq=False)
class Hotness:
    """One window. pairs int64 [layers, experts] and rank_busy_s float64 [ranks] of the phase;
    rank_pairs int64 [ranks] and imbalance float64 [layers] of both phases, which is how they are
    counted; replicas int64 [layers, experts] and the ranks that hold them, listed ones only, as
    they are now."""

    phase: PhaseChoice
    window: int
    seconds: float
    age_s: float
    missing: tuple[str, ...]
    pairs: IntArray
    rank_pairs: IntArray
    rank_busy_s: FloatArray
    imbalance: FloatArray
    replicas: IntArray
    ranks_of: dict[tuple[int, int], tuple[int, ...]]

    @property
    def num_layers(self) -> int:
        """Layers that route."""
        return int(self.pairs.shape[0])

    @property
    def num_experts(self) -> int:
        """Experts a layer."""
        return int(self.pairs.shape[1])

    @property
    def rates(self) -> FloatArray:
        """Pairs a second, float64 [layers, experts]; 0 where the window has no length."""
        return _rate(self.pairs, self.seconds)

    @property
    def rank_rates(self) -> FloatArray:
        """Pairs a second of each rank, both phases, float64 [ranks]."""
        return _rate(self.rank_pairs, self.seconds)

    @property
    def shares(self) -> FloatArray:
        """Of the pairs of its layer, float64 [layers, experts] in [0, 1]; 0 in a layer without
        load.

        >>> hotness_of(pb.GetLoadResponse(), pb.GetPlacementResponse(), PhaseChoice.ALL).shares.size
        0
        """
        total = self.pairs.sum(axis=1, keepdims=True)
        found: FloatArray = np.divide(
            self.pairs, total, out=np.zeros(self.pairs.shape, np.float64), where=total > 0
        )
        return found

    @property
    def fair_shares(self) -> FloatArray:
        """Share / fair share, float64 [layers, experts]: 1 is even, 0 is never asked for."""
        return self.shares * self.num_experts

    def busy(self, rank: int) -> float | None:
        """Share of the window in which a rank computed; None where it did not report."""
        if rank >= len(self.rank_busy_s) or self.seconds <= 0:
            return None
        return float(self.rank_busy_s[rank]) / self.seconds


def hotness_of(
    load: pb.GetLoadResponse | None, placement: pb.GetPlacementResponse, phase: PhaseChoice
) -> Hotness:
    """A window and a placement together. None = no window has closed: every count is 0, and so
    they are in a window of another model. Raises InvalidArgument where an array is not as large as
    its window says, or the phase is one that the service does not tell apart."""
    load = pb.GetLoadResponse() if load is None else load
    layers, experts = placement.num_layers, placement.num_experts
    demand = _array(load, "demand", "<i8", ("num_phases", "num_layers", "num_experts"))
    busy = _array(load, "rank_busy", "<f8", ("num_ranks", "num_phases"))
    rank_pairs = _array(load, "rank_pairs", "<i8", ("num_ranks", "num_layers"))
    pairs = _of_phase(demand, 0, phase).astype(np.int64)
    if pairs.shape != (layers, experts):
        pairs = np.zeros((layers, experts), np.int64)
    replicas: IntArray = np.zeros((layers, experts), np.int64)
    ranks_of: dict[tuple[int, int], tuple[int, ...]] = {}
    for rank in placement.ranks:
        for slot in rank.slots:
            if slot.state == LISTED and 0 <= slot.layer < layers and 0 <= slot.expert < experts:
                key = (slot.layer, slot.expert)
                replicas[key] += 1
                ranks_of[key] = (*ranks_of.get(key, ()), rank.rank)
    return Hotness(
        phase=phase,
        window=load.window,
        seconds=max(load.end_s - load.start_s, 0.0),
        age_s=load.age_s,
        missing=tuple(load.sources_missing),
        pairs=pairs,
        rank_pairs=rank_pairs.sum(axis=1).astype(np.int64),
        rank_busy_s=_of_phase(busy, 1, phase).astype(np.float64),
        imbalance=np.array(load.layer_imbalance, dtype=np.float64),
        replicas=replicas,
        ranks_of=ranks_of,
    )


def _rate(pairs: IntArray, seconds: float) -> FloatArray:
    return pairs / seconds if seconds > 0 else np.zeros(pairs.shape, np.float64)


def _array(
    load: pb.GetLoadResponse, name: str, kind: str, sizes: tuple[str, ...]
) -> npt.NDArray[Any]:
    """An array of the window by name; `sizes` name the fields with its shape."""
    data: bytes = getattr(load, name)
    shape = [getattr(load, size) for size in sizes]
    if min(shape) < 0 or len(data) != BYTES_A_CELL * math.prod(shape):
        wanted = " x ".join(f"{size} {n}" for size, n in zip(sizes, shape, strict=True))
        raise InvalidArgument(
            f"{name} of window {load.window} has {len(data)} bytes, not {BYTES_A_CELL} for each "
            f"of {wanted}; is the service of another version?"
        )
    found: npt.NDArray[Any] = np.frombuffer(data, dtype=kind).reshape(shape)
    return found


def _of_phase(array: npt.NDArray[Any], axis: int, phase: PhaseChoice) -> npt.NDArray[Any]:
    only = _ONLY.get(phase)
    if only is None or not array.shape[axis]:
        return np.asarray(array.sum(axis=axis))
    if only >= array.shape[axis]:
        raise InvalidArgument(
            f"--phase {phase.value}: this service counts {array.shape[axis]} phase and does not "
            "tell it apart; take --phase all"
        )
    found: npt.NDArray[Any] = array.take(int(only), axis=axis)
    return found
