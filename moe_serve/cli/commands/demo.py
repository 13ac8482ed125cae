"""`moe-serve demo`: a real model writes text while its experts move."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_serve.cli.options import OutputOption
from moe_serve.cli.output import Output, OutputFormat


class Injection(StrEnum):
    """A deliberate fault, which the demo's own accounting must find."""

    NONE = "none"
    DROP_ONE = "drop-one"
    DOUBLE_ONE = "double-one"


def demo(
    seconds: Annotated[
        float, typer.Option(min=1.0, max=3600.0, help="How long the model writes.")
    ] = 60.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there, too.")
    ] = None,
    inject: Annotated[
        Injection,
        typer.Option(
            help="Lose or double rows of one request a router: the demo must then exit non-zero."
        ),
    ] = Injection.NONE,
    dashboard: Annotated[
        bool, typer.Option("--dashboard/--no-dashboard", help="Run the page.")
    ] = True,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Not the text, only how it goes and the summary.")
    ] = False,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Let a real model write text on this machine and watch its experts move.

    Ctrl-C ends everything it started, and then there are no figures. With -o json or yaml they are
    all of standard output; how it goes is on standard error.
    """
    from moe_serve.demo.options import DemoOptions
    from moe_serve.demo.run import run_demo

    options = DemoOptions(
        seconds=seconds,
        json_file=json_file,
        inject="" if inject is Injection.NONE else inject.value,
        dashboard=dashboard,
        quiet=quiet,
    )
    out = Output(output)

    def show(report: dict[str, Any]) -> None:
        out.data(report, [])

    raise typer.Exit(run_demo(options, show if out.for_programs else None))
