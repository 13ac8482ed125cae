"""What the cost model says the measured load should have cost each rank, and would cost if an
expert were spread.

Responsible for seconds by rank and layer from pairs. Must never look at measured times. Used where
skew and slowness are looked for.

A rank's pairs of an expert are not counted apart; they are taken as its share among the replicas,
scaled so that the pairs of each rank and layer are those that the rank counted. A batch of a layer
costs, for each expert it touches, reading the expert or computing its pairs, whichever is longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moe_serve.explain.evidence import Evidence, Floats, Ints, Slice, able_ranks
from moe_serve.explain.sums import summed
from placement.cost import compute_seconds, memory_seconds

CANDIDATES_MAX = 4
"""Experts of a rank and layer that are tried as the one that explains its load."""
MOST = 0.5
"""Share of a layer's excess that one expert must explain, and that no other one may explain as
well, to be the one to blame."""
NOISE_DEVIATIONS = 3.0
"""Standard deviations of chance that a rank's seconds must be above an even share."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerSkew:
    """One layer whose slowest rank has more to do than an even share, in modelled seconds of the
    span: what that rank takes, what the slowest would with `expert` spread over all ranks, what it
    would with the next best one spread instead, and what all would at best."""

    layer: int
    rank: int
    expert: int
    expert_pairs: int
    replicas: int
    seconds: float
    spread_s: float
    next_spread_s: float
    even_s: float

    @property
    def by_one_expert(self) -> bool:
        """Whether most of the excess is this expert's, and not as well another's."""
        saved_s, next_saved_s = self.seconds - self.spread_s, self.seconds - self.next_spread_s
        most = saved_s >= MOST * (self.seconds - self.even_s)
        return most and next_saved_s <= MOST * saved_s


