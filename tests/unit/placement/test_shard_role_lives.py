"""Words for another fill, another life or an older controller: they change nothing in a shard."""

import msgspec
import pytest

from placement.messages.effects import SetRankSlots
from placement.messages.events import StepFailed
from placement.roles.shard import SlotPhase, TermRefused
from tests.unit.placement.test_shard_role import (
    WHO,
    abort,
    copy,
    filled,
    release,
    reserve,
    served,
    verify,
)


def other_fill(*, verified):
    """Slot 0 was fill 1 and is fill 2, of step 2: proved, or filled and waiting for its proof."""
    shard = filled()
    shard.release(release())
    assert shard.ledger.phase(0) is SlotPhase.EMPTY
    assert shard.reserve(reserve(2, expert=5)).slot_tag == 2
    shard.begin_copy(copy(2, tag=2))
    if verified:
        shard.copied(0, 2, 100, 0.5)
        shard.verified(0, 2)
    return shard


def test_words_on_an_earlier_fill_say_nothing_of_the_one_that_is_there():
    shard = other_fill(verified=False)
    assert shard.copied(0, 1, 100, 0.5) == []
    assert shard.copy_failed(0, 1, "io", "late") == []
    assert shard.ledger.phase(0) is SlotPhase.COPYING
    assert shard.ledger.slots[0].copying
    assert len(shard.copied(0, 2, 100, 0.5)) == 1
    assert shard.verified(0, 1) == []
    assert shard.verified(0, 1, "wrong bytes") == []
    assert not served(shard)
    assert shard.ledger.phase(0) is SlotPhase.FILLED
    assert len(shard.verified(0, 2)) == 1


@pytest.mark.parametrize("tag", [1, 3, -1])
def test_a_release_of_another_fill_frees_nothing(tag):
    shard = other_fill(verified=True)
    before = shard.ledger.resident()
    answer = shard.release(release(11, tag=tag))
    assert isinstance(answer, StepFailed)
    assert answer.code == "no_slot"
    assert shard.ledger.resident() == before
    assert shard.ledger.tags[0] == 2


@pytest.mark.parametrize("incarnation", [6, 8])
@pytest.mark.parametrize("kind", ["reserve", "copy", "verify", "abort", "release", "resize"])
def test_no_command_for_another_life_changes_anything(kind, incarnation):
    shard = filled()
    shard.reserve(reserve(2, 1))
    before = (shard.ledger.resident(), shard.ledger.tags.tolist(), shard.ledger.num_slots)
    resize = SetRankSlots(num_slots=2, budget_bytes=200, **WHO)
    do, command = {
        "reserve": (shard.reserve, reserve(3, 2)),
        "copy": (shard.begin_copy, copy(2, 1, 2)),
        "verify": (shard.begin_verify, verify()),
        "abort": (shard.abort, abort(2, 1, 2)),
        "release": (shard.release, release()),
        "resize": (shard.resize, resize),
    }[kind]
    answer = do(msgspec.structs.replace(command, incarnation=incarnation))
    assert isinstance(answer, StepFailed)
    assert answer.code == "io"
    after = (shard.ledger.resident(), shard.ledger.tags.tolist(), shard.ledger.num_slots)
    assert after == before
    assert served(shard)


def test_who_was_told_what_a_shard_holds_is_obeyed_and_nobody_before():
    """What an older controller still has on its way must not change what the newer was told."""
    shard = filled()
    told = shard.inventory(5)
    with pytest.raises(TermRefused):
        shard.accept_term(4)
    with pytest.raises(TermRefused):
        shard.inventory(4)
    assert shard.inventory(5) == told
    assert shard.highest_term == 5
