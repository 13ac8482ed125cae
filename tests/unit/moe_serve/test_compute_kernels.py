"""Each compiled loop of the shard against its numpy reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.shard.compute.batch_tables import batch_tables, row_blocks
from moe_serve.shard.compute.order import order_by_slot
from moe_serve.shard.kernels import (
    add_gated,
    add_work,
    count_absent,
    count_by_slot,
    count_unsound,
    gather_rows,
    scale_rows,
    silu_mul,
    sort_by_key,
    warm,
)


@given(st.lists(st.integers(0, 12), max_size=60))
def test_sort_by_key_is_numpys_stable_sort(keys: list[int]) -> None:
    pair_slot = np.array(keys, np.int32)
    starts, order = np.full(14, 77, np.int32), np.full(len(keys), 77, np.int32)
    used = np.full(13, 77, np.int32)
    num_used = sort_by_key(pair_slot, starts, order, used)
    assert order.tolist() == np.argsort(pair_slot, kind="stable").tolist()
    assert used[:num_used].tolist() == np.unique(pair_slot).tolist()
    assert starts.tolist() == np.searchsorted(np.sort(pair_slot), np.arange(14)).tolist()


@pytest.mark.parametrize("key", [-1, 3, 2**31 - 1])
def test_sort_by_key_refuses_a_key_out_of_range(key: int) -> None:
    scratch = [np.zeros(n, np.int32) for n in (4, 2, 2)]
    assert sort_by_key(np.array([0, key], np.int32), *scratch) == -1


def test_sort_by_key_example() -> None:
    starts, order, used = np.zeros(4, np.int32), np.zeros(3, np.int32), np.zeros(3, np.int32)
    assert sort_by_key(np.array([2, 0, 2], np.int32), starts, order, used) == 2
    assert (order.tolist(), starts.tolist()) == ([1, 0, 2], [0, 1, 1, 3])
    assert used[:2].tolist() == [0, 2]


def test_gather_rows_is_take() -> None:
    rows = np.random.default_rng(1).standard_normal((5, 7)).astype(np.float32)
    index = np.array([4, 0, 4, 2], np.int32)
    out = np.empty((4, 7), np.float32)
    gather_rows(rows, index, out)
    assert np.array_equal(out, rows[index])


def test_add_gated_adds_in_order() -> None:
    rng = np.random.default_rng(2)
    parts = rng.standard_normal((6, 5)).astype(np.float32)
    gates = rng.standard_normal(6).astype(np.float32)
    index = np.array([2, 0, 2, 1, 2, 0], np.int32)
    out = np.ones((4, 5), np.float32)
    expected = out.copy()
    for i, r in enumerate(index):
        expected[r] += gates[i] * parts[i]
    add_gated(out, index, gates, parts)
    # A fused multiply-add may round once where numpy rounds twice.
    assert np.allclose(out, expected, rtol=1e-6, atol=1e-6)
    assert np.array_equal(out[3], np.ones(5, np.float32))


def _silu_mul_reference(gate_up: np.ndarray) -> np.ndarray:
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


def test_silu_mul_is_within_float32_of_float64() -> None:
    gate = np.concatenate([np.linspace(-87, 120, 20001), np.linspace(-2, 2, 20001), [0.0, -0.0]])
    gate_up = np.concatenate([gate, np.ones_like(gate)]).astype(np.float32)[None, :]
    act = np.empty((1, gate.size), np.float32)
    silu_mul(gate_up, act)
    expected = _silu_mul_reference(gate_up)
    error = np.abs(act - expected) / np.maximum(np.abs(expected), 1e-30)
    assert error.max() < 3e-7


def test_silu_mul_at_the_ends() -> None:
    gate = np.array([-88.5, -1e30, -np.inf, 1e30, np.inf, np.nan], np.float32)
    act = np.empty((1, 6), np.float32)
    silu_mul(np.concatenate([gate, np.full(6, 2, np.float32)])[None, :], act)
    assert act[0, :3].tolist() == [0.0, 0.0, 0.0]
    assert act[0, 3:5].tolist() == [np.float32(2e30), np.inf]
    assert np.isnan(act[0, 5])


def test_warm_runs_every_kernel() -> None:
    warm()


def test_order_by_slot_example() -> None:
    order = order_by_slot(np.array([7, 2, 7], np.int32))
    assert order.order.tolist() == [1, 0, 2]
    assert order.slots.tolist() == [2, 7]
    assert (order.begin.tolist(), order.end.tolist()) == ([0, 1], [1, 3])
    assert order.pairs.tolist() == [1, 2]


def test_row_blocks_example() -> None:
    blocks = row_blocks(order_by_slot(np.array([4, 4, 6, 4], np.int32)), 2)
    assert blocks.begin.tolist() == [0, 2, 3]
    assert blocks.end.tolist() == [2, 3, 4]
    assert blocks.group.tolist() == [0, 0, 1]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=80), st.integers(1, 20))
def test_row_blocks_cover_every_pair_once_and_no_block_mixes_slots(
    keys: list[int], block_rows: int
) -> None:
    order = order_by_slot(np.array(keys, np.int32))
    blocks = row_blocks(order, block_rows)
    covered = [p for b, e in zip(blocks.begin, blocks.end, strict=True) for p in range(b, e)]
    assert covered == list(range(len(keys)))
    assert (blocks.end - blocks.begin).max() <= block_rows
    assert (blocks.begin >= order.begin[blocks.group]).all()
    assert (blocks.end <= order.end[blocks.group]).all()


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=50))
def test_combine_table_adds_each_pair_once_with_its_gate(pairs: list[tuple[int, int]]) -> None:
    row = np.array([p[0] for p in pairs], np.int32)
    slot = np.array([p[1] for p in pairs], np.int32)
    gate = np.arange(1, len(pairs) + 1, dtype=np.float32)
    tables = batch_tables(7, row, slot, gate)
    assert tables.row.tolist() == row[tables.order.order].tolist()
    for r in range(7):
        real = tables.combine.part[r] < len(pairs)
        original = tables.order.order[tables.combine.part[r][real]]
        assert original.tolist() == np.flatnonzero(row == r).tolist()
        assert tables.combine.gate[r][real].tolist() == gate[original].tolist()
        assert not tables.combine.gate[r][~real].any()


@given(st.lists(st.integers(0, 12), max_size=60))
def test_count_by_slot_is_numpys_unique(slots: list[int]) -> None:
    found, pairs = count_by_slot(np.array(slots, np.int32))
    expected, counts = np.unique(np.array(slots, np.int32), return_counts=True)
    assert found.tolist() == expected.tolist()
    assert pairs.tolist() == counts.tolist()
    assert count_by_slot(np.array([*slots, -1], np.int32))[0].size == 0


def test_scale_rows_sums_the_gates_of_a_row_and_clears_rows_without_pairs() -> None:
    rows = np.array([[1, 2], [np.inf, np.nan], [3, np.inf]], np.float32)
    out = np.full((3, 2), 7, np.float32)
    pair_row, gates = np.array([0, 2, 0], np.int32), np.array([0.5, -1, 0.25], np.float32)
    scale_rows(rows, pair_row, gates, out)
    assert out.tolist() == [[0.75, 1.5], [0, 0], [-3, -np.inf]]


def test_add_work_adds_from_its_first_key_on() -> None:
    pairs, seconds = np.zeros(6, np.int64), np.zeros(6)
    key = np.array([2, 0, 2], np.int32)
    add_work(pairs, seconds, 3, key, np.array([1, 2, 4]), np.array([0.5, 1.0, 2.0]))
    assert pairs.tolist() == [0, 0, 0, 2, 0, 5]
    assert seconds.tolist() == [0, 0, 0, 1.0, 0, 2.5]


def test_count_absent_clears_pairs_of_other_experts_and_names_the_slots_of_the_rest() -> None:
    keys = np.array([10, 11, 12, 13], np.int32)
    slot, expert = np.array([0, 1, 9, 3], np.int32), np.array([0, 2, 0, 3], np.int32)
    resident, named = np.array([True, True, False, True]), np.zeros(4, np.bool_)
    assert count_absent(resident, named, keys, slot, expert, 10) == 2
    assert resident.tolist() == [True, False, False, True]
    assert named.tolist() == [True, False, False, True]


def test_count_unsound_finds_each_fault() -> None:
    def unsound(**changed: list[float]) -> bool:
        parts = {
            "row_id": [4, 9],
            "row": [0, 0, 1],
            "slot": [5, 5, 0],
            "gate": [1, -1, 0],
            "k": [0, 1, 1],
            "expert": [0, 7, 3],
        }
        parts |= changed  # type: ignore[arg-type]
        kinds = {"gate": np.float32}
        arrays = [np.array(v, kinds.get(name, np.int32)) for name, v in parts.items()]
        return bool(count_unsound(*arrays, 8, 2))

    top = 2**31 - 1
    assert not unsound()
    for changed in (
        {"row_id": [-1, 9]},
        {"row_id": [top, 9]},
        {"row": [0, 0, 2]},
        {"row": [0, 0, -1]},
        {"slot": [5, -5, 0]},
        {"slot": [5, top, 0]},
        {"gate": [1, np.nan, 0]},
        {"gate": [1, np.inf, 0]},
        {"k": [0, 2, 1]},
        {"k": [0, -1, 1]},
        {"k": [1, 1, 1]},
        {"expert": [0, 8, 3]},
        {"expert": [0, -1, 3]},
        {"slot": [5, 5]},
        {"gate": [1, 1]},
        {"k": [0, 1]},
        {"expert": [0, 1]},
        {"row_id": [4]},
    ):
        assert unsound(**changed), changed
