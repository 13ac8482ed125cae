"""Why it is slow, and why a plan was made, as text: the verdict first. Pure. Called by the explain
command."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite

from rich.console import RenderableType
from rich.table import Table

from moe_serve.cli.figures import shown_imbalance, shown_number, shown_seconds
from moe_serve.cli.output import columns
from moe_serve.cli.views.events import event_line, refused_lines
from moe_serve.cli.views.moves import moves_table
from moe_serve.cli.views.plan import price_line
from moe_serve.explain.words import controller_away, next_step, sentence
from moe_serve.rpc import placement_pb2 as pb

BAR_CELLS = 20
RANKS_SHOWN = 8
"""Ranks in the table, those that came last most often first."""
VERDICTS = {
    "nothing_slow": "Nothing is slow.",
    "slow": "It is slow:",
    "idle": "Idle: no request was answered or is open.",
}


def explain_parts(answer: pb.ExplainResponse) -> list[RenderableType]:
    """Verdict, causes with evidence and next step, where the time went, who came last."""
    looked = f"Looked at the last {shown_seconds(answer.seconds)}, {answer.requests} requests"
    if answer.requests:
        looked += f", {shown_seconds(answer.mean_s)} on average"
    if answer.p99_s:
        looked += f", p99 of the newest {shown_seconds(answer.p99_s)}"
    parts: list[RenderableType] = [
        VERDICTS.get(answer.verdict, answer.verdict),
        *(line for cause in answer.causes for line in cause_lines(cause)),
        "",
        f"{looked}; newest figure {shown_seconds(answer.age_s)} old",
    ]
    if answer.requests:
        parts += ["", _stage_table(answer.stages)]
    if last := [part for part in answer.ranks if part.sub_calls]:
        parts += ["", _rank_table(last)]
    if answer.HasField("newest"):
        parts += [
            "",
            f"Newest decision: {event_line(answer.newest)}",
            *refused_lines(answer.newest),
        ]
    return parts


def cause_lines(cause: pb.Cause) -> list[str]:
    """What it is, the numbers, and what to do."""
    evidence = sorted(cause.evidence.items())
    numbers = ", ".join(f"{name} {shown_number(value, '.4g')}" for name, value in evidence)
    lines = [f"  {cause.kind}: {cause.text}"]
    if numbers:
        lines.append(f"    evidence: {numbers}")
    return [*lines, f"    next step: {cause.next_step}"]


def _stage_table(stages: Iterable[pb.Stage]) -> Table:
    asked = [stage for stage in stages if stage.requests]
    table = columns(["PHASE", "STAGE", "SHARE", "", "P50", "P99"], right=["SHARE", "P50", "P99"])
    of_phase: dict[str, float] = {}
    for stage in asked:
        of_phase[stage.phase] = of_phase.get(stage.phase, 0.0) + stage.seconds
    for stage in asked:
        total_s = of_phase[stage.phase]
        share = stage.seconds / total_s if total_s > 0 else 0.0
        table.add_row(
            stage.phase,
            stage.stage,
            shown_number(share, ".0%"),
            "#" * round(share * BAR_CELLS if isfinite(share) else 0.0),
            shown_seconds(stage.p50_s),
            shown_seconds(stage.p99_s),
        )
    return table


def _rank_table(ranks: list[pb.RankPart]) -> Table:
    headers = ["RANK", "SUB-CALLS", "CAME LAST", "LATE", "WIRE", "WAIT", "COMPUTE", "AS OTHERS"]
    table = columns(headers, right=headers)
    worst = sorted(ranks, key=lambda part: (-part.last, part.rank))
    for part in worst[:RANKS_SHOWN]:
        each = [part.wire_s, part.wait_s, part.compute_s]
        table.add_row(
            str(part.rank),
            str(part.sub_calls),
            f"{part.last / part.sub_calls:.0%}",
            shown_seconds(part.late_s / part.last) if part.last else "-",
            *(shown_seconds(seconds / part.sub_calls) for seconds in each),
            f"{shown_number(part.slowness, '.1f')} x" if part.slowness else "-",
        )
    return table


def away_parts(reason: str) -> list[RenderableType]:
    """What there is to say where the controller gave no answer."""
    cause = controller_away()
    return [
        VERDICTS["slow"],
        f"  {cause.kind.value}: {sentence(cause)}",
        f"    evidence: {reason}",
        f"    next step: {next_step(cause)}",
    ]


def plan_parts(answer: pb.ExplainPlanResponse) -> list[RenderableType]:
    """What a plan was made on, what it moves, what was refused, what became of it."""
    plan = answer.plan
    # Of an old plan the controller keeps the records alone.
    kept = bool(plan.moves) or plan.balancedness_before > 0.0
    price = price_line(plan) if kept else "what it moved is not kept any more"
    parts: list[RenderableType] = [f"Plan {plan.plan_id}: {price}"]
    if plan.moves:
        parts.append(moves_table(plan.moves, states=True))
    parts += [f"Refused: {reason}" for reason in plan.refused]
    parts.append(f"Imbalance {_measured(answer)}")
    parts += [
        line for record in answer.records for line in (event_line(record), *refused_lines(record))
    ]
    return parts


def _measured(answer: pb.ExplainPlanResponse) -> str:
    def shown(value: float) -> str:
        return shown_imbalance(value) if value > 0 else "not known"

    plan = answer.plan
    predicted = f"{shown(plan.balancedness_before)} -> {shown(plan.balancedness_after)}"
    return (
        f"predicted {predicted}; measured {shown(answer.measured_before)} in the window before it "
        f"began, {shown(answer.measured_after)} in the first whole one after it ended"
    )
