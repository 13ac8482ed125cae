"""What ranks, routers and plans come to as samples, and how many series a large service makes."""

import io
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moe_serve.controller.figures import Figures
from moe_serve.controller.growth import Growth
from moe_serve.controller.parts import PartTable
from moe_serve.controller.stages import difference, no_counts, together
from moe_serve.ports import RouterReport, ShardMemory, ShardReport
from moe_serve.stage_counts import STAGE_BOUNDS_S, STAGES, StageCounts
from moe_serve.telemetry import METRICS, Kind, MemorySink, Metrics, TeeSink, make_logger
from moe_serve.telemetry.prometheus import PrometheusSink
from moe_serve.telemetry.registry import (
    DEFAULT_SERIES_MAX,
    DEFAULT_SIZE,
    PLAN_OUTCOMES,
    STAGE_SECONDS,
    VERDICTS,
    series_at,
)
from moe_serve.telemetry.router_figures import FATES, OUTCOMES, RoutersFigures
from moe_serve.telemetry.spec import PREFIX, Scale
from placement.config import RebalanceConfig
from placement.engine import RebalanceEngine
from placement.engine.state import RankStatus, SlotState, SlotUse
from placement.load import HotnessReport, LoadWindow
from placement.messages.records import DecisionRecord
from placement.topology import NUM_PHASES, MoeSpec, Phase
from tests.builders import make_demand, make_spec, make_topology, make_window

COUNTERS = {
    "copies_from_ranks": 2.0,
    "copies_from_host_cache": 1.0,
    "copies_from_checkpoint": 4.0,
    "copies_s": 3.0,
    "copies_waited_s": 0.5,
}


def shard_report(rank: int, counters: Mapping[str, float], incarnation: int = 1) -> ShardReport:
    return ShardReport(
        rank=rank,
        incarnation=incarnation,
        reports=(),
        backlog_s=0.25,
        resident_bytes=600,
        reserved_bytes=100,
        budget_bytes=1000,
        highest_term=1,
        highest_epoch=1,
        busy=False,
        counters=dict(counters),
        memory=ShardMemory(host_cache_bytes=70 + rank),
    )


def put(parts: PartTable, report: ShardReport, heard_s: float = 0.0, node: str = "n") -> None:
    part = SimpleNamespace(report=report, heard_s=heard_s, info=SimpleNamespace(node=node))
    parts.shards[report.rank] = part  # type: ignore[assignment]


class Told:
    """Figures of two ranks, and what they told."""

    def __init__(self, spec: MoeSpec | None = None, **more: Any) -> None:
        self.sink, self.parts = MemorySink(), PartTable()
        self.spec = spec or make_spec()
        self.figures = Figures(
            self.spec,
            self.parts,
            log=make_logger(io.StringIO()),
            metrics=Metrics(self.sink, per_expert=more.pop("per_expert", None)),
            **more,
        )
        self.engine = RebalanceEngine(
            self.spec, make_topology([3, 3]), RebalanceConfig(), term=4, first_epoch=1, start_s=0.0
        )

    def close(self, **changes: Any) -> None:
        window = make_window(self.spec, make_demand(self.spec, {1: 8.0}))
        window = LoadWindow(
            **{name: changes.get(name, getattr(window, name)) for name in window.__struct_fields__}
        )
        self.figures.window_closed(self.engine.state, window)

    def value(self, name: str, *labels: str) -> float:
        return self.sink.values[PREFIX + name, labels]

    def told(self, name: str, *labels: str) -> bool:
        return (PREFIX + name, labels) in self.sink.values


# ---------------------------------------------------------------------------------------- growth


def test_counting_begins_with_the_first_report_and_again_with_each_life() -> None:
    growth = Growth()
    assert growth.of("a", 1, {"x": 100.0}) == {}
    assert growth.of("a", 1, {"x": 130.0, "y": 1.0}) == {"x": 30.0, "y": 1.0}
    assert growth.of("a", 2, {"x": 20.0}) == {"x": 20.0}
    assert growth.of("a", 1, {"x": 131.0}) == {}, "a late word of a life that is over"
    assert growth.of("a", 2, {"x": 20.0}) == {"x": 0.0}
    assert growth.of("a", 2, {"x": 5.0}) == {"x": 0.0}, "a total that fell has not grown"
    assert growth.of("b", 1, {"x": 1.0}) == {}


# ----------------------------------------------------------------------------------------- ranks


