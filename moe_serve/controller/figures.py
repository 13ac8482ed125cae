"""What the controller says to logs and metrics: a line a decision, figures once a closed window.

Responsible for their form, from records and state that others made. Must never be read by anything
that decides, nor cost anything a token batch. Called by the driver, and by polls and executor of
the same term.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import structlog

from moe_serve import __version__
from moe_serve.controller.clock import wall_s
from moe_serve.controller.parts import PartTable
from moe_serve.controller.plan_figures import PlanFigures
from moe_serve.controller.rank_figures import RankFigures
from moe_serve.controller.stages import difference, no_counts
from moe_serve.ports import RouterReport
from moe_serve.stage_counts import StageCounts
from moe_serve.telemetry import Metrics
from moe_serve.telemetry.router_figures import RoutersFigures
from placement.engine import EngineState
from placement.engine.stall import stalled
from placement.engine.state import SlotUse
from placement.forecast import choose
from placement.load import HotnessReport, LoadWindow
from placement.messages.records import DecisionRecord
from placement.scoring import balancedness, layer_balancedness
from placement.topology import MoeSpec, Phase

SCORED_FROM = 2
"""Windows after which forecasters have a score."""


class Figures:
    """Log lines and samples of one term. `parts` is read for what shards reported last; `stages`
    gives where the time of requests went, totals of this term. `routers`: takes what routers
    report, None where they tell it themselves."""

    def __init__(
        self,
        spec: MoeSpec,
        parts: PartTable,
        *,
        log: structlog.typing.FilteringBoundLogger,
        metrics: Metrics,
        stages: Callable[[], StageCounts] = no_counts,
        routers: RoutersFigures | None = None,
    ) -> None:
        self._spec = spec
        self._parts = parts
        self._log = log
        self._metrics = metrics
        self._plans = PlanFigures(metrics)
        self._ranks = RankFigures(spec, parts, metrics)
        self._stages = stages
        self._routers = routers
        self._staged = no_counts()
        """Of `stages`, what has been told."""
        metrics.set("build_info", 1.0, version=__version__, model=spec.model)

    def decided(self, records: Iterable[DecisionRecord]) -> None:
        """Decisions were made: one line each; that nothing was to do is said at DEBUG."""
        for record in records:
            say = self._log.debug if record.outcome == "kept" else self._log.info
            say(
                "decision",
                seq=record.seq,
                rule=record.rule,
                outcome=record.outcome,
                detail=record.detail,
                plan_id=record.plan_id,
                move_id=record.move_id,
                numbers=record.numbers,
                expected_gain_s_per_s=record.expected_gain_s_per_s,
                realised_gain_s_per_s=record.realised_gain_s_per_s,
                copy_bytes=record.copy_bytes,
            )
            self._plans.record(record)

    def solved(self, policy: str, seconds: float) -> None:
        """A target was computed by this policy, or could not be, in so many seconds."""
        self._plans.solved(policy, seconds)

    def executed(self, report: HotnessReport) -> None:
        """A shard told what it computed since its last report."""
        self._ranks.executed(report)

    def router_told(self, report: RouterReport) -> None:
        """A router reported."""
        if self._routers is not None:
            self._routers.tell(report)

    def window_closed(self, state: EngineState, window: LoadWindow) -> None:
        """A window closed: what was asked, computed and held, and where the placement stands."""
        metrics = self._metrics
        metrics.set("window_closed_timestamp_seconds", wall_s())
        metrics.set("window_seconds", window.end_s - window.start_s)
        metrics.set("term", state.term)
        metrics.set("epoch", state.epoch)
        metrics.set("rebalancing", float(state.run is not None))
        metrics.set("paused", float(state.paused))
        metrics.set("rebalance_stalled", float(bool(stalled(state))))
        metrics.set("moves_under_way", self._plans.moves_under_way)
        self._placement(state)
        self._load(state, window)
        self._forecast(state)
        self._ranks.window_closed(state, window)
        metrics.set("copying_bytes", self._ranks.copying_bytes())
        total = self._stages()
        self._ranks.stages(difference(total, self._staged))
        self._staged = total
        if self._routers is not None:
            self._routers.keep(self._parts.routers)

    def _placement(self, state: EngineState) -> None:
        replicas = np.zeros(self._spec.num_keys, np.int64)
        for rank in state.ranks:
            if rank.holds:
                held = [slot.key for slot in rank.slots if slot.use is SlotUse.LISTED]
                np.add.at(replicas, np.array(held, np.int64), 1)
        listed = int(np.count_nonzero(replicas))
        self._metrics.set("experts", listed, state="listed")
        self._metrics.set("experts", self._spec.num_keys - listed, state="missing")
        by_layer = replicas.reshape(self._spec.num_layers, -1).sum(axis=1)
        for layer, count in enumerate(by_layer.tolist()):
            self._metrics.set("layer_replicas", count, layer=layer)

    def _load(self, state: EngineState, window: LoadWindow) -> None:
        metrics = self._metrics
        by_expert = window.demand.sum(axis=0)
        for phase in Phase:
            for layer, pairs in enumerate(by_expert[phase].sum(axis=1).tolist()):
                metrics.add("layer_pairs_total", pairs, layer=layer, phase=phase.name.lower())
        both = by_expert.sum(axis=0)
        for layer, (hottest, all_) in enumerate(
            zip(both.max(axis=1), both.sum(axis=1), strict=True)
        ):
            if all_:
                share = float(hottest) / float(all_)
                metrics.set("layer_hottest_expert_share_ratio", share, layer=layer)
        metrics.add_experts(both)
        holding = [r.rank for r in state.ranks if r.holds and r.rank < len(window.rank_pairs)]
        loads = window.rank_pairs[holding]
        if loads.any():
            metrics.set("balancedness_ratio", balancedness(loads))
            for layer, value in enumerate(layer_balancedness(loads).tolist()):
                metrics.set("layer_imbalance_ratio", 1.0 / value - 1.0, layer=layer)

    def _forecast(self, state: EngineState) -> None:
        forecast = state.forecast
        if forecast.windows_seen <= SCORED_FROM:
            return
        followed = np.take_along_axis(forecast.scores, choose(forecast)[np.newaxis], axis=0)[0]
        for phase in Phase:
            error = float(np.clip(1.0 - followed[phase].mean(), 0.0, 1.0))
            self._metrics.set("forecast_error_ratio", error, phase=phase.name.lower())
