"""Causes that lie with single ranks: slow devices, copies, shards that have only just begun.

Responsible for telling a rank that is slow from one that has more to do. Each function takes the
evidence and returns a cause or None. Called by `finding`.

How slow a rank is: seconds of compute a pair, a batch, and against its cost model, each over the
median of the other ranks of its profile. What a rank has to do changes these three in different
ways (larger batches make a pair cheaper and a batch dearer), a slow device makes all three worse,
so the smallest counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe_serve.explain.cause import TIMES_SLOWER_MIN, Cause, Kind, named
from moe_serve.explain.evidence import Evidence, Floats, RankFacts, Slice
from moe_serve.explain.model import LoadModel, pair_seconds
from moe_serve.explain.sums import OTHER, Sums, others_median, ratio, summed

SUB_CALLS_MIN = 30
"""Sub-calls of a rank below which nothing is said of it."""
NEWEST_SLICES = 3
"""What touches none of so many newest slices is over, and weighs by its part of the whole span."""


def slow_rank(evidence: Evidence) -> Cause | None:
    """A device that computes slower than others of its kind, where no copy and no start explains
    it. Where there are several, the one that costs most."""
    found: list[tuple[float, int, dict[str, float]]] = []
    known: dict[tuple[float, ...], tuple[Sums, Floats]] = {}
    for one in evidence.ranks:
        rank = one.rank
        slices = [s for s in evidence.slices if rank not in s.copying and rank not in s.cold]
        if not one.serving or not slices:
            continue
        which = tuple(s.start_s for s in slices)
        if which not in known:
            sums = summed(slices, len(evidence.ranks))
            known[which] = sums, slowness(evidence, slices, sums)
        sums, slower_of = known[which]
        slower = slower_of[rank]
        if sums.sub_calls[rank] < SUB_CALLS_MIN or not slower >= TIMES_SLOWER_MIN:
            continue
        lost_s = lost_at(sums, rank, slower)
        numbers = {
            "times_slower": float(slower),
            "compute_s_per_pair": float(sums.compute_s[rank] / max(1, sums.pairs[rank])),
            "late_s": float(sums.late_s[rank]),
            "last_share": float(sums.last[rank] / max(1, sums.sub_calls[rank])),
            "ranks_alike": float(len(_alike(_judged(evidence, sums), one))),
        }
        found.append((_share(lost_s, sums), rank, numbers))
    share = max((entry[0] for entry in found), default=0.0)  # one request may ask several of them
    if not named(share):
        return None
    _, rank, numbers = max(found, key=lambda entry: (entry[0], -entry[1]))
    return Cause(Kind.SLOW_RANK, share, numbers | {"ranks": float(len(found))}, rank=rank)


def slowness(evidence: Evidence, slices: Sequence[Slice], sums: Sums) -> Floats:
    """How many times slower each rank computes than the median of the others of its profile (of all
    others, by the cost model alone, where it is the only one); NaN where too little is known.
    float64 [ranks]."""
    batches = np.where(sums.batches > 0, sums.batches, sums.sub_calls)
    a_pair, a_batch = ratio(sums.compute_s, sums.pairs), ratio(sums.compute_s, batches)
    of_pairs = ratio(a_pair, pair_seconds(evidence))
    found = _slower(evidence, sums, [a_pair, a_batch], [of_pairs])
    if not (found >= TIMES_SLOWER_MIN).any():
        return found  # the model is dear, and can only say less
    model_s = LoadModel(evidence, slices).rank_s(batches.astype(np.float64))
    of_model = ratio(sums.compute_s, model_s)
    return np.fmin(found, _slower(evidence, sums, [of_model], [of_model]))


def _slower(
    evidence: Evidence, sums: Sums, alike: Sequence[Floats], alone: Sequence[Floats]
) -> Floats:
    """Smallest of some measures over the median of the others: `alike` among ranks of one profile,
    `alone` among all where a rank is the only one of its profile."""
    judged = _judged(evidence, sums)
    found = np.full(len(evidence.ranks), np.nan)
    for one in judged:
        among, measures = _alike(judged, one), alike
        if len(among) < 2:
            among, measures = [r.rank for r in judged], alone
        times = [m[one.rank] / others_median(m, one.rank, among) for m in measures]
        known = [t for t in times if np.isfinite(t)]
        found[one.rank] = min(known) if known else np.nan
    return found


def _judged(evidence: Evidence, sums: Sums) -> list[RankFacts]:
    return [r for r in evidence.ranks if r.serving and sums.sub_calls[r.rank] >= SUB_CALLS_MIN]


def _alike(judged: Sequence[RankFacts], one: RankFacts) -> list[int]:
    """Ranks of its profile, itself among them."""
    return [r.rank for r in judged if r.profile == one.profile]


def copy(evidence: Evidence) -> Cause | None:
    """Ranks that copies run into or out of, and that take longer for it: than the same rank without
    a copy, by what changed for the others meanwhile; or than the others, where it copied all the
    time."""
    num_ranks = len(evidence.ranks)
    found: list[tuple[float, int, dict[str, float]]] = []
    for rank in sorted({r for s in evidence.slices for r in s.copying if r < num_ranks}):
        during = [s for s in evidence.slices if rank in s.copying]
        without = [s for s in evidence.slices if rank not in s.copying and rank not in s.cold]
        sums = summed(during, num_ranks)
        if sums.sub_calls[rank] < SUB_CALLS_MIN:
            continue
        slower = _times_without(evidence, rank, during, without)
        if not slower >= TIMES_SLOWER_MIN:
            continue
        lost_s = lost_at(sums, rank, slower)
        copies = [pair for s in during for pair in s.copies if rank in pair]
        numbers = {
            "times_slower": float(slower),
            "late_s": float(sums.late_s[rank]),
            "source_rank": float(copies[-1][0]),
            "target_rank": float(copies[-1][1]),
        }
        found.append((_share(lost_s, _weighed_in(evidence, during)), rank, numbers))
    share = max((entry[0] for entry in found), default=0.0)  # one request may ask several of them
    if not named(share):
        return None
    _, rank, numbers = max(found, key=lambda entry: (entry[0], -entry[1]))
    return Cause(Kind.COPY, share, numbers | {"ranks": float(len(found))}, rank=rank)


def _times_without(
    evidence: Evidence, rank: int, during: Sequence[Slice], without: Sequence[Slice]
) -> float:
    """How many times longer sub-calls took at the rank while it copied; NaN where unknown."""
    num_ranks = len(evidence.ranks)
    then, before = summed(during, num_ranks), summed(without, num_ranks)
    busy = {r for s in during for r in s.copying}
    others = [r.rank for r in evidence.ranks if r.serving and r.rank not in busy]
    known = [k for k in others if then.sub_calls[k] >= SUB_CALLS_MIN]
    times = []
    for count in ("sub_calls", "pairs"):
        now_s = ratio(then.at_rank_s, getattr(then, count))
        if before.sub_calls[rank] >= SUB_CALLS_MIN:
            before_s = ratio(before.at_rank_s, getattr(before, count))
            both = [k for k in known if before.sub_calls[k] >= SUB_CALLS_MIN]
            drift = others_median(ratio(now_s, before_s), rank, both)
            longer = float(ratio(now_s, before_s)[rank])
            times.append(longer / (drift if np.isfinite(drift) else 1.0))
        else:
            times.append(_times_others(then, rank, known))
    return float(np.min(times))  # NaN where either is


def cold_start(evidence: Evidence) -> Cause | None:
    """Ranks that do not serve, or only just began to, and experts without a replica: what requests
    spent on second tries and on first batches, and those that still wait or have failed."""
    num_ranks = len(evidence.ranks)
    now = evidence.slices[-1]
    held = _held_share(evidence) if now.missing or evidence.silent else 0.0
    cold = [s for s in evidence.slices if s.cold or s.missing]
    if not cold and not held:
        return None
    warm = [s for s in evidence.slices if not (s.cold or s.missing)]
    sums = summed(cold, num_ranks)
    lost_of = {
        rank: _lost_first(evidence, sums, rank)
        for rank in sorted({rank for s in cold for rank in s.cold if rank < num_ranks})
    }
    lost_s = _second_tries_s(sums, summed(warm, num_ranks)) + sum(lost_of.values())
    failed = _failed_for_it(evidence, cold, warm)
    shares = [held, _share(lost_s, _weighed_in(evidence, cold)) if cold else 0.0]
    if failed:
        shares.append(failed / (sum(s.failed for s in cold) + sums.requests))
    share = min(1.0, max(shares))
    if not named(share):
        return None
    numbers = {
        "experts_missing": float(now.missing),
        "ranks_cold": float(len(lost_of)),
        "ranks_silent": float(len(evidence.silent)),
        "second_tries_s": float(sums.stage_s[OTHER]),
        "requests_open": float(evidence.open_requests),
        "requests_failed": float(round(failed)),
    }
    # Of ranks that are cold still, the one that costs most.
    worst = max(lost_of, key=lambda r: (r in now.cold, lost_of[r], -r), default=-1)
    rank = worst if worst >= 0 else min(evidence.silent, default=-1)
    return Cause(Kind.COLD_START, share, numbers, rank=rank)


def _second_tries_s(cold: Sums, warm: Sums) -> float:
    """Seconds of the rest of requests beyond what it is while no rank is cold; none where that is
    not known."""
    if warm.requests < SUB_CALLS_MIN:
        return 0.0
    usual_s = float(warm.stage_s[OTHER]) / warm.requests
    return max(0.0, float(cold.stage_s[OTHER]) - usual_s * cold.requests)


def _failed_for_it(evidence: Evidence, cold: Sequence[Slice], warm: Sequence[Slice]) -> float:
    """Requests that failed while a rank was cold: all where experts were missing or a rank is
    silent, else those beyond the rate at which they fail anyway, if that is known."""
    num_ranks = len(evidence.ranks)
    failed = sum(s.failed for s in cold)
    if evidence.silent or any(s.missing for s in cold):
        return float(failed)
    usual = sum(s.failed for s in warm)
    tried = summed(warm, num_ranks).requests + usual
    if tried < SUB_CALLS_MIN:
        return 0.0
    return max(0.0, failed - usual / tried * (failed + summed(cold, num_ranks).requests))


def _held_share(evidence: Evidence) -> float:
    """Share of the requests open now that are more than there would be at the rate and the time
    at which they were answered lately."""
    newest = evidence.slices[-2:]
    seconds = newest[-1].end_s - newest[0].start_s
    answered_s = summed(newest, len(evidence.ranks)).total_s
    usual = answered_s / seconds if seconds > 0 else 0.0
    held = evidence.open_requests - TIMES_SLOWER_MIN * usual
    return max(0.0, held) / max(1, evidence.open_requests)


def _lost_first(evidence: Evidence, sums: Sums, rank: int) -> float:
    """Seconds that requests waited longer for a rank that only just began."""
    others = [r.rank for r in _judged(evidence, sums)]
    slower = _times_others(sums, rank, others)
    return lost_at(sums, rank, slower) if slower >= TIMES_SLOWER_MIN else 0.0


def _times_others(sums: Sums, rank: int, others: Sequence[int]) -> float:
    """How many times longer sub-calls took at the rank than at the others; NaN where unknown."""
    # Both a call and a pair: a rank that has more to do takes longer for a call alone.
    each = [ratio(sums.at_rank_s, sums.sub_calls), ratio(sums.at_rank_s, sums.pairs)]
    # What a shard does not tell of its waiting counts as the way there, so that a rank is longer by
    # what its sub-calls take longer with the way, at most.
    whole_s = ratio(sums.at_rank_s + sums.wire_s, sums.sub_calls)
    longer_s = float(whole_s[rank]) - others_median(whole_s, rank, others)
    at_s = float(each[0][rank])
    by_clock = at_s / (at_s - longer_s) if longer_s < at_s else np.inf
    return float(np.min([*(m[rank] / others_median(m, rank, others) for m in each), by_clock]))


def lost_at(sums: Sums, rank: int, slower: float) -> float:
    """Seconds that sub-calls took longer at the rank than they would have otherwise. Each request
    waits for all of its sub-calls, so that each that asks the rank is so much longer than it would
    be if nothing held it up; also where something else holds it up even more."""
    return float(sums.at_rank_s[rank]) * (1.0 - 1.0 / slower)


def _weighed_in(evidence: Evidence, slices: Sequence[Slice]) -> Sums:
    """What a cause of these slices is weighed in: their requests while it is there or only just
    over, else those of the whole span."""
    now = any(s in slices for s in evidence.slices[-NEWEST_SLICES:])
    return summed(slices if now else evidence.slices, len(evidence.ranks))


def _share(lost_s: float, sums: Sums) -> float:
    return min(1.0, lost_s / sums.service_s) if sums.service_s > 0 else 0.0
