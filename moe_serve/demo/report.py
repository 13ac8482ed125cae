"""The demo's figures, the bar each must reach, and how they are shown. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moe_serve.demo.audit import AuditResult
from moe_serve.demo.measure import BalanceFigures

PARITY_MAX = 1e-4
TOKENS_MIN = 500
DOMAIN_TURNS_MIN = 2
PARITY_DURING_MOVES_MIN = 20
EPOCHS_MIN = 3
GAIN_MIN = 0.30
"""Served imbalance lies at least this share under static imbalance."""
MOVE_KINDS = ("replicate", "migrate", "evict")


@dataclass(frozen=True, slots=True)
class Check:
    """One figure that must hold."""

    name: str
    bar: str
    holds: bool


def figures(  # noqa: PLR0913 - the parts of one report, by name
    *,
    summary: dict[str, Any],
    parity: list[tuple[float, float, float]],
    moving: list[tuple[float, float]],
    greedy_equal: list[bool],
    ledger: AuditResult,
    moves: dict[str, int],
    epochs_published: int,
    balance: BalanceFigures,
    seconds: float,
) -> dict[str, Any]:
    """Everything the JSON file holds. parity: (began, ended, max abs diff) of each sample."""
    during = sum(any(b < ended and began < e for b, e in moving) for began, ended, _ in parity)
    return {
        "seconds": seconds,
        "simulated_prices": True,
        "requests": summary["requests"],
        "layer_calls": summary["layer_calls"],
        "tokens": summary["tokens"],
        "domains": summary["domains"],
        "failed_requests": summary["failed_requests"],
        "call_p50_s": summary["call_p50_s"],
        "call_p99_s": summary["call_p99_s"],
        "parity_max_abs_diff": max((diff for _, _, diff in parity), default=None),
        "parity_samples": len(parity),
        "parity_samples_during_moves": during,
        "greedy_samples": len(greedy_equal),
        "greedy_tokens_equal": bool(greedy_equal) and all(greedy_equal),
        "contributions_lost": ledger.lost,
        "contributions_doubled": ledger.doubled,
        "contributions_unknown": ledger.unknown,
        "front_end_pairs": summary["demand_pairs"],
        "demand_pairs": ledger.demand_pairs,
        "executed_pairs": ledger.executed_pairs,
        "combined_pairs": ledger.combined_pairs,
        "retried": ledger.retried,
        "hedged": ledger.hedged,
        "resent": ledger.resent,
        "epochs_published": epochs_published,
        "moves": {kind: moves.get(kind, 0) for kind in MOVE_KINDS},
        "windows": balance.windows,
        "imbalance_static": balance.imbalance_static,
        "imbalance_static_leveled": balance.imbalance_static_leveled,
        "imbalance_served": balance.imbalance_served,
        "imbalance_gain": balance.gain,
    }


def checks(found: dict[str, Any], num_domains: int) -> list[Check]:
    """What must hold of a full run."""
    turns = min(found["domains"].values(), default=0) if len(found["domains"]) == num_domains else 0
    pairs = found["demand_pairs"] + found["retried"] + found["hedged"]
    rules: list[tuple[str, str, Callable[[], bool]]] = [
        ("tokens", f">= {TOKENS_MIN}", lambda: found["tokens"] >= TOKENS_MIN),
        ("domains", f"each >= {DOMAIN_TURNS_MIN} times", lambda: turns >= DOMAIN_TURNS_MIN),
        ("failed_requests", "= 0", lambda: found["failed_requests"] == 0),
        (
            "parity_max_abs_diff",
            f"<= {PARITY_MAX:g}",
            lambda: (
                found["parity_max_abs_diff"] is not None
                and found["parity_max_abs_diff"] <= PARITY_MAX
            ),
        ),
        (
            "parity_samples_during_moves",
            f">= {PARITY_DURING_MOVES_MIN}",
            lambda: found["parity_samples_during_moves"] >= PARITY_DURING_MOVES_MIN,
        ),
        ("greedy_tokens_equal", "true", lambda: found["greedy_tokens_equal"]),
        ("contributions_lost", "= 0", lambda: found["contributions_lost"] == 0),
        ("contributions_doubled", "= 0", lambda: found["contributions_doubled"] == 0),
        ("contributions_unknown", "= 0", lambda: found["contributions_unknown"] == 0),
        (
            "demand_pairs",
            "= front_end_pairs",
            lambda: found["demand_pairs"] == found["front_end_pairs"],
        ),
        ("executed_pairs", "= demand + retried + hedged", lambda: found["executed_pairs"] == pairs),
        ("epochs_published", f">= {EPOCHS_MIN}", lambda: found["epochs_published"] >= EPOCHS_MIN),
        ("moves", "each kind >= 1", lambda: all(n >= 1 for n in found["moves"].values())),
        ("imbalance_gain", f">= {GAIN_MIN:.2f}", lambda: found["imbalance_gain"] >= GAIN_MIN),
    ]
    return [Check(name, bar, rule()) for name, bar, rule in rules]
