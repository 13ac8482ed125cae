"""Why: the record every decision leaves, whether something moved or not. Read by page, CLI, metrics
and log."""

from __future__ import annotations

from typing import Final

import msgspec

REFUSED_MAX: Final = 8
"""Alternatives that one record names."""


class DecisionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One decision.

    rule: name of the rule that spoke. Of a window: in_balance | out_of_balance | cooldown | paused
    | plan_running | target_outstanding | not_ready | no_load. Of a target: nothing_better |
    gain_below_cost | gain_below_band | regret_below_cost, and for plans that start shift |
    regret_reached | pays_in_time. Plans: initial | restore | repair | budget | drain | staging |
    asked | cleanup. Others: target_stale | target_failed | step_aborted | plan_stalled | parked |
    plan_done | realised_gain | rank_lost | all_lost | floor | router_left | drain_wait_over |
    budget_refused ... outcome: kept | started | done | aborted | refused | noted.
    numbers: what the rule saw, by name (units last in each name). refused: what else was looked at
    and not done, each as "rule: why not", at most REFUSED_MAX.
    """

    at_s: float
    seq: int
    rule: str
    outcome: str
    detail: str = ""
    plan_id: str = ""
    move_id: int = -1
    numbers: dict[str, float] = {}
    expected_gain_s_per_s: float = 0.0
    realised_gain_s_per_s: float = 0.0
    copy_bytes: int = 0
    refused: tuple[str, ...] = ()
