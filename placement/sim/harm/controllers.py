"""Harm to the controller: it dies at a chosen point, stands still, is replaced, finds no room.

Responsible for the controller's life and its clock. Called by `Harm`.
"""

from __future__ import annotations

from functools import partial

from placement.messages import events as ev
from placement.sim.controller import DiesAt, SimController
from placement.sim.faults import FaultKind
from placement.sim.harm.targets import Does, Done, Targets

HOUR_S = 3600.0


class ControllerHarm:
    """See the module's text."""

    def __init__(self, who: Targets) -> None:
        self._who = who
        self._stage = who.stage
        self._fleet = who.fleet

    def does(self) -> Does:
        """What each kind does."""
        return {
            FaultKind.CONTROLLER_CRASH: self._controller_crash,
            FaultKind.CONTROLLER_TORN: self._controller_torn,
            FaultKind.CONTROLLER_PAUSE: self._controller_pause,
            FaultKind.CONTROLLER_RIVAL: self._controller_rival,
            FaultKind.DISK_FULL: self._disk_full,
            FaultKind.CLOCK_JUMP: self._clock_jump,
            FaultKind.RESTART_ALL: self._restart_all,
        }

    def _controller_crash(self, _rank: int) -> Done:
        points = (DiesAt.BEFORE_WRITE, DiesAt.AFTER_WRITE, DiesAt.AFTER_FIRST_COMMAND)
        return self._controller_dies(self._stage.dice.pick(points))

    def _controller_dies(self, point: DiesAt) -> Done:
        boss = self._fleet.controller
        if boss is None:
            return "nobody", None
        boss.dies_at = point
        # Where nothing is to be written it dies all the same.
        self._stage.clock.after(0.4, lambda: boss.end("fault"))
        return f"{boss.who} {point.value}", None

    def _controller_pause(self, _rank: int) -> Done:
        return self._who.pause(self._fleet.controller)

    def _controller_rival(self, _rank: int) -> Done:
        boss = self._fleet.controller
        if boss is None:
            return "nobody", None
        journal = self._stage.dice.chance(0.6)
        self._stage.clock.after(0.2, lambda: self._rival_begins(boss, journal))
        if self._stage.dice.chance(0.5):
            return self._who.pause(boss)
        # Or it goes on, and hears nothing of what it is told.
        boss.deaf = True

        def mend() -> None:
            boss.deaf = False

        return boss.who, mend

    def _rival_begins(self, boss: SimController, journal: bool) -> None:
        if self._fleet.controller is boss:
            self._fleet.begin_controller(journal=journal)
            if not journal:
                # It starts paused, for a person to look at it; who then lets it go on.
                self._stage.clock.after(1.0, partial(self._who.ask, _resume_asked))

    def _disk_full(self, _rank: int) -> Done:
        journal = self._fleet.journal
        journal.full = True

        def mend() -> None:
            journal.full = False

        return "journal", mend

    def _clock_jump(self, rank: int) -> Done:
        dice, boss = self._stage.dice, self._fleet.controller
        jump_s = HOUR_S if dice.chance(0.5) else -HOUR_S
        shard, router = self._who.shard(rank), self._who.router()
        kind = dice.below(3)
        if kind == 0 and shard is not None:
            trouble = shard.trouble
            trouble.jump_s = jump_s
            return shard.who, lambda: setattr(trouble, "jump_s", 0.0)
        if kind == 1 and router is not None:
            router.jump_s = jump_s
            return router.who, lambda: setattr(router, "jump_s", 0.0)
        if boss is None:
            return "nobody", None
        # It stays behind: a clock that is set forward again would end waits early, and the clock of
        # a driver never is.
        boss.step_back_s += dice.between(0.1, 0.8)
        return boss.who, lambda: None

    def _controller_torn(self, _rank: int) -> Done:
        return self._controller_dies(DiesAt.IN_WRITE)

    def _restart_all(self, _rank: int) -> Done:
        for shard in list(self._stage.shards.values()):
            self._fleet.kill(shard, "fault")
        for router in list(self._stage.routers.values()):
            self._fleet.kill(router, "fault")
        boss = self._fleet.controller
        if boss is not None:
            boss.end("fault")
        return "everything", None


def _resume_asked(number: int) -> ev.AnyEvent:
    return ev.ResumeAsked(at_s=0.0, request_id=number)
