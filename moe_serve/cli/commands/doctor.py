"""`moe-serve doctor`: a report about this machine that can be pasted into a question."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import RenderableType

from moe_serve.cli.checks import Check, Level
from moe_serve.cli.checks.machine import gpu_checks, machine_checks
from moe_serve.cli.checks.ports import port_checks
from moe_serve.cli.checks.ray_auth import ray_checks
from moe_serve.cli.checks.services import file_checks, service_checks
from moe_serve.cli.checks.software import version_checks
from moe_serve.cli.exits import ExitCode
from moe_serve.cli.options import OutputOption, Reach
from moe_serve.cli.output import Output, OutputFormat, columns
from moe_serve.cli.service_file import read_service_file


def doctor(
    ctx: typer.Context,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", metavar="FILE", help="Also check what a service file names."),
    ] = None,
    gpu: Annotated[
        bool, typer.Option("--gpu/--no-gpu", help="Look for GPUs (imports torch).")
    ] = True,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Report on this machine: versions, cores, GPUs, ports, Ray, services.

    It holds no secret and can be pasted. Exit 1 where something will not work.
    """
    reach = ctx.find_object(Reach) or Reach()
    config = None if file is None else read_service_file(file)
    rows = [*version_checks(), *machine_checks()]
    if gpu:
        rows += gpu_checks()
    rows += [*port_checks(config, reach.listen), *ray_checks(), *service_checks(reach.connect)]
    if config is not None:
        rows += file_checks(config)
    bad = [row for row in rows if row.level is Level.FAIL]
    plain = {"ok": not bad, "checks": msgspec.to_builtins(rows)}
    Output(output).data(plain, _report(rows))
    if bad:
        raise typer.Exit(ExitCode.FAILED)


def _report(rows: list[Check]) -> list[RenderableType]:
    table = columns(("TOPIC", "CHECK", "", "WHAT"))
    for row in rows:
        table.add_row(row.topic, row.name, row.level.value, row.detail)
        if row.next_step:
            table.add_row("", "", "", f"-> {row.next_step}")
    return [table]
