"""Players of the placement game: the production engine, parts of it, and rules to compare with.

- `engine`: the production engine, forecast, policy, planner and gate, priced so that a write costs
  `price` windows; its windows, decay, cool-down and limits are the production defaults.
- `policy`: the production policy and planner with the last windows one by one as scenarios, moved
  by the gate's rule (accumulated regret against cost) and nothing else of the engine.
- `gate`: the same rule around an exhaustive search: target = the state that would have cost least
  in the last windows. `gate of mean`: the same for the mean of the last windows. Against `engine`
  and `policy` they tell where a loss comes from: forecast, search, or rule.
- `never` (stays), `last` (always the best state for the last window), `eplb` (every 10 windows).
- `work`: the work function algorithm, a good rule for such games in theory: go where (least cost of
  the past ending there) + (cost of going there) is least.

Responsible for who plays how. Must never see a window before it is over. Called by the ratio
benchmark.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.policies_optimum import Game, work_step
from benchmarks.policies_rule import accumulate, plan_pays, regret_reached
from benchmarks.policies_world import (
    WINDOW_S,
    Fleet,
    Periodic,
    Planned,
    Production,
    Runner,
    Still,
    make_fleet,
    request_for,
)
from placement.config import RebalanceConfig
from placement.layout import ExpertLayout
from placement.planner import (
    Plan,
    WaveConfig,
    make_plan,
)
from placement.policy import propose

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

PLAYERS: Final = (
    "engine",
    "policy",
    "gate",
    "gate of mean",
    "work",
    "eplb",
    "last",
    "never",
)
KEEP: Final = 0.8
PAST_WINDOWS: Final = 8
"""What the players with a gate of their own remember: the last windows, each with KEEP of the
weight of the next younger one."""


class Player(Protocol):
    """Plays the game window by window."""

    @property
    def rows(self) -> tuple[int, ...]:
        """Layout that serves the next window: mask of experts of each rank."""
        ...

    def take(self, counts: IntArray) -> int:
        """See a window that is over, int64 [quarters, experts]; slots written before the next."""
        ...


class Running:
    """A runner of `policies_world` as a player."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    @property
    def rows(self) -> tuple[int, ...]:
        """Of the runner's layout."""
        return rows_of(self.runner.layout)

    def take(self, counts: IntArray) -> int:
        """Hand the window on."""
        return self.runner.take(counts[:, None, :])


class Searching:
    """Base of players that look at every state."""

    def __init__(self, game: Game, start: int, price: float) -> None:
        self.game, self.price, self.at = game, price, start

    @property
    def rows(self) -> tuple[int, ...]:
        """Of the state it is in."""
        return tuple(int(mask) for mask in self.game.states[self.at])

    def go(self, state: int) -> int:
        """Move there; slots written."""
        writes = int(self.game.writes[self.at, state])
        self.at = state
        return writes


class FollowLast(Searching):
    """Always the best state for the last window, the nearest such state."""

    def take(self, counts: IntArray) -> int:
        """Follow."""
        costs = self.game.costs(counts.sum(axis=0)[None])[0]
        return self.go(nearest(costs, self.game.writes[self.at]))


class WorkFunction(Searching):
    """The work function algorithm."""

    def __init__(self, game: Game, start: int, price: float) -> None:
        super().__init__(game, start, price)
        self._work: FloatArray = price * game.writes[start].astype(np.float64)

    def take(self, counts: IntArray) -> int:
        """Take the window into the work function, go where it and the way there are least.

        Only states that the window has not made dearer than coming to them from elsewhere count:
        else staying would always be as good as anything.
        """
        served = self._work + self.game.costs(counts.sum(axis=0)[None])[0]
        writes = self.game.writes[self.at]
        self._work = work_step(served, self.game.writes, self.price)
        return self.go(nearest(served + self.price * writes, writes))


