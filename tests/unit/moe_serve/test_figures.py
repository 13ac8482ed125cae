"""Records become log lines and samples; reports become growth."""

import io
import json

import numpy as np

from moe_serve.controller.figures import Figures
from moe_serve.controller.parts import PartTable
from moe_serve.ports import RouterReport
from moe_serve.router.figures import OUTCOMES, PAIRS, RouterFigures
from moe_serve.telemetry import MemorySink, Metrics, make_logger
from placement.config import RebalanceConfig
from placement.engine import RebalanceEngine
from placement.messages.records import DecisionRecord
from tests.builders import make_demand, make_spec, make_topology, make_window


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
    assert value(sink, "decisions_total", "in_balance", "kept") == 1.0


def test_a_move_is_timed_from_its_start_to_its_end() -> None:
    figures, sink, _ = make()
    figures.decided([record("started", 1.0)])
    figures.decided([record("done", 3.5)])
    figures.decided([record("done", 9.0)])  # begun under a controller before this one
    assert value(sink, "moves_total", "migrate", "done") == 2.0
    assert value(sink, "copy_bytes_total", "migrate") == 20.0
    assert sink.observations["moe_serve_move_seconds", ("migrate",)] == [2.5]


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
    assert value(sink, "rank_up", "1") == 0.0


def a_report(served: float, retried: float, **quantiles: float) -> RouterReport:
    names = [*OUTCOMES.values(), *PAIRS.values(), "tokens", "open_requests", "waiting_requests"]
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
    figures = RouterFigures(Metrics(sink))
    figures.tell(a_report(3.0, 1.0, dispatch_p50_s=0.1, dispatch_p99_s=0.2))
    figures.tell(a_report(5.0, 1.0))
    assert value(sink, "requests_total", "served") == 5.0
    assert value(sink, "pairs_total", "retried") == 1.0
    assert value(sink, "request_seconds", "p99") == 0.2
    assert value(sink, "loop_lag_seconds") == 0.25


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
