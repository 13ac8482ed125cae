"""Waiting until a rank that is being emptied holds nothing, or has left.

Responsible for when that is so, for showing how far it is, and for naming what is left where the
time is over. Asks for nothing: the rank goes on being emptied whether somebody waits or not. Called
by the commands drain and remove-rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import typer

from moe_serve.cli.admin import Admin
from moe_serve.cli.exits import ExitCode
from moe_serve.cli.output import Output
from moe_serve.cli.progress import tally
from moe_serve.cli.rolling import LOOK_S, Clock, until_answered
from moe_serve.errors import MoeServeError
from moe_serve.rpc import placement_pb2 as pb

NAMED = 4
"""Experts that are named of those which are left."""


@dataclass(frozen=True, slots=True)
class Emptying:
    """A rank that is being emptied. said: the controller's words at that. leaves: whether its shard
    is ended then."""

    rank: int
    said: str
    leaves: bool


@dataclass(frozen=True, slots=True)
class Emptied:
    """How it was at the end of the wait: the rank's state, slots that hold something, and a
    sentence. reached: whether it is what was waited for."""

    state: str
    held: tuple[pb.Slot, ...]
    text: str
    reached: bool


def wait_until_empty(
    admin: Admin, what: Emptying, wait_s: float, out: Output, clock: Clock | None = None
) -> Emptied:
    """Look until the rank is empty, somebody takes it back, or the time is over. Raises what the
    controller's absence was told by, where it is away at the end."""
    clock = clock or Clock()
    out.note(what.said)
    try:
        return _watch(admin, what, wait_s, out, clock)
    except (MoeServeError, KeyboardInterrupt):
        out.note(f"rank {what.rank} goes on being emptied; {_undrain(what)}")
        raise


def _watch(admin: Admin, what: Emptying, wait_s: float, out: Output, clock: Clock) -> Emptied:
    ends_s = clock.now_s() + wait_s
    most = 0
    with tally(out) as told:
        while True:
            # It may be between two lives.
            seen = until_answered(admin.placement, ends_s - clock.now_s(), clock)
            rank = next(one for one in seen.ranks if one.rank == what.rank)
            held = tuple(slot for slot in rank.slots if slot.layer >= 0)
            most = max(most, len(held))
            told.tell(f"rank {what.rank}: {_slots(held)} left", most - len(held), most)
            # A controller that starts has not heard yet what its ranks hold.
            if seen.state != "starting" and (found := _over(what, rank.state, held)) is not None:
                return found
            if clock.now_s() >= ends_s:
                return Emptied(rank.state, held, _late(what, held, wait_s), reached=False)
            clock.sleep(min(LOOK_S, max(0.0, ends_s - clock.now_s())))


def _over(what: Emptying, state: str, held: tuple[pb.Slot, ...]) -> Emptied | None:
    """None where it goes on."""
    name = f"rank {what.rank}"
    if state == "removed":
        return Emptied(state, (), f"{name} has left", reached=True)
    if not held and not what.leaves:
        lost = "was lost meanwhile and " if state == "lost" else ""
        return Emptied(state, (), f"{name} {lost}holds nothing", reached=True)
    if state == "up":
        text = f"{name} is not being emptied any more: somebody took it back"
        return Emptied(state, held, f"{text}; {_slots(held)} left", reached=False)
    return None


def _late(what: Emptying, held: Sequence[pb.Slot], wait_s: float) -> str:
    name, late = f"rank {what.rank}", f"after {wait_s:g} s"
    if not held:
        return f"{name} holds nothing and has not left {late}; see `moe-serve status`"
    named = [f"layer {slot.layer} expert {slot.expert}" for slot in held[:NAMED]]
    if more := len(held) - len(named):
        named.append(f"{more} more")
    return (
        f"{name} has {_slots(held)} left {late}: {', '.join(named)}. It goes on being emptied; see "
        f"`moe-serve status`, {_undrain(what)}"
    )


def _slots(held: Sequence[pb.Slot]) -> str:
    return "1 slot" if len(held) == 1 else f"{len(held)} slots"


def _undrain(what: Emptying) -> str:
    return f"`moe-serve undrain {what.rank}` takes it back"


def empty_report(out: Output, plain: dict[str, Any], said: str, found: Emptied | None) -> None:
    """Show what came of it. found: None = nobody waited. Exit 1 where it is not what was waited
    for."""
    left = None
    if found is not None:
        left = [
            {"slot": one.index, "layer": one.layer, "expert": one.expert, "state": one.state}
            for one in found.held
        ]
    state = None if found is None else found.state
    report = {**plain, "state": state, "left": left}
    if found is None:
        out.data(report, [said])
    elif found.reached:
        out.data(report, [found.text])
    else:
        out.data(report, [])
        out.error(f"error: {found.text}")
        raise typer.Exit(ExitCode.FAILED)
