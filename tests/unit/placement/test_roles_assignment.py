"""Which split a batch gets: the cost model's regime, units of backlog, and room that saves rows."""

import doctest

import numpy as np
import pytest

from placement.roles import assignment
from placement.roles.assignment import LayerReplicas, Part, assign, choose_quotas
from placement.split import compile_layer, rank_loads, split_activated, split_counts

BOUND = 20.0
"""Pairs that take as long as reading an expert."""


def some_replicas(slot_expert, slot_rank, num_experts, num_ranks) -> LayerReplicas:
    layer = compile_layer(slot_expert, slot_rank, num_experts, num_ranks)
    tags = layer.replica_slot.astype(np.int64) + 100
    return LayerReplicas(layer, layer.replica_slot.astype(np.int32), tags)


def parts_of(
    replicas: LayerReplicas,
    ids: np.ndarray,
    *,
    bound: float = 0.0,
    backlog: np.ndarray | None = None,
    tie_offset: int = 0,
) -> tuple[Part, ...]:
    queued = np.zeros(replicas.compiled.num_ranks, np.int64) if backlog is None else backlog
    rows = np.arange(len(ids), dtype=np.int32)
    return assign(replicas, ids, np.ones(ids.shape, np.uint8), rows, queued, tie_offset, bound)


def random_batch(seed: int, tokens: int) -> tuple[LayerReplicas, np.ndarray]:
    """24 experts on 6 ranks, a third of them twice; top-4 ids with a skew."""
    rng = np.random.default_rng(seed)
    experts = rng.permutation(np.concatenate((np.arange(24), rng.permutation(24)[:8], [-1] * 4)))
    replicas = some_replicas(experts, np.repeat(np.arange(6), 6), 24, 6)
    keys = rng.random((tokens, 24)) * (1 + np.arange(24))
    return replicas, np.argsort(keys, axis=1)[:, :4].astype(np.int32)


def test_worked_examples_in_docstrings_hold() -> None:
    result = doctest.testmod(assignment)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("pairs_each", [20, 21])
def test_up_to_the_crossover_experts_are_levelled_and_above_it_tokens(pairs_each: int) -> None:
    layer = compile_layer([0, 0, 1, 1], [0, 1, 0, 1], num_experts=2, num_ranks=2)
    counts = np.full(2, pairs_each)
    none = np.zeros(2, np.int64)
    quotas, room = choose_quotas(layer, counts, none, 3, BOUND)
    if pairs_each <= BOUND:
        assert sorted(quotas.tolist()) == [0, 0, 20, 20]
        assert room is None
    else:
        assert quotas.tolist() == split_counts(layer, counts, none, 3).tolist()
        assert room is not None


def test_nothing_is_memory_bound_where_reading_costs_nothing() -> None:
    replicas, ids = random_batch(0, 3)
    layer = replicas.compiled
    counts = np.bincount(ids.ravel(), minlength=24)
    none = np.zeros(6, np.int64)
    quotas, _ = choose_quotas(layer, counts, none, 5, 0.0)
    assert quotas.tolist() == split_counts(layer, counts, none, 5).tolist()


@pytest.mark.parametrize("seed", range(30))
def test_a_memory_bound_batch_ends_no_later_than_under_either_split(seed: int) -> None:
    replicas, ids = random_batch(seed, 1 + seed)
    layer = replicas.compiled
    rng = np.random.default_rng(seed)
    counts = np.bincount(ids.ravel(), minlength=24)
    backlog = rng.integers(0, 60, 6)

    def ends(quotas: np.ndarray) -> int:
        pairs = rank_loads(layer, quotas)
        reads = rank_loads(layer, (quotas > 0).astype(np.int64))
        return max(
            int(max(pairs[rank], BOUND * reads[rank]) + backlog[rank])
            for rank in range(6)
            if pairs[rank] > 0
        )

    chosen, _ = choose_quotas(layer, counts, backlog, seed, BOUND)
    queued = np.rint(backlog / BOUND).astype(np.int64)
    both = (
        split_counts(layer, counts, backlog, seed),
        split_activated(layer, counts, queued, seed),
    )
    assert ends(chosen) == min(ends(quotas) for quotas in both)