class Regretting(Planned):
    """Runner: `incremental` on the last windows one by one, started by the gate's rule for a whole
    plan."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self._config = RebalanceConfig()
        self._past: list[IntArray] = []
        self._regret_s = 0.0

    def take(self, counts: IntArray) -> int:
        """Plan; move once the regret against the plan has reached its cost."""
        self._past = [*self._past, counts.sum(axis=0)][-PAST_WINDOWS:]
        weight = recency(len(self._past))
        request = request_for(
            self.fleet, self.layout, np.stack(self._past) / WINDOW_S, weight, self._config.max_moves
        )
        target = propose("incremental", request)
        plan = make_plan(self.layout, target, request, WaveConfig())
        self._regret_s = accumulate(
            self._regret_s, plan.gain_s_per_s, WINDOW_S, self._config.regret_decay
        )
        if not plan.moves or not plan_pays(plan, self._config.plan_life_s):
            return 0
        if not regret_reached(self._regret_s, plan):
            return 0
        self._regret_s = 0.0
        return self.adopt(target)


def recency(windows: int) -> FloatArray:
    """Weights of the last windows, oldest first, sum 1."""
    weight = KEEP ** np.arange(windows, dtype=np.float64)[::-1]
    shares: FloatArray = weight / weight.sum()
    return shares


class Gated(Searching):
    """Exhaustive search for the target, the production gate's rule for the moment.

    What a state would have cost is the mean over the last windows (`recency`) of its cost, or, with
    `of_mean`, its cost for their mean demand, in which windows that differ cancel out.
    """

    def __init__(self, game: Game, start: int, price: float, *, of_mean: bool) -> None:
        super().__init__(game, start, price)
        self._config = RebalanceConfig()
        self._of_mean = of_mean
        self._past: list[FloatArray] = []
        self._regret_s = 0.0

    def take(self, counts: IntArray) -> int:
        """Move to the target once the regret against it has reached its cost."""
        self._past = [*self._past, counts.sum(axis=0).astype(np.float64)][-PAST_WINDOWS:]
        costs = self._costs()
        window_s, life_s = self._config.window_s, self._config.plan_life_s
        writes = self.game.writes[self.at]
        worth = (costs[self.at] - costs) * (life_s / window_s) - self.price * writes
        target = nearest(-worth, writes)
        plan = _plan(
            gain_s_per_s=float(costs[self.at] - costs[target]),
            cost_s=float(self.price * writes[target]) * window_s,
        )
        self._regret_s = accumulate(
            self._regret_s, plan.gain_s_per_s, window_s, self._config.regret_decay
        )
        if not plan_pays(plan, life_s) or not regret_reached(self._regret_s, plan):
            return 0
        self._regret_s = 0.0
        return self.go(target)

    def _costs(self) -> FloatArray:
        weight = recency(len(self._past))
        past = np.stack(self._past)
        if self._of_mean:
            of_mean: FloatArray = self.game.costs((weight @ past)[None])[0]
            return of_mean
        costs: FloatArray = weight @ self.game.costs(past)
        return costs


def nearest(costs: FloatArray, writes: npt.NDArray[np.uint8]) -> int:
    """State of least cost, of these (to 1e-9) the one of fewest writes, of these the lowest."""
    best = np.flatnonzero(costs <= costs.min() + 1e-9)
    return int(best[np.argmin(writes[best])])


def rows_of(layout: ExpertLayout) -> tuple[int, ...]:
    """Mask of experts of each rank of a layout of one layer."""
    return tuple(sum(1 << int(key) for key in row if key >= 0) for row in layout.slots)


def game_fleet(game: Game, pairs: float, price: float) -> Fleet:
    """Fleet of one layer whose gate sees a write cost `price` windows of mean load."""
    return make_fleet(
        layers=1,
        experts=game.num_experts,
        top_k=1,
        ranks=game.num_ranks,
        slots_per_rank=game.slots_per_rank,
        pairs_per_layer=pairs,
        write_price=price,
    )


def make_player(name: str, game: Game, pairs: float, price: float) -> Player:
    """A player of PLAYERS. pairs: of a window, the unit of the engine's seconds.

    Raises ValueError for an unknown name.
    """
    fleet = game_fleet(game, pairs, price)
    still = Still(fleet)
    start = game.number_of(rows_of(still.layout))
    if name == "engine":
        return Running(Production(fleet, RebalanceConfig()))
    if name == "policy":
        return Running(Regretting(fleet))
    if name in ("gate", "gate of mean"):
        return Gated(game, start, price, of_mean=name != "gate")
    if name == "work":
        return WorkFunction(game, start, price)
    if name == "last":
        return FollowLast(game, start, price)
    if name == "eplb":
        return Running(Periodic(fleet, "eplb", 10))
    if name == "never":
        return Running(still)
    raise ValueError(f"player {name!r} is not one of {', '.join(PLAYERS)}")


def _plan(*, gain_s_per_s: float, cost_s: float) -> Plan:
    """A plan of which the gate looks at two figures."""
    return Plan(
        moves=(),
        steps=(),
        copy_bytes=0,
        cross_node_bytes=0,
        cost_s=cost_s,
        gain_s_per_s=gain_s_per_s,
        balancedness_before=1.0,
        balancedness_after=1.0,
    )
