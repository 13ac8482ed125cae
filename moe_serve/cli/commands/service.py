"""`validate`, `up`, `down`: from a service file to a running service and back."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group

from moe_serve.bootstrap.preflight import NodeCheck
from moe_serve.bootstrap.ray_auth import join_auth
from moe_serve.bootstrap.record import ServiceRecord, is_kept, read_record, service_dir
from moe_serve.bootstrap.signals import end_as_interrupted
from moe_serve.bootstrap.size import SizeReport
from moe_serve.cli.beside import refuse_beside
from moe_serve.cli.exits import CannotReach, ExitCode
from moe_serve.cli.options import FileOption, OutputOption
from moe_serve.cli.output import Output, OutputFormat
from moe_serve.cli.progress import Steps, steps
from moe_serve.cli.service_file import read_service_file
from moe_serve.cli.views.deployment import (
    died_line,
    intent_line,
    nodes_parts,
    nodes_plain,
    record_parts,
    record_plain,
    size_parts,
    size_plain,
)
from moe_serve.config import ConfigInvalid, ServiceConfig
from moe_serve.errors import FailedPrecondition, NotFound


def validate(
    file: FileOption,
    show_effective: Annotated[
        bool, typer.Option("--show-effective", help="Print every field, defaults included.")
    ] = False,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Check a service file; print every fault with its line and column.

    The file alone: `up --size` also looks at the checkpoint and the sizes, `up --dry-run` at what
    `up` checks before it starts anything.
    """
    out = Output(output)
    try:
        config = read_service_file(file)
    except ConfigInvalid as error:
        faults = [
            {
                "file": one.file,
                "line": one.line or None,
                "column": one.column or None,
                "field": one.field,
                "problem": one.problem,
            }
            for one in error.faults
        ]
        out.data({"valid": False, "faults": faults}, [str(one) for one in error.faults])
        raise typer.Exit(ExitCode.USAGE) from error
    shown = json.loads(config.model_dump_json())
    fleet = config.fleet
    text = (
        f"{file}: valid; service {config.service}, model {config.model.name}, "
        f"{fleet.num_ranks} ranks, {fleet.routers} routers, network {config.network}"
    )
    effective = [json.dumps(shown, indent=2)] if show_effective else []
    out.data({"valid": True, "faults": [], "effective": shown}, [text, *effective])


