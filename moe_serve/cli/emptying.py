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
ABSENT = "absent"
"""State of a rank that the controller does not name."""


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
    """Look until the rank is empty, somebody takes it back, or the time is over. A rank that is
    lost meanwhile is empty once no expert is missing. Raises what the controller's absence was
    told by, where it is away at the end."""
    clock = clock or Clock()
    out.note(what.said)
    try:
        with admin.within(wait_s):
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
            rank = next((one for one in seen.ranks if one.rank == what.rank), None)
            state, slots = (ABSENT, ()) if rank is None else (rank.state, tuple(rank.slots))
            held = tuple(slot for slot in slots if slot.layer >= 0)
            # A controller that starts has not heard yet what its ranks hold, or which it has.
            starts = seen.state == "starting"
            if rank is not None and (held or not starts):
                most = max(most, len(held))
                told.tell(f"rank {what.rank}: {_slots(held)} left", most - len(held), most)
            # What a lost rank held may have been nowhere else: it comes back, or it does not.
            missing = tuple(seen.missing) if state == "lost" else ()
            if not (starts or missing) and (found := _over(what, state, held)) is not None:
                return found
            if clock.now_s() >= ends_s:
                if starts:
                    late = _unheard(what, wait_s)
                elif missing:
                    late = _lost(what, missing, seen.num_experts, wait_s)
                else:
                    late = _late(what, held, wait_s)
                return Emptied(state, held, late, reached=False)
            clock.sleep(min(LOOK_S, max(0.0, ends_s - clock.now_s())))


def _over(what: Emptying, state: str, held: tuple[pb.Slot, ...]) -> Emptied | None:
    """None where it goes on."""
    name = f"rank {what.rank}"
    if state == "removed" or (state == ABSENT and what.leaves):
        return Emptied(state, (), f"{name} has left", reached=True)
    if state == ABSENT:
        text = f"{name} is not there any more: the controller began anew, without it"
        return Emptied(state, (), text, reached=False)
    if state == "up":
        text = f"{name} is not being emptied any more: it was taken back, or the controller began"
        return Emptied(state, held, f"{text} anew; {_slots(held)} left", reached=False)
    if not held and not what.leaves:
        lost = "was lost meanwhile and " if state == "lost" else ""
        return Emptied(state, (), f"{name} {lost}holds nothing", reached=True)
    return None


def _unheard(what: Emptying, wait_s: float) -> str:
    return (
        f"the controller starts and does not know after {wait_s:g} s what rank {what.rank} holds; "
        "see `moe-serve status`"
    )


def _lost(what: Emptying, missing: Sequence[int], num_experts: int, wait_s: float) -> str:
    named = ["layer {} expert {}".format(*divmod(key, max(1, num_experts))) for key in missing]
    count = "1 expert is" if len(missing) == 1 else f"{len(missing)} experts are"
    return (
        f"rank {what.rank} was lost meanwhile, and after {wait_s:g} s {count} without a replica: "
        f"{_some(named)}; see `moe-serve status`"
    )


def _late(what: Emptying, held: Sequence[pb.Slot], wait_s: float) -> str:
    name, late = f"rank {what.rank}", f"after {wait_s:g} s"
    if not held:
        return f"{name} holds nothing and has not left {late}; see `moe-serve status`"
    named = [f"layer {slot.layer} expert {slot.expert}" for slot in held]
    return (
        f"{name} has {_slots(held)} left {late}: {_some(named)}. It goes on being emptied; see "
        f"`moe-serve status`, {_undrain(what)}"
    )


def _some(named: Sequence[str]) -> str:
    """The first NAMED of them, and how many more there are."""
    more = len(named) - NAMED
    return ", ".join([*named[:NAMED], *([f"{more} more"] if more > 0 else [])])


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
