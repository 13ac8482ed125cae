"""`moe-serve replay`: the production planner over what was recorded; changes nothing anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moe_serve.cli.beside import refuse_beside
from moe_serve.cli.exits import ExitCode
from moe_serve.cli.options import OutputOption
from moe_serve.cli.output import Output, OutputFormat
from moe_serve.cli.progress import counted
from moe_serve.cli.trace_options import (
    DecodeOption,
    ExpertsOption,
    FleetOption,
    FreeOption,
    MovesOption,
    RanksOption,
    SlotsOption,
    SourceArgument,
    TopKOption,
    TraceOptions,
    WindowOption,
    refuse_for_journal,
)
from moe_serve.cli.whole_file import STANDARD_OUTPUT
from moe_serve.errors import InvalidArgument

if TYPE_CHECKING:
    from moe_serve.cli.rehearsal import SegmentCheck, Stage
    from placement.load import LoadWindow

DEFAULT_POLICY = "incremental"
POLICIES_MAX = 8


PolicyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        "-p",
        metavar="NAME",
        help="incremental, eplb or static; several times to compare. Default: incremental for a "
        "trace, the configured one for a journal.",
    ),
]
ChartOption = Annotated[bool, typer.Option("--chart", help="Draw balancedness as text.")]
PngOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Draw balancedness and writes as a PNG.")
]


def replay(  # noqa: PLR0913, PLR0917 - typer wants a parameter for each option
    ctx: typer.Context,
    source: SourceArgument,
    policy: PolicyOption = None,
    file: FleetOption = None,
    ranks: RanksOption = 4,
    slots: SlotsOption = 0,
    experts: ExpertsOption = 0,
    top_k: TopKOption = 8,
    window_tokens: WindowOption = 2048,
    decode: DecodeOption = False,
    max_moves: MovesOption = None,
    free_copies: FreeOption = False,
    chart: ChartOption = False,
    png: PngOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Run the production planner over recorded load; print balance, writes, bytes and regret.

    Balancedness by window: of the layout that never moves, split equally (STATIC) and by our router
    (LEVELED); of the planner's layout, split equally (EQUAL) and by our router (SERVED); of a plan
    that knew the window (BEST); and what no layout can exceed (BOUND). REGRET: seconds lost against
    the best of these. RATIO: competitive ratio at a price of a slot write. A journal is also
    stepped through today's engine and compared with what was written.
    """
    from moe_serve.cli.recordings import is_journal, read_trace
    from moe_serve.cli.rehearsal import check_policies

    out = Output(output)
    wanted = tuple(dict.fromkeys(policy or ()))
    if len(wanted) > POLICIES_MAX:
        raise InvalidArgument(f"--policy: {len(wanted)} policies, at most {POLICIES_MAX}")
    if png == STANDARD_OUTPUT:
        raise InvalidArgument(
            "--png - wants standard output, where the comparison goes; name a file"
        )
    show = _Show(out, source.name, chart=chart, png=png)
    if out.for_programs:
        refuse_beside(ctx, ("chart",), f"-o {output.value}", "programs get the numbers")
    if is_journal(source):
        refuse_for_journal(ctx)
        _journal(source, wanted, max_moves, show)
        return
    options = TraceOptions(
        file, ranks, slots, experts, top_k, window_tokens, decode, max_moves, free_copies
    )
    trace = read_trace(source)
    stage = options.stage(ctx, trace)
    policies = wanted or (DEFAULT_POLICY,)
    check_policies(stage, policies)
    windows, stage = options.windows(trace, stage)
    for note in trace.notes:
        out.note(f"{source.name}: {note}")
    show.replayed(windows, stage, policies)


class _Show:
    """Runs the comparison and shows it the way the options say."""

    def __init__(self, out: Output, source: str, *, chart: bool, png: Path | None) -> None:
        self._out = out
        self._source = source
        self._chart = chart
        self._png = png

    def replayed(
        self,
        windows: Sequence[LoadWindow],
        stage: Stage,
        policies: Sequence[str],
        *,
        measured: Sequence[float | None] | None = None,
        checks: Sequence[SegmentCheck] = (),
    ) -> None:
        """Compare the policies on the windows and print."""
        from moe_serve.cli.charts import text_chart, write_png
        from moe_serve.cli.views.replay import (
            checks_parts,
            comparison_parts,
            replay_panels,
            replay_plain,
            stage_line,
        )
        from placement.replay import compare

        self._out.note(stage_line(stage, self._source, policies))
        # Foresight goes through the windows, then each policy, then the bound.
        with counted(self._out, "replaying", windows, passes=2 + len(policies)) as told:
            found = compare(told, stage.spec, stage.topology, stage.config, policies)
        panels = replay_panels(found, measured)
        if self._png is not None:
            write_png(self._png, panels)
            self._out.note(f"chart written to {self._png}")
        shown = [*checks_parts(checks), *comparison_parts(found, measured)]
        if self._chart:
            shown += ["", text_chart(panels[0])]
        self._out.data(replay_plain(found, measured, checks), shown)


def _journal(source: Path, policies: Sequence[str], max_moves: int | None, show: _Show) -> None:
    from moe_serve.cli.recordings import read_segments
    from moe_serve.cli.rehearsal import (
        check_policies,
        check_segments,
        journal_stage,
        journal_windows,
        measured,
        with_limits,
    )

    segments = read_segments(source)
    if not segments:
        raise InvalidArgument(f"{source} holds no whole segment: nothing to start from")
    checks = check_segments(segments)
    stage = with_limits(journal_stage(segments), max_moves=max_moves)
    policies = policies or (stage.config.policy,)
    check_policies(stage, policies)
    windows = journal_windows(segments)
    show.replayed(
        windows,
        stage,
        policies,
        measured=[measured(window) for window in windows],
        checks=checks,
    )
    if any(check.reaches_next is False for check in checks):
        raise typer.Exit(ExitCode.FAILED)
