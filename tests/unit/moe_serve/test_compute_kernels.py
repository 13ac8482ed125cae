"""Each compiled loop of the shard against its numpy reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.shard.compute.batch_tables import batch_tables, row_blocks
from moe_serve.shard.compute.order import order_by_slot
from moe_serve.shard.kernels import add_gated, gather_rows, silu_mul, sort_by_key, warm


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
