"""Waiting until the moves of a plan have ended.

Responsible for when that is so, for showing how far it is, and for what became of each move. Starts
nothing: the plan goes on whether somebody waits or not. Called by the commands apply, rollback and
import.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

from moe_serve.cli.admin import Admin
from moe_serve.cli.output import Output
from moe_serve.cli.plain import enum_word
from moe_serve.cli.progress import tally
from moe_serve.documents.plans import has_begun
from moe_serve.documents.views import MOVE_KINDS
from moe_serve.errors import MoeServeError, NotFound
from moe_serve.rpc import placement_pb2 as pb

POLL_S = 0.2
UNKNOWN = "whether the plan runs is not known: `moe-serve status` says so, and `moe-serve events`"
ENDED = frozenset({"done", "aborted"})
MOVE_RULES = frozenset(MOVE_KINDS.values())
"""Rules of the records that are about one move."""


@dataclass(frozen=True, slots=True)
class Moved:
    """How it was at the end of the wait. states: of every move of the plan, by id. begun: whether
    the plan ever ran."""

    states: dict[int, str]
    begun: bool

    @property
    def ended(self) -> int:
        """Moves that have ended, well or not."""
        return sum(state in ENDED for state in self.states.values())

    @property
    def done(self) -> int:
        """Moves that did what they were planned for."""
        return sum(state == "done" for state in self.states.values())

    @property
    def whole(self) -> bool:
        """Whether that is all of them."""
        return self.begun and self.done == len(self.states)


def wait_for_moves(admin: Admin, plan_id: str, wait_s: float, out: Output) -> Moved:
    """Look until every move of the plan has ended or the time is over. Raises NotFound where the
    controller does not know the plan at the end, and what its absence was told by."""
    try:
        with admin.within(wait_s):
            return _watch(admin, plan_id, wait_s, out)
    except KeyboardInterrupt:
        out.note(f"plan {plan_id} goes on; `moe-serve status` shows it")
        raise
    except MoeServeError:
        out.note(UNKNOWN)
        raise


def _watch(admin: Admin, plan_id: str, wait_s: float, out: Output) -> Moved:
    deadline = time.monotonic() + wait_s
    total = 0
    with tally(out) as told:
        while True:
            # Cheap, but the newest moves only, of whatever plan: it tells when to ask for all.
            shown = [
                enum_word(move, "state")
                for move in admin.placement().moves
                if move.plan_id == plan_id
            ]
            ended = sum(state in ENDED for state in shown)
            # A move is shown as ended before the last slot of its plan is released.
            over = bool(shown) and ended == len(shown)
            if over and any(step.plan_id == plan_id for step in admin.steps()):
                over = False
            if over or time.monotonic() >= deadline:
                found = _moved(admin, plan_id)
                whole = len(found.states) if found.begun else 0
                told.tell(_words(plan_id, found.ended, whole), found.ended, whole)
                return found
            if shown and not total:
                with suppress(NotFound):  # a controller that has just come back
                    total = len(_moved(admin, plan_id).states)
            whole = max(total, len(shown))
            told.tell(_words(plan_id, ended, whole), ended, whole)
            time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))


def _moved(admin: Admin, plan_id: str) -> Moved:
    answer = admin.explain_plan(plan_id)
    return Moved(_states(answer), has_begun(answer))


def _states(answer: pb.ExplainPlanResponse) -> dict[int, str]:
    """Of every move by id. Of a large plan the controller keeps more records than moves, and of a
    very large one the last record alone."""
    states = {move.move_id: enum_word(move, "state") for move in answer.plan.moves}
    for record in answer.records:
        if record.rule in MOVE_RULES and record.outcome in ENDED:
            states[record.move_id] = record.outcome
        elif (record.rule, record.outcome) == ("plan_done", "done"):
            states = dict.fromkeys(states, "done")
    return states


def _words(plan_id: str, ended: int, total: int) -> str:
    if not total:
        return f"plan {plan_id}: not begun yet"
    return f"plan {plan_id}: {ended} of {total} moves ended"
