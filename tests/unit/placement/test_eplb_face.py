"""The planner as one function: its results, what it keeps, what it refuses."""

import inspect

import numpy as np
import pytest
import torch

from placement.eplb import EplbError, inverse, rebalance_experts
from placement.eplb.arguments import check
from placement.eplb.even import search_even
from placement.eplb.nodes import aligned, nodes_of_experts
from placement.eplb.outlook import SUB_WINDOWS_MAX, outlook
from placement.eplb.plan import plan
from placement.eplb.pool import Pool, fill, hottest, improve, seat_missing
from placement.layout import ExpertLayout
from placement.policy.eplb import eplb_matrix, repair_duplicates
from placement.scoring import layer_balancedness, rank_load
from placement.split import level, level_uniform

TWELVE = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)


def skewed(seed: int, layers: int, experts: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.gamma(0.6, 100.0, (layers, experts)) + 1.0


def balance(physical: np.ndarray, weight: np.ndarray, gpus: int, split: str) -> np.ndarray:
    """Mean / hottest gpu of each layer."""
    found = []
    for row, load in zip(physical, weight, strict=True):
        layout = ExpertLayout(row.reshape(gpus, -1).astype(np.int32), 1, len(load))
        found.append(float(layer_balancedness(rank_load(layout, load[None], split))[0]))
    return np.array(found)


def greedy(
    weight: np.ndarray, replicas: int, gpus: int, groups: int = 1, nodes: int = 1
) -> np.ndarray:
    """The public greedy without two replicas of an expert on a gpu, as policy `eplb` has it."""
    matrix, _, _ = eplb_matrix(weight, replicas, groups, nodes, gpus)
    rows = [
        repair_duplicates(row.reshape(gpus, -1), load, nodes).ravel()
        for row, load in zip(matrix, weight, strict=True)
    ]
    return np.stack(rows)


def planned(weight, counts, split, current=None, max_moves=None, history=None):
    return plan(check(weight, counts, current, history, max_moves), split)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (
            rebalance_experts,
            "weight, num_replicas, num_groups, num_nodes, num_gpus, *, current=None, history=None, "
            "max_moves=None",
        ),
        (level, "slot_expert, slot_rank, counts, num_ranks, backlog=None, tie_offset=0"),
        (
            level_uniform,
            "physical_to_logical_of_layer, counts, num_gpus, backlog=None, tie_offset=0",
        ),
    ],
)
def test_the_published_signatures_hold(function, arguments: str) -> None:
    parameters = inspect.signature(function).parameters.values()
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    assert str(inspect.Signature(bare)) == f"({arguments})"


