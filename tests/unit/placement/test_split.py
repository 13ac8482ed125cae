import doctest
import pickle

import numpy as np
import pytest
import torch
from scipy.optimize import Bounds, LinearConstraint, milp

from placement.split import (
    CompiledLayer,
    SplitError,
    assign_pairs,
    compile_layer,
    compiled,
    count_ids,
    kernels,
    level,
    level_activated,
    level_uniform,
    levels,
    pairs,
    rank_loads,
    split_activated,
    split_counts,
)
from placement.split.pairs import kernels as pair_kernels


def random_layer(rng: np.random.Generator) -> tuple[CompiledLayer, int]:
    num_experts, num_ranks = int(rng.integers(1, 10)), int(rng.integers(1, 7))
    extra = rng.integers(-1, num_experts, int(rng.integers(0, 10)))
    slot_expert = rng.permutation(np.concatenate((np.arange(num_experts), extra)))
    slot_rank = rng.integers(0, num_ranks, slot_expert.size)
    return compile_layer(slot_expert, slot_rank, num_experts, num_ranks), num_experts


def by_expert(layer: CompiledLayer, quotas: np.ndarray) -> list[int]:
    ptr = layer.replica_ptr
    return [int(quotas[ptr[e] : ptr[e + 1]].sum()) for e in range(layer.num_experts)]


def milp_optimum(layer: CompiledLayer, counts: np.ndarray, backlog: np.ndarray) -> int:
    """Least maximum by HiGHS: tokens of each replica, and the maximum as the last variable."""
    replicas = layer.num_replicas
    served = np.zeros((layer.num_experts, replicas + 1))
    for expert in range(layer.num_experts):
        served[expert, layer.replica_ptr[expert] : layer.replica_ptr[expert + 1]] = 1
    loaded = np.zeros((layer.num_ranks, replicas + 1))
    loaded[layer.replica_rank, np.arange(replicas)] = 1
    loaded[:, replicas] = -1
    answer = milp(
        np.eye(replicas + 1)[replicas],
        constraints=[
            LinearConstraint(served, counts, counts),
            LinearConstraint(loaded, -np.inf, -backlog),
        ],
        integrality=np.ones(replicas + 1),
        bounds=Bounds(0, np.inf),
    )
    return round(answer.fun)


@pytest.mark.parametrize("module", [levels, compiled, pairs], ids=lambda module: module.__name__)
def test_worked_examples_in_docstrings_hold(module):
    result = doctest.testmod(module, extraglobs={"compile_layer": compile_layer})
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("seed", range(4))
def test_maximum_is_the_integer_optimum(seed):
    rng = np.random.default_rng(seed)
    for case in range(40):
        layer, num_experts = random_layer(rng)
        counts = rng.integers(0, (3, 30, 1000)[case % 3], num_experts)
        backlog = rng.integers(0, (1, 30)[case % 2], layer.num_ranks)
        quotas = split_counts(layer, counts, backlog, case)
        assert by_expert(layer, quotas) == counts.tolist()
        assert quotas.min(initial=0) >= 0
        assert rank_loads(layer, quotas, backlog).max() == milp_optimum(layer, counts, backlog)


