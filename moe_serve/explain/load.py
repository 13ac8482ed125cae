"""Causes that lie with what is asked: experts that many want, more requests than are taken, no
memory to spread experts.

Responsible for naming skew only where the counts and the routers' clocks both say it. Each function
takes the evidence, or the skew that was found in it, and returns a cause or None. Called by
`finding`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moe_serve.explain.cause import Cause, Kind, named
from moe_serve.explain.evidence import Evidence, Floats, Slice, able_ranks
from moe_serve.explain.model import LayerSkew, LoadModel
from moe_serve.explain.ranks import SUB_CALLS_MIN
from moe_serve.explain.sums import QUEUE, WAIT, Sums, ratio, summed

BUSY_MIN = 0.7
"""Share of the time that ranks compute from which a wait at all of them is overload."""
ALIKE = 0.5
"""Of the median wait: a rank that waits less has room, so the others' wait is skew."""


@dataclass(frozen=True, slots=True)
class Skew:
    """Layers whose load is uneven, and the share of the time of requests that is lost in them."""

    share: float = 0.0
    layers: tuple[LayerSkew, ...] = ()


@dataclass(frozen=True, slots=True)
class Skews:
    """Skew that single experts make, and other."""

    by_one_expert: Skew = Skew()
    other: Skew = Skew()


def hot_expert(skews: Skews) -> Cause | None:
    """One expert that makes its ranks the last to answer."""
    return _skew(skews.by_one_expert, one_expert=True)


def imbalance(skews: Skews) -> Cause | None:
    """Ranks that have more to do than others without one expert to blame."""
    return _skew(skews.other, one_expert=False)


def _skew(skew: Skew, *, one_expert: bool) -> Cause | None:
    share, layers = skew.share, skew.layers
    if not named(share) or not layers:
        return None
    worst = max(layers, key=lambda s: (s.seconds - s.even_s, -s.layer))
    numbers = {
        "times_even_share": worst.seconds / worst.even_s if worst.even_s > 0 else 0.0,
        "layers": float(len(layers)),
        "modelled_s": worst.seconds,
        "even_s": worst.even_s,
    }
    if not one_expert:
        return Cause(Kind.IMBALANCE, share, numbers, rank=worst.rank, layer=worst.layer)
    numbers |= {
        "expert_pairs": float(worst.expert_pairs),
        "replicas": float(worst.replicas),
        "spread_s": worst.spread_s,
    }
    return Cause(
        Kind.HOT_EXPERT,
        share,
        numbers,
        rank=worst.rank,
        layer=worst.layer,
        expert=worst.expert,
    )


def skews_of(evidence: Evidence) -> Skews:
    """Uneven load and what it costs: the smaller of what the cost model says would be saved at
    shards, and of what routers saw those ranks take longer."""
    slices = settled(evidence)
    num_ranks = len(evidence.ranks)
    sums = summed(slices, num_ranks)
    model = LoadModel(evidence, [s for s in slices if s.rank_pairs.any()])
    all_s = model.all_layers_s
    if not all_s or sums.service_s <= 0 or sums.requests < SUB_CALLS_MIN:
        return Skews()

    def skew(layers: list[LayerSkew], best: list[float]) -> Skew:
        saved_s = sum(s.seconds - least for s, least in zip(layers, best, strict=True))
        seen_s = _seen_longer(evidence, sums, sorted({s.rank for s in layers}))
        lost_s = min(sums.shard_s * saved_s / all_s, seen_s)
        return Skew(lost_s / sums.service_s, tuple(layers))

    found = model.skewed()
    ones = [s for s in found if s.by_one_expert]
    rest = [s for s in found if not s.by_one_expert]
    return Skews(skew(ones, [s.spread_s for s in ones]), skew(rest, [s.even_s for s in rest]))


