"""Slots of a shard: tags, pins, terms, budgets, and commands that come twice or out of order."""

import numpy as np
import pytest

from placement.messages.effects import (
    AbortAdd,
    CopyExpert,
    CopySource,
    ReleaseSlot,
    ReserveSlot,
    SetRankSlots,
    VerifyExpert,
)
from placement.messages.events import (
    AddAborted,
    BudgetApplied,
    ExpertCopied,
    ExpertVerified,
    SlotReleased,
    SlotReserved,
    StepFailed,
)
from placement.roles.shard import ShardSlots, SlotPhase, Start, TermRefused, Work
from placement.roles.shard.ledger import REMEMBERED_STEPS
from tests.builders import make_layout, make_table


def make(num_slots=3):
    return ShardSlots(
        rank=0, incarnation=7, num_slots=num_slots, slot_bytes=100, weights_version="v1"
    )


WHO = {"rank": 0, "incarnation": 7}


def reserve(step_id=1, slot=0, expert=5, **changes):
    fields = {"layer": 0, "expert": expert, "weights_version": "v1", **WHO} | changes
    return ReserveSlot(step_id=step_id, slot=slot, **fields)


def copy(step_id=1, slot=0, tag=1):
    return CopyExpert(
        step_id=step_id,
        slot=slot,
        slot_tag=tag,
        layer=0,
        expert=5,
        source=CopySource(rank=-1),
        timeout_s=1.0,
        **WHO,
    )


def verify(step_id=1, slot=0, tag=1):
    return VerifyExpert(step_id=step_id, slot=slot, slot_tag=tag, **WHO)


def abort(step_id=1, slot=0, tag=1):
    return AbortAdd(step_id=step_id, slot=slot, slot_tag=tag, **WHO)


def release(step_id=9, slot=0, tag=1):
    return ReleaseSlot(step_id=step_id, slot=slot, slot_tag=tag, layer=0, expert=5, **WHO)


def filled(step_id=1, slot=0, shard=None):
    """A shard with one verified expert, filled by `step_id`."""
    shard = shard or make()
    tag = shard.reserve(reserve(step_id, slot)).slot_tag
    shard.begin_copy(copy(step_id, slot, tag))
    shard.copied(slot, tag, 80, 0.5)
    shard.begin_verify(verify(step_id, slot, tag))
    shard.verified(slot, tag)
    return shard


def code(answer):
    assert isinstance(answer, StepFailed)
    return answer.code


def served(shard, slot=0, tag=1):
    pairs = np.array([slot], np.int32), np.array([tag], np.int64)
    return bool(shard.ledger.served(*pairs)[0])


def test_an_add_goes_from_empty_to_served():
    shard = make()
    assert shard.reserve(reserve()).slot_tag == 1
    assert shard.ledger.reserved_bytes == 100
    assert shard.begin_copy(copy()) == Start(Work.COPY, 0, 1, 1)
    (answer,) = shard.copied(0, 1, 80, 0.5)
    assert isinstance(answer, ExpertCopied)
    assert not served(shard)
    assert shard.begin_verify(verify()) == Start(Work.VERIFY, 0, 1, 1)
    (answer,) = shard.verified(0, 1)
    assert isinstance(answer, ExpertVerified)
    assert served(shard)
    assert (shard.ledger.resident_bytes, shard.ledger.reserved_bytes) == (100, 0)
    (resident,) = shard.ledger.resident()
    assert (resident.slot, resident.tag, resident.expert, resident.verified) == (0, 1, 5, True)


def test_every_command_may_come_twice():
    shard = make()
    first, second = shard.reserve(reserve()), shard.reserve(reserve())
    assert first.slot_tag == second.slot_tag == 1
    assert shard.begin_copy(copy()).work is Work.COPY
    assert shard.begin_copy(copy()).work is Work.WAIT
    shard.copied(0, 1, 80, 0.5)
    assert isinstance(shard.begin_copy(copy()), ExpertCopied)
    shard.verified(0, 1)
    assert isinstance(shard.begin_verify(verify()), ExpertVerified)
    assert shard.verified(0, 1) == []
    assert isinstance(shard.begin_copy(copy()), ExpertCopied)
    assert isinstance(shard.release(release()), SlotReleased)
    assert isinstance(shard.release(release()), SlotReleased)


def test_a_tag_is_never_used_again():
    shard = filled()
    shard.release(release())
    assert shard.reserve(reserve(step_id=2)).slot_tag == 2
    assert not served(shard, tag=1)


def test_pairs_with_another_tag_or_outside_are_not_served():
    shard = filled()
    slots = np.array([0, 0, 1, -1, 99], np.int32)
    tags = np.array([1, 2, -1, 1, 1], np.int64)
    assert shard.ledger.served(slots, tags).tolist() == [True, False, False, False, False]
    none = make(num_slots=0)
    assert none.ledger.served(slots, tags).tolist() == [False] * 5


