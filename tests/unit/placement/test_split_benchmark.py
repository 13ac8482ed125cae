"""The splitter's benchmark measures what it says; what it found holds on small samples."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import split
from benchmarks.split_cases import (
    DATA_VARIABLE,
    Case,
    cases,
    layers_of,
    packed_ranks,
    synthetic,
    trace_folder,
)
from benchmarks.split_parts import activated, largest_quota, optimum, pair_choice, rows_sent, spread
from benchmarks.split_proof import Oracle
from placement.split import compile_layer, rank_loads

CHAIN = compile_layer([0, 1, 1, 2, 2, 3, 3], [0, 0, 1, 1, 2, 2, 3], num_experts=4, num_ranks=4)


def small_case(tokens: int = 512) -> Case:
    ids = synthetic(3, tokens=tokens, layers=2, num_experts=24)
    return Case("small", ids, num_experts=24, num_ranks=6, slots_per_rank=5)


@pytest.mark.parametrize(
    ("counts", "backlog", "least"),
    [
        ([8, 4, 8, 12], [0, 0, 0, 0], 8),
        ([8, 4, 8, 13], [0, 0, 0, 0], 9),
        ([0, 8, 8, 0], [0, 0, 0, 0], 6),
        ([9, 0, 0, 0], [3, 0, 0, 0], 12),
        ([1, 0, 0, 0], [0, 0, 0, 50], 50),
        ([0, 0, 0, 0], [0, 0, 0, 0], 0),
    ],
)
def test_both_oracles_know_the_least_maximum(counts, backlog, least):
    oracle = Oracle(CHAIN)
    given = np.array(counts), np.array(backlog)
    assert oracle.passes(*given, least)
    assert oracle.is_least(*given, least)
    assert not oracle.is_least(*given, least + 1)
    assert oracle.lp_optimum(*given) == least
    assert oracle.lp_maximum(*given) <= least


def test_synthetic_traffic_draws_distinct_experts_and_shifts():
    ids = synthetic(1, tokens=2000, layers=1, num_experts=64)
    assert (synthetic(1, tokens=2000, layers=1, num_experts=64) == ids).all()
    assert (np.diff(np.sort(ids, axis=2), axis=2) > 0).all()
    halves = [np.bincount(half.ravel(), minlength=64) for half in (ids[:1000], ids[1000:])]
    assert np.abs(halves[0] - halves[1]).max() > 200


@pytest.mark.parametrize("layout", ["static", "random"])
def test_layers_of_a_layout_hold_every_expert(layout):
    case = small_case()
    for layer in layers_of(case, layout, 1):
        assert (np.diff(layer.replica_ptr) >= 1).all()
        assert np.bincount(layer.replica_rank).tolist() == [5] * 6


def test_past_and_batches_are_the_two_halves():
    case = small_case()
    assert case.past.sum() == 2 * 256 * 8
    assert [batch.shape for batch in case.batches(1, 100)] == [(100, 8), (100, 8)]
    assert (case.batches(0, 100)[1] == case.ids[356:456, 0]).all()
    uses = case.past_activations(64)
    assert uses.shape == (2, 24)
    assert uses[1, 5] == sum(5 in case.ids[at : at + 64, 1] for at in range(0, 256, 64))
    assert (np.bincount(packed_ranks(case)[0]) == 4).all()


def test_every_part_measures_a_small_case():
    case = small_case()
    layers = layers_of(case, "eplb", 1)
    found = optimum(case, layers, 1, lp_batches=5)
    assert found["proved"] == found["activated_proved"] == 2 * (16 + 4 + 1)
    assert found["by_lp"] > 5
    assert found["wrong"] == []
    saved = pair_choice(case, layers, 64, most=4)
    assert 0 <= saved["saved_exact"] <= saved["saved_roomy"] < 1
    reads = activated(case, layers, 16)
    assert reads["experts_ours"] <= reads["experts_even"]
    assert reads["ours_over_without"] == reads["experts_ours"] / reads["experts_without_replicas"]


def test_a_split_that_is_not_the_optimum_is_found(monkeypatch):
    case = small_case()

    def first_replica(layer, counts, *_):
        quotas = np.zeros(layer.num_replicas, np.int64)
        quotas[layer.replica_ptr[:-1]] = counts
        return quotas

    monkeypatch.setattr("benchmarks.split_parts.split_counts", first_replica)
    assert optimum(case, layers_of(case, "eplb", 1), 1, lp_batches=1)["wrong"]


def test_baselines_of_pair_choice_and_reads():
    layer = compile_layer([0, 0, 1], [0, 1, 1], num_experts=2, num_ranks=2)
    chosen = np.empty((3, 2), np.int32)
    ids = np.array([[0, 1], [0, 1], [0, 1]], np.int32)
    largest_quota(ids, np.array([1, 2, 3]), layer.replica_ptr, chosen)
    assert chosen.tolist() == [[1, 2], [0, 2], [1, 2]]
    assert rows_sent(chosen, layer.replica_rank, 2) == 4
    used = np.zeros(3, np.int64)
    spread(np.array([1, 0]), layer.replica_ptr, used)
    assert used.tolist() == [1, 0, 0]
    spread(np.array([5, 1]), layer.replica_ptr, used)
    assert rank_loads(layer, used).tolist() == [1, 2]


def test_the_command_writes_its_figures(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.split.use_one_thread", lambda: None)
    monkeypatch.setattr("benchmarks.split_cases.cases", lambda seed: [small_case(1024)])
    monkeypatch.setattr("benchmarks.split_cases.LAYOUTS", ("eplb", "random"))
    monkeypatch.setattr("benchmarks.split_cases.POLICIES", ("eplb",))
    assert split.main(["--quick", "--json", str(tmp_path / "split.json")]) == 0
    written = json.loads((tmp_path / "split.json").read_text())
    assert set(written) == {"environment", "optimum", "latency", "pair_choice", "activated"}
    assert {row["layout"] for row in written["optimum"]} == {"eplb", "random"}
    assert "by flow" in capsys.readouterr().out


@pytest.mark.skipif(trace_folder() is None, reason=f"{DATA_VARIABLE} names no recorded traces")
def test_recorded_batches_are_split_to_the_optimum_and_save_rows():
    wide = cases(1)[0].first_layers(1)
    layers = layers_of(wide, "eplb", 1)
    found = optimum(Case("few", wide.ids[:2048], 256, 32, 9), layers, 1, lp_batches=4)
    assert found["wrong"] == []
    assert pair_choice(wide, layers, 64, most=20)["saved_roomy"] > 0.015
    assert activated(wide, layers, 16)["ours_over_without"] < 0.97
