"""Options that several commands share, and what a command gets from outside.

Responsible for one spelling, one help text and one environment variable for each. `Reach` is how
commands get to a controller; tests hand in another one as the context's object. Called by commands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from moe_serve.bootstrap.record import read_record, recorded_services
from moe_serve.cli.admin import Admin, AdminTarget, GrpcAdmin, find_target, same_place
from moe_serve.cli.beside import refuse_beside, typed
from moe_serve.cli.checks.ports import Listen, listen_once
from moe_serve.cli.output import OutputFormat
from moe_serve.documents.window import PhaseChoice
from moe_serve.errors import NotFound


def _services_from(incomplete: str) -> list[str]:
    """What TAB offers for a service: those that are recorded here."""
    return [name for name in recorded_services() if name.startswith(incomplete)]


AddressOption = Annotated[
    str,
    typer.Option(
        "--address",
        envvar="MOE_SERVE_ADDRESS",
        metavar="HOST:PORT",
        help="Admin address of the service. Default: the one that `up` recorded on this machine.",
    ),
]
ServiceOption = Annotated[
    str,
    typer.Option(
        "--service",
        "-s",
        envvar="MOE_SERVE_SERVICE",
        help="Which recorded service, where several run on this machine.",
        autocompletion=_services_from,
    ),
]
OutputOption = Annotated[
    OutputFormat,
    typer.Option("--output", "-o", help="A table for people, JSON or YAML for programs."),
]
PhaseOption = Annotated[PhaseChoice, typer.Option("--phase", help="Which tokens count.")]
FileOption = Annotated[
    Path, typer.Option("--file", "-f", metavar="FILE", help="The service file (YAML).")
]
INT32_MAX = (1 << 31) - 1
INT64_MAX = (1 << 63) - 1
"""Largest numbers that the fields of requests hold."""
RankArgument = Annotated[
    int, typer.Argument(metavar="RANK", min=0, max=INT32_MAX, help="Number of the rank.")
]

EmptyWaitOption = Annotated[
    float,
    typer.Option(
        "--wait",
        min=0.0,
        metavar="SECONDS",
        help="Wait so long until the rank is empty; exit 1 if it is not.",
    ),
]


@dataclass(frozen=True, slots=True)
class Reach:
    """Ways out of a command. Made once by the app from its own options."""

    connect: Callable[[AdminTarget], Admin] = GrpcAdmin
    listen: Listen = listen_once
    token_file: Path | None = None
    tls_ca: Path | None = None


@contextmanager
def admin_of(ctx: typer.Context, address: str, service: str) -> Iterator[Admin]:
    """The controller a command speaks to. Raises CannotReach, InvalidArgument, StartRefused."""
    reach = ctx.find_object(Reach) or Reach()
    if address and typed(ctx, "service"):
        _check_there(ctx, address, service)
    admin = reach.connect(find_target(address, service, reach.token_file, reach.tls_ca))
    try:
        yield admin
    finally:
        admin.close()


def _check_there(ctx: typer.Context, address: str, service: str) -> None:
    """Raise InvalidArgument where the service is not the one at the address."""
    try:
        recorded = read_record(service).admin_address
    except NotFound:
        where = "is not recorded on this machine"
    else:
        if same_place(recorded, address):
            return
        where = f"was recorded at {recorded or 'no address yet'}"
    other = f"--address {address} (or MOE_SERVE_ADDRESS)"
    refuse_beside(ctx, ("service",), other, f"{service} {where}; give one")