def test_backlog_of_a_memory_bound_batch_is_counted_in_experts() -> None:
    """40 pairs of work are two reads: four experts more make three reads on either rank."""
    replicas = some_replicas([0, 1, 2, 3] * 2, np.arange(8) // 4, 4, 2)
    ids = np.array([[0, 1, 2, 3]] * 5, np.int32)
    parts = parts_of(replicas, ids, bound=BOUND, backlog=np.array([40, 0]))
    assert [(part.rank, len(set(part.pair_expert.tolist()))) for part in parts] == [(0, 1), (1, 3)]


def test_work_of_a_part_is_pairs_or_what_reading_costs() -> None:
    replicas = some_replicas([0, 1, 2], [0, 0, 1], 3, 2)
    ids = np.array([[0, 2], [1, 2]] + [[2, 2]] * 15, np.int32)
    parts = parts_of(replicas, ids, bound=BOUND)
    assert [(part.rank, part.num_pairs, part.work_pairs) for part in parts] == [
        (0, 2, 40.0),
        (1, 32, 32.0),
    ]
    assert [part.work_pairs for part in parts_of(replicas, ids)] == [2.0, 32.0]


@pytest.mark.parametrize("seed", range(20))
def test_room_saves_rows_and_no_rank_ends_later_than_the_last_one(seed: int) -> None:
    replicas, ids = random_batch(seed, 64)
    layer = replicas.compiled
    counts = np.bincount(ids.ravel(), minlength=24)
    backlog = np.random.default_rng(seed).integers(0, 30, 6)
    parts = parts_of(replicas, ids, backlog=backlog, tie_offset=seed)
    loads = backlog.copy()
    for part in parts:
        loads[part.rank] += part.num_pairs
    served = [part.rank for part in parts]
    quotas = split_counts(layer, counts, backlog, seed)
    assert sum(part.num_pairs for part in parts) == ids.size
    assert loads[served].max() <= rank_loads(layer, quotas, backlog)[served].max()


def test_room_lets_a_lone_pair_join_its_row() -> None:
    # Rank 2 is the last to end, so ranks 0 and 1 have room for token 0 as a whole.
    replicas = some_replicas([0, 0, 1, 2], [0, 1, 1, 2], 3, 3)
    ids = np.array([[0, 1], [0, 1], [2, 2]], np.int32)
    parts = parts_of(replicas, ids)
    assert [(part.rank, part.num_pairs) for part in parts] == [(0, 2), (1, 2), (2, 2)]
    parts = parts_of(replicas, np.concatenate((ids, [[2, 2]])).astype(np.int32))
    assert [(part.rank, part.num_pairs) for part in parts] == [(1, 4), (2, 4)]


def test_a_rank_that_could_read_longer_than_the_batch_lasts_has_no_room() -> None:
    """Three experts on rank 1 take 60 pairs to read, the batch ends after 50."""
    layer = compile_layer([0, 0, 1, 3, 2], [0, 1, 1, 1, 2], num_experts=4, num_ranks=3)
    counts = np.array([40, 30, 50, 0])
    none = np.zeros(3, np.int64)
    _, room = choose_quotas(layer, counts, none, 0, BOUND)
    assert room is not None
    assert room.tolist() == [15, 0, 0]
    _, room = choose_quotas(layer, counts, none, 0, 50 / 3)
    assert room is not None
    assert room.tolist() == [15, 15, 0]


def test_work_waiting_at_a_rank_that_serves_nothing_gives_no_room() -> None:
    layer = compile_layer([0, 0, 1, 1, 2], [0, 1, 0, 1, 2], num_experts=3, num_ranks=3)
    counts = np.array([3, 4, 0])
    _, room = choose_quotas(layer, counts, np.array([0, 0, 900]), 0, 0.0)
    assert room is not None
    assert room[:2].max() <= 1
    assert room[2] <= 0
