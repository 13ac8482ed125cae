"""`moe-serve screen`: would placement help this traffic?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moe_serve.cli.options import OutputOption
from moe_serve.cli.output import Output, OutputFormat
from moe_serve.cli.progress import counted
from moe_serve.cli.trace_options import (
    DecodeOption,
    ExpertsOption,
    FleetOption,
    MovesOption,
    RanksOption,
    SlotsOption,
    SourceArgument,
    TopKOption,
    TraceOptions,
    WindowOption,
    refuse_for_journal,
)
from moe_serve.errors import InvalidArgument

if TYPE_CHECKING:
    from moe_serve.cli.rehearsal import Stage
    from placement.load import LoadWindow

POLICY = "incremental"


def screen(  # noqa: PLR0913, PLR0917 - typer wants a parameter for each option
    ctx: typer.Context,
    source: SourceArgument,
    file: FleetOption = None,
    ranks: RanksOption = 4,
    slots: SlotsOption = 0,
    experts: ExpertsOption = 0,
    top_k: TopKOption = 8,
    window_tokens: WindowOption = 2048,
    decode: DecodeOption = False,
    max_moves: MovesOption = None,
    first: Annotated[
        float,
        typer.Option(
            min=0.05, max=0.95, metavar="SHARE", help="Of the windows, that plans are made from."
        ),
    ] = 0.5,
    worth: Annotated[
        float,
        typer.Option(
            min=0.001, max=0.99, metavar="SHARE", help="Gain that makes a trial worth its while."
        ),
    ] = 0.05,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Say whether placement would help the traffic of a recording: a verdict with its evidence.

    Plans are made from the first part of the windows, and judged on the later part. The verdict is
    recommend_trial, not_recommended_now or insufficient_evidence; it is about balance on this
    recording and promises no speed. Exit 0 whatever it is; nothing is changed.
    """
    from moe_serve.cli.recordings import is_journal, read_trace
    from moe_serve.cli.rehearsal import check_policies
    from moe_serve.cli.views.replay import stage_line
    from moe_serve.cli.views.screen import screen_parts, screen_plain
    from placement.replay import screen as judge

    out = Output(output)
    if is_journal(source):
        refuse_for_journal(ctx)
        windows, stage = _journal(source, max_moves)
    else:
        options = TraceOptions(file, ranks, slots, experts, top_k, window_tokens, decode, max_moves)
        trace = read_trace(source)
        stage = options.stage(ctx, trace)
        check_policies(stage, (POLICY,))
        windows, stage = options.windows(trace, stage)
        for note in trace.notes:
            out.note(f"{source.name}: {note}")
    out.note(stage_line(stage, source.name, (stage.config.policy,)))
    with counted(out, "screening", windows, passes=2) as told:
        found = judge(
            told, stage.spec, stage.topology, stage.config, first_share=first, worth=worth
        )
    out.data(screen_plain(found), screen_parts(found))


def _journal(source: Path, max_moves: int | None) -> tuple[Sequence[LoadWindow], Stage]:
    """Windows of a service's journal, and the fleet it had. Windows without load tell nothing."""
    from moe_serve.cli.recordings import read_segments
    from moe_serve.cli.rehearsal import check_policies, journal_stage, journal_windows, with_limits

    segments = read_segments(source)
    if not segments:
        raise InvalidArgument(f"{source} holds no whole segment: nothing to start from")
    stage = with_limits(journal_stage(segments), max_moves=max_moves)
    check_policies(stage, (stage.config.policy,))
    return [window for window in journal_windows(segments) if window.demand.any()], stage
