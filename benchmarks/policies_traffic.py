"""Traffic of the placement game: six patterns, six experts of a recorded layer, and an
adversary that looks at the layout.

Patterns, each a share of the load for every expert and window, drawn anew for each seed; hot sets
hold about 45% of the load:

- *stationary*: one set of shares for ever.
- *step*: two changes for good, a third and two thirds of the way.
- *periodic*: two sets take turns, 12 windows each.
- *drift*: one set turns into another, and that into a third, in straight lines.
- *burst*: stationary, and every 10 to 25 windows another expert gets half the load for 1 to 4
  windows.
- *walk*: log shares walk at random, 0.25 a window, pulled back to even by 3%.

Responsible for demand as counts int64 [windows, quarters, experts]; the same seed gives the same
demand. Must never look at a layout (only the adversary may). Called by the ratio benchmark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks.placement_traces import load_case, timeline
from benchmarks.policies_optimum import layout_cost

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

QUARTERS = 4
PAIRS = 4_096
"""Pairs of a window; enough that the noise of a window costs little (about 1% of a rank)."""
_HOT = 0.45
HOT_OVER_MEAN: Final = (1.97, 4.01)
HOTTER: Final = (2.4, 4.5)


def shares(experts: int, generator: np.random.Generator) -> FloatArray:
    """A skewed set of shares: one hot expert in a random place, the rest drawn evenly."""
    rest = generator.dirichlet(np.full(experts - 1, 4.0)) * (1.0 - _HOT)
    return np.insert(rest, int(generator.integers(experts)), _HOT)


def _stationary(windows: int, experts: int, generator: np.random.Generator) -> FloatArray:
    return np.tile(shares(experts, generator), (windows, 1))


def _step(windows: int, experts: int, generator: np.random.Generator) -> FloatArray:
    sets = np.stack([shares(experts, generator) for _ in range(3)])
    return sets[np.arange(windows) * 3 // windows]


def _periodic(windows: int, experts: int, generator: np.random.Generator) -> FloatArray:
    sets = np.stack([shares(experts, generator) for _ in range(2)])
    return sets[np.arange(windows) // 12 % 2]


def _drift(windows: int, experts: int, generator: np.random.Generator) -> FloatArray:
    sets = np.stack([shares(experts, generator) for _ in range(3)])
    at = np.linspace(0.0, 2.0, windows)
    low = np.minimum(at.astype(np.int64), 1)
    part = (at - low)[:, None]
    mixed: FloatArray = sets[low] * (1.0 - part) + sets[low + 1] * part
    return mixed


def _burst(windows: int, experts: int, generator: np.random.Generator) -> FloatArray:
    out = _stationary(windows, experts, generator)
    at = int(generator.integers(10, 26))
    while at < windows:
        length = int(generator.integers(1, 5))
        hot = np.zeros(experts)
        hot[int(generator.integers(experts))] = 1.0
        out[at : at + length] = 0.5 * out[at : at + length] + 0.5 * hot
        at += length + int(generator.integers(10, 26))
    return out


def _walk(windows: int, experts: int, generator: np.random.Generator) -> FloatArray:
    logs = np.zeros((windows, experts))
    logs[0] = np.log(shares(experts, generator))
    for window in range(1, windows):
        logs[window] = 0.97 * logs[window - 1] + 0.25 * generator.standard_normal(experts)
    out = np.exp(logs)
    even: FloatArray = out / out.sum(axis=1, keepdims=True)
    return even


_PATTERNS: Final[MappingProxyType[str, Callable[[int, int, np.random.Generator], FloatArray]]] = (
    MappingProxyType(
        {
            "stationary": _stationary,
            "step": _step,
            "periodic": _periodic,
            "drift": _drift,
            "burst": _burst,
            "walk": _walk,
        }
    )
)
PATTERNS: Final = tuple(_PATTERNS)


def pattern(name: str, seed: int, windows: int = 200, experts: int = 6) -> IntArray:
    """Counts of a pattern: int64 [windows, QUARTERS, experts], PAIRS a window.

    Raises ValueError for an unknown name.
    """
    if name not in _PATTERNS:
        raise ValueError(f"pattern {name!r} is not one of {', '.join(PATTERNS)}")
    generator = np.random.default_rng((seed, PATTERNS.index(name)))
    share = _PATTERNS[name](windows, experts, generator)
    return generator.multinomial(PAIRS // QUARTERS, share[:, None].repeat(QUARTERS, axis=1))


def recorded(
    order: str, seed: int, experts: int = 6, passes: int = 16, window_tokens: int = 2048
) -> IntArray:
    """GPT-OSS-20B decode, a few experts of one layer: int64 [windows, QUARTERS, experts].

    The seed draws the layer and which of its experts play. order: of `placement_traces`. Windows of
    2,048 tokens (about 1,500 pairs of six experts), the trace gone through `passes` times, each in
    its own order: 107 windows. Raises TracesMissing where the trace is not here.
    """
    case = load_case("gptoss8")
    generator = np.random.default_rng((seed, 99))
    layer = int(generator.integers(case.layers))
    drawn = np.sort(generator.permutation(case.experts)[:experts])
    counts = timeline(case, order, seed, window_tokens, QUARTERS, passes=passes)
    return np.ascontiguousarray(counts[:, :, layer, drawn])


class PingPong:
    """Adversary: of two sets of shares, ask for the one that costs the layout it sees more.

    Each set has its own hot expert. Its load over the mean is drawn from `hot_over_mean`:
    HOT_OVER_MEAN is the range of the layers of GPT-OSS-20B, HOTTER lies half a mean higher. Same
    layouts, same demand: nothing is random once it is made.
    """

    def __init__(
        self, seed: int, experts: int = 6, hot_over_mean: tuple[float, float] = HOT_OVER_MEAN
    ) -> None:
        generator = np.random.default_rng((seed, 98))
        hot_experts = generator.permutation(experts)[:2].tolist()
        self.hot = float(generator.uniform(*hot_over_mean)) / experts
        self.sets = np.full((2, experts), (1.0 - self.hot) / (experts - 1))
        self.sets[[0, 1], hot_experts] = self.hot
        self.sets = np.rint(self.sets * (PAIRS // QUARTERS)).astype(np.int64)
        """Counts of a quarter for each set: int64 [2, experts]."""

    def ask(self, rows: Sequence[int]) -> IntArray:
        """Counts of the next window, int64 [QUARTERS, experts], against a layout (mask of experts
        a rank)."""
        costs = [layout_cost(rows, counts) for counts in self.sets]
        return np.tile(self.sets[int(costs[1] > costs[0])], (QUARTERS, 1))
