"""Policies against each other on recorded traffic, learned ones in and out of their distribution;
and the clairvoyant reference.

Every runner starts from the layout nobody planned, sees windows one after another, and is scored on
the next, under the exact split: balance of windows and of quarters of windows (mean over layers of
mean / max rank load), and slots written a window as a share of all. The first windows are not
scored. All planners that keep to a budget have the same one.

Learned policies are trained on the odd requests of a trace in some order, everything is tested on
the even ones (of the same or another trace) with other seeds. `in` marks the order and model a
network was trained on.

Responsible for the timelines, runners and figures. Called by `benchmarks.policies`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks.placement_traces import Case, load_case, request_domains, timeline
from benchmarks.policies_learned import (
    QUARTERS_SEEN,
    Network,
    cross_entropy,
    mean_shares,
    policy_of,
    train,
)
from benchmarks.policies_world import (
    Clairvoyant,
    Fleet,
    Forecasting,
    Learned,
    Periodic,
    Production,
    Runner,
    Still,
    make_fleet,
)
from placement.config import RebalanceConfig
from placement.layout import ExpertLayout
from placement.scoring import layer_balancedness, rank_load

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

QUARTERS: Final = 4
WARM_UP: Final = 4
WINDOWS_MAX: Final = 24
BUDGET: Final = 0.08
"""Slots written a window, as a share of all slots, that planners with a budget may use."""
WRITE_PRICE: Final = 0.005
PASSES: Final = 4
TRAIN_SEEDS: Final = (1000, 1001, 1002)
TRAINED_ON: Final = (
    ("deepseek8", "mixed"),
    ("deepseek8", "blocks"),
    ("deepseek8", "mixed+blocks"),
    ("gptoss8", "mixed"),
)
TESTS: Final = tuple(
    (case, order) for case in ("deepseek8", "gptoss8", "tiny") for order in ("mixed", "blocks")
)
PLAIN: Final = ("static", "eplb", "eplb each", "engine", "incremental", "clairvoyant")
REFERENCES: Final = ("incremental", "clairvoyant", "clairvoyant, quarters")
REFERENCE_CASES: Final = ("deepseek8", "deepseek16", "gptoss8", "tiny")
RACE_WINDOW_TOKENS: Final[Mapping[str, int]] = {"gptoss8": 1024}
"""Shorter windows where half of a trace would be only three of the usual ones."""


@dataclass(frozen=True)
class Raced:
    """One runner on one timeline."""

    case: str
    order: str
    runner: str
    trained_on: str
    """Case and order of a learned policy's training, "" for others."""
    seed: int
    windows: int
    window_balance: float
    quarter_balance: float
    writes_share: float


def race_fleet(case: Case, window_tokens: int) -> Fleet:
    """Fleet of a case."""
    return make_fleet(
        layers=case.layers,
        experts=case.experts,
        top_k=case.top_k,
        ranks=case.ranks,
        slots_per_rank=case.slots_per_rank,
        pairs_per_layer=float(window_tokens * case.top_k),
        write_price=WRITE_PRICE,
    )


def max_moves(case: Case) -> int:
    """Slot writes a window of the budget, all layers."""
    return int(BUDGET * case.slots * case.layers)


def half(case: Case, *, test: bool) -> list[int]:
    """Numbers of the requests to test on (even) or to train on (odd)."""
    return list(range(0 if test else 1, len(request_domains(case)), 2))


def window_tokens_of(case: Case) -> int:
    """Tokens of a window in the race."""
    return RACE_WINDOW_TOKENS.get(case.name, case.window_tokens)


def race_timeline(case: Case, order: str, seed: int, *, test: bool) -> IntArray:
    """Counts int64 [windows, quarters, layers, experts] of one half of the requests, gone through
    until there are WINDOWS_MAX windows (or PASSES times)."""
    counts = timeline(
        case,
        order,
        seed,
        window_tokens_of(case),
        QUARTERS,
        requests=half(case, test=test),
        passes=PASSES,
    )
    return counts[:WINDOWS_MAX]


def trained(case_name: str, order: str, seed: int, *, memory: bool) -> Network:
    """Network trained on the odd requests of a case in an order, or in several (joined by +)."""
    case = load_case(case_name)
    lines = [
        race_timeline(case, each, s, test=False) for each in order.split("+") for s in TRAIN_SEEDS
    ]
    return train(lines, seed, memory=memory)


def make_runner(name: str, case: Case, fleet: Fleet, counts: IntArray) -> Runner:
    """A runner of PLAIN or REFERENCES. Raises ValueError for an unknown name."""
    limit = max_moves(case)
    match name:
        case "static":
            return Still(fleet)
        case "eplb":
            return Periodic(fleet, "eplb", 10)
        case "eplb each":
            return Periodic(fleet, "eplb", 1)
        case "engine":
            return Production(fleet, msgspec.structs.replace(RebalanceConfig(), max_moves=limit))
        case "incremental":
            return Forecasting(fleet, limit)
        case "clairvoyant":
            return Clairvoyant(fleet, limit, counts)
        case "clairvoyant, quarters":
            return Clairvoyant(fleet, limit, counts, by_quarters=True)
    raise ValueError(f"runner {name!r} is not one of {', '.join(PLAIN)}")