def test_memory_of_slots_is_used_reserved_or_free() -> None:
    told = Told()
    put(told.parts, shard_report(1, {}))
    told.close()
    uses = ("used", "reserved", "free")
    assert [told.value("rank_memory_bytes", "1", use) for use in uses] == [600, 100, 300]
    assert told.value("rank_backlog_seconds", "1") == 0.25
    assert not told.told("rank_backlog_seconds", "0")


def test_copies_are_counted_from_where_a_shard_was_first_heard() -> None:
    told = Told()
    put(told.parts, shard_report(1, COUNTERS))
    told.close()
    assert told.value("copied_bytes_total", "checkpoint") == 0.0
    put(told.parts, shard_report(1, {name: 3 * total for name, total in COUNTERS.items()}))
    told.close()
    sources = ("rank", "host_cache", "checkpoint")
    sums = [told.value("copied_bytes_total", source) for source in sources]
    assert sums == [4_000.0, 2_000.0, 8_000.0]
    assert told.value("copy_seconds_total") == 6.0
    assert told.value("copy_wait_seconds_total") == 1.0
    put(told.parts, shard_report(1, COUNTERS, incarnation=2))
    told.close()
    assert told.value("copy_seconds_total") == 9.0


def test_a_cache_is_its_nodes_and_is_gone_with_it() -> None:
    told = Told()
    put(told.parts, shard_report(0, {}), node="a")
    put(told.parts, shard_report(1, {}), node="a")
    told.close()
    assert told.value("host_cache_bytes", "a") == 71
    told.parts.shards.clear()
    told.close()
    assert not told.told("host_cache_bytes", "a")


def test_the_word_of_a_lost_rank_ages_and_nobody_waits_for_that_of_a_removed_one() -> None:
    told = Told()
    put(told.parts, shard_report(0, {}), heard_s=9.0)
    told.engine.state.now_s = 10.0
    told.close()
    assert told.value("rank_report_age_seconds", "0") == 1.0
    assert told.value("rank_report_age_seconds", "1") == 0.0, "waited for since now"
    told.parts.shards.clear()
    told.engine.state.now_s = 15.0
    told.close()
    assert told.value("rank_report_age_seconds", "0") == 6.0
    assert told.value("rank_report_age_seconds", "1") == 5.0
    put(told.parts, shard_report(0, {}))
    told.close()
    assert told.told("rank_memory_bytes", "0", "used")
    told.engine.state.ranks[0].status = RankStatus.REMOVED
    told.close()
    gauges = [
        labels[0]
        for name, labels in told.sink.values
        if METRICS[name].labels[:1] == ("rank",) and METRICS[name].kind is Kind.GAUGE
    ]
    assert set(gauges) == {"1"}
    assert told.value("ranks", "removed") == 1


def test_pairs_of_a_rank_are_told_by_phase() -> None:
    told = Told()
    keys = np.array([0, 3, 4, 7], np.int32)  # one layer of four experts: prefill, then decode
    pairs = np.array([1, 2, 10, 20], np.int64)
    report = HotnessReport(
        source="s",
        incarnation=1,
        seq=1,
        rank=1,
        at_s=0.0,
        key=keys,
        pairs=pairs,
        seconds=np.zeros(4),
    )
    told.figures.executed(report)
    told.figures.executed(report)
    assert told.value("rank_pairs_total", "1", "prefill") == 6.0
    assert told.value("rank_pairs_total", "1", "decode") == 60.0


def test_slots_are_counted_over_all_ranks() -> None:
    told = Told()
    for rank in told.engine.state.ranks:
        rank.slots = [SlotState(use=SlotUse.LISTED, key=0), SlotState()]
    told.close()
    assert (told.value("slots", "listed"), told.value("slots", "empty")) == (2, 2)


# ------------------------------------------------------------------------------------ load, stages


def test_the_hottest_expert_has_a_share_and_single_experts_only_where_asked_for() -> None:
    told = Told()
    told.close()
    assert told.value("layer_hottest_expert_share_ratio", "0") == 1.0
    assert not [name for name, _ in told.sink.values if name == PREFIX + "expert_pairs_total"]
    plain = MemorySink()
    told = Told(per_expert=plain)
    told.close()
    told.close()
    assert plain.values == {(PREFIX + "expert_pairs_total", ("0", "1")): 16.0}
    assert not [name for name, _ in told.sink.values if name == PREFIX + "expert_pairs_total"]


