"""`moe-serve replay`: the production planner over what was recorded; changes nothing anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moe_serve.cli.exits import ExitCode
from moe_serve.cli.options import OutputOption
from moe_serve.cli.output import Output, OutputFormat
from moe_serve.errors import InvalidArgument


def replay(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="JOURNAL|TRACE",
            help="A folder of state (or its inputs.db), or a .npz with topk_ids.",
        ),
    ],
    policy: Annotated[
        str, typer.Option("--policy", "-p", help="Another policy than the configured one.")
    ] = "",
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", metavar="FILE", help="Trace: model and fleet of this file."),
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, max=4096, help="Trace: ranks.")] = 4,
    slots: Annotated[
        int, typer.Option(min=0, help="Trace: slots a rank; 0 = every expert and a quarter more.")
    ] = 0,
    experts: Annotated[
        int, typer.Option(min=0, help="Trace: experts a layer; 0 = the greatest id + 1.")
    ] = 0,
    window_tokens: Annotated[int, typer.Option(min=1, help="Trace: tokens of a window.")] = 4096,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Run the production planner over recorded load; print balance, writes and bytes by window.

    Balancedness of the static layout split equally (STATIC), of the same one split by our router
    (LEVELED), and of the planner's layout (SERVED). A journal is also stepped through today's
    engine and compared with what was written.
    """
    from moe_serve.cli.recordings import is_journal, read_trace
    from moe_serve.cli.rehearsal import check_start, service_stage, trace_stage, with_policy
    from moe_serve.cli.service_file import read_service_file
    from moe_serve.cli.views.replay import figures_parts, replay_plain, stage_line
    from placement.config import RebalanceConfig
    from placement.replay import replay_trace, trace_windows

    out = Output(output)
    if is_journal(source):
        _journal(source, policy, out)
        return
    ids = read_trace(source)
    if file is not None:
        stage = service_stage(ids, read_service_file(file))
    else:
        stage = trace_stage(
            ids,
            num_experts=experts,
            num_ranks=ranks,
            num_slots=slots,
            config=RebalanceConfig(cooldown_s=1.0),
        )
    stage = with_policy(stage, policy)
    check_start(stage)
    windows = trace_windows(
        ids,
        stage.spec,
        window_tokens=window_tokens,
        window_s=stage.config.window_s,
        sub_windows=stage.config.sub_windows,
    )
    if not windows:
        raise InvalidArgument(
            f"{source}: {ids.shape[0]} tokens are less than one window of {window_tokens}; give "
            "--window-tokens"
        )
    out.note(stage_line(stage, source.name))
    figures = replay_trace(windows, stage.spec, stage.topology, stage.config)
    out.data(replay_plain(figures, None, ()), figures_parts(figures, None))


def _journal(source: Path, policy: str, out: Output) -> None:
    from moe_serve.cli.recordings import read_segments
    from moe_serve.cli.rehearsal import (
        check_segments,
        check_start,
        journal_stage,
        journal_windows,
        measured,
        with_policy,
    )
    from moe_serve.cli.views.replay import checks_parts, figures_parts, replay_plain, stage_line
    from placement.replay import replay_trace

    segments = read_segments(source)
    if not segments:
        raise InvalidArgument(f"{source} holds no whole segment: nothing to start from")
    checks = check_segments(segments)
    stage = with_policy(journal_stage(segments), policy)
    check_start(stage)
    windows = journal_windows(segments)
    seen = [measured(window) for window in windows]
    out.note(stage_line(stage, source.name))
    figures = replay_trace(windows, stage.spec, stage.topology, stage.config) if windows else None
    shown = [] if figures is None else figures_parts(figures, seen)
    out.data(replay_plain(figures, seen, checks), [*checks_parts(checks), *shown])
    if any(check.reaches_next is False for check in checks):
        raise typer.Exit(ExitCode.FAILED)
