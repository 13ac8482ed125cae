"""Figures by expert: history within its bound, one expert's place, all of them as CSV."""

from typing import Any

import numpy as np
import pytest

from moe_serve.dashboard import experts
from moe_serve.dashboard.answers import ApiError
from moe_serve.dashboard.experts import LoadHistory, csv_of, expert_document, holders_of, of_phase
from moe_serve.rpc import placement_pb2 as pb


def load(demand: Any, *, seconds: float = 2.0, window: int = 1) -> pb.GetLoadResponse:
    counts = np.asarray(demand, dtype="<i8")
    phases, layers, count = counts.shape
    return pb.GetLoadResponse(
        window=window,
        start_s=10.0,
        end_s=10.0 + seconds,
        demand=counts.tobytes(),
        num_phases=phases,
        num_layers=layers,
        num_experts=count,
    )


def test_history_is_a_rate_over_both_phases() -> None:
    kept = LoadHistory()
    kept.add(load([[[1, 2]], [[3, 4]]]), 100.0)
    kept.add(load([[[0, 200_000]], [[6, 0]]]), 102.0)
    assert kept.of(0, 0) == {"wall_s": [100.0, 102.0], "pairs_per_s": [2.0, pytest.approx(3, 0.4)]}
    assert kept.of(0, 1)["pairs_per_s"] == [3.0, 100_000.0]


def test_history_is_bounded_by_bytes_and_by_age() -> None:
    frame = np.ones((1, 4, 8), dtype=np.int64)
    small = LoadHistory(bytes_max=10 * 64)
    for n in range(50):
        small.add(load(frame), 100.0 + n)
        assert small.held_bytes() <= 10 * 64
    assert small.of(0, 0)["wall_s"] == [140.0 + n for n in range(10)]
    old = LoadHistory()
    for n in range(4):
        old.add(load(frame), n * experts.HISTORY_S / 2)
    assert old.of(0, 0)["wall_s"] == [n * experts.HISTORY_S / 2 for n in (1, 2, 3)]
    none = LoadHistory(bytes_max=10)
    none.add(load(frame), 0.0)
    assert (none.held_bytes(), none.of(0, 0)["wall_s"]) == (0, [])


def test_fifteen_minutes_of_a_large_model_fit_the_bound() -> None:
    frame_bytes = 58 * 256 * 2
    assert experts.HISTORY_S * frame_bytes < experts.HISTORY_BYTES_MAX


def test_another_shape_begins_anew() -> None:
    kept = LoadHistory()
    kept.add(load(np.ones((1, 2, 2))), 1.0)
    kept.add(load(np.ones((1, 2, 3))), 2.0)
    assert kept.of(1, 2)["wall_s"] == [2.0]
    assert kept.held_bytes() == 12


def test_a_long_history_is_averaged_and_keeps_its_total() -> None:
    kept = LoadHistory()
    count = 2 * experts.POINTS_MAX + 300
    rng = np.random.default_rng(5)
    rates = rng.integers(0, 50, count)
    for n, rate in enumerate(rates):
        kept.add(load([[[rate]]], seconds=1.0), n * 0.4)
    points = kept.of(0, 0)
    assert len(points["wall_s"]) == len(points["pairs_per_s"]) == experts.POINTS_MAX
    assert points["wall_s"] == sorted(points["wall_s"])
    assert np.mean(points["pairs_per_s"]) == pytest.approx(rates.mean(), rel=0.05)
    assert max(points["pairs_per_s"]) <= 50


def placement() -> pb.GetPlacementResponse:
    slots = [(0, 0, 0, "LISTED"), (1, 0, 1, "COPYING"), (2, -1, -1, "")]
    other = [(0, 0, 1, "LISTED"), (1, 0, 0, "LISTED")]
    return pb.GetPlacementResponse(
        num_layers=1,
        num_experts=3,
        ranks=[
            pb.Rank(
                rank=rank,
                slots=[pb.Slot(index=i, layer=n, expert=e, state=s) for i, n, e, s in row],
            )
            for rank, row in enumerate([slots, other])
        ],
    )


def test_one_expert_has_a_place_in_its_layer() -> None:
    window = load([[[5, 3, 5]], [[1, 3, 1]]])
    holders = holders_of(placement())
    seen = [
        expert_document(window, holders, {0: "a", 1: "b"}, layer=0, expert=expert)
        for expert in range(3)
    ]
    assert [one["rank_in_layer"] for one in seen] == [1, 2, 3], "equals: the lower id first"
    assert [one["share"] for one in seen] == [1 / 3] * 3
    assert seen[0]["by_phase"] == {"prefill": 5, "decode": 1}
    assert seen[0]["replicas"] == [
        {"rank": 0, "slot": 0, "state": "LISTED", "node": "a"},
        {"rank": 1, "slot": 1, "state": "LISTED", "node": "b"},
    ]
    assert [one["state"] for one in seen[1]["replicas"]] == ["COPYING", "LISTED"]
    assert seen[2]["replicas"] == []
    with pytest.raises(ApiError, match="layer 1"):
        expert_document(window, holders, {}, layer=1, expert=0)


def test_a_layer_without_load_has_no_share() -> None:
    seen = expert_document(load([[[0, 0]]]), {}, {}, layer=0, expert=1)
    assert (seen["share"], seen["rank_in_layer"]) == (0.0, 2)


def test_csv_counts_listed_replicas_only() -> None:
    text = csv_of(np.array([[4, 6, 0]]), holders_of(placement())).decode()
    assert text.split("\r\n") == [
        "layer,expert,pairs,share,rank_in_layer,replicas,ranks",
        "0,0,4,0.40000000,2,2,0 1",
        "0,1,6,0.60000000,1,1,1",
        "0,2,0,0.00000000,3,0,",
        "",
    ]


def test_csv_has_a_limit_that_names_another_way() -> None:
    with pytest.raises(ApiError) as refused:
        csv_of(np.ones((400, 1024), dtype=np.int64), {})
    assert refused.value.status == 413
    assert "/api/v1/frame" in refused.value.next_step
    assert len(csv_of(np.ones((64, 512), dtype=np.int64), {})) < experts.CSV_BYTES_MAX


def test_a_phase_that_is_not_told_is_refused() -> None:
    one = np.ones((1, 2, 3), dtype=np.int64)
    assert of_phase(one, "all").tolist() == of_phase(one, "prefill").tolist()
    with pytest.raises(ApiError, match="decode"):
        of_phase(one, "decode")
