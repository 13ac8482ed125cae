"""A shift all at once: 16 of the 64 hottest of 256 experts trade popularity with cold ones.

Popularity follows a power law (share of the n-th expert ~ n^-s, at most one pair in top-8 a token)
and counts are drawn from it. The shift comes after `shift_after(seed)` windows, at another place of
a period of ten for each seed. Scored under the exact split, from the shift on: windows with
max_over_mean >= 1.15; area above 1.15; steady = mean of the last 20 windows; writes = slots written
a window, all windows after the warm-up, over all slots.

The window in which the shift falls is scored on the layout made before it: no policy can do better
there, so it is also counted apart (`first`).

Responsible for this traffic and these figures; simulated. Called by `benchmarks.policies`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks.policies_world import (
    Clairvoyant,
    Fleet,
    Forecasting,
    Periodic,
    Production,
    Runner,
    Still,
    make_fleet,
)
from placement.config import RebalanceConfig
from placement.scoring import max_over_mean, rank_load

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

EXPERTS, RANKS, SLOTS_PER_RANK, TOP_K = 256, 32, 9, 8
SLOTS: Final = RANKS * SLOTS_PER_RANK
TOKENS: Final = 16_384
QUARTERS: Final = 4
WARM_UP: Final = 12
"""Windows before anything is scored: every runner starts from a layout nobody planned."""
WINDOWS: Final = 80
STEADY: Final = 20
HOT: Final = 64
SWAPPED: Final = 16
LIMIT: Final = 1.15
SKEWS: Final = (0.3, 0.4, 0.6, 0.8)
"""Exponents: fits over the recorded models lie between 0.30 and 0.78, DeepSeek-V2-Lite's domains at
0.38 to 0.50."""
PRICES: Final = (0.005, 0.02)
"""Cost of a slot write, in windows of the layer: the engine's gate weighs it."""
RUNNERS: Final = ("engine", "incremental", "clairvoyant", "eplb", "eplb each", "static")


@dataclass(frozen=True)
class Shift:
    """One runner on one shift."""

    runner: str
    skew: float
    price: float
    seed: int
    windows_over: int
    area: float
    first: float
    """max_over_mean in the window of the shift."""
    steady: float
    writes_share: float
    writes_worst_share: float
    curve: tuple[float, ...]
    """max_over_mean of each window from two before the shift to fifteen after it."""


def shift_after(seed: int) -> int:
    """Windows before the shift: a periodic planner meets it early and late in its period."""
    return 25 + seed % 10


def traffic(skew: float, seed: int) -> IntArray:
    """Counts int64 [WINDOWS, QUARTERS, 1, EXPERTS]; the shift comes after `shift_after`."""
    generator = np.random.default_rng((seed, round(skew * 1000)))
    share = np.arange(1, EXPERTS + 1, dtype=np.float64) ** -skew
    share = np.minimum(share / share.sum(), 1.0 / TOP_K)
    share /= share.sum()
    places = generator.permutation(EXPERTS)
    before, after = np.empty(EXPERTS), np.empty(EXPERTS)
    before[places] = share
    hot = generator.permutation(HOT)[:SWAPPED]
    cold = HOT + generator.permutation(EXPERTS - HOT)[:SWAPPED]
    moved = places.copy()
    moved[hot], moved[cold] = places[cold], places[hot]
    after[moved] = share
    pairs = TOKENS * TOP_K // QUARTERS
    counts = [
        generator.multinomial(pairs, before if window < shift_after(seed) else after, size=QUARTERS)
        for window in range(WINDOWS)
    ]
    return np.stack(counts)[:, :, None, :]


def make_runner(name: str, price: float, max_moves: int, coming: IntArray) -> Runner:
    """A runner of RUNNERS. Raises ValueError for an unknown name."""
    fleet = swap_fleet(price)
    match name:
        case "engine":
            return Production(
                fleet, msgspec.structs.replace(RebalanceConfig(), max_moves=max_moves)
            )
        case "incremental":
            return Forecasting(fleet, max_moves)
        case "clairvoyant":
            return Clairvoyant(fleet, max_moves, coming)
        case "eplb":
            return Periodic(fleet, "eplb", 10)
        case "eplb each":
            return Periodic(fleet, "eplb", 1)
        case "static":
            return Still(fleet)
    raise ValueError(f"runner {name!r} is not one of {', '.join(RUNNERS)}")


def runners_at(price: float) -> tuple[str, ...]:
    """Runners to measure at a price: all at the first of PRICES, then only the one that looks at
    it."""
    return RUNNERS if price == PRICES[0] else ("engine",)


def swap_fleet(price: float) -> Fleet:
    """The fleet of the shift: one layer."""
    return make_fleet(
        layers=1,
        experts=EXPERTS,
        top_k=TOP_K,
        ranks=RANKS,
        slots_per_rank=SLOTS_PER_RANK,
        pairs_per_layer=float(TOKENS * TOP_K),
        write_price=price,
    )


def measure(
    skew: float,
    price: float,
    seed: int,
    runners: Sequence[str] = RUNNERS,
    max_moves: int | None = None,
) -> list[Shift]:
    """Every runner on one shift. max_moves: slot writes a plan, None = the production default."""
    counts = traffic(skew, seed)
    limit = RebalanceConfig().max_moves if max_moves is None else max_moves
    return [
        scored(name, skew, price, seed, *drive(make_runner(name, price, limit, counts), counts))
        for name in runners
    ]


def drive(runner: Runner, counts: IntArray) -> tuple[FloatArray, IntArray]:
    """(max_over_mean, slots written after it) of every window, of a fleet of one layer."""
    ratios, writes = np.empty(len(counts)), np.empty(len(counts), dtype=np.int64)
    for window, quarters in enumerate(counts):
        ratios[window] = max_over_mean(rank_load(runner.layout, quarters.sum(axis=0)))[0]
        writes[window] = runner.take(quarters)
    return ratios, writes


def scored(
    runner: str, skew: float, price: float, seed: int, ratios: FloatArray, writes: IntArray
) -> Shift:
    """Figures of one runner from its windows."""
    shift = shift_after(seed)
    after = ratios[shift:]
    return Shift(
        runner=runner,
        skew=skew,
        price=price,
        seed=seed,
        windows_over=int((after >= LIMIT).sum()),
        area=float(np.maximum(after - LIMIT, 0.0).sum()),
        first=float(after[0]),
        steady=float(ratios[-STEADY:].mean()),
        writes_share=float(writes[WARM_UP:].mean()) / SLOTS,
        writes_worst_share=float(writes[WARM_UP:].max()) / SLOTS,
        curve=tuple(float(r) for r in ratios[shift - 2 : shift + 16]),
    )
