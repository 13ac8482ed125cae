"""`add-rank`, `remove-rank`, `roll`: a fleet that grows, shrinks and is renewed while it serves."""

from __future__ import annotations

from typing import Annotated
from uuid import uuid4

import typer

from moe_serve.cli.admin import Admin
from moe_serve.cli.beside import refuse_beside
from moe_serve.cli.emptying import Emptying, empty_report, wait_until_empty
from moe_serve.cli.exits import CannotReach
from moe_serve.cli.options import (
    INT32_MAX,
    AddressOption,
    EmptyWaitOption,
    OutputOption,
    RankArgument,
    ServiceOption,
    admin_of,
)
from moe_serve.cli.output import Output, OutputFormat
from moe_serve.cli.plain import plain
from moe_serve.cli.progress import bar
from moe_serve.cli.rolling import NO_ANSWER, Clock, PartGroup, Roll, until_answered
from moe_serve.cli.unheard import told_if_unheard
from moe_serve.rpc import placement_pb2 as pb

ADD_WAIT_S = 20.0
"""How long a rank is asked for whose adding is not answered; a controller that died is back by
then."""
LowerFloorOption = Annotated[
    bool,
    typer.Option(
        "--accept-lower-floor",
        help="Go on where the other ranks can only hold every expert in fewer failure domains.",
    ),
]


def add_rank(
    ctx: typer.Context,
    group: Annotated[
        int,
        typer.Option(
            min=0, max=INT32_MAX, help="Which entry of fleet.ranks it is made from, from 0."
        ),
    ] = 0,
    node: Annotated[str, typer.Option(help="The only node it may run on, by its name.")] = "",
    again: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=INT32_MAX,
            metavar="RANK",
            help="A removed rank that is to come back as it was.",
        ),
    ] = None,
    key: Annotated[
        str,
        typer.Option(help="Name of this request: asked again with the same one it adds no other."),
    ] = "",
    address: AddressOption = "",
    service: ServiceOption = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Add a rank to the running service, or take a removed one back.

    Its shard is started; experts come to it as soon as that pays.
    """
    if again is not None:
        refuse_beside(ctx, ("group", "node"), "--again", "the rank comes back as it was")
    with admin_of(ctx, address, service) as admin:
        answer = add_once(admin, group, node, again, key)
    Output(output).data(plain(answer), [answer.message])


def add_once(
    admin: Admin,
    group: int,
    node: str,
    again: int | None,
    key: str = "",
    clock: Clock | None = None,
) -> pb.AddRankResponse:
    """Ask for a rank until there is an answer; however often it is asked for, one is added. key: ""
    = one of its own. Raises CannotReach where there is none within ADD_WAIT_S, with the key to go
    on with."""
    admin.placement()  # a service that is not there is told of at once
    key = key or uuid4().hex
    try:
        return until_answered(
            lambda: admin.add_rank(group, node, again, key), ADD_WAIT_S, clock or Clock()
        )
    except NO_ANSWER as error:
        raise CannotReach(
            f"{error.message}; whether the rank was added is not known: ask again with --key {key}"
        ) from error


def remove_rank(
    ctx: typer.Context,
    rank: RankArgument,
    accept_lower_floor: LowerFloorOption = False,
    wait: EmptyWaitOption = 0.0,
    address: AddressOption = "",
    service: ServiceOption = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Empty a rank, then end its shard for good.

    Refused where the others cannot hold every expert. `undrain` takes it back until the rank is
    empty, `add-rank --again` afterwards. With --wait: until it has left; Ctrl-C ends the wait, not
    the removal.
    """
    out = Output(output)
    with admin_of(ctx, address, service) as admin:
        with told_if_unheard(out):
            answer = admin.remove_rank(rank, accept_lower_floor)
        found = None
        if wait:
            found = wait_until_empty(admin, Emptying(rank, answer.message, leaves=True), wait, out)
    empty_report(out, {"rank": rank, **plain(answer)}, answer.message, found)


def roll(  # noqa: PLR0913, PLR0917  # its parameters are the command's options
    ctx: typer.Context,
    only: Annotated[
        list[PartGroup] | None,
        typer.Option(
            metavar="PARTS", help="Only ranks, routers or controller; may be given again."
        ),
    ] = None,
    accept_lower_floor: LowerFloorOption = False,
    accept_gap: Annotated[
        bool,
        typer.Option("--accept-gap", help="Replace the only router: calls fail until it is back."),
    ] = False,
    accept_problems: Annotated[
        bool, typer.Option("--accept-problems", help="Go on though status shows a problem.")
    ] = False,
    wait: Annotated[
        float, typer.Option(min=1.0, metavar="SECONDS", help="Longest time for one part.")
    ] = 300.0,
    address: AddressOption = "",
    service: ServiceOption = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Replace every part by a new one, one after another: ranks, routers, the controller.

    Each is emptied or drained first and back before the next goes. Stops at the first failure.
    """
    out = Output(output)
    with admin_of(ctx, address, service) as admin, bar(out, "rolling", None) as shown:
        rolling = Roll(
            admin,
            out.note,
            wait_s=wait,
            accept_lower_floor=accept_lower_floor,
            accept_gap=accept_gap,
            accept_problems=accept_problems,
            tell=shown.tell,
        )
        rolling.run(tuple(only) if only else tuple(PartGroup))
    out.data({"replaced": rolling.replaced}, [f"replaced: {', '.join(rolling.replaced)}"])
