"""Links between parts, and the parts as the network sees them: alive, paused, gone.

Responsible for when a message arrives, whether it does, and how often. A link keeps order, as a
connection does, unless the network is told to break it. Faults name a part, or a pair of parts in
one direction. Decides nothing about what a message means. Called by every part of a world.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from placement.sim.clock import Action, Timer, VirtualClock
from placement.sim.dice import Dice

REORDER_SPAN = 20.0
"""A message on a link that reorders is late by up to so many usual delays."""


class Part:
    """One life of something that runs: it takes messages and timers while it lives, and keeps them
    for later while it is paused. `who` is its name with its life: "rank2/1"."""

    def __init__(self, place: str, life: int, clock: VirtualClock) -> None:
        self.place = place
        self.who = f"{place}/{life}"
        self.life = life
        self.alive = True
        self.paused = False
        self.deaf = False
        """Whether nothing that is sent reaches it, though it goes on and is heard."""
        self.clock = clock
        self._inbox: list[Action] = []

    def receive(self, action: Action) -> None:
        """Do it now; later, if paused; never, if dead."""
        if not self.alive:
            return
        if self.paused:
            self._inbox.append(action)
        else:
            action()

    def after(self, delay_s: float, action: Action) -> Timer:
        """A timer of this part: one that ends during a pause goes off when it resumes."""
        return self.clock.after(delay_s, lambda: self.receive(action))

    def pause(self) -> None:
        """Stand still."""
        self.paused = True

    def resume(self) -> None:
        """Go on with all that came meanwhile, in its order."""
        self.paused = False
        waiting, self._inbox = self._inbox, []
        for action in waiting:
            self.receive(action)

    def die(self) -> None:
        """End. What is on its way to it is lost."""
        self.alive = False
        self._inbox.clear()


@dataclass(slots=True)
class Weather:
    """What befalls messages now. Places are names without their life; shares lie in [0, 1]."""

    slow: Counter[str] = field(default_factory=Counter)
    """Place -> factor on the delay of what it sends and gets, where above 1."""
    loss: dict[str, float] = field(default_factory=dict)
    """Place -> share of its messages that are lost, in either direction."""
    twice: dict[str, float] = field(default_factory=dict)
    """Place -> share of its messages that arrive twice."""
    shuffled: set[str] = field(default_factory=set)
    """Places whose messages overtake one another."""
    cut: set[tuple[str, str]] = field(default_factory=set)
    """(from, to): nothing passes in this direction."""
    late: dict[tuple[str, str], float] = field(default_factory=dict)
    """(from, to): what is sent now comes so many seconds later, after what is sent then."""
    dark: set[str] = field(default_factory=set)
    """Places that nothing reaches and nothing leaves."""

    @property
    def fair(self) -> bool:
        """Whether nothing befalls anything."""
        befallen = (self.slow, self.loss, self.twice, self.shuffled, self.cut, self.late, self.dark)
        return not any(befallen)


class Network:
    """Carries messages. `delay_s`: usual delay of one."""

    def __init__(self, clock: VirtualClock, dice: Dice, delay_s: float) -> None:
        self.weather = Weather()
        self.sent = self.lost = 0
        self._clock = clock
        self._dice = dice
        self._delay_s = delay_s
        self._newest: dict[tuple[str, str], float] = {}

    def reaches(self, source: Part, target: Part) -> bool:
        """Whether anything passes from one to the other now."""
        weather = self.weather
        return (
            (source.place, target.place) not in weather.cut
            and source.place not in weather.dark
            and target.place not in weather.dark
        )

    def send(self, source: Part, target: Part, action: Callable[[], None]) -> None:
        """Have the target do this when the message arrives, if it does."""
        self.sent += 1
        delay_s = self._dice.around(self._delay_s)
        if self.weather.fair and not target.deaf:
            self._deliver(source, target, delay_s, action, in_order=True)
            return
        weather, ends = self.weather, (source.place, target.place)
        losses = [weather.loss.get(end, 0.0) for end in ends]
        unheard = target.deaf or not self.reaches(source, target)
        if unheard or self._dice.chance(max(losses)):
            self.lost += 1
            return
        delay_s *= max(1, weather.slow[ends[0]], weather.slow[ends[1]])
        held_s = weather.late.get(ends, 0.0)
        shuffled = held_s > 0.0 or not weather.shuffled.isdisjoint(ends)
        copies = 1 + self._dice.chance(max(weather.twice.get(end, 0.0) for end in ends))
        for _ in range(copies):
            late_s = self._dice.between(0.0, REORDER_SPAN * self._delay_s) if shuffled else 0.0
            late_s += held_s
            self._deliver(source, target, delay_s + late_s, action, in_order=not shuffled)

    def _deliver(
        self, source: Part, target: Part, delay_s: float, action: Action, *, in_order: bool
    ) -> None:
        at_s = self._clock.now_s + delay_s
        if in_order:
            link = (source.who, target.who)
            at_s = self._newest[link] = max(at_s, self._newest.get(link, 0.0) + 1e-9)
        self._clock.at(at_s, lambda: target.receive(action))