def balances(layout: ExpertLayout, quarters: IntArray) -> tuple[float, float]:
    """(balance of the window, mean balance of its quarters): means over layers of mean / max rank
    load."""
    whole = layer_balancedness(rank_load(layout, quarters.sum(axis=0))).mean()
    parts = [layer_balancedness(rank_load(layout, quarter)).mean() for quarter in quarters]
    return float(whole), float(np.mean(parts))


def drive(runner: Runner, counts: IntArray, warm_up: int = WARM_UP) -> tuple[float, float, float]:
    """(window balance, quarter balance, slots written a window) after the warm-up, each window
    scored on the layout made before it; plans made during the warm-up count no writes."""
    scores, writes = [], []
    for window, quarters in enumerate(counts):
        if window >= warm_up:
            scores.append(balances(runner.layout, quarters))
        written = runner.take(quarters)
        if warm_up <= window < len(counts) - 1:  # with warm_up 1 the first plan does not count
            writes.append(written)
    whole, parts = np.mean(scores, axis=0)
    return float(whole), float(parts), float(np.mean(writes))


def race(
    tests: Iterable[tuple[str, str]],
    seeds: Sequence[int],
    networks: Mapping[tuple[str, str, str], Network],
) -> list[Raced]:
    """Every plain runner and every network on every test. networks: by (name, case, order)."""
    out = []
    for case_name, order in tests:
        case = load_case(case_name)
        fleet = race_fleet(case, window_tokens_of(case))
        for seed in seeds:
            counts = race_timeline(case, order, seed, test=True)
            for name in PLAIN:
                runner = make_runner(name, case, fleet, counts)
                out.append(_raced(case, order, name, "", seed, counts, runner))
            for (name, *where), network in networks.items():
                learned = Learned(fleet, policy_of(network), max_moves(case), QUARTERS_SEEN)
                on = " ".join(where)
                out.append(_raced(case, order, name, on, seed, counts, learned))
    return out


def all_networks(seed: int) -> dict[tuple[str, str, str], Network]:
    """With and without memory, for every traffic of TRAINED_ON."""
    return {
        ("memory" if memory else "shares", case, order): trained(case, order, seed, memory=memory)
        for case, order in TRAINED_ON
        for memory in (False, True)
    }


@dataclass(frozen=True)
class Learnt:
    """How well a network forecasts one timeline; trained_on "" for the plain means."""

    case: str
    order: str
    network: str
    trained_on: str
    seed: int
    excess_nats: float


def learning(
    networks: Mapping[tuple[str, str, str], Network], seeds: Sequence[int]
) -> list[Learnt]:
    """Cross-entropy of every network, and of two plain means, on every test."""
    out = []
    for case_name, order in TESTS:
        case = load_case(case_name)
        for seed in seeds:
            counts = race_timeline(case, order, seed, test=True)
            for name, quarters in (("last", QUARTERS), ("three", QUARTERS_SEEN)):
                excess = cross_entropy(partial(mean_shares, quarters_kept=quarters), counts)
                out.append(Learnt(case_name, order, name, "", seed, excess))
            for (name, *where), network in networks.items():
                excess = cross_entropy(network.shares, counts)
                out.append(Learnt(case_name, order, name, " ".join(where), seed, excess))
    return out


def clairvoyant(cases: Iterable[str], orders: Sequence[str], seeds: Sequence[int]) -> list[Raced]:
    """The clairvoyant and the forecasting planner on the placement benchmark's own timelines, all
    requests once, scored after the first plan."""
    out = []
    for case_name in cases:
        case = load_case(case_name)
        fleet = race_fleet(case, case.window_tokens)
        for order in orders:
            for seed in seeds:
                counts = timeline(case, order, seed, case.window_tokens, QUARTERS)
                for name in REFERENCES:
                    runner = make_runner(name, case, fleet, counts)
                    out.append(_raced(case, order, name, "", seed, counts, runner, warm_up=1))
    return out


def _raced(
    case: Case,
    order: str,
    name: str,
    trained_on: str,
    seed: int,
    counts: IntArray,
    runner: Runner,
    warm_up: int = WARM_UP,
) -> Raced:
    whole, parts, writes = drive(runner, counts, warm_up)
    return Raced(
        case=case.name,
        order=order,
        runner=name,
        trained_on=trained_on,
        seed=seed,
        windows=len(counts) - warm_up,
        window_balance=whole,
        quarter_balance=parts,
        writes_share=writes / (case.slots * case.layers),
    )
