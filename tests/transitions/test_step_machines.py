"""Every pair of state and event of both machines, against a table written anew in another form.

One line an event: what it does in each state, to be checked against the design by reading it.
`.` = the pair is a bug. `=` = stays, nothing to do. Otherwise NEXT or NEXT:action.
"""

import pytest

from placement.migration import (
    ADD_TABLE,
    REMOVE_TABLE,
    AddState,
    IllegalTransition,
    RemoveState,
    StepAction,
    StepEvent,
    advance,
    can_take,
    is_terminal,
)
from placement.planner.plan import StepKind

ADD = """
event         planned reserved      copying       verified      listed aborting      aborted
begun         reserved:reserve .      .             .             .    .             .
slot_reserved .       copying:copy  =             =             .    =             .
expert_copied .       .             copying:verify =             .    =             .
expert_verified .       .             verified      =             .    =             .
published     .       .             .             listed        .    .             .
acked         .       .             .             .             .    .             .
quiesced      .       .             .             .             .    .             .
slot_released .       .             .             .             .    .             .
add_aborted   .       .             .             .             .    aborted       .
failed        .       aborting:abort aborting:abort aborting:abort .    =             .
deadline      .       aborting:abort aborting:abort .             .    aborting:abort .
cancelled     aborted aborting:abort aborting:abort aborting:abort .    =             .
rank_lost     aborted aborted       aborted       aborted       .    aborted       .
resumed       .       reserved:reserve copying:copy =             .    aborting:abort .
"""

REMOVE = """
event         planned unlisted     acked          drained        recalled       released listed
begun         .       .            .              .              .              .      .
slot_reserved .       .            .              .              .              .      .
expert_copied .       .            .              .              .              .      .
expert_verified .       .            .              .              listed:relist  .      .
published     unlisted .            .              .              .              .      .
acked         .       acked        .              .              .              .      .
quiesced      .       .            drained:release .              .              .      .
slot_released .       .            .              released       released       .      .
add_aborted   .       .            .              .              .              .      .
failed        .       .            .              =              =              .      .
deadline      .       acked        drained:release drained:release recalled:recall .      .
cancelled     listed  listed:relist listed:relist  recalled:recall =              .      .
rank_lost     released released     released       released       released       .      .
resumed       .       =            =              drained:release recalled:recall .      .
"""


def parse(text: str) -> dict[tuple[str, str], str]:
    lines = [line.split() for line in text.strip().splitlines()]
    states = lines[0][1:]
    cells = {}
    for event, *row in lines[1:]:
        assert len(row) == len(states), event
        for state, cell in zip(states, row, strict=True):
            cells[state, event] = cell
    return cells


CASES = [(StepKind.ADD, AddState, parse(ADD)), (StepKind.REMOVE, RemoveState, parse(REMOVE))]


@pytest.mark.parametrize(("kind", "states", "cells"), CASES, ids=["add", "remove"])
def test_every_pair_of_state_and_event(kind, states, cells):
    assert {pair for pair in cells} == {(s.value, e.value) for s in states for e in StepEvent}
    for (state, event), cell in cells.items():
        if cell == ".":
            assert not can_take(kind, state, StepEvent(event))
            with pytest.raises(IllegalTransition):
                advance(kind, state, StepEvent(event))
            continue
        after, _, action = cell.partition(":")
        after = state if after == "=" else after
        got = advance(kind, state, StepEvent(event))
        assert got == (after, StepAction(action or "none")), (state, event)


@pytest.mark.parametrize(("kind", "states", "cells"), CASES, ids=["add", "remove"])
def test_a_step_that_has_ended_takes_no_event(kind, states, cells):
    for state in states:
        rows = [cell for (s, _), cell in cells.items() if s == state.value]
        assert is_terminal(kind, state.value) == all(cell == "." for cell in rows)


def test_nothing_is_listed_before_it_is_verified():
    before_listed = {s for (s, _), (after, _) in ADD_TABLE.items() if after is AddState.LISTED}
    assert before_listed == {AddState.VERIFIED}


def test_a_slot_is_freed_only_after_it_was_drained():
    releasing = {s for (s, _), (_, act) in REMOVE_TABLE.items() if act is StepAction.RELEASE}
    assert releasing == {RemoveState.ACKED, RemoveState.DRAINED}
    freed = {
        s
        for (s, e), (after, _) in REMOVE_TABLE.items()
        if after is RemoveState.RELEASED and e is StepEvent.RELEASED
    }
    assert freed == {RemoveState.DRAINED, RemoveState.RECALLED}


def test_every_state_before_released_can_return_to_listed():
    reach = {RemoveState.LISTED}
    grew = True
    while grew:
        new = {
            s for (s, e), (after, _) in REMOVE_TABLE.items() if after in reach and s not in reach
        }
        grew = bool(new)
        reach |= new
    assert reach == set(RemoveState) - {RemoveState.RELEASED}


def test_a_lost_rank_ends_every_open_step():
    for state in AddState:
        if not is_terminal(StepKind.ADD, state):
            assert advance(StepKind.ADD, state, StepEvent.RANK_LOST)[0] == AddState.ABORTED
    for state in RemoveState:
        if not is_terminal(StepKind.REMOVE, state):
            assert advance(StepKind.REMOVE, state, StepEvent.RANK_LOST)[0] == RemoveState.RELEASED


def test_unknown_state_text_is_refused():
    with pytest.raises(ValueError, match="half_done"):
        advance(StepKind.ADD, "half_done", StepEvent.BEGUN)
