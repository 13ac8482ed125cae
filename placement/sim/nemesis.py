"""Brings faults about, at moments that matter, and mends them.

Responsible for when a fault of the seed's list strikes: as a step enters a wanted state, or, where
it does not in time, whenever it is. What a fault does is in `harm`. Called by the world and, after
each step of the engine, by the controller.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from placement.messages.effects import Effects
from placement.messages.history import FaultBegan, FaultEnded
from placement.migration import AddState, RemoveState
from placement.planner.plan import StepKind
from placement.sim.controller import SimController
from placement.sim.coverage import STATES
from placement.sim.faults import LASTS_S, FaultKind
from placement.sim.harm import Harm, Mend

PATIENCE_S = 1.6
"""Longest wait for a state before the fault strikes anyway."""
GAP_S = 0.35
"""Usual pause between two faults; they may overlap, for most last longer."""
PAIRS = tuple((state, kind) for state in STATES for kind in FaultKind)
_STRIDE = 89
"""Step through `PAIRS` from one aim of a seed to the next: prime to their number, so that seeds in
a row aim at all of them."""
_ABORTING = frozenset({f"add.{AddState.ABORTING.value}", f"add.{AddState.ABORTED.value}"})
_RECALLED = frozenset({f"remove.{RemoveState.RECALLED.value}"})
_REMOVING = frozenset(f"remove.{state.value}" for state in RemoveState)
_MAKES_ROOM = (FaultKind.BUDGET, FaultKind.TRAFFIC_SHIFT, FaultKind.RANK_LEAVES)
AGAIN = 3
"""Times that a seed aims once more at what it did not hit."""


def label_of(kind: StepKind, state: str) -> str:
    """A step's state in a word: "add.copying"."""
    return f"{kind.value}.{state}"


def aims_of(seed: int, number: int) -> list[tuple[str, FaultKind]]:
    """What the faults of a seed aim at."""
    first = seed * number
    return [PAIRS[(first + i) * _STRIDE % len(PAIRS)] for i in range(number)]


@dataclass(slots=True)
class _Active:
    kind: FaultKind
    target: str
    mend: Mend


@dataclass(slots=True)
class Nemesis:
    """See the module's text."""

    harm: Harm
    aims: deque[tuple[str, FaultKind]]
    active: list[_Active] = field(default_factory=list)
    over: bool = False
    again: int = AGAIN
    _armed: tuple[str, FaultKind] | None = None
    _number: int = 0
    _plan_id: str = ""

    @property
    def done(self) -> bool:
        """Whether every fault of the list has struck and is mended."""
        return not (self.aims or self.active or self._armed is not None)

    # -- the list ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Aim the next fault."""
        if self.over or not self.aims:
            return
        self._armed = self.aims.popleft()
        self._number += 1
        number = self._number
        state, _ = self._armed
        stage = self.harm.stage
        patience_s = PATIENCE_S
        if state in _ABORTING:
            self._strike(FaultKind.COPY_CORRUPT, -1)
        elif state in _REMOVING:
            # Something has to go before a removal can be in that state.
            self._strike(stage.dice.pick(_MAKES_ROOM), -1)
            patience_s = PATIENCE_S + 1.0
        if state in _RECALLED:
            patience_s = 3 * PATIENCE_S
        wait_s = stage.dice.between(0.4 * patience_s, patience_s)
        stage.clock.after(wait_s, lambda: self._impatient(number))

    def _impatient(self, number: int) -> None:
        if number == self._number and self._armed is not None and not self.over:
            if self.again > 0:
                self.again -= 1
                self.aims.append(self._armed)
            self._fire(-1)

    def _fire(self, rank: int) -> None:
        """The armed fault strikes, at the rank where it can."""
        assert self._armed is not None, "nothing is aimed"
        _, kind = self._armed
        self._armed = None
        self._strike(kind, rank)
        stage = self.harm.stage
        stage.clock.after(stage.dice.around(GAP_S), self.begin)

    def _strike(self, kind: FaultKind, rank: int) -> None:
        stage = self.harm.stage
        stage.coverage.faults[kind.value] += 1
        for label in self._states():
            stage.coverage.met(label, kind)
        target, mend = self.harm.do(kind, rank)
        stage.note(FaultBegan, "nemesis", kind=kind.value, target=target)
        if mend is None:
            stage.note(FaultEnded, "nemesis", kind=kind.value, target=target)
            return
        active = _Active(kind, target, mend)
        self.active.append(active)
        stage.clock.after(stage.dice.around(LASTS_S[kind]), lambda: self._mend(active))

    def _mend(self, active: _Active) -> None:
        if active in self.active:
            self.active.remove(active)
            active.mend()
            self.harm.stage.note(
                FaultEnded, "nemesis", kind=active.kind.value, target=active.target
            )

    def heal(self) -> None:
        """Mend everything; nothing strikes any more."""
        self.over = True
        self._armed = None
        for active in list(self.active):
            self._mend(active)
        self.harm.heal()

    # -- watching ----------------------------------------------------------------------------------

    def _states(self) -> set[str]:
        """States of the steps of the running plan now."""
        boss = self.harm.fleet.controller
        if boss is None:
            return set()
        state = boss.engine.state
        steps = [*state.parked.values(), *(state.run.steps.values() if state.run else ())]
        return {label_of(s.step.kind, s.state) for s in steps}

    def stepped(self, controller: SimController, effects: Effects) -> None:
        """The engine has taken an event; nothing of what it asks for has been done yet."""
        entered: dict[str, int] = {}
        run = controller.engine.state.run
        if run is not None and run.plan_id != self._plan_id:
            self._plan_id = run.plan_id
            for step in run.steps.values():
                entered.setdefault(f"{step.step.kind.value}.planned", step.step.slot.rank)
        for t in effects.transitions:
            entered[label_of(t.kind, t.after)] = t.rank
        if not entered:
            return
        coverage = self.harm.stage.coverage
        for kind in {a.kind for a in self.active}:
            for label in entered:
                coverage.met(label, kind)
        if self._armed is None or controller is not self.harm.fleet.controller:
            return
        state, kind = self._armed
        if state in entered:
            coverage.met(state, kind)
            self._fire(entered[state])
        elif state in _RECALLED and "remove.drained" in entered:
            self._ambush(controller, effects)

    def _ambush(self, controller: SimController, effects: Effects) -> None:
        """Keep a release from its shard and take away what it relied on: a recall follows."""
        run = controller.engine.state.run
        for t in effects.transitions:
            if run is None or t.after != RemoveState.DRAINED or t.step_id not in run.steps:
                continue
            relied = [run.steps[a].step.slot.rank for a in run.steps[t.step_id].step.after]
            others = controller.engine.layout().ranks_of(t.layer, t.expert)
            victims = relied[:1] or list(others)
            victims = [rank for rank in victims if rank != t.rank]
            if victims:
                self.harm.network.hold_back(t.rank)
                for rank in victims:
                    self.harm.parts.crash_rank(rank)
                return
