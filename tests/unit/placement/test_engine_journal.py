"""What a restarted controller knows is what its journal says, wherever the journal ends."""

import pytest

from placement.engine import RebalanceEngine
from placement.engine.state import SlotUse
from placement.layout import EMPTY
from placement.messages import events as ev
from placement.messages.effects import CopyExpert, PublishTable, ReleaseSlot, VerifyExpert
from placement.migration import is_terminal
from tests.engine_driver import two_ranks


def journal_of(*, hold=(), fails=False, lost=False):
    """(driver, snapshot, transitions) of a plan of two migrations, as far as it went."""
    driver = two_ranks(slots=3)
    snapshot, start = driver.engine.snapshot(), len(driver.transitions)
    driver.hold |= set(hold)
    if fails:
        driver.hold.add(CopyExpert)
    driver.close_window({driver.keys()[0][0]: 5000.0, driver.keys()[0][1]: 5000.0})
    if fails:
        copy = driver.held[0]
        driver.feed(ev.StepFailed(at_s=0.0, step_id=copy.step_id, code="io", detail="disk"))
    if lost:
        driver.lose(1)
    return driver, snapshot, driver.transitions[start:]


def open_by_journal(transitions):
    """Step -> (state, rank, slot, tag) of every step that has begun and not ended."""
    newest = {t.step_id: t for t in transitions}
    return {
        number: (t.after, t.rank, t.slot, t.slot_tag)
        for number, t in newest.items()
        if not is_terminal(t.kind, t.after)
    }


def open_by_engine(engine):
    state = engine.state
    steps = {**state.parked, **(state.run.steps if state.run is not None else {})}
    return {
        number: (s.state, s.step.slot.rank, s.step.slot.index, s.tag)
        for number, s in steps.items()
        if not is_terminal(s.step.kind, s.state)
    }


@pytest.mark.parametrize(
    "life",
    [
        {},
        {"hold": [CopyExpert]},
        {"hold": [VerifyExpert]},
        {"hold": [PublishTable]},
        {"hold": [ReleaseSlot]},
        {"fails": True},
        {"hold": [CopyExpert], "lost": True},
    ],
    ids=str,
)
def test_every_step_that_was_journalled_is_known_again_wherever_the_journal_ends(life):
    driver, snapshot, transitions = journal_of(**life)
    assert len(transitions) >= 2
    for end in range(len(transitions) + 1):
        known = transitions[:end]
        engine = RebalanceEngine.restore(
            snapshot, known, term=2, first_epoch=driver.table.epoch + 1, start_s=driver.now_s
        )
        assert open_by_engine(engine) == open_by_journal(known), f"after {end} transitions"
        for number, (_state, rank, index, _tag) in open_by_engine(engine).items():
            slot = engine.state.ranks[rank].slots[index]
            assert slot.use is not SlotUse.EMPTY, f"the slot of step {number} is free"
            assert slot.key != EMPTY
        assert all(engine.state.next_step_id > t.step_id for t in known), "ids are used again"
