"""Scoring of the placement benchmark against brute force, and peers' files loaded from a folder."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import linprog

from benchmarks.placement_peers import PeerPlanner, find_peers
from benchmarks.placement_planners import (
    EnginePlanner,
    Planned,
    PolicyPlanner,
    closed_window,
    topology_of,
)
from benchmarks.placement_runs import ANY_LAYOUT, run_planner
from benchmarks.placement_score import (
    LayerSlots,
    Placement,
    any_layout_bound,
    from_layout,
    from_matrix,
    score,
    slot_writes,
)
from benchmarks.placement_traces import Case
from placement.layout import ExpertLayout
from placement.topology import Phase

SMALL = Case("small", "small", "", 2, 6, 2, 3, 3, 64)


def random_matrix(rng: np.random.Generator) -> np.ndarray:
    """[2 layers, 9 places] of six experts, each at least once."""
    rows = [rng.permutation(np.concatenate((np.arange(6), rng.integers(0, 6, 3)))) for _ in "ab"]
    return np.stack(rows)


def lowest_maximum(expert: np.ndarray, rank: np.ndarray, counts: np.ndarray) -> int:
    """Least largest rank load in whole tokens, by trying every way of cutting each expert."""
    hosts = [sorted(set(rank[expert == e].tolist())) for e in range(len(counts))]

    def ways(tokens: int, places: int) -> list[tuple[int, ...]]:
        if places == 1:
            return [(tokens,)]
        return [
            (first, *rest)
            for first in range(tokens + 1)
            for rest in ways(tokens - first, places - 1)
        ]

    best = int(counts.sum())
    choices = [ways(int(counts[e]), len(hosts[e])) for e in range(len(counts))]
    for choice in itertools.product(*choices):
        load = np.zeros(int(rank.max()) + 1, dtype=np.int64)
        for e, shares in enumerate(choice):
            load[hosts[e]] += shares
        best = min(best, int(load.max()))
    return best


def lp_maximum(expert: np.ndarray, rank: np.ndarray, counts: np.ndarray, ranks: int) -> float:
    """Least largest rank load where tokens may be cut."""
    places = len(expert)
    upper = np.zeros((ranks, places + 1))
    upper[rank, np.arange(places)] = 1.0
    upper[:, -1] = -1.0
    equal = np.zeros((len(counts), places + 1))
    equal[expert, np.arange(places)] = 1.0
    cost = np.zeros(places + 1)
    cost[-1] = 1.0
    found = linprog(cost, A_ub=upper, b_ub=np.zeros(ranks), A_eq=equal, b_eq=counts)
    return float(found.fun)


@pytest.mark.parametrize("seed", range(6))
def test_balance_under_each_split_is_what_brute_force_gives(seed: int) -> None:
    rng = np.random.default_rng(seed)
    placement = from_matrix(random_matrix(rng), 3, 6)
    counts = rng.integers(0, 5, (2, 2, 6)).astype(np.int64)
    counts[:, :, 0] += 1
    scores = score(placement, counts)
    for row, layer in np.ndindex(2, 2):
        expert, rank = placement.layers[layer]
        came = counts[row, layer]
        fair = came.sum() / 3
        even = np.zeros(3)
        for e, r in zip(expert, rank, strict=True):
            even[r] += came[e] / (expert == e).sum()
        assert scores.equal[row, layer] == pytest.approx(fair / even.max())
        assert scores.level[row, layer] == fair / lowest_maximum(expert, rank, came)
        assert scores.bound[row, layer] == pytest.approx(
            fair / lp_maximum(expert, rank, came, 3), abs=1e-3
        )
    assert (scores.equal <= scores.bound + 1e-9).all()
    assert (scores.level <= scores.bound + 1e-9).all()


def test_a_layer_without_demand_is_even() -> None:
    placement = from_matrix([[0, 1, 2, 3, 4, 5, 0, 1, 2]] * 2, 3, 6)
    counts = np.zeros((1, 2, 6), dtype=np.int64)
    assert [float(s.min()) for s in score(placement, counts)] == [1.0, 1.0, 1.0]
    assert any_layout_bound(counts, 9, 3).tolist() == [[1.0, 1.0]]


def test_two_replicas_on_a_rank_count_twice_in_the_equal_split() -> None:
    # expert 0 twice on rank 0 and once on rank 1: two thirds of it fall on rank 0
    one = Placement((LayerSlots(np.array([0, 0, 0, 1]), np.array([0, 0, 1, 1])),), 2, 2)
    scores = score(one, np.array([[[6, 0]]], dtype=np.int64))
    assert scores.equal[0, 0] == 3 / 4
    assert scores.level[0, 0] == 1.0


def test_writes_are_replicas_that_a_rank_did_not_hold_whatever_their_slots() -> None:
    before = from_matrix([[0, 1, 2, 3, 4, 5, 0, 1, 2]], 3, 6)
    shuffled = from_matrix([[2, 0, 1, 5, 4, 3, 1, 0, 2]], 3, 6)
    assert slot_writes(before, shuffled) == 0
    moved = from_matrix([[0, 1, 2, 3, 4, 5, 0, 3, 4]], 3, 6)
    assert slot_writes(before, moved) == 2
    doubled = from_matrix([[0, 1, 2, 3, 4, 5, 0, 0, 2]], 3, 6)
    assert slot_writes(before, doubled) == 1


def test_no_layout_beats_the_bound_of_any_layout() -> None:
    # one expert with all the load: 3 spare slots give it 4 replicas, so 3 ranks share it
    skewed = np.array([[[12, 0, 0, 0, 0, 0]]], dtype=np.int64)
    assert any_layout_bound(skewed, 9, 3)[0, 0] == 1.0
    assert any_layout_bound(skewed, 6, 3)[0, 0] == pytest.approx(1 / 3)
    assert any_layout_bound(skewed, 7, 3)[0, 0] == pytest.approx(2 / 3)
    rng = np.random.default_rng(0)
    for _ in range(20):
        counts = (rng.pareto(1.0, (1, 2, 6)) * 10).astype(np.int64) + 1
        bound = any_layout_bound(counts, 9, 3)
        assert (score(from_matrix(random_matrix(rng), 3, 6), counts).bound <= bound + 1e-6).all()


def test_a_matrix_that_places_no_expert_somewhere_is_refused() -> None:
    with pytest.raises(ValueError, match="layer 0"):
        from_matrix([[0, 1, 2, 3, 4, 4]], 3, 6)
    with pytest.raises(ValueError, match="divide"):
        from_matrix([[0, 1, 2, 3, 4, 5, 0]], 3, 6)


def test_a_pool_layout_becomes_the_same_slots_layer_by_layer() -> None:
    layout = ExpertLayout.from_rows([[0, 3, -1], [1, 2, 0]], num_layers=2, num_experts=2)
    placement = from_layout(layout)
    assert [layer.expert.tolist() for layer in placement.layers] == [[0, 1, 0], [1, 0]]
    assert [layer.rank.tolist() for layer in placement.layers] == [[0, 1, 1], [0, 1]]
    assert placement.num_slots == 5


def steady_windows() -> np.ndarray:
    """Six windows of four equal quarters: expert 0 has half the load."""
    quarter = np.array([[16, 4, 4, 4, 2, 2], [2, 2, 16, 4, 4, 4]], dtype=np.int64)
    return np.broadcast_to(quarter, (6, 4, 2, 6)).copy()


def test_our_planner_levels_steady_traffic_and_then_writes_nothing() -> None:
    windows = steady_windows()
    row = run_planner(SMALL, "mixed", 0, "ours", PolicyPlanner(SMALL, "incremental", 0.1), windows)
    still = run_planner(SMALL, "mixed", 0, "still", PolicyPlanner(SMALL, "static"), windows)
    assert row.writes_share == 0.0
    assert row.window["level"] > 0.95
    assert row.window["level"] >= still.window["level"]
    assert len(row.by_window) == 5
    assert row.planner != ANY_LAYOUT


def test_the_engine_is_driven_through_its_own_gate() -> None:
    windows = steady_windows()
    row = run_planner(SMALL, "mixed", 0, "engine", EnginePlanner(SMALL, 0.5), windows)
    assert 0.0 < row.window["level"] <= 1.0


class Spy:
    """Remembers what it is shown; always the same placement."""

    def __init__(self) -> None:
        self.seen: list[np.ndarray] = []

    def plan(self, window: np.ndarray, upcoming: np.ndarray) -> Planned:
        del upcoming
        self.seen.append(window)
        number = len(self.seen)
        second = [0, 1, 2, 3, 4, 5, 0, 1, 2] if number < 3 else [0, 1, 2, 3, 4, 5, 0, 1, 3]
        return Planned(from_matrix([second] * 2, 3, 6), 0.002 * number, 0.004 * number)


def test_a_plan_is_scored_on_the_window_after_it_and_the_first_writes_nothing() -> None:
    windows = steady_windows()
    windows[0] = 1
    spy = Spy()
    row = run_planner(SMALL, "mixed", 0, "spy", spy, windows)
    assert len(spy.seen) == 5
    assert np.array_equal(spy.seen[0], windows[0])
    # the even first window is scored by nobody: all balances are those of the skewed ones
    assert len(set(row.by_window[:2])) == 1
    # one of 9 slots a layer in one of four plans after the first
    assert row.writes_share == pytest.approx(1 / 9 / 4)
    assert row.writes_share_max == pytest.approx(1 / 9)
    assert row.plan_ms == pytest.approx(4.0 * np.mean([2, 3, 4, 5]) / 2)


def test_ranks_are_half_busy_so_that_the_gate_sees_a_price() -> None:
    topology = topology_of(SMALL)
    assert topology.num_ranks == 3
    assert {rank.num_slots for rank in topology.ranks} == {2 * 3 + 1}
    window = closed_window(SMALL, steady_windows()[0], 3)
    assert window.demand[:, Phase.PREFILL].sum() == steady_windows()[0].sum()
    assert window.end_s - window.start_s == 2.0


DEEPSEEK = """
import torch

