"""Whom harm befalls, and what harm gives back.

Responsible for choosing parts that live, and for pausing one. Called by the harm of each kind.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count

from placement.messages import events as ev
from placement.messages.history import Paused, Resumed
from placement.sim.faults import FaultKind
from placement.sim.fleet import Fleet
from placement.sim.network import Part
from placement.sim.router import SimRouter
from placement.sim.shard import SimShard
from placement.sim.stage import Stage

Mend = Callable[[], None]
Done = tuple[str, Mend | None]
"""What was befallen, and how it is mended; None where it is over at once."""
Does = dict[FaultKind, Callable[[int], Done]]
"""What each kind does to a rank (-1: any)."""
FIRST_REQUEST = 1_000_000
"""Numbers of operators' requests start here: the controller's own lie below."""


class Targets:
    """See the module's text."""

    def __init__(self, stage: Stage, fleet: Fleet) -> None:
        self.stage = stage
        self.fleet = fleet
        self._requests = count(FIRST_REQUEST)

    def shard(self, rank: int) -> SimShard | None:
        """The rank's shard, or any that lives."""
        shard = self.stage.shards.get(rank)
        if shard is not None and shard.alive:
            return shard
        alive = [s for s in self.stage.shards.values() if s.alive]
        return self.stage.dice.pick(alive) if alive else None

    def router(self) -> SimRouter | None:
        """Any router that lives."""
        alive = [r for r in self.stage.routers.values() if r.alive]
        return self.stage.dice.pick(alive) if alive else None

    def place(self, rank: int) -> str:
        """A place: the rank's, the controller's, a router's, or another rank's."""
        dice = self.stage.dice
        ranks = [f"rank{r}" for r in self.stage.shards]
        if rank >= 0 and dice.chance(0.5):
            return f"rank{rank}"
        return dice.pick(["controller", *self.fleet.router_names, *ranks])

    def pause(self, part: Part | None) -> Done:
        """The part stands still until it is mended."""
        if part is None or part.paused:
            return "nobody", None
        part.pause()
        self.stage.note(Paused, part.who)

        def mend() -> None:
            if part.alive:
                self.stage.note(Resumed, part.who)
                part.resume()

        return part.who, mend

    def ask(self, make: Callable[[int], ev.AnyEvent]) -> None:
        """An operator asks the controller, if there is one."""
        boss = self.fleet.controller
        if boss is not None:
            event = make(next(self._requests))
            boss.after(0.0, partial(boss.feed, event))
