"""Bugs planted into production code are found by the simulation, which does not know them.

Each lives in one process for a few seeds; the checkers, or an assertion of production code, must
raise.
"""

import msgspec
import numpy as np
import pytest

from placement.engine import steps, supervise, tables
from placement.engine.engine import RebalanceEngine
from placement.messages.effects import Effects
from placement.migration import ADD_TABLE, AddState, RemoveState, StepEvent
from placement.roles.admission import Admission
from placement.roles.calls import CallBook
from placement.roles.router import RouterRole
from placement.roles.shard import ShardSlots
from placement.sim.checks import InvariantBroken
from placement.sim.runner import run

pytestmark = pytest.mark.timeout(300)
SEEDS = range(20)


def tags_used_again(monkeypatch):
    reserve = ShardSlots.reserve

    def reserve_with_the_same_tag(self, command):
        self._next_tag = 1
        return reserve(self, command)

    monkeypatch.setattr(ShardSlots, "reserve", reserve_with_the_same_tag)


def freed_before_acknowledged(monkeypatch):
    advance_removals = tables.advance_removals

    def at_once(turn):
        for router in turn.state.routers.values():
            router.applied = router.quiesced = turn.state.epoch
        return advance_removals(turn)

    monkeypatch.setattr(supervise, "advance_removals", at_once)


def listed_before_proved(monkeypatch):
    key = AddState.COPYING, StepEvent.COPIED
    monkeypatch.setitem(ADD_TABLE, key, (AddState.VERIFIED, ADD_TABLE[key][1]))


def no_digest(monkeypatch):
    verified = ShardSlots.verified

    def whatever_it_is(self, slot_id, tag, problem=""):
        del problem
        return verified(self, slot_id, tag, "")

    monkeypatch.setattr(ShardSlots, "verified", whatever_it_is)


def any_term_is_obeyed(monkeypatch):
    def accept_term(self, term):
        self.highest_term = term

    monkeypatch.setattr(ShardSlots, "accept_term", accept_term)


def hedge_and_original_are_added(monkeypatch):
    close = CallBook._close

    def both(self, call, covers, at_s):
        request = self.requests[call.request_key]
        settled = close(self, call, covers, at_s)
        rows = np.ones(call.row_id.shape[0], np.bool_)
        for cover in call.covers.values():
            if cover not in covers:
                for sub in cover.subs:
                    self._add(request, call, sub, rows)
        return settled

    monkeypatch.setattr(CallBook, "_close", both)


def lost_rows_are_forgotten(monkeypatch):
    close = CallBook._close

    def forget(self, call, covers, at_s):
        settled = close(self, call, covers, at_s)
        if settled.reopened is not None:
            self.requests[call.request_key].open_calls.discard(settled.reopened.call_id)
            del self.calls[settled.reopened.call_id]
            settled = type(settled)(closed=settled.closed)
        return settled

    monkeypatch.setattr(CallBook, "_close", forget)


def a_cancelled_permit_leaks(monkeypatch):
    def cancel(self, request, at_s):
        if request in self._at_work and request % 7 == 0:
            return self._admit(at_s)
        return (
            type(self).finish(self, request, at_s)
            if request in self._at_work
            else (
                self._waiting.pop(request, None),
                self._admit(at_s),
            )[1]
        )

    monkeypatch.setattr(Admission, "cancel", cancel)


def tables_of_old_terms_are_taken(monkeypatch):
    accept = RouterRole.accept

    def accept_any(self, table):
        self.highest_term = 0
        return accept(self, msgspec.structs.replace(table))

    monkeypatch.setattr(RouterRole, "accept", accept_any)
    monkeypatch.setattr(
        "placement.routing.RoutingTable.is_newer",
        lambda self, than: than is None or self is not than,
    )


def a_transition_is_not_told(monkeypatch):
    step = RebalanceEngine.step

    def silent(self, event):
        effects = step(self, event)
        kept = tuple(t for t in effects.transitions if t.after != RemoveState.DRAINED)
        return Effects(transitions=kept, commands=effects.commands, records=effects.records)

    monkeypatch.setattr(RebalanceEngine, "step", silent)


def an_aborted_copy_keeps_its_slot(monkeypatch):
    monkeypatch.setitem(steps.ADD_USE, AddState.ABORTING, steps.ADD_USE[AddState.ABORTED])


PLANTED = [
    tags_used_again,
    freed_before_acknowledged,
    listed_before_proved,
    no_digest,
    any_term_is_obeyed,
    hedge_and_original_are_added,
    lost_rows_are_forgotten,
    a_cancelled_permit_leaks,
    tables_of_old_terms_are_taken,
    a_transition_is_not_told,
    an_aborted_copy_keeps_its_slot,
]


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_bug_is_found(plant, monkeypatch):
    plant(monkeypatch)
    for seed in SEEDS:
        try:
            run(seed)
        except (InvariantBroken, KeyError) as found:
            print(f"{plant.__name__}: {found}")
            return
    pytest.fail(f"{plant.__name__} was not found in {len(SEEDS)} seeds")