def up(  # noqa: PLR0913, PLR0917  # its parameters are the command's options
    ctx: typer.Context,
    file: FileOption,
    ray_address: Annotated[
        str,
        typer.Option(
            envvar="RAY_ADDRESS",
            metavar="HOST:PORT",
            help="A running Ray cluster. Default: start one on this machine.",
        ),
    ] = "",
    ship: Annotated[
        bool, typer.Option("--ship", help="Send this machine's moe_serve to the nodes.")
    ] = False,
    size: Annotated[
        bool, typer.Option("--size", help="Only print what it needs: bytes, slots, floor.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, start nothing.")
    ] = False,
    accept_insecure: Annotated[
        bool,
        typer.Option(
            "--i-accept-insecure", help="network: cluster with gRPC without token and TLS."
        ),
    ] = False,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep",
            help="Stay, and start the service again whenever it is gone. SIGTERM or Ctrl-C ends "
            "both.",
        ),
    ] = False,
    wait: Annotated[
        float, typer.Option(min=1.0, metavar="SECONDS", help="Longest wait until it is ready.")
    ] = 180.0,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Start a service on a running Ray cluster, or on one of its own.

    Refuses with one clear line, and then leaves nothing running.
    """
    out = Output(output)
    _check_heard(ctx, size, dry_run)
    config = read_service_file(file, accept_insecure=accept_insecure)
    if size or dry_run:
        _only_look(config, size, ray_address, ship, out)
        return

    from moe_serve.bootstrap import service

    def show_nodes(checks: list[NodeCheck]) -> None:
        for part in nodes_parts(checks):
            out.note_part(part)

    def start(shown: Steps) -> ServiceRecord:
        return service.up(
            config,
            config_file=str(file),
            address=ray_address,
            ship=ship,
            wait_s=wait,
            progress=shown.say,
            on_checks=show_nodes,
            on_filled=shown.tell,
        )

    end_as_interrupted()
    if keep:
        _keep(config.service, file, partial(start, Steps(out)), out)
        return
    with steps(out) as shown:
        record = start(shown)
    out.data(record_plain(record), record_parts(record))


def _check_heard(ctx: typer.Context, size: bool, dry_run: bool) -> None:
    """Raise InvalidArgument where an option was typed that `up` would not use."""
    if size:
        others = ("dry_run", "keep", "wait", "ship", "ray_address")
        refuse_beside(ctx, others, "--size", "only what the file needs is printed")
    elif dry_run:
        refuse_beside(ctx, ("keep", "wait"), "--dry-run", "nothing is started")


def _keep(service: str, file: Path, start: Callable[[], ServiceRecord], out: Output) -> None:
    """`up --keep`: a record at each start, one line of JSON each where programs read."""
    from moe_serve.bootstrap.kept_service import keep

    def show(record: ServiceRecord) -> None:
        out.line(record_plain(record), Group(*record_parts(record)))

    keep(service, str(file), start, on_up=show, progress=out.note)


def _sized(config: ServiceConfig) -> SizeReport:
    from moe_serve.bootstrap.parts import moe_spec
    from moe_serve.bootstrap.size import size_report

    spec, _ = moe_spec(config)
    return size_report(config, spec)


def _only_look(
    config: ServiceConfig, size: bool, ray_address: str, ship: bool, out: Output
) -> None:
    """`up --size` and `up --dry-run`. Exit 1 where it would not start."""
    report = _sized(config)
    if size:
        out.data(size_plain(report), size_parts(report))
        fit = report.fits
    else:
        fit = _rehearse(config, report, ray_address, ship, out)
    if not fit:
        raise typer.Exit(ExitCode.FAILED)


def _rehearse(
    config: ServiceConfig, report: SizeReport, ray_address: str, ship: bool, out: Output
) -> bool:
    """Everything `up` checks; on a running cluster also its nodes. True where it would start.

    Raises StartRefused where the service runs already, and where the journal of an earlier start,
    or a token or TLS file, would be refused."""
    from moe_serve.bootstrap import refusals

    dead = refusals.check_not_running(config.service)
    refusals.check_journal(config)
    checks: list[NodeCheck] = []
    if not ray_address:
        refusals.check_files(config)
    else:
        from moe_serve.bootstrap.preflight import preflight
        from moe_serve.bootstrap.service import command_connected

        join_auth(os.environ, Path.home())
        folder = str(service_dir(config.service, config.state_dir))
        with command_connected(ray_address, ship=ship):
            from moe_serve.bootstrap.fleet import alive_nodes

            refusals.check_no_actors(config.service)
            checks = preflight(config, alive_nodes(), folder, report.slot_bytes)
    fit = report.fits and not any(check.problems for check in checks)
    out.data(
        {
            "would_start": fit,
            "replaces_dead": dead is not None,
            "size": size_plain(report),
            "nodes": nodes_plain(checks),
        },
        [
            *size_parts(report),
            *(nodes_parts(checks) if checks else []),
            *([died_line(config.service)] if dead is not None else []),
            intent_line(config, ray_address) if fit else "Would be refused. Nothing was started.",
        ],
    )
    return fit


def down(
    service_name: Annotated[
        str, typer.Argument(metavar="[SERVICE]", help="Needed only where several are recorded.")
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """End a service and, where `up` started it, its Ray cluster."""
    out = Output(output)
    try:
        name = read_record(service_name).service
    except NotFound as error:
        if service_name and is_kept(service_name):
            raise FailedPrecondition(
                f"service {service_name} is down, and its `moe-serve up --keep` is starting it "
                "again; end that program, by Ctrl-C or SIGTERM"
            ) from error
        raise CannotReach(error.message) from error
    if not yes:
        typer.confirm(f"End service {name}?", abort=True, err=True)

    from moe_serve.bootstrap import service

    with steps(out) as shown:
        record = service.down(name, progress=shown.say)
    out.data({"service": record.service, "down": True}, [f"Service {record.service} is down"])
