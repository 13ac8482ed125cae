"""What the controller says to logs and metrics: a line a decision, figures once a closed window.

Responsible for their form, from records and state that others made. Must never be read by anything
that decides, nor cost anything a token batch. Called by the driver.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import structlog

from moe_serve import __version__
from moe_serve.controller.book import MOVE_RULES
from moe_serve.controller.parts import PartTable
from moe_serve.telemetry import Metrics
from placement.engine import EngineState
from placement.engine.stall import stalled
from placement.engine.state import RankState, RankStatus, SlotUse
from placement.load import LoadWindow
from placement.messages.records import DecisionRecord
from placement.scoring import balancedness, layer_balancedness
from placement.topology import MoeSpec, Phase

ENDS = frozenset({"done", "aborted"})
STALL_RULE = "plan_stalled"


class Figures:
    """Log lines and samples of one term. `parts` is read for what shards reported last."""

    def __init__(
        self,
        spec: MoeSpec,
        parts: PartTable,
        *,
        log: structlog.typing.FilteringBoundLogger,
        metrics: Metrics,
    ) -> None:
        self._spec = spec
        self._parts = parts
        self._log = log
        self._metrics = metrics
        self._began: dict[tuple[str, int], float] = {}
        """Driver time at which moves under way were started."""
        self._stalls = 0.0
        """Plans that stood still, as the newest record of one says."""
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
            self._metrics.add("decisions_total", rule=record.rule, outcome=record.outcome)
            if record.rule == STALL_RULE:
                self._stall(record)
            if record.rule in MOVE_RULES and record.move_id >= 0:
                self._move(record)

    def window_closed(self, state: EngineState, window: LoadWindow) -> None:
        """A window closed: what was asked, computed and held, and where the placement stands."""
        metrics = self._metrics
        metrics.set("term", state.term)
        metrics.set("epoch", state.epoch)
        metrics.set("rebalancing", float(state.run is not None))
        metrics.set("paused", float(state.paused))
        metrics.set("rebalance_stalled", float(bool(stalled(state))))
        metrics.set("moves_under_way", len(self._began))
        self._placement(state)
        self._load(state, window)
        metrics.set("copying_bytes", self._copying_bytes())
        for rank in state.ranks:
            self._rank(rank)

    def _copying_bytes(self) -> int:
        reports = [part.report for part in self._parts.shards.values() if part.report is not None]
        return sum(c.total_bytes - c.done_bytes for report in reports for c in report.copies)

    def _stall(self, record: DecisionRecord) -> None:
        # One plan may leave two records: that it stands still, and that it was aborted for it.
        number = record.numbers.get("plans_stalled", 0.0)
        if number != self._stalls:
            self._metrics.add("plans_stalled_total")
        self._stalls = number

    def _move(self, record: DecisionRecord) -> None:
        key = record.plan_id, record.move_id
        if record.outcome not in ENDS:
            self._began[key] = record.at_s
            return
        self._metrics.add("moves_total", kind=record.rule, outcome=record.outcome)
        began_s = self._began.pop(key, None)  # unknown where a controller before this one began it
        if record.outcome == "done":
            self._metrics.add("copy_bytes_total", record.copy_bytes, kind=record.rule)
            if began_s is not None:
                self._metrics.observe("move_seconds", record.at_s - began_s, kind=record.rule)

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
        demand = window.demand.sum(axis=(0, 3))
        for phase in Phase:
            for layer, pairs in enumerate(demand[phase].tolist()):
                self._metrics.add("layer_pairs_total", pairs, layer=layer, phase=phase.name.lower())
        for rank, pairs in enumerate(window.rank_pairs.sum(axis=1).tolist()):
            self._metrics.add("rank_pairs_total", pairs, rank=rank)
            for phase in Phase:
                busy_s = float(window.rank_busy_s[rank, phase])
                self._metrics.add(
                    "rank_busy_seconds_total", busy_s, rank=rank, phase=phase.name.lower()
                )
        holding = [r.rank for r in state.ranks if r.holds and r.rank < len(window.rank_pairs)]
        if holding:
            loads = window.rank_pairs[holding]
            self._metrics.set("balancedness_ratio", balancedness(loads))
            for layer, value in enumerate(layer_balancedness(loads).tolist()):
                self._metrics.set("layer_imbalance_ratio", 1.0 / value - 1.0, layer=layer)

    def _rank(self, rank: RankState) -> None:
        metrics, number = self._metrics, rank.rank
        part = self._parts.shards.get(number)
        report = None if part is None else part.report
        metrics.set("rank_up", float(rank.status is RankStatus.LIVE), rank=number)
        uses = Counter(slot.use for slot in rank.slots)
        for use in SlotUse:
            metrics.set("rank_slots", uses[use], rank=number, state=use.name.lower())
        if report is not None:
            held = report.resident_bytes + report.reserved_bytes
            metrics.set("rank_weight_bytes", held, rank=number)
            metrics.set("rank_backlog_seconds", report.backlog_s, rank=number)
            metrics.set("rank_fragmentation_ratio", report.memory.fragmentation, rank=number)