def long_chain(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(slot_expert, slot_rank, counts): levelling stalls here, as wide paths are rare.

    Six experts join each of 12 ranks to the next, and most tokens start at one end.
    """
    upper = np.repeat(np.arange(1, 12), 6)
    slot_expert = np.tile(np.arange(upper.size), 2)
    counts = rng.integers(0, 2 * (12 - upper) + 4)
    return slot_expert, np.concatenate((upper, upper - 1)), counts


@pytest.mark.parametrize("seed", range(20))
def test_maximum_is_the_optimum_where_tokens_must_pass_many_ranks(seed):
    slot_expert, slot_rank, counts = long_chain(np.random.default_rng(seed))
    layer = compile_layer(slot_expert, slot_rank, counts.size, 12)
    quotas = split_counts(layer, counts, None, seed)
    assert by_expert(layer, quotas) == counts.tolist()
    assert quotas.min() >= 0
    assert rank_loads(layer, quotas).max() == milp_optimum(layer, counts, np.zeros(12))


@pytest.mark.parametrize("seed", range(20))
def test_relabelling_experts_only_relabels_where_paths_are_needed(seed):
    rng = np.random.default_rng(seed)
    slot_expert, slot_rank, counts = long_chain(rng)
    name = rng.permutation(counts.size)
    renamed_counts = np.empty_like(counts)
    renamed_counts[name] = counts
    tokens = level(slot_expert, slot_rank, counts, 12)
    assert level(name[slot_expert], slot_rank, renamed_counts, 12).tolist() == tokens.tolist()


@pytest.mark.parametrize("seed", range(4))
def test_activated_maximum_is_the_integer_optimum(seed):
    rng = np.random.default_rng(seed)
    for case in range(40):
        layer, num_experts = random_layer(rng)
        counts = rng.integers(0, 4, num_experts)
        backlog = rng.integers(0, 3, layer.num_ranks)
        quotas = split_activated(layer, counts, backlog, case)
        read = (quotas > 0).astype(np.int64)
        assert by_expert(layer, quotas) == counts.tolist()
        assert by_expert(layer, read) == np.minimum(counts, 1).tolist()
        optimum = milp_optimum(layer, np.minimum(counts, 1), backlog)
        assert rank_loads(layer, read, backlog).max() == optimum


def test_tokens_travel_along_a_chain_of_experts():
    layer = compile_layer([0, 1, 1, 2, 2, 3, 3], [0, 0, 1, 1, 2, 2, 3], num_experts=4, num_ranks=4)
    assert rank_loads(layer, split_counts(layer, [8, 4, 8, 12])).tolist() == [8, 8, 8, 8]
    assert rank_loads(layer, split_counts(layer, [0, 8, 8, 0])).max() == 6


def test_cold_ranks_are_level_beside_a_forced_hot_one():
    layer = compile_layer([0, 1, 1, 1], [0, 1, 2, 3], num_experts=2, num_ranks=4)
    assert split_counts(layer, [100, 30]).tolist() == [100, 10, 10, 10]


def test_backlog_moves_tokens_away():
    layer = compile_layer([0, 0], [0, 1], num_experts=1, num_ranks=2)
    assert split_counts(layer, [10], backlog=[100, 0]).tolist() == [0, 10]
    assert split_counts(layer, [10], backlog=[4, 0]).tolist() == [3, 7]


def test_backlog_of_activated_experts_moves_an_expert_away():
    layer = compile_layer([0, 0], [0, 1], num_experts=1, num_ranks=2)
    for tie_offset in range(8):
        assert split_activated(layer, [10], [1, 0], tie_offset).tolist() == [0, 10]
        assert split_activated(layer, [10], [0, 1], tie_offset).tolist() == [10, 0]


def test_zero_counts_give_zero_tokens():
    layer = compile_layer([0, 0, 1], [0, 1, 1], num_experts=2, num_ranks=2)
    assert split_counts(layer, [0, 0], [3, 1]).tolist() == [0, 0, 0]
    assert split_activated(layer, [0, 0], [3, 1]).tolist() == [0, 0, 0]


def test_one_rank_takes_all():
    assert level([0, 1, -1], [0, 0, 0], counts=[3, 4], num_ranks=1).tolist() == [3, 4, 0]


def test_fully_skewed_batch_goes_evenly_to_all_replicas_of_the_hot_expert():
    layer = compile_layer([0, 1, 0, 2, 0, 3, 0, 1], np.arange(8) // 2, num_experts=4, num_ranks=4)
    assert split_counts(layer, [4096, 0, 0, 0])[:4].tolist() == [1024] * 4


def test_replicas_on_one_rank_share_its_tokens_evenly():
    layer = compile_layer([0, 0, 0], [0, 0, 1], num_experts=1, num_ranks=2)
    assert split_counts(layer, [40]).tolist() == [10, 10, 20]
    firsts = {tuple(split_counts(layer, [2], [0, 9], tie).tolist()) for tie in range(8)}
    assert firsts == {(1, 1, 0)}
    odd = {tuple(split_counts(layer, [1], [0, 9], tie).tolist()) for tie in range(8)}
    assert odd == {(1, 0, 0), (0, 1, 0)}
    chosen = {tuple(split_activated(layer, [5], [0, 9], tie).tolist()) for tie in range(8)}
    assert chosen == {(5, 0, 0), (0, 5, 0)}


def test_absent_and_empty_slots_get_nothing():
    assert level([-2, 0, -1, 0], [0, 0, 1, 1], counts=[6], num_ranks=2).tolist() == [0, 3, 0, 3]


def test_a_rank_without_slots_is_legal():
    layer = compile_layer([0, 0], [0, 2], num_experts=1, num_ranks=4)
    assert split_counts(layer, [10], backlog=[0, 50, 2, 0]).tolist() == [6, 4]


def test_uniform_view_equals_level_with_ranks():
    table = [3, 0, 1, 2, 0, 1]
    counts = [9, 4, 2, 1]
    ranks = [0, 0, 1, 1, 2, 2]
    backlog = [0, 2, 1]
    expected = level(table, ranks, counts, 3, backlog, tie_offset=5)
    assert level_uniform(table, counts, 3, backlog, 5).tolist() == expected.tolist()


def test_largest_legal_sum_is_split_exactly():
    layer = compile_layer([0, 0, 1, 1], [0, 1, 1, 2], num_experts=2, num_ranks=3)
    counts = np.array([1 << 61, (1 << 61) - 1])
    quotas = split_counts(layer, counts)
    assert by_expert(layer, quotas) == counts.tolist()
    assert rank_loads(layer, quotas).max() == -(-int(counts.sum()) // 3)


@pytest.mark.parametrize("stride", [1, 2, 4, 8, 64])
@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_equal_replicas_get_equal_shares_in_the_long_run(stride, replicas):
    layer = compile_layer([0] * replicas, range(replicas), num_experts=1, num_ranks=replicas)
    counts = np.ones(1, np.int64)
    tokens = np.zeros(replicas, np.int64)
    for batch in range(400):
        instant = np.zeros(replicas, np.int64)
        for router in range(4):
            instant += split_counts(layer, counts, tie_offset=router + batch * stride)
        # No herd: four routers that see the same do not all pick the same replica.
        assert instant.max() <= 2 + (replicas < 4)
        tokens += instant
    shares = tokens / tokens.sum()
    assert np.abs(shares - 1 / replicas).max() < 0.03


@pytest.mark.parametrize("stride", [1, 2, 4, 8, 64])
@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_equal_replicas_are_activated_equally_often(stride, replicas):
    layer = compile_layer([0] * replicas, range(replicas), num_experts=1, num_ranks=replicas)
    times = np.zeros(replicas, np.int64)
    for batch in range(400):
        instant = np.zeros(replicas, np.int64)
        for router in range(4):
            quotas = split_activated(layer, [5], tie_offset=router + batch * stride)
            instant += quotas > 0
        assert instant.sum() == 4, "one replica a batch and router"
        assert instant.max() <= 2 + (replicas < 4)
        times += instant
    assert np.abs(times / times.sum() - 1 / replicas).max() < 0.03


@pytest.mark.parametrize("tokens_below", [2, 4, 50])
@pytest.mark.parametrize("stride", [1, 2, 4, 8, 64])
def test_a_ring_of_equal_experts_favours_no_replica(stride, tokens_below):
    layer = compile_layer([0, 0, 1, 1, 2, 2], [0, 1, 1, 2, 2, 0], num_experts=3, num_ranks=3)
    rng = np.random.default_rng(stride)
    tokens = np.zeros(6)
    for batch in range(3000):
        tokens += split_counts(
            layer, rng.integers(0, tokens_below, 3), tie_offset=7 + batch * stride
        )
    shares = tokens.reshape(3, 2) / tokens.reshape(3, 2).sum(1, keepdims=True)
    assert np.abs(shares - 0.5).max() < 0.03


@pytest.mark.parametrize("stride", [1, 2, 4, 8, 64])
def test_a_hot_expert_at_regular_token_indices_is_served_evenly(stride):
    layer = compile_layer([0, 0, 0, 0, 1], [0, 1, 2, 3, 0], num_experts=2, num_ranks=4)
    ids = np.full((6400, 1), 0, np.int32)
    valid = (np.arange(6400) % stride == 0)[:, None]
    quotas = split_counts(layer, count_ids(ids, valid, 2))
    chosen = assign_pairs(layer, ids, valid, quotas)
    shares = np.bincount(chosen[valid], minlength=5)[:4] / valid.sum()
    assert np.abs(shares - 0.25).max() < 0.03


def test_same_input_same_output_and_inputs_are_left_alone():
    rng = np.random.default_rng(3)
    layer, num_experts = random_layer(rng)
    counts, backlog = rng.integers(0, 50, num_experts), rng.integers(0, 50, layer.num_ranks)
    before = counts.copy(), backlog.copy()
    first = split_counts(layer, counts, backlog, 11)
    assert split_counts(layer, counts, backlog, 11).tolist() == first.tolist()
    assert counts.tolist() == before[0].tolist()
    assert backlog.tolist() == before[1].tolist()


def test_tie_offset_may_be_any_integer():
    layer = compile_layer([0, 0], [0, 1], num_experts=1, num_ranks=2)
    for tie_offset in (-1, 1 << 80, np.int32(7)):
        assert split_counts(layer, [1], tie_offset=tie_offset).sum() == 1


def rows_sent(layer: CompiledLayer, chosen: np.ndarray) -> int:
    return sum(len({int(layer.replica_rank[r]) for r in row if r >= 0}) for row in chosen)


def test_an_open_pair_joins_the_rank_its_token_uses():
    layer = compile_layer([0, 0, 1, 2], [0, 1, 0, 1], num_experts=3, num_ranks=2)
    ids = np.array([[0, 1], [0, 2], [2, 0], [1, 0]], np.int32)
    chosen = assign_pairs(layer, ids, None, split_counts(layer, count_ids(ids, None, 3)))
    assert rows_sent(layer, chosen) == 4


def test_two_open_pairs_meet_on_a_shared_rank():
    layer = compile_layer([0, 0, 1, 1], [0, 1, 1, 2], num_experts=2, num_ranks=3)
    assert assign_pairs(layer, [[0, 1]], None, [0, 1, 1, 0]).tolist() == [[1, 2]]
    ids = np.array([[0, 1], [0, -1], [-1, 1]], np.int32)
    chosen = assign_pairs(layer, ids, ids >= 0, quotas=[1, 1, 1, 1])
    assert chosen.tolist() == [[1, 2], [0, -1], [-1, 3]]


def test_the_rest_goes_where_most_quota_remains():
    layer = compile_layer([0, 0], [0, 1], num_experts=1, num_ranks=2)
    assert assign_pairs(layer, [[0], [0], [0]], None, [1, 2]).ravel().tolist() == [1, 0, 1]


def test_an_expert_twice_in_a_row_takes_two_of_the_quota():
    layer = compile_layer([0, 0, 0], [0, 0, 1], num_experts=1, num_ranks=2)
    chosen = assign_pairs(layer, [[0, 0]], None, [1, 1, 0])
    assert sorted(chosen.ravel().tolist()) == [0, 1]


def test_pair_choice_saves_rows_against_quota_alone():
    rng = np.random.default_rng(0)
    slot_expert = np.concatenate((np.arange(32), np.arange(8)))
    layer = compile_layer(slot_expert, rng.permutation(np.arange(40) % 4), 32, 4)
    ids = np.argsort(rng.random((512, 32)) * (1 + np.arange(32)), axis=1)[:, :4].astype(np.int32)
    quotas = split_counts(layer, count_ids(ids, None, 32))
    alone = np.empty_like(ids)
    left = quotas.copy()
    for pair, expert in np.ndenumerate(ids):
        first, last = layer.replica_ptr[expert : expert + 2]
        alone[pair] = first + int(np.argmax(left[first:last]))
        left[alone[pair]] -= 1
    chosen = assign_pairs(layer, ids, None, quotas)
    assert rows_sent(layer, chosen) <= 0.975 * rows_sent(layer, alone)


def random_batch(rng: np.random.Generator, tokens: int) -> tuple[CompiledLayer, np.ndarray]:
    """24 experts on 6 ranks, a third of them twice; top-4 ids with a skew."""
    experts = rng.permutation(np.concatenate((np.arange(24), rng.permutation(24)[:8], [-1] * 4)))
    layer = compile_layer(experts, np.repeat(np.arange(6), 6), 24, 6)
    ids = np.argsort(rng.random((tokens, 24)) * (1 + np.arange(24)), axis=1)[:, :4]
    return layer, ids.astype(np.int32)


def test_room_below_the_maximum_saves_more_rows_than_quotas_do():
    saved = []
    for seed in range(10):
        layer, ids = random_batch(np.random.default_rng(seed), 64)
        quotas = split_counts(layer, count_ids(ids, None, 24), None, seed)
        loads = rank_loads(layer, quotas)
        exact = assign_pairs(layer, ids, None, quotas, seed)
        roomy = assign_pairs(layer, ids, None, quotas, seed, room=loads.max() - loads)
        served = np.bincount(layer.replica_rank[roomy].ravel(), minlength=6)
        assert served.max() == loads.max()
        saved.append(1 - rows_sent(layer, roomy) / rows_sent(layer, exact))
    assert min(saved) >= 0
    assert np.mean(saved) > 0.01


def test_room_is_taken_where_most_is_left_and_given_back_where_a_pair_leaves():
    layer = compile_layer([0, 0, 0, 1, 2], [0, 1, 2, 1, 2], num_experts=3, num_ranks=3)
    ids, quotas = [[0, 1, 2]], [1, 0, 0, 1, 1]
    assert assign_pairs(layer, ids, None, quotas, room=[0, 1, 2]).tolist() == [[2, 3, 4]]
    assert assign_pairs(layer, ids, None, quotas, room=[0, 2, 2]).tolist() == [[1, 3, 4]]
    assert assign_pairs(layer, ids, None, quotas, room=[9, 0, -1]).tolist() == [[0, 3, 4]]
    assert assign_pairs(layer, ids, None, quotas, room=[9, 0, 1 << 62]).tolist() == [[2, 3, 4]]
    # What one token leaves, the next one may take: it has no other way to rank 0.
    layer = compile_layer([0, 0, 1, 1, 2, 3], [0, 1, 0, 1, 1, 0], num_experts=4, num_ranks=2)
    ids = np.array([[0, 2], [1, 3]], np.int32)
    chosen = assign_pairs(layer, ids, None, [1, 0, 0, 1, 1, 1], room=[0, 1])
    assert layer.replica_rank[chosen].tolist() == [[1, 1], [0, 0]]


def test_a_pair_that_shares_its_rank_stays_there():
    layer = compile_layer([0, 0, 1, 2], [0, 1, 0, 1], num_experts=3, num_ranks=2)
    chosen = assign_pairs(layer, [[0, 1, 2]], None, [1, 0, 1, 1], room=[9, 9])
    assert chosen.tolist() == [[0, 2, 3]]


def test_no_rows_and_no_pairs():
    layer = compile_layer([0], [0], num_experts=1, num_ranks=1)
    assert assign_pairs(layer, np.empty((0, 4), np.int32), None, [0]).shape == (0, 4)
    assert assign_pairs(layer, np.empty((3, 0), np.int32), None, [0]).shape == (3, 0)
    assert count_ids(np.empty((0, 4), np.int32), None, 1).tolist() == [0]


def test_ids_of_invalid_pairs_are_not_looked_at():
    ids = np.array([[7, 1], [-9, 0]])
    flags = np.array([[False, True], [False, True]])
    assert count_ids(ids, flags, 2).tolist() == [1, 1]
    layer = compile_layer([0, 1], [0, 0], num_experts=2, num_ranks=1)
    assert assign_pairs(layer, ids, flags, [1, 1]).tolist() == [[-1, 1], [-1, 0]]


LAYER = compile_layer([0, 0, 1], [0, 1, 1], num_experts=3, num_ranks=2)
NO_REPLICAS = compile_layer([-1, -1], [0, 1], num_experts=1, num_ranks=2)


@pytest.mark.parametrize(
    ("call", "field", "says"),
    [
        (lambda: compile_layer([0, 3], [0, 0], 3, 2), "slot_expert[1]", "[-2, 3), got 3"),
        (lambda: compile_layer([0, 1], [0, 2], 3, 2), "slot_rank[1]", "[0, 2), got 2"),
        (lambda: compile_layer([0, 1], [0], 3, 2), "slot_rank", "shape (2,), got shape (1,)"),
        (lambda: compile_layer([0.0], [0], 3, 2), "slot_expert", "integers, got dtype float64"),
        (lambda: compile_layer([[0]], [0], 3, 2), "slot_expert", "one axis"),
        (lambda: compile_layer([0], [0], 0, 2), "num_experts", "[1, 1048576], got 0"),
        (lambda: compile_layer([0], [0], 3, 1 << 20), "num_ranks", "[1, 65536], got 1048576"),
        (lambda: compile_layer([0], [0], 3.0, 2), "num_experts", "must be an integer, got float"),
        (lambda: compile_layer([0], [0], True, 2), "num_experts", "must be an integer, got bool"),
        (lambda: split_counts(LAYER, [1, 2]), "counts", "shape (3,), got shape (2,)"),
        (lambda: split_counts(LAYER, [1, -2, 0]), "counts[1]", "at least 0, got -2"),
        (lambda: split_counts(LAYER, [1, 2, 5]), "counts[2]", "expert 2 has 5 tokens but no rep"),
        (lambda: split_counts(LAYER, [1, np.nan, 0]), "counts", "integers, got dtype float64"),
        (lambda: split_counts(LAYER, [1 << 61, 1 << 61, 0]), "counts[1]", "2^62"),
        (lambda: split_counts(LAYER, np.array([1 << 63, 0, 0], np.uint64)), "counts", "below 2^63"),
        (lambda: split_counts(LAYER, [(1 << 63) - 1, 0, 0]), "counts[0]", "2^62"),
        (lambda: split_counts(LAYER, [1, 1, 0], [0, -4]), "backlog[1]", "at least 0, got -4"),
        (lambda: split_counts(LAYER, [1, 1, 0], [1 << 61, 1 << 61]), "backlog[1]", "2^62"),
        (lambda: split_counts(LAYER, [1, 1, 0], [0]), "backlog", "shape (2,), got shape (1,)"),
        (lambda: split_counts(LAYER, [1, 1, 0], tie_offset=0.5), "tie_offset", "got float"),
        (lambda: split_activated(LAYER, [1, 2, 5]), "counts[2]", "no replica"),
        (lambda: level_uniform([0, 1, 0], [1, 1], 2), "physical_to_logical_of_layer", "3 physical"),
        (lambda: level_activated([0], [0], [], 1), "num_experts", "got 0"),
        (lambda: rank_loads(LAYER, [1, 2]), "quotas", "shape (3,)"),
        (lambda: count_ids([[0, 3]], None, 3), "topk_ids[0, 1]", "[0, 3), got 3"),
        (lambda: count_ids([[0, -1]], None, 3), "topk_ids[0, 1]", "[0, 3), got -1"),
        (lambda: count_ids(np.array([[1 << 32]]), None, 3), "topk_ids[0, 0]", "got 4294967296"),
        (
            lambda: count_ids(np.array([[1 << 63]], np.uint64), None, 3),
            "topk_ids[0, 0]",
            "got 9223372036854775808",
        ),
        (lambda: count_ids([0, 1], None, 3), "topk_ids", "(tokens, k), got (2,)"),
        (lambda: count_ids([[0.0]], None, 3), "topk_ids", "integers"),
        (lambda: count_ids([[0, 1], [0]], None, 3), "topk_ids", "is not an array"),
        (lambda: count_ids([[0]], [[True, True]], 3), "pair_valid", "shape (1, 1), got (1, 2)"),
        (lambda: count_ids([[0]], [[1.0]], 3), "pair_valid", "bool or uint8, got float64"),
        (lambda: assign_pairs(LAYER, [[0]], None, [1, 0]), "quotas", "shape (3,)"),
        (lambda: assign_pairs(LAYER, [[0]], None, [1, 0, 0], room=[1]), "room", "shape (2,)"),
        (lambda: assign_pairs(LAYER, [[0]], None, [1, 0, 0], room=[0.5, 1]), "room", "integers"),
        (lambda: assign_pairs(LAYER, [[3]], None, [1, 0, 0]), "topk_ids[0, 0]", "got 3"),
        (lambda: assign_pairs(LAYER, [[0]], None, [2, -1, 0]), "quotas[1]", "at least 0, got -1"),
        (lambda: assign_pairs(LAYER, [[0], [0]], None, [1, 0, 0]), "quotas", "pair (1, 0)"),
        (lambda: assign_pairs(LAYER, [[0]], None, [0, 0, 0]), "quotas", "expert 0 has fewer"),
        (lambda: assign_pairs(NO_REPLICAS, [[0]], None, []), "quotas", "expert 0 has fewer"),
        (lambda: assign_pairs(LAYER, [[0]], None, [1, 0, 1]), "quotas[2]", "expert 1 has more"),
    ],
)
def test_bad_input_is_refused_by_name(call, field, says):
    with pytest.raises(SplitError) as caught:
        call()
    assert caught.value.field == field
    assert says in str(caught.value)
    assert caught.value.remedy in str(caught.value)


def test_the_error_survives_pickling():
    error = SplitError("counts[1]", "must be at least 0, got -2", "pass counted pairs")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301 - our own bytes


def test_no_input_starts_a_second_compilation():
    kernels.warm()
    pair_kernels.warm()
    frozen_ids = np.frombuffer(np.array([[0, 1], [1, 0]], np.int32).tobytes(), np.int32)
    ids = frozen_ids.reshape(2, 2)
    counts = count_ids(ids, np.ones((2, 4), np.uint8)[:, ::2], 3)
    counts.flags.writeable = False
    quotas = split_counts(LAYER, counts, np.zeros(4, np.int32)[::2], np.int64(1))
    quotas.flags.writeable = False
    assign_pairs(LAYER, ids[:, ::-1], None, quotas)
    room = np.zeros(4, np.int32)[::2]
    room.flags.writeable = False
    assign_pairs(LAYER, ids, None, quotas, 1 << 70, room)
    split_activated(LAYER, counts.astype(np.uint16))
    for entry in (kernels.split_batch, pair_kernels.count_pairs, pair_kernels.choose):
        assert len(entry.signatures) == 1


def test_kernels_release_the_interpreter_lock():
    entries = [value for value in vars(kernels).values() if hasattr(value, "targetoptions")]
    entries += [value for value in vars(pair_kernels).values() if hasattr(value, "targetoptions")]
    assert len(entries) >= 12
    assert all(entry.targetoptions["nogil"] for entry in entries)


def test_the_index_of_a_layer_is_read_only():
    with pytest.raises(ValueError, match="read-only"):
        LAYER.replica_rank[0] = 1


@pytest.mark.parametrize(
    "counts",
    [
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, requires_grad=True),
        torch.ones(2, dtype=torch.int64, device="meta"),
        torch.ones(2, dtype=torch.int64).to_sparse(),
    ],
)
def test_tensors_that_numpy_cannot_read_are_the_fields_fault(counts: torch.Tensor) -> None:
    with pytest.raises(SplitError, match=r"^counts: is not an array"):
        level([0, 1], [0, 1], counts, 2)  # type: ignore[arg-type]
    with pytest.raises(SplitError, match=r"^backlog: is not an array"):
        level([0, 1], [0, 1], [1, 1], 2, counts)  # type: ignore[arg-type]
