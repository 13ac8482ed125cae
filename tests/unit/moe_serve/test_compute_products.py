"""The choice of a matrix product on a CPU, and the product of our own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest
import torch

from moe_serve.shard.compute.base import ExpertSpec
from moe_serve.shard.compute.numpy_backend import NumpyBackend
from moe_serve.shard.compute.products import (
    ROW_BUCKETS,
    SKINNY_ROWS_MAX,
    TORCH_LEAST_ELEMENTS,
    measured_products,
    unmeasured_products,
)
from moe_serve.shard.kernels import skinny_matmul

SMALL = ExpertSpec(32, 16)
LARGE = ExpertSpec(512, 192)


@pytest.mark.parametrize("rows", [1, 2, 8, 9])
@pytest.mark.parametrize("depth", [1, 7, 8, 19, 64])
@pytest.mark.parametrize("width", [1, 16, 33])
def test_skinny_matmul_is_matmul(rows: int, depth: int, width: int) -> None:
    rng = np.random.default_rng(rows * depth * width)
    left = rng.standard_normal((rows, depth)).astype(np.float32)
    right = rng.standard_normal((depth, width)).astype(np.float32)
    out = np.full((rows, width), np.nan, np.float32)
    skinny_matmul(left, right, out)
    expected = left.astype(np.float64) @ right.astype(np.float64)
    scale = np.abs(left).astype(np.float64) @ np.abs(right).astype(np.float64)
    assert (np.abs(out - expected) <= 1e-6 * scale).all()


def test_skinny_matmul_keeps_a_nan_in_its_row() -> None:
    left = np.ones((3, 16), np.float32)
    left[1, 5] = np.nan
    out = np.empty((3, 4), np.float32)
    skinny_matmul(left, np.ones((16, 4), np.float32), out)
    assert np.isnan(out[1]).all()
    assert (out[[0, 2]] == 16).all()


def test_a_number_of_rows_uses_the_next_measured_bucket_or_the_last() -> None:
    table = unmeasured_products()
    marked = type(table)(names=table.names, products=tuple(range(len(ROW_BUCKETS))))  # type: ignore[arg-type]
    asked = [1, 2, 3, 4, 5, 64, 65, 128, 129, 10_000]
    assert [marked.of(rows) for rows in asked] == [0, 1, 2, 2, 3, 6, 7, 7, 7, 7]


def test_small_experts_are_not_offered_torch_and_many_rows_not_our_own_product() -> None:
    assert SMALL.elements < TORCH_LEAST_ELEMENTS
    ticks = count()
    table = measured_products(
        SMALL, clock=lambda: -(float(next(ticks)) ** 2)
    )  # the last offer wins
    assert table.names == tuple(
        "compiled" if rows <= SKINNY_ROWS_MAX else "numpy" for rows in ROW_BUCKETS
    )
    assert len(table.products) == len(ROW_BUCKETS)


def test_a_tie_goes_to_numpy() -> None:
    assert set(measured_products(SMALL, clock=lambda: 0.0).names) == {"numpy"}


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """As in a shard; several on a busy machine spend seconds waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_torch_thread")
def test_whatever_was_chosen_multiplies() -> None:
    assert LARGE.elements >= TORCH_LEAST_ELEMENTS
    backend = NumpyBackend(LARGE)
    assert set(backend.products.names) == {"numpy"}
    backend.warm_up()
    assert set(backend.products.names) <= {"numpy", "compiled", "torch"}
    weights = np.random.default_rng(1).standard_normal((512, 384)).astype(np.float32)
    for rows in ROW_BUCKETS:
        left = np.random.default_rng(rows).standard_normal((rows, 512)).astype(np.float32)
        out = np.empty((rows, 384), np.float32)
        backend.products.of(rows)(left, weights, out)
        assert np.allclose(out, left @ weights, rtol=1e-4, atol=1e-4)