class TestResults:
    def test_shapes_and_types_are_the_public_functions(self) -> None:
        physical, logical, count = rebalance_experts(TWELVE, 16, 4, 2, 8)
        assert [a.dtype for a in (physical, logical, count)] == [np.int64] * 3
        assert physical.shape == (2, 16)
        assert count.shape == (2, 12)
        assert logical.shape == (2, 12, int(count.max()))

    def test_the_three_results_say_the_same(self) -> None:
        physical, logical, count = rebalance_experts(TWELVE, 20, 1, 1, 4)
        for layer in range(2):
            for expert in range(12):
                slots = logical[layer, expert]
                filled = slots[slots >= 0].tolist()
                assert filled == np.flatnonzero(physical[layer] == expert).tolist()
                assert len(filled) == count[layer, expert]
                assert (slots[len(filled) :] == -1).all()

    def test_experts_of_a_group_stay_on_one_node(self) -> None:
        physical, _, _ = rebalance_experts(TWELVE, 16, 4, 2, 8)
        for row in physical:
            node_of_group = {}
            for slot, expert in enumerate(row.tolist()):
                assert node_of_group.setdefault(expert // 3, slot // 8) == slot // 8
            assert sorted(node_of_group.values()) == [0, 0, 1, 1]

    def test_groups_that_do_not_divide_over_nodes_are_no_rule(self) -> None:
        free = rebalance_experts(TWELVE, 16, 1, 1, 8)[0]
        assert np.array_equal(rebalance_experts(TWELVE, 16, 3, 2, 8)[0], free)

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize(("groups", "nodes"), [(1, 1), (8, 4)])
    @pytest.mark.parametrize("split", ["level", "equal"])
    def test_from_nothing_it_is_never_worse_than_the_public_greedy(
        self, seed: int, groups: int, nodes: int, split: str
    ) -> None:
        weight = skewed(seed, 2, 32)
        ours = planned(weight, (40, groups, nodes, 8), split)
        theirs = greedy(weight, 40, 8, groups, nodes)
        assert (balance(ours, weight, 8, split) >= balance(theirs, weight, 8, split) - 1e-9).all()

    def test_scale_of_the_load_does_not_matter(self) -> None:
        weight = skewed(1, 1, 16)
        assert np.array_equal(
            rebalance_experts(weight, 20, 1, 1, 4)[0],
            rebalance_experts(weight * 2.0**40, 20, 1, 1, 4)[0],
        )

    def test_loads_near_the_largest_float_are_planned(self) -> None:
        physical, _, _ = rebalance_experts(np.full((1, 8), 1e308), 8, 1, 1, 4)
        assert sorted(physical[0].tolist()) == list(range(8))

    def test_loads_of_2_63_are_planned(self) -> None:
        weight = np.array([[1 << 63, 1, 1, 1]], dtype=np.uint64)
        _, _, count = rebalance_experts(weight, 6, 1, 1, 2)
        assert count[0, 0] == 2

    def test_without_load_every_expert_has_its_place(self) -> None:
        _, _, count = rebalance_experts(np.zeros((2, 8)), 12, 1, 1, 4)
        assert count.min() == 1
        assert count.max() == 2

    def test_more_slots_a_gpu_than_experts(self) -> None:
        physical, _, count = rebalance_experts([[5, 1]], 12, 1, 1, 3)
        assert all({0, 1} <= set(gpu) for gpu in physical.reshape(3, 4).tolist())
        assert count.sum() == 12


class TestTensors:
    @pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16])
    def test_tensors_give_tensors_with_the_same_answer(self, dtype: torch.dtype) -> None:
        weight = torch.from_numpy(np.rint(skewed(2, 2, 16))).to(dtype)
        tensors = rebalance_experts(weight, 20, 1, 1, 4)
        arrays = rebalance_experts(weight.double().numpy(), 20, 1, 1, 4)
        for tensor, array in zip(tensors, arrays, strict=True):
            assert isinstance(tensor, torch.Tensor)
            assert isinstance(array, np.ndarray)
            assert tensor.dtype == torch.int64
            assert np.array_equal(tensor.numpy(), array)

    def test_every_array_argument_may_be_a_tensor(self) -> None:
        weight, current = skewed(3, 1, 8), np.array([[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]])
        history = np.stack([weight, weight[:, ::-1]])
        plain = rebalance_experts(weight, 12, 1, 1, 4, current=current, history=history)
        tensor = rebalance_experts(
            torch.from_numpy(weight),
            12,
            1,
            1,
            4,
            current=torch.from_numpy(current),
            history=torch.from_numpy(history.copy()),
        )
        assert np.array_equal(plain[0], tensor[0].numpy())

    def test_a_tensor_with_gradient_is_planned(self) -> None:
        weight = torch.ones((1, 4), requires_grad=True)
        assert rebalance_experts(weight, 4, 1, 1, 2)[0].requires_grad is False


