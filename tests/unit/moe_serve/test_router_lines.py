"""A router's lines of single requests: by which id, with which table, and how many."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from moe_serve.errors import InvalidArgument, MoeServeError, ResourceExhausted, Unavailable
from moe_serve.router.flight import ForwardOutput, Stamps
from moe_serve.router.lines import RouterLines
from placement.roles.router import RouterRole
from tests.fake_shards import marker_spec, router_settings
from tests.fakes.served import a_request


class Rig:
    def __init__(self, capsys: pytest.CaptureFixture[str], table: Any = None) -> None:
        self.now_s = 100.0
        self._capsys = capsys
        self.lines = RouterLines(
            router_settings(marker_spec(), node="n1"),
            lambda: self.now_s,
            cast(RouterRole, SimpleNamespace(table=table)),
        )

    def written(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._capsys.readouterr().err.splitlines()]


TABLE = SimpleNamespace(term=3, epoch=7)


def test_a_callers_own_fault_and_a_full_queue_are_not_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rig = Rig(capsys)
    rig.lines.failed(InvalidArgument("layer: is 99"), "a", 99)
    rig.lines.failed(ResourceExhausted("the queue is full"), "b", 1)
    assert rig.written() == []


def test_a_bug_is_always_written_with_its_cause(capsys: pytest.CaptureFixture[str]) -> None:
    rig = Rig(capsys, TABLE)
    error = MoeServeError("the router failed on this request; see its log")
    error.__cause__ = ZeroDivisionError("division by zero")
    for _ in range(3):
        rig.lines.failed(error, "order-1", 1)
    written = rig.written()
    assert len(written) == 3
    assert "division by zero" in written[0]["cause"]
    assert (written[0]["term"], written[0]["epoch"]) == (3, 7)
    assert (written[0]["part"], written[0]["node"]) == ("r0", "n1")


def test_of_a_storm_a_line_now_and_then_says_how_many_were_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rig = Rig(capsys)
    for number in range(10):
        rig.lines.failed(Unavailable("no rank"), f"order-{number}", 1)
        rig.lines.sent_again(f"order-{number}", 1, "retry")
    rig.now_s += 0.5
    rig.lines.failed(Unavailable("no rank"), "order-10", 1)
    rig.lines.sent_again("order-10", 1, "hedge")
    rig.now_s += 1.0
    rig.lines.sent_again("order-11", 1, "hedge")
    told = [(one["event"], one["request_id"], one["more_before"]) for one in rig.written()]
    assert told == [
        ("request failed", "order-0", 0),
        ("call sent again", "order-0", 0),
        ("request failed", "order-10", 9),
        ("call sent again", "order-11", 10),
    ]


def test_a_slow_request_is_told_by_the_table_it_was_split_under(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rig = Rig(capsys, TABLE)
    output = ForwardOutput(np.zeros((4, 8), np.float32), 3, 6, "v1")
    # The only sub-call: rank 2, 12 pairs, split again 0, sent, came, waited, computed, rest.
    stamps = Stamps(99.75, 99.76, 0.01, [2, 12, 0.0, 99.77, 99.97, 0.05, 0.1, 0.02])
    for _ in range(3):
        rig.lines.slow(a_request(request_id="order-1"), output, stamps, 100.0)
    rig.now_s += 1.0
    rig.lines.slow(a_request(request_id="order-2"), output, Stamps(100.0, 100.5), 101.0)
    line, unasked = rig.written()
    assert (unasked["more_before"], unasked["stages_s"]["queue"]) == (2, 0.5)
    assert "last_rank" not in unasked
    assert line["last_rank"] == 2
    assert line["stages_s"] == {
        "queue": 0.01,
        "split": 0.01,
        "wire": 0.03,
        "wait": 0.07,
        "compute": 0.1,
        "combine": 0.03,
        "other": 0.0,
    }
    assert line["request_id"] == "order-1"
    assert (line["term"], line["epoch"], line["rows"], line["seconds"]) == (3, 6, 4, 0.25)
    assert list(line)[:8] == [
        "ts",
        "level",
        "event",
        "part",
        "node",
        "term",
        "epoch",
        "request_id",
    ]
