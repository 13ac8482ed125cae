"""Realised competitive ratio: what an online player pays in the placement game, over the optimum.

Paid: sum over windows of max_over_mean under the exact split, plus price x slots written. The
optimum knows all windows; both start from the same layout.

Responsible for traffic and sums. Called by `benchmarks.policies`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks.policies_optimum import Game, layout_cost, optimum
from benchmarks.policies_players import (
    PLAYERS,
    Player,
    Running,
    game_fleet,
    make_player,
    rows_of,
)
from benchmarks.policies_traffic import HOTTER, PAIRS, PATTERNS, PingPong, pattern, recorded
from benchmarks.policies_world import Production, Still

IntArray = npt.NDArray[np.int64]

PRICES: Final = (0.005, 0.02, 0.05)
ADVERSARY_WINDOWS: Final = 200
TRAFFIC: Final = ("gptoss mixed", "gptoss blocks", "ping-pong", "ping-pong hotter", *PATTERNS)


@dataclass(frozen=True)
class Played:
    """One player on one traffic. loss: sum of max_over_mean; best: the optimum's total."""

    traffic: str
    player: str
    price: float
    seed: int
    windows: int
    loss: float
    writes: int
    best: float
    best_writes: int
    floor: float
    """Of an adversary: what the best single layout costs against it for ever, over the optimum
    then; 0 for other traffic."""
    rules: dict[str, int]
    """How often each rule of the engine spoke; empty for other players."""

    @property
    def ratio(self) -> float:
        """Paid over the optimum."""
        return (self.loss + self.price * self.writes) / self.best


def demand_of(traffic: str, seed: int) -> IntArray | PingPong:
    """Counts int64 [windows, quarters, experts], or the adversary."""
    if traffic == "ping-pong":
        return PingPong(seed)
    if traffic == "ping-pong hotter":
        return PingPong(seed, hot_over_mean=HOTTER)
    if traffic.startswith("gptoss "):
        return recorded(traffic.removeprefix("gptoss "), seed)
    return pattern(traffic, seed)


def play(
    player: Player, demand: IntArray | PingPong, windows: int = ADVERSARY_WINDOWS
) -> tuple[float, int, IntArray]:
    """(sum of max_over_mean, slots written, counts that were asked [windows, experts]). windows: of
    an adversary."""
    loss, writes = 0.0, 0
    asked = []
    for window in range(windows if isinstance(demand, PingPong) else len(demand)):
        rows = player.rows
        counts = demand.ask(rows) if isinstance(demand, PingPong) else demand[window]
        asked.append(counts.sum(axis=0))
        loss += layout_cost(rows, asked[-1])
        writes += player.take(counts)
    return loss, writes, np.stack(asked)


def floor_of(game: Game, adversary: PingPong) -> float:
    """Least over layouts of the worse set's cost, over the least cost of that set: the ratio of a
    player who goes to that layout and stays there while the adversary asks on."""
    costs = game.costs(adversary.sets)
    at = int(np.argmin(costs.max(axis=0)))
    worse = int(np.argmax(costs[:, at]))
    return float(costs[worse, at] / costs[worse].min())


def measure(
    traffic: str, seed: int, prices: Sequence[float] = PRICES, players: Sequence[str] = PLAYERS
) -> list[Played]:
    """Every player at every price on one traffic; the adversary plays against each anew."""
    game, out = Game(), []
    demand = demand_of(traffic, seed)
    pairs = float(PAIRS if isinstance(demand, PingPong) else demand.sum() / len(demand))
    start = game.number_of(rows_of(Still(game_fleet(game, pairs, 1.0)).layout))
    costs, floor = None, 0.0
    if isinstance(demand, PingPong):
        floor = floor_of(game, demand)
    else:
        costs = game.costs(demand.sum(axis=1))
    for price in prices:
        for name in players:
            player = make_player(name, game, pairs, price)
            loss, writes, asked = play(player, demand)
            best = optimum(game, game.costs(asked) if costs is None else costs, start, price)
            runner = player.runner if isinstance(player, Running) else None
            rules = runner.rules if isinstance(runner, Production) else []
            out.append(
                Played(
                    traffic,
                    name,
                    price,
                    seed,
                    len(asked),
                    loss,
                    writes,
                    best.total,
                    best.writes,
                    floor,
                    {rule: rules.count(rule) for rule in sorted(set(rules))},
                )
            )
    return out
