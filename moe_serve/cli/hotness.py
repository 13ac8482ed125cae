"""What is hot, as arrays: a load window and a placement as `top` and `heat` need them. Pure.

Responsible for rates, shares and replicas of one phase. Called by the commands top and heat.

Words are those of `documents.experts`: an expert at 3 x fair share gets three times what it would
if all were asked for alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import numpy as np
import numpy.typing as npt

from moe_serve.documents.experts import ranks_in_layer, shares_of
from moe_serve.documents.replicas import Ranks, holders_of, listed_ranks, replica_counts
from moe_serve.documents.window import Counts, PhaseChoice, busy_of, counts_of, of_phase
from moe_serve.errors import FailedPrecondition, InvalidArgument, NotFound
from moe_serve.rpc import placement_pb2 as pb

FloatArray = npt.NDArray[np.float64]


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
    pairs: Counts
    rank_pairs: Counts
    rank_busy_s: FloatArray
    imbalance: FloatArray
    replicas: Counts
    ranks_of: Ranks

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
        return shares_of(self.pairs)

    @property
    def times_fair_share(self) -> FloatArray:
        """Share / fair share, float64 [layers, experts]: 1 is even, 0 is never asked for."""
        return self.shares * self.num_experts

    @property
    def ranks_in_layer(self) -> Counts:
        """Rank of each expert in its layer, int64 [layers, experts], 1 = hottest."""
        return ranks_in_layer(self.pairs)

    def busy(self, rank: int) -> float | None:
        """Share of the window in which a rank computed; None where it did not report, or a figure
        that is no number."""
        if rank >= len(self.rank_busy_s) or not self.seconds > 0:
            return None
        share = float(self.rank_busy_s[rank]) / self.seconds
        return share if isfinite(share) else None


def hotness_of(
    load: pb.GetLoadResponse | None, placement: pb.GetPlacementResponse, phase: PhaseChoice
) -> Hotness:
    """A window and a placement together. None = no window has closed: every count is 0, and so
    they are in a window of another model. Raises FailedPrecondition where an array is not as large
    as its window says, InvalidArgument where the phase is one that the service does not tell
    apart."""
    load = pb.GetLoadResponse() if load is None else load
    layers, experts = placement.num_layers, placement.num_experts
    try:
        demand, rank_pairs = counts_of(load, "demand"), counts_of(load, "rank_pairs")
        busy = busy_of(load)
    except InvalidArgument as error:
        # Of the service's answer: nothing that was typed is wrong.
        raise FailedPrecondition(error.message) from error
    try:
        pairs = of_phase(demand, phase).astype(np.int64)
        busy_s = of_phase(busy, phase, axis=1).astype(np.float64)
    except NotFound as error:
        raise InvalidArgument(
            f"--phase {phase.value}: this service counts {load.num_phases} phase and does not "
            "tell it apart; take --phase all"
        ) from error
    if pairs.shape != (layers, experts):
        pairs = np.zeros((layers, experts), np.int64)
    return Hotness(
        phase=phase,
        window=load.window,
        seconds=max(load.end_s - load.start_s, 0.0),
        age_s=load.age_s,
        missing=tuple(load.sources_missing),
        pairs=pairs,
        rank_pairs=rank_pairs.sum(axis=1),
        rank_busy_s=busy_s,
        imbalance=np.array(load.layer_imbalance, dtype=np.float64),
        replicas=replica_counts(placement),
        ranks_of=listed_ranks(holders_of(placement)),
    )


def _rate(pairs: Counts, seconds: float) -> FloatArray:
    return pairs / seconds if seconds > 0 else np.zeros(pairs.shape, np.float64)