def rebalance_experts(weight, num_replicas, num_groups, num_nodes, num_gpus):
    order = torch.argsort(-weight, dim=1, stable=True)
    extra = order[:, : num_replicas - weight.shape[1]]
    return torch.cat((order, extra), dim=1), None, None
"""
VLLM = """
from .abstract import Base

class DefaultEplbPolicy(Base):
    @classmethod
    def rebalance_experts(cls, weight, num_replicas, groups, nodes, ranks, old=None):
        if old is not None:
            return old
        return cls.fill(weight, num_replicas)
"""
ABSTRACT = """
import torch

class Base:
    @classmethod
    def fill(cls, weight, num_replicas):
        places = torch.arange(num_replicas) + int(weight[0, 0])
        return places.repeat(len(weight), 1) % weight.shape[1]
"""


def test_peers_are_run_from_their_own_files_and_absent_ones_are_named(tmp_path: Path) -> None:
    nothing = find_peers(tmp_path)
    assert nothing.found == ()
    assert len(nothing.absent) == 2
    assert all("make peers" in line for line in nothing.absent)

    (tmp_path / "deepseek_eplb").mkdir()
    (tmp_path / "deepseek_eplb" / "eplb.py").write_text(DEEPSEEK)
    (tmp_path / "vllm_eplb").mkdir()
    (tmp_path / "vllm_eplb" / "default.py").write_text(VLLM)
    (tmp_path / "vllm_eplb" / "abstract.py").write_text(ABSTRACT)
    (tmp_path / "vllm_eplb" / "SOURCE").write_text("vllm==0.0\n")
    peers = find_peers(tmp_path)
    assert [(p.name, p.source) for p in peers.found] == [
        ("DeepSeek EPLB", "eplb.py"),
        ("vLLM EPLB", "vllm==0.0"),
    ]
    assert peers.absent == ()

    first, second = steady_windows()[0], steady_windows()[1][:, :, ::-1].copy()
    last, summed = (PeerPlanner(SMALL, peers.found[0], signal) for signal in ("last", "sum8"))
    for planner in (last, summed):
        planned = planner.plan(first, second)
        assert planned.placement.layers[0].expert.tolist()[:2] == [0, 1]
    # the window turned round: the last one alone follows it, the sum of both does not
    assert last.plan(second, first).placement.layers[0].expert.tolist()[0] == 5
    assert summed.plan(second, first).placement.layers[0].expert.tolist()[0] == 0
    vllm = PeerPlanner(SMALL, peers.found[1], "last")
    kept = vllm.plan(first, second).placement
    assert slot_writes(kept, vllm.plan(second, first).placement) == 0
