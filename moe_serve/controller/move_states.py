"""How the moves of a plan stand that are not kept one by one: by the plan's steps while it runs, by
what was recorded of it once it has ended.

A move that neither tells of is not in the answer: nothing is guessed. Called by `explaining`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from moe_serve.controller.book import MOVE_RULES
from moe_serve.rpc import placement_pb2 as pb
from placement.engine.runs import did_its_work, has_ended
from placement.engine.state import PlanRun, StepRun
from placement.messages.records import DecisionRecord

_ENDED: Final = {"done": pb.MOVE_STATE_DONE, "aborted": pb.MOVE_STATE_ABORTED}


def move_states(
    view: pb.PlanView, run: PlanRun | None, records: Iterable[DecisionRecord]
) -> dict[int, pb.MoveState.ValueType]:
    """State by move id of a plan that has begun. run: the running plan, whichever it is; records:
    those of the plan, oldest first."""
    states: dict[int, pb.MoveState.ValueType] = {}
    if run is not None and run.plan_id == view.plan_id:
        steps: dict[int, list[StepRun]] = {}
        for step in run.steps.values():
            steps.setdefault(step.step.move_id, []).append(step)
        states = {move_id: _of_steps(found) for move_id, found in steps.items()}
    for record in records:
        if record.rule in MOVE_RULES and record.outcome in _ENDED:
            states[record.move_id] = _ENDED[record.outcome]
        elif (record.rule, record.outcome) == ("plan_done", "done"):
            states = {move.move_id: pb.MOVE_STATE_DONE for move in view.moves}
    return states


def _of_steps(steps: list[StepRun]) -> pb.MoveState.ValueType:
    if all(did_its_work(step) for step in steps):
        return pb.MOVE_STATE_DONE
    if all(step.state == "planned" for step in steps):
        return pb.MOVE_STATE_PLANNED
    if all(map(has_ended, steps)):
        return pb.MOVE_STATE_ABORTED
    return pb.MOVE_STATE_RUNNING