class TestCurrent:
    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("max_moves", [0, 1, 3, None])
    @pytest.mark.parametrize("split", ["level", "equal"])
    def test_writes_stay_within_max_moves_and_never_make_it_worse(
        self, seed: int, max_moves: int | None, split: str
    ) -> None:
        before = greedy(skewed(seed, 2, 32), 40, 8)
        weight = skewed(seed + 50, 2, 32)
        after = planned(weight, (40, 1, 1, 8), split, before, max_moves)
        if max_moves is not None:
            assert ((after != before).sum(axis=1) <= max_moves).all()
        assert (balance(after, weight, 8, split) >= balance(before, weight, 8, split) - 1e-9).all()

    @pytest.mark.parametrize("split", ["level", "equal"])
    def test_one_write_helps_a_skewed_layer(self, split: str) -> None:
        before = greedy(skewed(0, 1, 32), 40, 8)
        weight = skewed(60, 1, 32)
        after = planned(weight, (40, 1, 1, 8), split, before, 2)
        assert balance(after, weight, 8, split) > balance(before, weight, 8, split)

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("split", ["level", "equal"])
    @pytest.mark.parametrize(("groups", "nodes"), [(1, 1), (4, 2)])
    def test_the_same_load_again_changes_nothing(
        self, seed: int, split: str, groups: int, nodes: int
    ) -> None:
        counts = (40, groups, nodes, 8)
        first = planned(skewed(seed, 2, 32), counts, split)
        weight = skewed(seed + 70, 2, 32)
        second = planned(weight, counts, split, first)
        assert np.array_equal(planned(weight, counts, split, second), second)

    def test_a_plan_from_nothing_is_kept(self) -> None:
        weight = skewed(4, 2, 32)
        first = rebalance_experts(weight, 40, 1, 1, 8)[0]
        assert np.array_equal(rebalance_experts(weight, 40, 1, 1, 8, current=first)[0], first)

    def test_a_layer_near_even_is_left_alone(self) -> None:
        # 51 : 49 is within 2% of even
        weight = np.array([[26, 25, 25, 24]])
        before = np.array([[0, 1, 1, 2, 3, 3]])
        after, _, _ = rebalance_experts(weight, 6, 1, 1, 2, current=before)
        assert np.array_equal(after, before)

    def test_a_layer_without_load_is_left_alone(self) -> None:
        before = np.array([[0, 1, 1, 2, 3, 3]])
        after, _, _ = rebalance_experts(np.zeros((1, 4)), 6, 1, 1, 2, current=before)
        assert np.array_equal(after, before)

    def test_slots_that_hold_nothing_are_filled_beyond_max_moves(self) -> None:
        before = np.array([[0, 1, -1, 2, 3, -1]])
        after, _, _ = rebalance_experts([[9, 1, 1, 1]], 6, 1, 1, 2, current=before, max_moves=0)
        assert np.array_equal(after[before >= 0], before[before >= 0])
        assert after.min() >= 0
        assert 0 in after[0, 3:]

    def test_a_duplicate_on_a_gpu_survives_where_nothing_may_be_written(self) -> None:
        before = np.array([[0, 0, 1, 2, 3, 3]])
        after, _, _ = rebalance_experts([[1, 90, 1, 1]], 6, 1, 1, 2, current=before, max_moves=0)
        assert np.array_equal(after, before)

    def test_what_a_gpu_lacks_replaces_its_second_replicas(self) -> None:
        before = np.array([[0, 1, 1, 0, 2, 2]])
        after = planned(np.array([[1, 1, 9]]), (6, 1, 1, 2), "level", before)
        assert after.tolist() == [[0, 1, 2, 0, 2, 2]]

    def test_second_replicas_are_replaced_within_max_moves(self) -> None:
        before = np.array([[0, 0, 0, 1, 1, 1, 2, 2, 2]])
        after = planned(np.array([[9, 8, 1]]), (9, 1, 1, 3), "level", before, 1)
        assert (after != before).sum() == 1

    def test_more_slots_than_experts_are_written_by_need(self) -> None:
        before = np.array([[0, 0, 0, 1, 1, 1]])
        counts = (6, 1, 1, 2)
        even = planned(np.array([[5, 5]]), counts, "level", before)
        assert np.array_equal(even, before)
        uneven = planned(np.array([[9, 1]]), counts, "level", before, 1)
        assert (uneven != before).sum() == 1
        assert 0 in uneven[0, 3:]