def test_balance_is_of_windows_with_load() -> None:
    told = Told()
    told.close()
    assert not told.told("balancedness_ratio")
    for rank in told.engine.state.ranks:
        rank.status = RankStatus.LIVE
    told.close(rank_pairs=np.array([[30], [10]]))
    assert told.value("balancedness_ratio") == pytest.approx(2 / 3)
    assert told.value("layer_imbalance_ratio", "0") == pytest.approx(0.5)
    told.close(rank_busy_s=np.array([[1.0, 2.0], [0.0, 0.5]]))
    assert told.value("balancedness_ratio") == pytest.approx(2 / 3)
    assert told.value("rank_busy_seconds_total", "0") == 3.0


def counts(requests: int, bucket: int, seconds: float, ranks: int = 2) -> StageCounts:
    """Requests of decode, all in one bucket of `wire`, over so many ranks."""
    found = together((no_counts(),))
    found.requests[Phase.DECODE, STAGES.index("wire"), bucket] = requests
    found.seconds[Phase.DECODE, STAGES.index("wire")] = seconds
    calls = np.full(ranks, requests, np.int64)
    spent = np.arange(ranks) * seconds
    zeros = np.zeros(ranks)
    return replace(
        found,
        sub_calls=calls,
        pairs=calls,
        last=np.zeros(ranks, np.int64),
        late_s=zeros,
        wire_s=spent,
        wait_s=zeros,
        compute_s=zeros,
    )


@pytest.mark.parametrize("bucket", range(len(STAGE_BOUNDS_S) + 1))
def test_a_bucket_of_the_routers_lies_in_the_told_one(bucket: int) -> None:
    told = Told(stages=lambda: counts(3, bucket, 1.5))
    told.close()
    folded, seconds = told.sink.folded[PREFIX + "stage_seconds", ("decode", "wire")]
    assert (sum(folded), seconds) == (3, 1.5)
    bounds = [*STAGE_SECONDS, float("inf")]
    least = 0.0 if bucket == 0 else STAGE_BOUNDS_S[bucket - 1]
    most = STAGE_BOUNDS_S[bucket] if bucket < len(STAGE_BOUNDS_S) else float("inf")
    at = folded.index(3)
    assert (bounds[at - 1] if at else 0.0) <= least
    assert most <= bounds[at]


def test_stages_are_told_as_they_grow() -> None:
    totals = [counts(3, 0, 1.5), counts(5, 0, 2.0)]
    told = Told(stages=lambda: totals[0])
    told.close()
    told.close()
    totals.pop(0)
    told.close()
    folded = told.sink.folded[PREFIX + "stage_seconds", ("decode", "wire")]
    assert folded == ([5, 0, 0, 0, 0, 0, 0], 2.0)
    assert told.value("rank_sub_calls_total", "1") == 5.0
    assert told.value("rank_wire_seconds_total", "1") == 2.0
    assert difference(totals[0], totals[0]).requests.sum() == 0


# ----------------------------------------------------------------------------------------- plans


def record(rule: str, outcome: str, plan_id: str = "", **numbers: float) -> DecisionRecord:
    return DecisionRecord(
        at_s=1.0, seq=1, rule=rule, outcome=outcome, plan_id=plan_id, numbers=numbers
    )


WEIGHED = {"threshold_s": 1.0, "balancedness_before": 0.5, "balancedness_after": 0.8}


def plans(told: Told) -> dict[tuple[str, ...], float]:
    name = PREFIX + "plans_total"
    return {labels: value for (found, labels), value in told.sink.values.items() if found == name}


def test_a_plan_is_its_policys_until_it_ends() -> None:
    told = Told()
    told.figures.solved("incremental", 0.05)
    told.figures.decided([record("regret_reached", "started", "p1", **WEIGHED)])
    told.figures.decided([record("cleanup", "started", "p2")])
    told.figures.decided([record("plan_stalled", "noted", "p1", plans_stalled=1.0)])
    told.figures.decided([record("plan_done", "done", "p2")])
    told.figures.decided([record("plan_done", "aborted", "p1")])
    assert plans(told) == {("none", "done"): 1.0, ("incremental", "aborted"): 1.0}
    assert told.sink.observations[PREFIX + "plan_solve_seconds", ()] == [0.05]
    assert told.value("plan_imbalance_ratio", "before") == 1.0
    assert told.value("plan_imbalance_ratio", "after") == pytest.approx(0.25)


