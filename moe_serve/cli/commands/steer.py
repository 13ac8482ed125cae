"""`pause`, `resume`, `drain`, `undrain`, `budget`: what an operator may ask of the controller."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from moe_serve.cli.emptying import Emptying, empty_report, wait_until_empty
from moe_serve.cli.figures import shown_bytes
from moe_serve.cli.options import (
    AddressOption,
    EmptyWaitOption,
    OutputOption,
    RankArgument,
    ServiceOption,
    admin_of,
)
from moe_serve.cli.output import Output, OutputFormat
from moe_serve.cli.plain import plain
from moe_serve.cli.unheard import told_if_unheard
from moe_serve.config.schema import parse_bytes
from moe_serve.errors import FieldViolation, InvalidArgument

SLOTS = re.compile(r"(\d{1,9})\s*slots?")


def pause(
    ctx: typer.Context,
    reason: Annotated[str, typer.Option(help="Why, for the decision log.")] = "",
    address: AddressOption = "",
    service: ServiceOption = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Stop automatic plans. Repairs go on, running steps finish."""
    with admin_of(ctx, address, service) as admin:
        admin.pause(reason)
    Output(output).data(
        {"paused": True}, ["automatic plans are paused; `moe-serve resume` ends it"]
    )


def resume(
    ctx: typer.Context,
    address: AddressOption = "",
    service: ServiceOption = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Let automatic plans run again."""
    with admin_of(ctx, address, service) as admin:
        admin.resume()
    Output(output).data({"paused": False}, ["automatic plans run again"])


def drain(
    ctx: typer.Context,
    rank: RankArgument,
    wait: EmptyWaitOption = 0.0,
    address: AddressOption = "",
    service: ServiceOption = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Move everything off a rank.

    Refused where the others cannot hold every expert. With --wait: until it holds nothing; Ctrl-C
    ends the wait, not the drain.
    """
    out = Output(output)
    with admin_of(ctx, address, service) as admin:
        with told_if_unheard(out):
            answer = admin.drain(rank)
        message = answer.message or f"rank {rank} is draining"
        found = None
        if wait:
            found = wait_until_empty(admin, Emptying(rank, message, leaves=False), wait, out)
    empty_report(out, {"rank": rank, **plain(answer)}, message, found)


def undrain(
    ctx: typer.Context,
    rank: RankArgument,
    address: AddressOption = "",
    service: ServiceOption = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Let a drained rank hold replicas again."""
    with admin_of(ctx, address, service) as admin:
        admin.undrain(rank)
    Output(output).data({"rank": rank}, [f"rank {rank} may hold replicas again"])


def budget(
    ctx: typer.Context,
    rank: RankArgument,
    size: Annotated[
        str, typer.Argument(metavar="SIZE", help='Bytes ("12GiB") or slots ("39slots").')
    ],
    address: AddressOption = "",
    service: ServiceOption = "",
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Set the memory that expert slots of a rank may use.

    A lower budget evicts the least useful replicas, never the last one of an expert.
    """
    with admin_of(ctx, address, service) as admin:
        slots = _slots(size)
        each = 1 if slots is None else admin.placement().slot_bytes
        budget_bytes = each * (_bytes(size) if slots is None else slots)
        answer = admin.set_budget(rank, budget_bytes)
    said = answer.message or "accepted"
    shown = f"rank {rank}: {shown_bytes(budget_bytes)}, {answer.num_slots} slots: {said}"
    Output(output).data({"budget_bytes": budget_bytes, **plain(answer)}, [shown])


def _slots(size: str) -> int | None:
    match = SLOTS.fullmatch(size.strip())
    return None if match is None else int(match[1])


def _bytes(size: str) -> int:
    try:
        return int(parse_bytes(size))
    except ValueError as error:
        text = f'{size!r} is neither bytes ("12GiB", 1048576) nor slots ("39slots")'
        raise InvalidArgument(
            "SIZE is wrong", violations=(FieldViolation("SIZE", text),)
        ) from error