class TestNodes:
    def test_current_that_keeps_the_rule_keeps_its_nodes(self) -> None:
        before = rebalance_experts(skewed(0, 1, 16), 24, 4, 2, 4)[0]
        weight = skewed(0, 1, 16) * np.random.default_rng(5).gamma(8, 1 / 8, (1, 16))
        after, _, _ = rebalance_experts(weight, 24, 4, 2, 4, current=before, max_moves=4)
        assert (after != before).sum() <= 4
        nodes = [set((row // 4).tolist()) for row in after.reshape(2, 12)]
        assert nodes == [set((row // 4).tolist()) for row in before.reshape(2, 12)]

    def test_current_that_is_balanced_over_nodes_is_kept(self) -> None:
        weight = np.array([[4.0, 2, 3, 3, 4, 2, 3, 3]])
        before = np.array([[5, 4, 7, 6, 1, 0, 2, 3]])
        after, _, _ = rebalance_experts(weight, 8, 2, 2, 4, current=before)
        assert np.array_equal(after, before)

    def test_nodes_share_the_writes_of_a_layer(self) -> None:
        before = np.array([[0, 1, 2, 3, 2, 1, 4, 5, 6, 7, 6, 5]])
        weight = np.array([[90.0, 2, 2, 2, 80, 2, 2, 2]])
        free = rebalance_experts(weight, 12, 2, 2, 4, current=before)[0]
        assert (free != before)[0, :6].any()
        assert (free != before)[0, 6:].any()
        one = rebalance_experts(weight, 12, 2, 2, 4, current=before, max_moves=1)[0]
        assert np.flatnonzero((one != before)[0]).tolist() in ([4], [5])

    def test_a_node_that_is_not_the_bottleneck_is_left_alone(self) -> None:
        weight = np.array([[10.0, 10, 10, 10, 4, 4, 1, 1]])
        before = np.array([[0, 1, 2, 3, 4, 5, 6, 7]])
        after, _, _ = rebalance_experts(weight, 8, 2, 2, 4, current=before)
        assert np.array_equal(after, before)

    def test_groups_move_where_that_pays(self) -> None:
        weight = np.array([[100.0] * 8 + [1.0] * 8])
        before = np.array([[*range(8), *range(8, 16)]])
        after, _, _ = rebalance_experts(weight, 16, 4, 2, 4, current=before)
        assert balance(after, weight, 4, "level")[0] > 0.95
        # A group of four each way, and two experts of the other group to the other gpu of the node.
        assert (after != before).sum() == 12

    def test_groups_stay_where_moving_them_is_too_dear(self) -> None:
        weight = np.array([[100.0] * 8 + [1.0] * 8])
        before = np.array([[*range(8), *range(8, 16)]])
        after, _, _ = rebalance_experts(weight, 16, 4, 2, 4, current=before, max_moves=11)
        assert np.array_equal(after, before)

    def test_current_that_breaks_the_rule_is_put_right(self) -> None:
        before = np.array([[0, 4, 1, 5, 2, 6, 3, 7]])
        after, _, _ = rebalance_experts(np.ones((1, 8)), 8, 2, 2, 4, current=before)
        assert (
            nodes_of_experts(
                after.reshape(4, 2),
                check(np.ones((1, 8)), (8, 2, 2, 4), None, None, None).counts,
                8,
            )
            is not None
        )
        assert (after != before).sum() == 4

    def test_putting_it_right_does_not_exceed_max_moves(self) -> None:
        before = np.array([[0, 4, 1, 5, 2, 6, 3, 7]])
        with pytest.raises(EplbError, match=r"takes 4 slot writes, max_moves is 3.*max_moves 4"):
            rebalance_experts(np.ones((1, 8)), 8, 2, 2, 4, current=before, max_moves=3)

    def test_numbers_follow_the_live_placement(self) -> None:
        live = np.array([[0, 1], [2, 3], [4, 5], [6, 7]])
        target = np.array([[7, 6], [5, 4], [2, 3], [1, 0]])
        assert np.array_equal(aligned(target, live, 2), live)


class TestHistory:
    def test_the_forecast_replaces_weight(self) -> None:
        hot_first, hot_last = np.array([[90.0, 1, 1, 1, 1]]), np.array([[1.0, 1, 1, 1, 90]])
        history = np.stack([hot_last] * 12)
        _, _, count = rebalance_experts(hot_first, 6, 1, 1, 2, history=history)
        assert count.tolist() == [[1, 1, 1, 1, 2]]

    def test_weight_speaks_for_layers_that_history_is_silent_on(self) -> None:
        weight = np.array([[90.0, 1, 1, 1, 1], [1, 1, 90.0, 1, 1]])
        history = np.zeros((8, 2, 5))
        history[:, 0] = [1, 1, 1, 1, 90]
        _, _, count = rebalance_experts(weight, 6, 1, 1, 2, history=history)
        assert count.tolist() == [[1, 1, 1, 1, 2], [1, 1, 2, 1, 1]]

    @pytest.mark.parametrize("intervals", [1, 3, 4, 7, 64, 65, 200])
    def test_any_number_of_intervals_makes_scenarios(self, intervals: int) -> None:
        history = skewed(0, intervals * 2, 6).reshape(intervals, 2, 6)
        problem = check(np.ones((2, 6)), (6, 1, 1, 2), None, history, None)
        ahead = outlook(problem)
        assert ahead.weights.sum() == pytest.approx(1)
        assert np.tensordot(ahead.weights, ahead.demand.sum(axis=2), axes=1) == pytest.approx(1)
        assert (ahead.demand >= 0).all()

    def test_a_window_that_is_not_full_is_filled_up_with_its_mean(self) -> None:
        first, then = skewed(1, 1, 6), skewed(2, 1, 6)
        mean = (first + then) / 2
        for short, full in (([first], [first] * 4), ([first, then], [mean, mean, first, then])):
            both = [
                outlook(check(then, (6, 1, 1, 2), None, np.stack(parts), None))
                for parts in (short + [then] * 4, full + [then] * 4)
            ]
            assert both[0].demand == pytest.approx(both[1].demand, abs=1e-6)

    def test_of_a_long_history_neighbours_are_added_up_from_the_newest(self) -> None:
        history = skewed(3, SUB_WINDOWS_MAX + 1, 6)[:, None]
        pairs = (history[1::2] + history[2::2]) / 2
        folded = np.concatenate((history[:1], pairs))
        both = [
            outlook(check(np.ones((1, 6)), (6, 1, 1, 2), None, each, None))
            for each in (history, folded)
        ]
        assert both[0].demand == pytest.approx(both[1].demand, abs=1e-6)

    def test_a_steady_history_forecasts_itself(self) -> None:
        load = skewed(7, 2, 6)
        for intervals in (1, 4, 10, SUB_WINDOWS_MAX * 2 + 3):
            problem = check(np.ones((2, 6)), (6, 1, 1, 2), None, np.stack([load] * intervals), None)
            ahead = outlook(problem)
            mean = np.tensordot(ahead.weights, ahead.demand, axes=1)
            assert mean == pytest.approx(load / load.sum(axis=1, keepdims=True), abs=1e-3)


class TestPool:
    def test_empty_slots_take_the_hottest_a_replica_that_the_gpu_lacks(self) -> None:
        pool = Pool(np.array([[9.0, 4.0, 1.0]]), np.ones(1))
        rows = np.array([[0, 2, -1], [1, -1, -1]])
        assert fill(rows, rows, pool).tolist() == [[0, 2, 1], [1, 0, 2]]

    def test_a_gpu_that_has_every_expert_takes_a_second_replica(self) -> None:
        pool = Pool(np.array([[9.0, 4.0]]), np.ones(1))
        rows = np.array([[0, 1, -1]])
        assert fill(rows, rows, pool).tolist() == [[0, 1, 0]]

    def test_missing_experts_go_where_there_is_room_and_least_load(self) -> None:
        pool = Pool(np.array([[9.0, 4.0, 3.0, 2.0]]), np.ones(1))
        rows = np.array([[0, -1], [1, -1]])
        assert seat_missing(rows, pool).tolist() == [[0, 3], [1, 2]]

    def test_without_room_the_least_useful_surplus_gives_way(self) -> None:
        pool = Pool(np.array([[9.0, 4.0, 3.0]]), np.ones(1))
        rows = np.array([[0, 1], [0, 1]])
        assert seat_missing(rows, pool).tolist() == [[0, 2], [0, 1]]

    def test_rounds_bound_the_search(self) -> None:
        pool = Pool(skewed(60, 1, 32), np.ones(1))
        rows = greedy(skewed(0, 1, 32), 40, 8).reshape(8, 5)
        once = improve(rows, pool, "level", writes=None, enough=1.0, rounds=1)
        assert not np.array_equal(once, rows)
        assert np.array_equal(improve(rows, pool, "level", writes=None, enough=1.0, rounds=0), rows)

    def test_hottest_is_weighted_over_scenarios(self) -> None:
        pool = Pool(np.array([[4.0, 0.0], [0.0, 8.0]]), np.array([0.25, 0.75]))
        assert hottest(np.array([[0], [1]]), pool, "equal") == pytest.approx(7.0)

    def test_the_even_search_stops_at_enough(self) -> None:
        rows = np.array([[0, 1], [0, 2]])
        demand = np.array([[2.0, 5.0, 4.0]])
        kept = search_even(rows, demand, np.ones(1), None, enough=0.9, gain_min=0.002)
        assert np.array_equal(kept, rows)

    def test_the_even_search_exchanges_two_experts(self) -> None:
        rows = np.array([[0, 1], [2, 3]])
        demand = np.array([[9.0, 8.0, 1.0, 2.0]])
        found = search_even(rows, demand, np.ones(1), None, enough=0.98, gain_min=0.002)
        pool = Pool(demand, np.ones(1))
        assert hottest(found, pool, "equal") == 10.0
        one = search_even(rows, demand, np.ones(1), 1, enough=0.98, gain_min=0.002)
        assert np.array_equal(one, rows)

    def test_a_write_that_brings_too_little_is_not_made(self) -> None:
        rows = np.array([[0, 1, 2], [1, 3, 2]])
        demand = np.array([[10.0, 10.0, 1e-3, 9.0]])
        pool = Pool(demand, np.ones(1))
        dear = improve(rows, pool, "equal", writes=None, enough=1.0)
        assert np.array_equal(
            search_even(rows, demand, np.ones(1), None, enough=1.0, gain_min=1.0), rows
        )
        assert hottest(dear, pool, "equal") <= hottest(rows, pool, "equal")


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"weight": [1, 2]}, r"weight: must have shape \[layers, experts\].*\(2,\)"),
            ({"weight": np.ones((0, 4))}, "weight: must have shape"),
            ({"weight": [[1, 2], [3]]}, "weight: is not an array"),
            ({"weight": [["a", "b"]]}, "weight: must hold real numbers"),
            ({"weight": [[1, float("nan"), 1, 1]]}, r"weight\[0, 1\]: must be finite, got nan"),
            ({"weight": [[1, 1, float("inf"), 1]]}, r"weight\[0, 2\]: must be finite"),
            ({"weight": [[1, 1, 1, -2]]}, r"weight\[0, 3\]: must be at least 0, got -2"),
            ({"num_replicas": 3}, "3 replicas cannot hold 4 experts; pass at least 4"),
            ({"num_replicas": 7}, "7 replicas do not divide by num_gpus 2; pass 8"),
            ({"num_replicas": 6.0}, "num_replicas: must be an integer, got float"),
            ({"num_gpus": 0}, r"num_gpus: must be in \[1, "),
            ({"num_groups": True}, "num_groups: must be an integer, got bool"),
            ({"num_groups": 6, "num_nodes": 2}, "4 experts do not divide into 6 groups"),
            ({"num_groups": 4, "num_nodes": 4}, "2 gpus do not divide over num_nodes 4"),
            ({"max_moves": -1}, r"max_moves: must be in \[0, "),
            ({"history": [[1, 1, 1, 1]]}, "history: must have shape"),
            ({"history": np.ones((3, 1, 5))}, r"history: must have shape \[intervals, 1, 4\]"),
            ({"history": -np.ones((3, 1, 4))}, r"history\[0, 0, 0\]: must be at least 0"),
            ({"current": [[0, 1, 2, 3]]}, r"current: must have shape \[1, 6\]"),
            ({"current": [[0, 1, 2, 3, 0.0, 1]]}, "current: must hold integers"),
            (
                {"current": np.full((1, 6), 1 << 63, dtype=np.uint64)},
                r"current: must stay below 2\^63",
            ),
            ({"current": [[0, 1, 2, 3, 4, 0]]}, r"current\[0, 4\]: names expert 4.*0 to 3"),
            ({"current": [[0, 1, 2, 3, -2, 0]]}, r"current\[0, 4\]: names expert -2"),
            ({"current": [[0, 1, 2, 0, 1, 0]]}, r"current\[0\]: has no replica of expert 3"),
        ],
    )
    def test_a_refusal_names_argument_limit_and_next_step(self, change, words) -> None:
        arguments = {
            "weight": [[1, 2, 3, 4]],
            "num_replicas": 6,
            "num_groups": 1,
            "num_nodes": 1,
            "num_gpus": 2,
            **change,
        }
        with pytest.raises(EplbError, match=words) as caught:
            rebalance_experts(**arguments)
        assert caught.value.argument.partition("[")[0] in arguments
        assert caught.value.remedy

    def test_a_refusal_is_a_value_error(self) -> None:
        assert issubclass(EplbError, ValueError)


def test_inverse_pads_with_minus_one() -> None:
    logical, count = inverse(np.array([[1, 1, 0], [0, 1, 0]]), 2)
    assert logical.tolist() == [[[2, -1], [0, 1]], [[0, 2], [1, -1]]]
    assert count.tolist() == [[1, 2], [2, 1]]


class TestArraysOfEveryKind:
    """What numpy or torch cannot turn into numbers is the argument's fault, whatever they raise."""

    @pytest.mark.parametrize(
        "weight",
        [
            torch.ones(1, 8, device="meta"),
            torch.ones(1, 8).to_sparse(),
            torch.ones(1, 8, dtype=torch.complex64),
            [torch.ones(8, requires_grad=True)],
            [torch.ones(8).bfloat16()],
            np.full((1, 8), np.longdouble("1e4000")),
        ],
    )
    def test_a_weight_without_numbers_is_refused(self, weight: object) -> None:
        with pytest.raises(EplbError, match=r"^weight"):
            rebalance_experts(weight, 12, 1, 1, 4)  # type: ignore[arg-type]

    def test_a_current_without_integers_is_refused(self) -> None:
        current = torch.zeros(1, 12, dtype=torch.bfloat16)
        with pytest.raises(EplbError, match=r"^current"):
            rebalance_experts(np.ones((1, 8)), 12, 1, 1, 4, current=current)

    def test_a_tensor_that_needs_a_gradient_is_read_and_kept(self) -> None:
        weight = torch.ones(1, 8, requires_grad=True)
        assert rebalance_experts(weight, 12, 1, 1, 4)[0].shape == (1, 12)
        assert weight.requires_grad

    def test_more_gpus_than_the_splitter_takes_are_refused_by_their_name(self) -> None:
        with pytest.raises(EplbError, match=r"^num_gpus: must be in \[1, 65536\]"):
            rebalance_experts(np.ones((1, 8)), 1 << 17, 1, 1, 1 << 17)