def test_an_operators_plan_is_told_when_it_ran() -> None:
    told = Told()
    told.figures.solved("eplb", 0.05)
    told.figures.decided([record("asked", "noted", "p1")])
    told.figures.solved("incremental", 0.05)
    told.figures.decided([record("asked", "started", "p1")])
    told.figures.decided([record("plan_done", "done", "p1")])
    assert plans(told) == {("eplb", "done"): 1.0}


@pytest.mark.parametrize(
    ("rule", "numbers", "outcome"),
    [
        ("gain_below_cost", WEIGHED, "kept"),
        ("paused", WEIGHED, "kept"),
        ("repair", {}, "kept"),
        ("target_stale", {}, "stale"),
        ("target_failed", {}, "failed"),
    ],
)
def test_a_plan_that_did_not_start_says_why(
    rule: str, numbers: dict[str, float], outcome: str
) -> None:
    told = Told()
    told.figures.solved("incremental", 0.05)
    said = "refused" if rule == "target_failed" else "kept"
    told.figures.decided([record(rule, said, **numbers)])
    assert plans(told) == {("incremental", outcome): 1.0}
    assert not told.told("windows_total", rule)


def test_what_a_window_came_to_is_no_plan() -> None:
    told = Told()
    told.figures.decided([record(rule, "kept") for rule in VERDICTS if rule != "out_of_balance"])
    told.figures.decided([record("out_of_balance", "noted")])
    assert plans(told) == {}
    assert [told.value("windows_total", verdict) for verdict in VERDICTS] == [1.0] * len(VERDICTS)
    told.figures.decided([record("paused", "noted")])  # somebody paused; no window closed
    assert told.value("windows_total", "paused") == 1.0


def test_gains_are_told_as_promised_and_as_found() -> None:
    told = Told()
    gains = {"expected_gain_s_per_s": 0.4, "realised_gain_s_per_s": -0.1}
    told.figures.decided([record("realised_gain", "done", "p", **gains)])
    assert told.value("plan_gain_ratio", "expected") == 0.4
    assert told.value("plan_gain_ratio", "realised") == -0.1


# --------------------------------------------------------------------------------------- routers


def router_report(router: str, incarnation: int, total: float) -> RouterReport:
    names = [*OUTCOMES.values(), *FATES.values(), "tokens", "ejections"]
    return RouterReport(
        router=router,
        incarnation=incarnation,
        applied_epoch=1,
        quiesced_epoch=1,
        reports=(),
        suspects=(),
        counters=dict.fromkeys(names, total) | {"open_requests": 2.0, "waiting_requests": 1.0},
        quantiles={"loop_lag_s": 0.25, "dispatch_p50_s": 0.1, "dispatch_p99_s": 0.2},
    )


def test_the_controller_tells_of_routers_what_is_new() -> None:
    sink = MemorySink()
    told = Told(routers=RoutersFigures(Metrics(sink)))
    for incarnation, total in ((1, 100.0), (1, 130.0), (2, 20.0), (1, 131.0)):
        told.figures.router_told(router_report("router-0", incarnation, total))
    told.figures.router_told(router_report("router-1", 1, 7.0))
    assert sink.values[PREFIX + "rows_total", ("router-0",)] == 50.0
    assert sink.values[PREFIX + "rows_total", ("router-1",)] == 0.0
    assert sink.values[PREFIX + "requests_waiting", ("router-0",)] == 1.0
    Told().figures.router_told(router_report("router-0", 1, 1.0))  # who tells itself is left alone


def test_gauges_of_a_router_that_is_gone_are_forgotten() -> None:
    sink = MemorySink()
    told = Told(routers=RoutersFigures(Metrics(sink)))
    for name in ("router-0", "router-1"):
        told.parts.routers[name] = None  # type: ignore[assignment]
        told.figures.router_told(router_report(name, 1, 100.0))
    told.close()

    def gauges(router: str) -> set[str]:
        names = {name for name, labels in sink.values if labels[:1] == (router,)}
        return {name.removeprefix(PREFIX) for name in names if not name.endswith("_total")}

    every = {"requests_in_flight", "requests_waiting", "loop_lag_seconds", "request_seconds"}
    assert gauges("router-0") == gauges("router-1") == every
    del told.parts.routers["router-1"]
    told.close()
    assert (gauges("router-0"), gauges("router-1")) == (every, set())
    told.figures.router_told(router_report("router-1", 2, 30.0))
    assert gauges("router-1") == every
    assert sink.values[PREFIX + "rows_total", ("router-1",)] == 30.0, "a known one's next life"