def test_a_taken_or_missing_slot_is_refused():
    shard = filled()
    assert code(shard.reserve(reserve(step_id=2, slot=0))) == "no_slot"
    assert code(shard.reserve(reserve(step_id=2, slot=3))) == "over_budget"


@pytest.mark.parametrize("slot", [-1, 1, 99])
def test_a_slot_that_is_not_there_or_holds_another_fill_cannot_be_proved(slot):
    shard = make()
    shard.reserve(reserve(slot=0))
    refused = shard.begin_verify(verify(slot=slot, tag=1))
    assert (refused.code, refused.step_id) == ("no_slot", 1)


def test_of_ended_steps_only_so_many_are_remembered():
    ledger = make().ledger
    for step_id in range(REMEMBERED_STEPS + 1):
        ledger.end(step_id, "released")
    ledger.end(1, "recalled")  # an old one that ends again is new
    ledger.end(REMEMBERED_STEPS + 1, "released")
    assert len(ledger.ended) == REMEMBERED_STEPS
    assert 0 not in ledger.ended
    assert ledger.ended[1] == "recalled"
    assert 2 not in ledger.ended


def test_another_life_or_version_is_refused():
    shard = make()
    assert code(shard.reserve(reserve(incarnation=6))) == "io"
    assert code(shard.reserve(reserve(weights_version="v2"))) == "io"
    assert code(shard.release(ReleaseSlot(**{**_fields(release()), "incarnation": 6}))) == "io"
    assert code(shard.abort(AbortAdd(**{**_fields(abort()), "incarnation": 6}))) == "io"


def _fields(command):
    return {name: getattr(command, name) for name in command.__struct_fields__}


def test_release_waits_for_batches_and_copies():
    shard = filled()
    pinned = np.array([0], np.int32)
    shard.ledger.pin(pinned)
    assert shard.ledger.pin_copy(0, 1)
    assert shard.release(release()) == Start(Work.WAIT, 0, 1, 9)
    assert not served(shard)
    assert shard.ledger.unpin(pinned) == []
    assert shard.ledger.phase(0) is SlotPhase.RELEASING
    (answer,) = shard.ledger.unpin_copy(0)
    assert isinstance(answer, SlotReleased)
    assert shard.ledger.phase(0) is SlotPhase.EMPTY


def test_a_copy_pins_only_what_is_proved_and_still_there():
    shard = make()
    shard.reserve(reserve())
    assert not shard.ledger.pin_copy(0, 1)
    assert not shard.ledger.pin_copy(9, 1)
    assert not filled().ledger.pin_copy(0, 2)


def test_a_recalled_removal_keeps_the_slot():
    shard = filled()
    pinned = np.array([0], np.int32)
    shard.ledger.pin(pinned)
    shard.release(release(step_id=9))
    assert isinstance(shard.begin_verify(verify(step_id=9)), ExpertVerified)
    (answer,) = shard.ledger.take_ready()
    assert code(answer) == "recalled"
    assert served(shard)
    assert shard.ledger.unpin(pinned) == []
    assert code(shard.release(release(step_id=9))) == "recalled"
    assert isinstance(shard.begin_verify(verify(step_id=9)), ExpertVerified)
    assert isinstance(shard.release(release(step_id=10)), SlotReleased)


def test_a_recall_that_overtakes_the_release_forbids_it():
    shard = filled()
    assert isinstance(shard.begin_verify(verify(step_id=9)), ExpertVerified)
    assert code(shard.release(release(step_id=9))) == "recalled"
    assert served(shard)


def test_a_recall_that_comes_too_late_is_told_so():
    shard = filled()
    shard.release(release(step_id=9))
    assert code(shard.begin_verify(verify(step_id=9))) == "no_slot"


def test_an_abort_frees_a_reservation_at_once():
    shard = make()
    shard.reserve(reserve())
    assert isinstance(shard.abort(abort()), AddAborted)
    assert shard.ledger.take_ready() == []
    assert shard.ledger.reserved_bytes == 0
    assert isinstance(shard.abort(abort()), AddAborted)


def test_an_abort_waits_until_a_running_copy_stops():
    shard = make()
    shard.reserve(reserve())
    shard.begin_copy(copy())
    assert shard.abort(abort()) == Start(Work.STOP_COPY, 0, 1, 1)
    assert code(shard.begin_copy(copy())) == "no_slot"
    (answer,) = shard.copy_stopped(0, 1)
    assert isinstance(answer, AddAborted)
    assert shard.copied(0, 1, 80, 0.5) == []