def _seen_longer(evidence: Evidence, sums: Sums, ranks: Sequence[int]) -> float:
    """Seconds that routers saw sub-calls spend at these ranks beyond an even share (or what others
    take, where that is less), or, which is all there is where each rank is one of them, come later
    than the last but one."""
    # What a shard does not tell of its waiting counts as the way there: both have to say it.
    spent = (sums.at_rank_s, sums.at_rank_s + sums.wire_s)
    longer_s = min(_longer_s(able_ranks(evidence), spent_s, ranks) for spent_s in spent)
    return max(float(sums.late_s[list(ranks)].sum()), longer_s)


def _longer_s(warm: Sequence[int], spent_s: Floats, ranks: Sequence[int]) -> float:
    """Seconds that these ranks spent beyond an even share, or what others did, where less."""
    others = [rank for rank in warm if rank not in ranks]
    usual_s = min(
        float(np.mean(spent_s[warm])) if warm else 0.0,
        float(np.median(spent_s[others])) if others else np.inf,
    )
    return sum(max(0.0, float(spent_s[rank]) - usual_s) for rank in ranks)


def settled(evidence: Evidence) -> Sequence[Slice]:
    """Slices since the placement is as it is now; all, where that is too short a while."""
    since = [s for s in evidence.slices if s.start_s >= evidence.layout_since_s]
    enough = any(s.rank_pairs.any() for s in since)
    return since if enough else evidence.slices


def overload(evidence: Evidence) -> Cause | None:
    """More comes than is taken: requests wait for a permit or are refused one, or every rank has a
    queue and computes nearly all the time."""
    sums = summed(evidence.slices, len(evidence.ranks))
    queued = float(sums.stage_s[QUEUE]) / sums.total_s if sums.total_s > 0 else 0.0
    refused = sum(s.refused for s in evidence.slices)
    turned_away = refused / (refused + sums.requests) if refused else 0.0
    waited, busy = _waits_everywhere(evidence)
    share = max(queued, turned_away, waited)
    if not named(share):
        return None
    numbers = {
        "queue_share": queued,
        "waiting_requests": float(evidence.waiting_requests),
        "refused_requests": float(refused),
        "busy_share": busy,
        "wait_share": waited,
    }
    return Cause(Kind.OVERLOAD, share, numbers)


def _waits_everywhere(evidence: Evidence) -> tuple[float, float]:
    """(share of the time of requests that is waiting at shards, where all of them have a queue;
    share of the time that the median rank computes)."""
    closed = [s for s in evidence.slices if s.rank_pairs.any()]
    seconds = sum(s.end_s - s.start_s for s in closed)
    sums = summed(evidence.slices, len(evidence.ranks))
    ranks = [r.rank for r in evidence.ranks if r.serving and sums.sub_calls[r.rank]]
    if not ranks or seconds <= 0 or sums.service_s <= 0:
        return 0.0, 0.0
    busy = float(np.median([sum(float(s.busy_s[r]) for s in closed) / seconds for r in ranks]))
    waits = ratio(sums.wait_s, sums.sub_calls)[ranks]
    alike = float(waits.min()) >= ALIKE * float(np.median(waits))
    if busy < BUSY_MIN or not alike or len(ranks) < 2:
        return 0.0, busy
    return float(sums.stage_s[WAIT]) / sums.service_s, busy


def memory(evidence: Evidence, skews: Skews) -> Cause | None:
    """Skew that stays because there is no memory to spread experts, or batches that a rank had too
    little memory for."""
    short = evidence.spare_slots <= 0  # whatever was refused: other things are told with it
    share = skews.by_one_expert.share + skews.other.share if short else 0.0
    sums = summed(evidence.slices, len(evidence.ranks))
    pressed = [r.rank for r in evidence.ranks if r.memory_errors]
    if pressed and sums.service_s > 0:
        share = max(share, _seen_longer(evidence, sums, pressed) / sums.service_s)
    share = min(1.0, share)
    if not named(share):
        return None
    numbers = {
        "spare_slots": float(evidence.spare_slots),
        "refused": float(len(evidence.wanted_memory)),
        "memory_errors": float(sum(r.memory_errors for r in evidence.ranks)),
    }
    return Cause(Kind.MEMORY, share, numbers, rank=pressed[0] if pressed else -1)
