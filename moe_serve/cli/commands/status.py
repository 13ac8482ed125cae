"""`moe-serve status`: health, balance, moves and problems of a running service."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Group

from moe_serve.bootstrap.record import refresh_record
from moe_serve.cli.admin import Admin
from moe_serve.cli.beside import refuse_beside
from moe_serve.cli.exits import ExitCode
from moe_serve.cli.options import AddressOption, OutputOption, ServiceOption, admin_of
from moe_serve.cli.output import Output, OutputFormat
from moe_serve.cli.views.status import degraded, status_parts, status_plain
from moe_serve.cli.watching import Following, Watch, keys_read, show_live
from moe_serve.errors import Unavailable
from moe_serve.rpc import placement_pb2 as pb


def status(
    ctx: typer.Context,
    check: Annotated[
        bool, typer.Option("--check", help="Exit 5 where something is wrong, for scripts.")
    ] = False,
    watch: Annotated[
        bool,
        typer.Option("--watch", "-w", help="Show it again at every change, until `q` or Ctrl-C."),
    ] = False,
    address: AddressOption = "",
    service: ServiceOption = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Health, imbalance, moves under way and open problems of a service."""
    out = Output(output)
    if watch:
        refuse_beside(ctx, ("check",), "--watch", "a watch goes on whatever it sees; give one")
    with admin_of(ctx, address, service) as admin:
        if watch:
            _watch(admin, out)
            return
        placement = admin.placement()
        if not address:
            _keep_record(placement)
        load = _load(admin)
        out.data(status_plain(placement, load), status_parts(placement, load))
    if check and degraded(placement):
        raise typer.Exit(ExitCode.DEGRADED)


def _load(admin: Admin) -> pb.GetLoadResponse | None:
    """None before the first closed window."""
    try:
        return admin.load()
    except Unavailable:
        return None


def _keep_record(placement: pb.GetPlacementResponse) -> None:
    """The addresses that `up` recorded are those of now, once every router has one."""
    addresses = tuple(router.address for router in placement.routers)
    if all(addresses):
        refresh_record(placement.service_id, addresses)


def _watch(admin: Admin, out: Output) -> None:
    if out.for_programs or not out.out.is_terminal:
        for placement in admin.watch_placement():
            load = _load(admin)
            out.line(status_plain(placement, load), Group(*status_parts(placement, load)))
        return
    follow = Following(admin.watch_placement)

    def ask() -> tuple[pb.GetPlacementResponse, pb.GetLoadResponse | None]:
        placement = follow()
        return placement, _load(admin)

    with Watch(ask, 0.0) as watched, keys_read() as wait_key:
        show_live(out.out, watched, lambda seen, _: status_parts(*seen), wait_key)
