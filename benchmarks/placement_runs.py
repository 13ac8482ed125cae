"""One timeline through one planner, window by window, and what is recorded of it.

Responsible for the rule of the comparison: plan on what closed, score on what comes next. Called by
`placement`, in as many processes as it is given; a run depends on nothing but its arguments.

Every planner sees windows 0..t and its placement is scored on window t + 1, from t = 0 on. Writes
are counted for every plan but the first, which fills an empty fleet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec
import numpy as np

from benchmarks.placement_peers import SUMMED, PeerPlanner, find_peers, peers_folder
from benchmarks.placement_planners import EnginePlanner, Planner, PolicyPlanner
from benchmarks.placement_score import SPLITS, IntArray, any_layout_bound, score, slot_writes
from benchmarks.placement_traces import Case, load_case, timeline

SHARES: Final = (0.01, 0.02, 0.04, 0.08, 0.10)
"""Budgets of ours: slots that a plan may write, as a share of all."""
TABLE_SHARE: Final = {"gptoss8": 0.10}
"""Budget of the published table, by case; others have `USUAL_SHARE`."""
USUAL_SHARE: Final = 0.08
ANY_LAYOUT: Final = "any layout (bound)"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One planner on one timeline.

    window, quarter: split -> balance, mean over layers and scored windows (and their quarters).
    by_window: balance of each scored window under our split. writes_share, writes_share_max: share
    of slots written by a plan after the first, mean and largest. forecast_ms, plan_ms: CPU
    milliseconds a layer of such a plan.
    """

    case: str
    order: str
    seed: int
    planner: str
    window: dict[str, float]
    quarter: dict[str, float]
    by_window: tuple[float, ...]
    writes_share: float
    writes_share_max: float
    forecast_ms: float
    plan_ms: float
    passes: int = 1
    """Times the recorded requests were gone through: above 1, requests (not windows) recur."""


class Contender(NamedTuple):
    """A planner by name, and how to make it for a case."""

    name: str
    make: Callable[[Case], Planner]


def ours(share: float) -> str:
    """Name of our planner with a budget.

    >>> ours(0.08)
    'incremental 8%'
    """
    return f"incremental {share:.0%}"


class Variant(NamedTuple):
    """What a run leaves out, adds or changes.

    few: ours at the table's budget only. engine: also the whole engine. balance_enough: of ours,
    None = production's. passes: times the recorded requests are gone through.
    """

    few: bool = False
    engine: bool = False
    balance_enough: float | None = None
    passes: int = 1


def contenders(case: Case, variant: Variant) -> list[Contender]:
    """Planners of a case: ours at each budget, a clairvoyant one, baselines, peers that are
    here."""
    few, engine, enough, _ = variant
    largest = TABLE_SHARE.get(case.name, USUAL_SHARE)
    shares = [share for share in SHARES if share == largest or (share < largest and not few)]
    found = [Contender(ours(s), _policy("incremental", s, enough)) for s in shares]
    found.append(
        Contender(
            f"clairvoyant {largest:.0%}",
            lambda c: PolicyPlanner(
                c, "incremental", largest, clairvoyant=True, balance_enough=enough
            ),
        )
    )
    if engine:
        found.append(Contender(f"engine {largest:.0%}", lambda c: EnginePlanner(c, largest)))
    found.append(Contender("eplb", _policy("eplb", None)))
    found.append(Contender("static", _policy("static", None)))
    for peer in find_peers(peers_folder()).found:
        for signal in SUMMED:
            make = _peer_maker(signal, peer.name)
            found.append(Contender(f"{peer.name} ({signal})", make))
    return found


def run_timeline(case_name: str, order: str, seed: int, variant: Variant) -> list[Row]:
    """Every contender on one timeline, and the bound of any layout.

    Raises ValueError for a timeline of fewer than three windows, TracesMissing without the trace.
    """
    case = load_case(case_name)
    windows = timeline(case, order, seed, passes=variant.passes)
    if len(windows) < 3:
        raise ValueError(f"{case_name} {order}: {len(windows)} windows, scoring needs 3")
    rows = [
        run_planner(case, order, seed, contender.name, contender.make(case), windows)
        for contender in contenders(case, variant)
    ]
    rows.append(_bound_row(case, order, seed, windows))
    return [msgspec.structs.replace(row, passes=variant.passes) for row in rows]


def run_planner(
    case: Case, order: str, seed: int, name: str, planner: Planner, windows: IntArray
) -> Row:
    """One planner on windows int64 [windows, quarters, layers, experts]."""
    balances: list[list[tuple[float, float]]] = []
    written: list[float] = []
    spent: list[tuple[float, float]] = []
    before = None
    for at in range(len(windows) - 1):
        planned = planner.plan(windows[at], windows[at + 1])
        if before is not None:
            written.append(slot_writes(before, planned.placement) / before.num_slots)
            spent.append((planned.forecast_s, planned.plan_s))
        before = planned.placement
        came = np.concatenate((windows[at + 1].sum(axis=0)[None], windows[at + 1]))
        scores = score(planned.placement, came)
        balances.append([(float(s[0].mean()), float(s[1:].mean())) for s in scores])
    mean = np.array(balances).mean(axis=0)
    forecast_s, plan_s = np.array(spent).mean(axis=0)
    return Row(
        case=case.name,
        order=order,
        seed=seed,
        planner=name,
        window={split: float(mean[i, 0]) for i, split in enumerate(SPLITS)},
        quarter={split: float(mean[i, 1]) for i, split in enumerate(SPLITS)},
        by_window=tuple(b[SPLITS.index("level")][0] for b in balances),
        writes_share=float(np.mean(written)),
        writes_share_max=float(np.max(written)),
        forecast_ms=float(forecast_s) * 1e3 / case.layers,
        plan_ms=float(plan_s) * 1e3 / case.layers,
    )


def _bound_row(case: Case, order: str, seed: int, windows: IntArray) -> Row:
    scored = windows[1:]
    whole = any_layout_bound(scored.sum(axis=1), case.slots, case.ranks)
    parts = any_layout_bound(scored.reshape(-1, case.layers, case.experts), case.slots, case.ranks)
    return Row(
        case=case.name,
        order=order,
        seed=seed,
        planner=ANY_LAYOUT,
        window={"bound": float(whole.mean())},
        quarter={"bound": float(parts.mean())},
        by_window=tuple(float(x) for x in whole.mean(axis=1)),
        writes_share=0.0,
        writes_share_max=0.0,
        forecast_ms=0.0,
        plan_ms=0.0,
    )


def _policy(
    policy: str, share: float | None, enough: float | None = None
) -> Callable[[Case], Planner]:
    return lambda case: PolicyPlanner(case, policy, share, balance_enough=enough)


def _peer_maker(signal: str, name: str) -> Callable[[Case], Planner]:
    def make(case: Case) -> Planner:
        for peer in find_peers(peers_folder()).found:
            if peer.name == name:
                return PeerPlanner(case, peer, signal)
        raise AssertionError(f"{name} was here a moment ago")

    return make
