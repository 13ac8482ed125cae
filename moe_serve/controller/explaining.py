"""Why it is slow, and why a plan was made: evidence gathered from what the controller has at hand,
and the answers in their wire form.

Responsible for cutting the newest windows into slices and for the form of the answers; `explain`
judges. Must never ask a part. Called by the admin port.

Routers' stage counts are kept to a second, so what a slice holds of them may belong to a second
after it. A slice therefore counts as one with a copy, or with a cold rank, where there was one up
to that long after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from moe_serve.controller.admin_checks import check_text, wrong
from moe_serve.controller.move_states import move_states
from moe_serve.controller.plans import NOT_YET_S
from moe_serve.controller.recent import Sample
from moe_serve.controller.stages import GRAIN_S, difference, together
from moe_serve.controller.views import Sight, move_view, plan_view, record_view
from moe_serve.errors import NotFound
from moe_serve.explain import Evidence, Finding, RankFacts, Slice, explain
from moe_serve.explain.finding import SECONDS_MAX
from moe_serve.explain.sums import answered, quantile_s
from moe_serve.explain.words import next_step, sentence
from moe_serve.ports import RouterReport
from moe_serve.rpc import placement_pb2 as pb
from moe_serve.stage_counts import STAGE_BOUNDS_S, STAGES, StageCounts
from placement.config import RebalanceConfig
from placement.engine.state import RankState, SlotUse
from placement.load import LoadWindow
from placement.messages.effects import Answer
from placement.topology import DeviceProfile, Phase

REPORT_LAG_S: Final = 0.5
"""What a report tells may be so old."""
RECORDS_LOOKED_AT: Final = 256
"""Newest decision records in which refusals for want of memory are looked for."""
MEMORY_WORDS: Final = ("slot", "byte", "budget", "memory")
"""Words of a refusal that is for want of memory."""


async def explain_view(sight: Sight, request: pb.ExplainRequest) -> pb.ExplainResponse:
    """Answer of Explain; judged in a thread, for a large model is some work. Raises
    InvalidArgument."""
    seconds = request.seconds
    if not 0.0 <= seconds <= SECONDS_MAX:  # also what is no number
        raise wrong("seconds", f"{seconds} must lie in [0, {SECONDS_MAX:g}]; 0 = ten windows")
    evidence = evidence_of(sight, seconds)
    finding = await asyncio.to_thread(explain, evidence)
    counts = together(one.stages for one in evidence.slices)
    requests = answered(counts)
    total_s = float(counts.seconds.sum())
    reports = _router_reports(sight)
    heard_s = [part.heard_s for part in sight.parts.routers.values() if part.report is not None]
    newest = sight.book.newest(1)
    return pb.ExplainResponse(
        verdict=finding.verdict,
        causes=_causes(finding),
        stages=_stages(counts),
        ranks=_ranks(counts, finding),
        bounds_s=STAGE_BOUNDS_S,
        seconds=sight.now_s - evidence.slices[0].start_s,
        age_s=max(0.0, sight.now_s - max(heard_s, default=sight.now_s)),
        requests=requests,
        mean_s=total_s / requests if requests else 0.0,
        p99_s=max((r.quantiles.get("dispatch_p99_s", 0.0) for r in reports), default=0.0),
        newest=record_view(newest[0]) if newest else None,
    )


async def explain_plan_view(sight: Sight, request: pb.ExplainPlanRequest) -> pb.ExplainPlanResponse:
    """Answer of ExplainPlan. Raises InvalidArgument, NotFound."""
    check_text("plan_id", request.plan_id)
    book = sight.book
    kept = book.plans.find(request.plan_id)
    plan_id = request.plan_id if kept is None else kept.plan_id
    records = [one for one in book.newest(book.records_kept) if one.record.plan_id == plan_id]
    if not plan_id or (kept is None and not records):
        known = "none has run or was asked for yet" if not plan_id else "see `moe-serve events`"
        raise NotFound(f"no plan {plan_id!r} is kept; {known}")
    view = pb.PlanView(plan_id=plan_id)  # by its records alone neither moves nor balance are known
    if kept is not None:
        answer = Answer(request_id=0, code="ok", message="", plan_id=plan_id, plan=kept.plan)
        view = plan_view(answer)
    moves = {move.move_id: move for move in book.moves if move.plan_id == plan_id}
    begun = kept is not None and kept.began_s < NOT_YET_S
    told = move_states(view, sight.state.run, (one.record for one in records))
    for move in view.moves:
        if move.move_id in moves:
            move.CopyFrom(move_view(sight.state, moves[move.move_id]))
        elif begun:
            # Fewer moves than plans are kept, and of a first fill none.
            move.state = told.get(move.move_id, pb.MOVE_STATE_UNSPECIFIED)
    return pb.ExplainPlanResponse(
        plan=view,
        records=[record_view(one) for one in records],
        measured_before=0.0 if kept is None else kept.before,
        measured_after=0.0 if kept is None else kept.after,
    )


# ------------------------------------------------------------------------------------ evidence


def evidence_of(sight: Sight, seconds: float) -> Evidence:
    """What was measured in the last `seconds` (0 = the windows that are kept), to a window."""
    state, config = sight.state, sight.settings.config
    profiles = {profile.name: profile for profile in sight.settings.profiles}
    slices = _slices(sight, seconds)
    samples = [*(sample for _, sample in _windows(sight, seconds)), sight.recent.sample(state)]
    errors = [sample.memory_errors for sample in samples]
    reports = _router_reports(sight)
    return Evidence(
        spec=sight.settings.spec,
        slices=slices,
        ranks=tuple(
            RankFacts(
                rank=rank.rank,
                profile=_profile(rank, profiles),
                serving=rank.holds,
                usable=rank.holds and not rank.draining,
                memory_errors=sum(found.get(rank.rank, 0) for found in errors),
            )
            for rank in state.ranks
        ),
        hosts=_hosts(sight),
        layout_since_s=state.published_at_s,
        open_requests=_total(reports, "open_requests") + _total(reports, "waiting_requests"),
        waiting_requests=_total(reports, "waiting_requests"),
        silent=frozenset(sight.parts.suspects()),
        spare_slots=_spare_slots(state.ranks, sight.settings.spec.num_keys, config),
        wanted_memory=_wanted_memory(sight, slices[0].start_s),
    )


def _slices(sight: Sight, seconds: float) -> tuple[Slice, ...]:
    """One for each window, one for what came since; where more was asked for than windows are kept,
    one before them."""
    recent, now_s = sight.recent, sight.now_s
    start_s, windows = _start_s(sight, seconds), _windows(sight, seconds)
    first_s = windows[0][0].start_s if windows else max(start_s, sight.started_s)
    cuts = [window.start_s for window, _ in windows]
    cuts.append(windows[-1][0].end_s if windows else first_s)
    loads: list[tuple[LoadWindow | None, Sample]] = [*windows, (None, recent.sample(sight.state))]
    earlier_s = max(start_s, sight.started_s)
    if earlier_s < first_s - REPORT_LAG_S and seconds and len(windows) == len(recent.windows):
        cuts.insert(0, earlier_s)
        loads.insert(0, (None, Sample()))
    since = [*(sight.stages.since(cut) for cut in cuts), together(())]
    ends = [*cuts[1:], max(now_s, cuts[-1])]
    colds = [sample.cold for _, sample in loads]
    return tuple(
        _slice(
            sight,
            (cut, end_s),
            difference(since[i], since[i + 1]),
            *loads[i],
            cold=colds[i].union(*colds[i + 1 : i + 2]),
        )
        for i, (cut, end_s) in enumerate(zip(cuts, ends, strict=True))
    )


def _start_s(sight: Sight, seconds: float) -> float:
    return sight.now_s - seconds if seconds else float("-inf")


def _windows(sight: Sight, seconds: float) -> list[tuple[LoadWindow, Sample]]:
    """Kept windows that lie in the span by more than half; the newest one always."""
    kept = list(sight.recent.windows)
    start_s = _start_s(sight, seconds)
    return [(w, s) for w, s in kept if (w.start_s + w.end_s) / 2 >= start_s] or kept[-1:]


def _slice(  # one argument a source
    sight: Sight,
    when: tuple[float, float],
    stages: StageCounts,
    window: LoadWindow | None,
    sample: Sample,
    *,
    cold: frozenset[int],
) -> Slice:
    spec, num_ranks = sight.settings.spec, len(sight.state.ranks)
    rank_pairs = np.zeros((num_ranks, spec.num_layers), np.int64)
    busy_s = np.zeros(num_ranks, np.float64)
    expert_pairs = np.zeros((spec.num_layers, spec.num_experts), np.int64)
    if window is not None:
        met = min(num_ranks, len(window.rank_pairs))
        rank_pairs[:met] = window.rank_pairs[:met]
        busy_s[:met] = window.rank_busy_s[:met].sum(axis=1)
        expert_pairs = window.executed_pairs.sum(axis=0)
    copies = sight.recent.copies(when[0] - REPORT_LAG_S, when[1] + GRAIN_S)
    return Slice(
        start_s=when[0],
        end_s=when[1],
        stages=stages,
        rank_pairs=rank_pairs,
        expert_pairs=expert_pairs,
        busy_s=busy_s,
        batches=np.array([sample.batches.get(r, 0) for r in range(num_ranks)], np.int64),
        copies=tuple((copy.source_rank, copy.target_rank) for copy in copies),
        cold=cold,
        missing=sample.missing,
        failed=sample.failed,
        refused=sample.refused,
    )


def _hosts(sight: Sight) -> npt.NDArray[np.bool_]:
    hosts = np.zeros((sight.settings.spec.num_keys, len(sight.state.ranks)), np.bool_)
    for rank in sight.state.ranks:
        if rank.holds:
            hosts[[s.key for s in rank.slots if s.use is SlotUse.LISTED], rank.rank] = True
    return hosts


def _profile(rank: RankState, profiles: dict[str, DeviceProfile]) -> DeviceProfile:
    return profiles.get(rank.profile, next(iter(profiles.values())))


def _spare_slots(ranks: Sequence[RankState], num_keys: int, config: RebalanceConfig) -> int:
    """Slots that may be filled beyond one replica of each expert in each failure domain of the
    floor, as far as there are so many."""
    usable = [rank for rank in ranks if rank.holds and not rank.draining]
    domains = len({rank.failure_domain for rank in usable})
    room = sum(max(0, rank.num_slots - config.staging_slots) for rank in usable)
    return room - num_keys * max(1, min(config.floor, domains))


def _wanted_memory(sight: Sight, start_s: float) -> tuple[str, ...]:
    """What the newest plan that was judged was refused for want of slots or bytes. That an operator
    was refused a smaller budget is no want of any."""
    records = [kept.record for kept in sight.book.newest(RECORDS_LOOKED_AT)]
    judged = next((r for r in reversed(records) if r.refused), None)
    if judged is None or judged.at_s < start_s:
        return ()
    return tuple(
        why
        for why in judged.refused
        if why.startswith("move_refused:") and any(word in why for word in MEMORY_WORDS)
    )


def _router_reports(sight: Sight) -> list[RouterReport]:
    parts = sight.parts.routers.values()
    return [part.report for part in parts if part.report is not None and not part.silent]


def _total(reports: Sequence[RouterReport], name: str) -> int:
    return int(sum(report.counters.get(name, 0.0) for report in reports))


# ------------------------------------------------------------------------------------ answers


def _causes(finding: Finding) -> list[pb.Cause]:
    return [
        pb.Cause(
            kind=cause.kind,
            share=cause.share,
            text=sentence(cause),
            next_step=next_step(cause),
            rank=cause.rank,
            layer=cause.layer,
            expert=cause.expert,
            evidence=dict(cause.evidence),
        )
        for cause in finding.causes
    ]


def _stages(counts: StageCounts) -> list[pb.Stage]:
    return [
        pb.Stage(
            phase=phase.name.lower(),
            stage=stage,
            requests=int(counts.requests[phase, number].sum()),
            seconds=float(counts.seconds[phase, number]),
            p50_s=quantile_s(counts.requests[phase, number], 0.5),
            p99_s=quantile_s(counts.requests[phase, number], 0.99),
            buckets=counts.requests[phase, number].tolist(),
        )
        for phase in Phase
        for number, stage in enumerate(STAGES)
    ]


def _ranks(counts: StageCounts, finding: Finding) -> list[pb.RankPart]:
    met = len(counts.sub_calls)
    return [
        pb.RankPart(
            rank=part.rank,
            sub_calls=int(counts.sub_calls[part.rank]),
            last=int(counts.last[part.rank]),
            late_s=float(counts.late_s[part.rank]),
            wire_s=float(counts.wire_s[part.rank]),
            wait_s=float(counts.wait_s[part.rank]),
            compute_s=float(counts.compute_s[part.rank]),
            pairs=int(counts.pairs[part.rank]),
            slowness=part.slowness,
        )
        if part.rank < met
        else pb.RankPart(rank=part.rank)
        for part in finding.ranks
    ]
