"""All harm together: one entry for each kind, and the mending of whatever is left.

Responsible for putting the kinds together. Called by the nemesis, the world and the operators.
"""

from __future__ import annotations

from placement.sim.faults import FaultKind
from placement.sim.fleet import Fleet
from placement.sim.harm.controllers import ControllerHarm
from placement.sim.harm.network import NetworkHarm
from placement.sim.harm.parts import PartsHarm
from placement.sim.harm.people import Flow, PeopleHarm
from placement.sim.harm.targets import Does, Done, Targets
from placement.sim.shard import Trouble
from placement.sim.stage import Stage
from placement.sim.traffic import Traffic


class Harm:
    """See the module's text."""

    def __init__(
        self,
        stage: Stage,
        fleet: Fleet,
        traffic: Traffic,
        flow: Flow,
        *,
        elastic: bool = False,
    ) -> None:
        self.stage = stage
        self.fleet = fleet
        self._flow = flow
        who = Targets(stage, fleet)
        self.network = NetworkHarm(who)
        self.parts = PartsHarm(who)
        self.people = PeopleHarm(who, traffic, flow, elastic=elastic)
        self.ask = who.ask
        self._does: Does = {
            **self.network.does(),
            **self.parts.does(),
            **ControllerHarm(who).does(),
            **self.people.does(),
        }

    def do(self, kind: FaultKind, rank: int) -> Done:
        """Do it, to the rank where it can be one's and is named (-1: any)."""
        return self._does[kind](rank)

    def heal(self) -> None:
        """Whatever is left of any harm is mended."""
        weather = self.stage.network.weather
        for befallen in (weather.slow, weather.loss, weather.twice):
            befallen.clear()
        for those in (weather.shuffled, weather.cut, weather.dark):
            those.clear()
        for shard in self.stage.shards.values():
            shard.trouble = Trouble()
            shard.compute.factor = 1.0
        self.fleet.journal.full = False
        self._flow.factor = 1.0
