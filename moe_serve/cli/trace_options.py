"""Options of the commands that read a recording: what it is replayed on.

Responsible for one spelling of them, and for opening what they name. Called by the commands replay
and screen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moe_serve.cli.beside import refuse_beside

if TYPE_CHECKING:
    from moe_serve.cli.rehearsal import Stage, Trace
    from placement.load import LoadWindow

SourceArgument = Annotated[
    Path,
    typer.Argument(
        metavar="JOURNAL|TRACE",
        help="A folder of state (or its inputs.db); or a trace: .npz, .pt of SGLang's recorder "
        "or a folder of them, .jsonl of vLLM.",
    ),
]
FleetOption = Annotated[
    Path | None,
    typer.Option("--file", "-f", metavar="FILE", help="Trace: model and fleet of this file."),
]
RanksOption = Annotated[int, typer.Option(min=1, max=4096, help="Trace: ranks.")]
SlotsOption = Annotated[
    int, typer.Option(min=0, help="Trace: slots a rank; 0 = every expert and a quarter more.")
]
ExpertsOption = Annotated[
    int, typer.Option(min=0, help="Trace: experts a layer; 0 = the greatest id + 1.")
]
TopKOption = Annotated[
    int,
    typer.Option(
        min=1, max=1024, help="Trace of counts: experts a token uses, to tell its tokens."
    ),
]
WindowOption = Annotated[int, typer.Option(min=1, help="Trace: tokens of a window.")]
DecodeOption = Annotated[
    bool, typer.Option("--decode", help="Trace: tokens without a recorded phase are decode.")
]
MovesOption = Annotated[
    int | None,
    typer.Option(min=0, max=1_000_000, help="Slot writes a plan may hold. Default: as configured."),
]
FreeOption = Annotated[
    bool,
    typer.Option(
        "--free-copies",
        help="Trace: copies cost nothing, so that a plan needs no more than a gain.",
    ),
]
OF_A_FLEET = ("ranks", "slots", "experts", "top_k")
OF_A_TRACE = ("file", *OF_A_FLEET, "window_tokens", "decode", "free_copies")
"""Parameters that say what a trace does not."""


def refuse_for_journal(ctx: typer.Context) -> None:
    """Raise InvalidArgument where an option of a trace was typed."""
    refuse_beside(
        ctx, OF_A_TRACE, "a journal", "it holds the fleet and the windows that there were"
    )


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """As they were given."""

    file: Path | None
    ranks: int
    slots: int
    experts: int
    top_k: int
    window_tokens: int
    decode: bool
    max_moves: int | None
    free_copies: bool = False

    def stage(self, ctx: typer.Context, trace: Trace) -> Stage:
        """Model, fleet and settings for a trace. Raises InvalidArgument, also where an option was
        typed that has no say; StartRefused, ConfigInvalid."""
        from moe_serve.cli.recordings import TokenTrace
        from moe_serve.cli.rehearsal import service_stage, trace_stage, with_limits
        from moe_serve.cli.service_file import read_service_file
        from placement.config import RebalanceConfig

        if self.file is not None:
            refuse_beside(ctx, OF_A_FLEET, "--file", "the service file names the fleet")
        if isinstance(trace, TokenTrace):
            refuse_beside(ctx, ("top_k",), "a trace of tokens", "it holds the experts of each")
        if self.file is not None:
            stage = service_stage(trace, read_service_file(self.file))
        else:
            stage = trace_stage(
                trace,
                num_experts=self.experts,
                num_ranks=self.ranks,
                num_slots=self.slots,
                top_k=self.top_k,
                config=RebalanceConfig(cooldown_s=1.0),
            )
        return with_limits(stage, max_moves=self.max_moves, free_copies=self.free_copies)

    def windows(self, trace: Trace, stage: Stage) -> tuple[Sequence[LoadWindow], Stage]:
        """The trace cut into windows, and the stage as they need it. Raises InvalidArgument."""
        from moe_serve.cli.rehearsal import staged_windows
        from placement.topology import Phase

        return staged_windows(
            trace,
            stage,
            window_tokens=self.window_tokens,
            phase=Phase.DECODE if self.decode else Phase.PREFILL,
        )
