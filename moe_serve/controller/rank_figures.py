"""Metrics of ranks: what they computed, how their memory is used, what they copied, how old their
word is.

Responsible for reading shards' reports and routers' stage counts. Must never be read by anything
that decides. Called by `figures`.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import numpy as np

from moe_serve.controller.growth import Growth
from moe_serve.controller.parts import PartTable, ShardPart
from moe_serve.ports import ShardReport
from moe_serve.stage_counts import STAGE_BOUNDS_S, STAGES, StageCounts
from moe_serve.telemetry import Metrics
from moe_serve.telemetry.registry import MEMORY_USES, STAGE_SECONDS
from placement.engine import EngineState
from placement.engine.state import RankState, RankStatus, SlotUse
from placement.load import HotnessReport, LoadWindow
from placement.topology import MoeSpec, Phase

COPIES: Final = {
    "rank": "copies_from_ranks",
    "host_cache": "copies_from_host_cache",
    "checkpoint": "copies_from_checkpoint",
}
"""Where an expert's bytes came from -> the shard's counter of such copies."""
_CUTS: Final = (0, *(STAGE_BOUNDS_S.index(bound) + 1 for bound in STAGE_SECONDS))
"""Bucket of the routers with which each told bucket begins."""


class RankFigures:
    """Samples of one term. Times are driver times."""

    def __init__(self, spec: MoeSpec, parts: PartTable, metrics: Metrics) -> None:
        self._spec = spec
        self._parts = parts
        self._metrics = metrics
        self._growth = Growth()
        self._heard_s: dict[int, float] = {}
        """When each rank last answered, also of those that are gone."""
        self._nodes: set[str] = set()
        """Nodes whose cache has been told of."""

    def executed(self, report: HotnessReport) -> None:
        """A shard's new report of what it computed."""
        phase = report.key // (self._spec.num_layers * self._spec.num_experts)
        pairs = np.bincount(phase, weights=report.pairs, minlength=len(Phase))
        for number in Phase:
            self._metrics.add(
                "rank_pairs_total", float(pairs[number]), rank=report.rank, phase=_word(number)
            )

    def window_closed(self, state: EngineState, window: LoadWindow) -> None:
        """What the ranks hold and are, and what they computed in the window."""
        metrics = self._metrics
        for rank, busy_s in enumerate(window.rank_busy_s.sum(axis=1).tolist()):
            metrics.add("rank_busy_seconds_total", busy_s, rank=rank)
        statuses = Counter(rank.status for rank in state.ranks)
        for status in RankStatus:
            metrics.set("ranks", statuses[status], status=status.value)
        uses = Counter(slot.use for rank in state.ranks for slot in rank.slots)
        for use in SlotUse:
            metrics.set("slots", uses[use], state=use.name.lower())
        for rank_state in state.ranks:
            self._rank(rank_state, state.now_s)
        self._host_caches()

    def stages(self, new: StageCounts) -> None:
        """Requests that were answered since this was last told."""
        for phase in Phase:
            for number, stage in enumerate(STAGES):
                counts = np.add.reduceat(new.requests[phase, number], _CUTS)
                self._metrics.fold(
                    "stage_seconds",
                    counts.tolist(),
                    float(new.seconds[phase, number]),
                    phase=_word(phase),
                    stage=stage,
                )
        for rank, sub_calls in enumerate(new.sub_calls.tolist()):
            self._metrics.add("rank_sub_calls_total", sub_calls, rank=rank)
            wire_s = max(0.0, float(new.wire_s[rank]))
            self._metrics.add("rank_wire_seconds_total", wire_s, rank=rank)

    def copying_bytes(self) -> int:
        """Still to come in the copies that run now."""
        reports = [part.report for part in self._parts.shards.values() if part.report is not None]
        return sum(c.total_bytes - c.done_bytes for report in reports for c in report.copies)

    def _rank(self, rank: RankState, now_s: float) -> None:
        number = rank.rank
        part = self._parts.shards.get(number)
        heard_s = self._heard_s.setdefault(number, now_s)
        if part is not None:
            heard_s = self._heard_s[number] = part.heard_s
        if rank.status is RankStatus.REMOVED:
            self._forget(number)
            return
        self._metrics.set("rank_report_age_seconds", max(0.0, now_s - heard_s), rank=number)
        if part is not None and part.report is not None:
            self._report(part, part.report)

    def _forget(self, rank: int) -> None:
        """A rank has left: nobody waits for its word any more."""
        for name in ("report_age_seconds", "backlog_seconds", "fragmentation_ratio"):
            self._metrics.forget(f"rank_{name}", rank=rank)
        for use in MEMORY_USES:
            self._metrics.forget("rank_memory_bytes", rank=rank, use=use)

    def _report(self, part: ShardPart, report: ShardReport) -> None:
        metrics, rank = self._metrics, report.rank
        used, reserved = report.resident_bytes, report.reserved_bytes
        free = max(0, report.budget_bytes - used - reserved)
        for use, num_bytes in zip(MEMORY_USES, (used, reserved, free), strict=True):
            metrics.set("rank_memory_bytes", num_bytes, rank=rank, use=use)
        metrics.set("rank_fragmentation_ratio", report.memory.fragmentation, rank=rank)
        metrics.set("rank_backlog_seconds", report.backlog_s, rank=rank)
        grown = self._growth.of(rank, report.incarnation, report.counters)
        for source, counter in COPIES.items():
            copied_bytes = grown.get(counter, 0.0) * self._spec.expert_bytes
            metrics.add("copied_bytes_total", copied_bytes, source=source)
        metrics.add("copy_seconds_total", grown.get("copies_s", 0.0))
        metrics.add("copy_wait_seconds_total", grown.get("copies_waited_s", 0.0))

    def _host_caches(self) -> None:
        held: dict[str, int] = {}
        for part in self._parts.shards.values():
            if part.report is not None:
                cached = part.report.memory.host_cache_bytes
                held[part.info.node] = max(held.get(part.info.node, 0), cached)
        for node in self._nodes - held.keys():
            self._metrics.forget("host_cache_bytes", node=node)
        self._nodes = set(held)
        for node, cached in held.items():
            self._metrics.set("host_cache_bytes", cached, node=node)


def _word(phase: Phase) -> str:
    return phase.name.lower()
