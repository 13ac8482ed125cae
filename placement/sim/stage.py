"""What all parts of a world share: clock, network, dice, delays, the record of facts, and which
lives are there.

Responsible for looking lives up. Decides nothing. Made by the world.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from placement.config import RebalanceConfig
from placement.messages.history import DemandUnsure, Fact, Recorder
from placement.sim.clock import VirtualClock
from placement.sim.coverage import Coverage
from placement.sim.dice import Dice
from placement.sim.network import Network
from placement.topology import MoeSpec, Topology

if TYPE_CHECKING:
    from placement.sim.router import SimRouter
    from placement.sim.shard import SimShard

_F = TypeVar("_F", bound=Fact)


@dataclass(slots=True)
class Delays:
    """Seconds of simulated work; each is drawn evenly between half and one and a half times its
    value. Times without a draw are limits."""

    network_s: float = 0.002
    copy_s: float = 0.05
    verify_s: float = 0.01
    compute_s: float = 0.01
    pair_s: float = 0.0002
    plan_s: float = 0.02
    report_s: float = 0.2
    probe_s: float = 0.4
    start_s: float = 0.8
    """From the wish for a new shard or router until it answers."""
    call_timeout_s: float = 0.6
    pin_wait_s: float = 0.5
    """Longest wait of a release or abort for pins."""
    deadline_s: float = 1.5
    """Usual time a request has."""


@dataclass(slots=True)
class Stage:
    """See the module's text. `marks` uint64 [keys]: what an expert makes of a value, so that sums
    tell which experts are in them."""

    spec: MoeSpec
    topology: Topology
    config: RebalanceConfig
    delays: Delays
    clock: VirtualClock
    network: Network
    dice: Dice
    recorder: Recorder
    coverage: Coverage
    marks: npt.NDArray[np.uint64]
    shards: dict[int, SimShard] = field(default_factory=dict)
    """Newest life of each rank."""
    routers: dict[str, SimRouter] = field(default_factory=dict)

    def note(self, kind: type[_F], who: str, /, **fields: Any) -> None:
        """Note a fact, now."""
        self.recorder.note(kind, who, self.clock.now_s, **fields)

    def note_of(self, who: str, kind: type[Fact], /, **fields: Any) -> None:
        """The same for whoever is given a way to note its own facts."""
        self.note(kind, who, **fields)

    def lost_demand(self, router: SimRouter) -> None:
        """A router's life ended with demand that no controller has acknowledged: it may have been
        counted or not."""
        lost = router.demand.unreported()
        self.note(DemandUnsure, router.who, lost=tuple(sorted(lost.items())))

    def shard(self, rank: int, incarnation: int) -> SimShard | None:
        """That life of a rank if it is the newest one and lives."""
        found = self.shards.get(rank)
        if found is None or found.life != incarnation or not found.alive:
            return None
        return found
