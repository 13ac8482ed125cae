"""Records become log lines and samples; reports become growth."""

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from moe_serve.controller.figures import Figures
from moe_serve.controller.parts import PartTable
from moe_serve.controller.views import placement_view
from moe_serve.ports import RouterReport, RunningCopy, ShardMemory, ShardReport
from moe_serve.rpc import placement_pb2 as pb
from moe_serve.telemetry import MemorySink, Metrics, make_logger
from moe_serve.telemetry.router_figures import FATES, OUTCOMES, RouterFigures
from placement.config import RebalanceConfig
from placement.engine import RebalanceEngine
from placement.messages.records import DecisionRecord
from tests.builders import make_demand, make_spec, make_topology, make_window
from tests.fakes.controller import controller, make_cluster, make_settings, until
from tests.fakes.fleet import FakeShardPort


def record(outcome: str, at_s: float = 1.0, rule: str = "migrate", seq: int = 1) -> DecisionRecord:
    return DecisionRecord(
        at_s=at_s, seq=seq, rule=rule, outcome=outcome, plan_id="p", move_id=3, copy_bytes=10
    )


def make() -> tuple[Figures, MemorySink, io.StringIO]:
    sink, lines = MemorySink(), io.StringIO()
    figures = Figures(make_spec(), PartTable(), log=make_logger(lines), metrics=Metrics(sink))
    return figures, sink, lines


def value(sink: MemorySink, name: str, *labels: str) -> float:
    return sink.values["moe_serve_" + name, labels]


def test_a_decision_is_one_line_and_one_sample() -> None:
    figures, sink, lines = make()
    figures.decided([record("started"), record("kept", rule="in_balance", seq=2)])
    (line,) = [json.loads(text) for text in lines.getvalue().splitlines()]
    assert (line["event"], line["rule"], line["outcome"]) == ("decision", "migrate", "started")
    assert (line["plan_id"], line["seq"]) == ("p", 1)
    assert value(sink, "windows_total", "in_balance") == 1.0


def test_a_move_is_timed_from_its_start_to_its_end() -> None:
    figures, sink, _ = make()
    figures.decided([record("started", 1.0)])
    figures.decided([record("done", 3.5)])
    figures.decided([record("done", 9.0)])  # begun under a controller before this one
    assert value(sink, "moves_total", "migrate", "done") == 2.0
    assert value(sink, "copy_bytes_total", "migrate") == 20.0
    assert sink.observations["moe_serve_move_seconds", ()] == [2.5]


def test_a_window_tells_demand_and_where_the_placement_stands() -> None:
    figures, sink, _ = make()
    spec = make_spec()
    engine = RebalanceEngine(
        spec, make_topology([3, 3]), RebalanceConfig(), term=4, first_epoch=1, start_s=0.0
    )
    window = make_window(spec, make_demand(spec, {0: 8.0}))
    figures.window_closed(engine.state, window)
    assert value(sink, "term") == 4.0
    assert value(sink, "experts", "missing") == spec.num_keys
    pairs = [v for (name, _), v in sink.values.items() if name == "moe_serve_layer_pairs_total"]
    assert sum(pairs) == float(np.sum(window.demand)) > 0.0
    assert value(sink, "ranks", "expected") == 2.0
    assert value(sink, "slots", "listed") == 0.0


def a_report(served: float, retried: float, **quantiles: float) -> RouterReport:
    names = [*OUTCOMES.values(), *FATES.values(), "tokens", "open_requests", "waiting_requests"]
    names.append("ejections")
    counters = dict.fromkeys(names, 0.0) | {"requests": served, "retried_pairs": retried}
    return RouterReport(
        router="router-0",
        incarnation=1,
        applied_epoch=1,
        quiesced_epoch=1,
        reports=(),
        suspects=(),
        counters=counters,
        quantiles={"loop_lag_s": 0.25, **quantiles},
    )


def test_a_routers_totals_become_growth() -> None:
    sink = MemorySink()
    figures = RouterFigures(Metrics(sink), "router-0")
    figures.tell(a_report(3.0, 1.0, dispatch_p50_s=0.1, dispatch_p99_s=0.2))
    figures.tell(a_report(5.0, 1.0))
    assert value(sink, "requests_total", "router-0", "served") == 5.0
    assert value(sink, "pairs_total", "router-0", "retried") == 1.0
    assert value(sink, "request_seconds", "router-0", "p99") == 0.2
    assert value(sink, "loop_lag_seconds", "router-0") == 0.25