# --------------------------------------------------------------- everything, in a service's size


def test_all_that_a_large_service_can_tell_is_below_the_limit() -> None:
    """Every figure there is, told by the code itself at 58 layers x 32 ranks."""
    size = DEFAULT_SIZE
    spec = make_spec(num_layers=size.layers, num_experts=size.experts)
    parts, memory, plain = PartTable(), MemorySink(), PrometheusSink()
    metrics = Metrics(TeeSink(memory, plain))
    metrics.begin()
    figures = Figures(
        spec,
        parts,
        log=make_logger(io.StringIO()),
        metrics=metrics,
        stages=lambda: counts(3, 0, 1.5, ranks=size.ranks),
        routers=RoutersFigures(Metrics(TeeSink(memory, plain))),
    )
    engine = RebalanceEngine(
        spec,
        make_topology([600] * size.ranks),
        RebalanceConfig(),
        term=1,
        first_epoch=1,
        start_s=0.0,
    )
    state = engine.state
    for rank in state.ranks:
        rank.status = RankStatus.LIVE
        put(parts, shard_report(rank.rank, COUNTERS), node=f"n{rank.rank % size.nodes}")
        shape = (NUM_PHASES, spec.num_layers, spec.num_experts)
        key = np.arange(np.prod(shape), dtype=np.int32)[:: spec.num_experts]
        ones = np.ones(len(key), np.int64)
        figures.executed(
            HotnessReport(
                source=f"s{rank.rank}",
                incarnation=1,
                seq=1,
                rank=rank.rank,
                at_s=0.0,
                key=key,
                pairs=ones,
                seconds=np.ones(len(key)),
            )
        )
    for number in range(size.routers):
        parts.routers[f"router-{number}"] = None  # type: ignore[assignment]
        figures.router_told(router_report(f"router-{number}", 1, 5.0))
    window = make_window(spec, make_demand(spec, base=8.0), num_ranks=size.ranks)
    window = LoadWindow(
        **{
            **{name: getattr(window, name) for name in window.__struct_fields__},
            "rank_pairs": np.ones((size.ranks, size.layers), np.int64),
        }
    )
    state.forecast = SimpleNamespace(  # type: ignore[assignment]
        windows_seen=9,
        scores=np.full((7, NUM_PHASES, size.layers), 0.5),
        shift=SimpleNamespace(parts_since=np.full(NUM_PHASES, 99), parts=4),
    )
    all_told(figures)
    figures.window_closed(state, window)
    told = plain.snapshot().text()[0].decode().splitlines()
    emitted = sum(1 for line in told if line and not line.startswith("#"))
    print(f"series told at 58 layers x 32 ranks, 2 routers, 4 nodes: {emitted}")
    assert emitted == series_at(size) <= DEFAULT_SERIES_MAX
    for name, labels in [*memory.values, *memory.observations, *memory.folded]:
        metric = METRICS[name]
        for label, value in zip(metric.labels, labels, strict=True):
            values = metric.values[label]
            assert isinstance(values, Scale) or value in values, (name, label, value)
    assert memory.values[PREFIX + "series_dropped_total", ()] == 0.0


def all_told(figures: Figures) -> None:
    """Decisions of every kind, by three policies."""
    numbers = {"expected_gain_s_per_s": 0.4, "realised_gain_s_per_s": 0.1}
    figures.decided([record("realised_gain", "done", "p", **numbers)])
    for policy in ("incremental", "static", "none"):
        for outcome in PLAN_OUTCOMES:
            figures.solved(policy, 0.05)
            if outcome in ("done", "aborted"):
                figures.decided([record("shift", "started", policy + outcome, **WEIGHED)])
                figures.decided([record("plan_done", outcome, policy + outcome)])
            elif outcome == "kept":
                figures.decided([record("gain_below_cost", "kept", **WEIGHED)])
            else:
                figures.decided([record(f"target_{outcome}", "kept")])
    for kind, copied in (("replicate", 10), ("migrate", 10), ("evict", 0)):
        for outcome in ("started", "done", "aborted"):
            figures.decided(
                [
                    DecisionRecord(
                        at_s=1.0,
                        seq=1,
                        rule=kind,
                        outcome=outcome,
                        plan_id="p",
                        move_id=3,
                        copy_bytes=copied,
                    )
                ]
            )