class LoadModel:
    """Pairs and modelled seconds of the load windows in `slices`."""

    def __init__(self, evidence: Evidence, slices: Sequence[Slice]) -> None:
        spec, num_ranks = evidence.spec, len(evidence.ranks)
        self._evidence = evidence
        self.rank_pairs = sum(
            (one.rank_pairs for one in slices), np.zeros((num_ranks, spec.num_layers), np.int64)
        )
        self.expert_pairs = sum(
            (one.expert_pairs for one in slices),
            np.zeros((spec.num_layers, spec.num_experts), np.int64),
        )
        profiles = [rank.profile for rank in evidence.ranks]
        self.pair_s = pair_seconds(evidence)
        self.read_s = np.array([float(memory_seconds(1, spec, p)) for p in profiles])
        self._overhead_s = np.array([p.overhead_s for p in profiles])
        self._batches = self._layer_batches(summed(slices, num_ranks).batches)
        self._key_pairs = self._by_key()
        self._key_s = self._seconds(
            self._key_pairs,
            self._batches[:, :, None],
            self.pair_s[:, None, None],
            self.read_s[:, None, None],
        )
        self.layer_s: Floats = self._key_s.sum(axis=2)
        """Modelled seconds of each rank for each layer, without overheads: [ranks, layers]."""

    def rank_s(self, batches: Floats) -> Floats:
        """Modelled seconds of each rank, for so many batches of each with their overheads:
        float64 [ranks]."""
        total: Floats = self.layer_s.sum(axis=1) + self._overhead_s * batches
        return total

    @property
    def all_layers_s(self) -> float:
        """Seconds of the slowest rank of each layer, added up."""
        return float(self.layer_s.max(axis=0).sum())

    def skewed(self) -> list[LayerSkew]:
        """Layers whose slowest rank is beyond an even share by more than chance."""
        usable = np.zeros(len(self._evidence.ranks), np.bool_)
        usable[able_ranks(self._evidence)] = True
        if usable.sum() < 2:
            return []
        speed = np.where(usable, 1.0 / self.pair_s, 0.0)
        found = []
        for layer in range(self.layer_s.shape[1]):
            rank = int(np.argmax(self.layer_s[:, layer]))
            even_s = float((self.layer_s[:, layer] / self.pair_s).sum() / speed.sum())
            # So much seconds scatter with the number of pairs that they are of.
            chance = NOISE_DEVIATIONS / np.sqrt(max(1, int(self.rank_pairs[rank, layer])))
            if not usable[rank] or self.layer_s[rank, layer] <= even_s * (1.0 + chance):
                continue
            found.append(self._best_spread(layer, rank, even_s, speed / speed.sum()))
        return found

    def _best_spread(self, layer: int, rank: int, even_s: float, share: Floats) -> LayerSkew:
        """The expert of the slowest rank whose spreading helps the layer most."""
        seconds = self.layer_s[:, layer]
        mine = self._key_pairs[rank, layer]
        tried: list[tuple[float, int]] = []
        for expert in np.argsort(-mine, kind="stable")[:CANDIDATES_MAX].tolist():
            if mine[expert] <= 0:
                break
            pairs = self._key_pairs[:, layer, expert].sum() * share
            there_s = self._seconds(
                pairs, np.maximum(self._batches[:, layer], 1.0), self.pair_s, self.read_s
            )
            spread_s = float((seconds - self._key_s[:, layer, expert] + there_s).max())
            tried.append((spread_s, expert))
        top = float(seconds[rank])
        (spread_s, expert), (next_s, _) = sorted([*tried, (top, -1), (top, -1)])[:2]
        key = self._evidence.spec.key(layer, max(0, expert))
        return LayerSkew(
            layer=layer,
            rank=rank,
            expert=expert,
            expert_pairs=int(self.expert_pairs[layer, expert]),
            replicas=int(self._evidence.hosts[key].sum()),
            seconds=top,
            spread_s=spread_s,
            next_spread_s=next_s,
            even_s=even_s,
        )

    def _layer_batches(self, batches: Ints) -> Floats:
        """Batches of each rank and layer, by their shares of its pairs; where a rank's batches are
        not known every pair is one: [ranks, layers]."""
        of_rank = self.rank_pairs.sum(axis=1, keepdims=True)
        known = np.where(batches > 0, batches, of_rank[:, 0])[:, None]
        share = np.divide(
            self.rank_pairs, of_rank, out=np.zeros(self.rank_pairs.shape), where=of_rank > 0
        )
        found: Floats = known * share
        return found

    def _by_key(self) -> Floats:
        """Pairs of each rank, layer and expert: float64 [ranks, layers, experts]."""
        spec = self._evidence.spec
        hosts = self._evidence.hosts.T.astype(np.float64)
        hosts = hosts.reshape(-1, spec.num_layers, spec.num_experts)
        replicas = np.maximum(hosts.sum(axis=0), 1.0)
        pairs = hosts * (self.expert_pairs / replicas)
        guessed = pairs.sum(axis=2)
        scale = np.divide(self.rank_pairs, guessed, out=np.zeros(guessed.shape), where=guessed > 0)
        scaled: Floats = pairs * scale[:, :, None]
        return scaled

    @staticmethod
    def _seconds(pairs: Floats, batches: Floats, pair_s: Floats, read_s: Floats) -> Floats:
        """Of experts with so many pairs in so many batches of their layer."""
        a_batch = np.divide(
            pairs,
            batches,
            out=np.zeros(pairs.shape),
            where=np.broadcast_to(batches, pairs.shape) > 0,
        )
        touched = np.minimum(a_batch, 1.0)
        each_s = np.maximum(np.maximum(a_batch, 1.0) * pair_s, read_s)
        found: Floats = batches * touched * each_s
        return found


def pair_seconds(evidence: Evidence) -> Floats:
    """Seconds of one pair on each rank by its cost model: float64 [ranks]."""
    return np.array([float(compute_seconds(1, evidence.spec, r.profile)) for r in evidence.ranks])