def test_a_copy_that_was_done_before_it_could_be_stopped_ends_the_abort():
    shard = make()
    shard.reserve(reserve())
    shard.begin_copy(copy())
    assert shard.abort(abort()).work is Work.STOP_COPY
    (answer,) = shard.copied(0, 1, 80, 0.5)
    assert isinstance(answer, AddAborted), "and no word that it was copied"
    assert shard.ledger.phase(0) is SlotPhase.EMPTY
    assert shard.ledger.reserved_bytes == 0


def test_an_abort_of_a_served_slot_waits_for_its_pins():
    shard = filled()
    pinned = np.array([0], np.int32)
    shard.ledger.pin(pinned)
    assert shard.abort(abort()) == Start(Work.WAIT, 0, 1, 1)
    assert not served(shard)
    (answer,) = shard.ledger.unpin(pinned)
    assert isinstance(answer, AddAborted)


def test_an_abort_that_overtakes_its_reservation_forbids_it():
    shard = make()
    assert isinstance(shard.abort(abort(tag=-1)), AddAborted)
    assert code(shard.reserve(reserve())) == "no_slot"
    assert shard.ledger.phase(0) is SlotPhase.EMPTY


def test_a_failed_copy_may_be_tried_again_or_aborted():
    shard = make()
    shard.reserve(reserve())
    shard.begin_copy(copy())
    (answer,) = shard.copy_failed(0, 1, "source_lost", "rank 3 is gone")
    assert (answer.code, answer.detail) == ("source_lost", "rank 3 is gone")
    assert shard.begin_copy(copy()).work is Work.COPY
    assert shard.copy_failed(0, 99, "io", "") == []


def test_what_is_not_proved_is_not_served():
    shard = make()
    shard.reserve(reserve())
    assert code(shard.begin_verify(verify())) == "no_slot"
    shard.begin_copy(copy())
    shard.copied(0, 1, 80, 0.5)
    (answer,) = shard.verified(0, 1, problem="digest differs")
    assert code(answer) == "digest"
    assert not served(shard)
    assert shard.verified(0, 99) == []
    assert code(shard.begin_copy(copy(step_id=3))) == "no_slot"


def test_a_release_takes_even_an_unproved_fill():
    shard = make()
    shard.reserve(reserve())
    shard.begin_copy(copy())
    assert shard.release(release()).work is Work.STOP_COPY
    assert [type(a) for a in shard.copy_stopped(0, 1)] == [SlotReleased]
    assert code(shard.release(release(step_id=10))) == "no_slot"


def test_budgets_change_only_over_empty_slots():
    shard = filled(slot=2)
    smaller = SetRankSlots(num_slots=2, budget_bytes=200, **WHO)
    assert code(shard.resize(smaller)) == "no_slot"
    shard.release(release(slot=2))
    assert isinstance(shard.resize(smaller), BudgetApplied)
    assert code(shard.reserve(reserve(step_id=4, slot=2))) == "over_budget"
    assert code(shard.resize(SetRankSlots(num_slots=3, budget_bytes=200, **WHO))) == "over_budget"
    assert code(shard.resize(SetRankSlots(num_slots=3, budget_bytes=300, rank=0, incarnation=6)))
    larger = shard.resize(SetRankSlots(num_slots=4, budget_bytes=400, **WHO))
    assert (larger.num_slots, shard.ledger.num_slots) == (4, 4)


def test_a_served_slot_survives_a_change_of_budget():
    shard = filled()
    shard.resize(SetRankSlots(num_slots=9, budget_bytes=900, **WHO))
    assert served(shard)
    assert shard.ledger.holder(0) == (0, 5, 1)


def test_lower_terms_are_refused():
    shard = make()
    shard.accept_term(3)
    shard.accept_term(3)
    with pytest.raises(TermRefused, match="term 2") as refused:
        shard.accept_term(2)
    assert refused.value.term == 3


def test_the_newest_table_is_kept():
    shard = make()
    assert shard.highest_epoch == -1
    layout = make_layout([[0, 1], [2, 3]])
    assert shard.install_table(make_table(layout, term=1, epoch=5)) == 5
    assert shard.install_table(make_table(layout, term=1, epoch=4)) == 5
    assert shard.install_table(make_table(layout, term=2, epoch=6)) == 6
    with pytest.raises(TermRefused):
        shard.install_table(make_table(layout, term=1, epoch=9))
    assert shard.highest_epoch == 6


def test_a_draining_shard_takes_nothing_new():
    shard = make()
    shard.drain()
    assert code(shard.reserve(reserve())) == "no_slot"


def test_answers_to_ended_steps_are_typed():
    shard = filled()
    shard.release(release(step_id=9))
    assert code(shard.begin_copy(copy(step_id=9))) == "no_slot"
    assert isinstance(shard.reserve(reserve(step_id=2)), SlotReserved)