def test_a_window_tells_the_memory_of_a_shard_and_what_is_copied_into_it() -> None:
    parts = PartTable()
    sink = MemorySink()
    figures = Figures(make_spec(), parts, log=make_logger(io.StringIO()), metrics=Metrics(sink))
    spec = make_spec()
    engine = RebalanceEngine(
        spec, make_topology([3, 3]), RebalanceConfig(), term=4, first_epoch=1, start_s=0.0
    )
    copies = tuple(
        RunningCopy(n, n, 0, n, "checkpoint", done_bytes=n, total_bytes=10, seconds=1.0)
        for n in (3, 4)
    )
    report = ShardReport(
        rank=1,
        incarnation=1,
        reports=(),
        backlog_s=0.0,
        resident_bytes=0,
        reserved_bytes=0,
        budget_bytes=0,
        highest_term=1,
        highest_epoch=1,
        busy=False,
        memory=ShardMemory(free_bytes=40, largest_free_run_bytes=10, process_bytes=7),
        copies=copies,
    )
    assert ShardMemory().fragmentation == 0.0
    info = SimpleNamespace(node="n")
    part = SimpleNamespace(report=report, heard_s=0.0, info=info)
    parts.shards[1] = part  # type: ignore[assignment]
    figures.window_closed(engine.state, make_window(spec, make_demand(spec, {0: 8.0})))
    assert value(sink, "rank_fragmentation_ratio", "1") == 0.75
    assert value(sink, "copying_bytes") == 13.0


@pytest.mark.asyncio
async def test_what_a_shard_reports_of_its_memory_and_its_copies_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = ShardMemory(10, 4, 2, 5, 6, 7)
    copy = RunningCopy(3, 1, 0, 2, "rank 0", done_bytes=8, total_bytes=9, seconds=0.5)
    plain = FakeShardPort.report

    async def told(port: FakeShardPort, acked_seq: int) -> ShardReport:
        found = await plain(port, acked_seq)
        return replace(found, memory=memory, copies=(copy,)) if port.rank == 1 else found

    monkeypatch.setattr(FakeShardPort, "report", told)
    async with controller(make_settings(tmp_path), make_cluster()) as made:
        await made.ready()
        await until(lambda: bool(placement_view(made.service.sight()).ranks[1].copies))
        rank = placement_view(made.service.sight()).ranks[1]
    assert rank.memory == pb.RankMemory(
        slab_bytes=10,
        free_bytes=4,
        largest_free_run_bytes=2,
        loaded_bytes=5,
        process_bytes=6,
        host_cache_bytes=7,
    )
    (shown,) = rank.copies
    assert (shown.step_id, shown.slot, shown.layer, shown.expert) == (3, 1, 0, 2)
    assert (shown.source, shown.done_bytes, shown.total_bytes) == ("rank 0", 8, 9)


def test_ejections_are_counted_as_they_grow() -> None:
    sink = MemorySink()
    figures = RouterFigures(Metrics(sink), "router-0")
    for total in (0.0, 2.0, 3.0):
        report = a_report(1.0, 0.0)
        report.counters["ejections"] = total
        figures.tell(report)
    assert value(sink, "ejections_total", "router-0") == 3.0


def test_a_plan_that_stands_still_is_counted_once_whatever_becomes_of_it() -> None:
    figures, sink, _ = make()

    def still(outcome: str, number: int, seq: int) -> DecisionRecord:
        return DecisionRecord(
            at_s=1.0,
            seq=seq,
            rule="plan_stalled",
            outcome=outcome,
            plan_id="p",
            numbers={"plans_stalled": float(number)},
        )

    figures.decided([still("noted", 4, 1)])
    assert value(sink, "plans_stalled_total") == 1.0
    figures.decided([still("aborted", 4, 2)])
    assert value(sink, "plans_stalled_total") == 1.0
    figures.decided([still("aborted", 5, 3)])
    assert value(sink, "plans_stalled_total") == 2.0
