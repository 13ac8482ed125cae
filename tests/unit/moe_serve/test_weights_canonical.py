"""The canonical form: fused gate|up [H, 2F], then down [F, H], in the serving dtype."""

from __future__ import annotations

import hashlib
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from moe_serve.weights.canonical import (
    canonical_digest,
    canonical_from_projections,
    canonical_views,
    expert_bytes,
    write_projection,
)
from moe_serve.weights.dtypes import (
    SERVING_DTYPES,
    ServingDtype,
    first_non_finite,
    numpy_dtype,
    serving_dtype,
)
from moe_serve.weights.errors import ShapeMismatch, UnsupportedCheckpoint

HIDDEN, WIDTH = 300, 130  # not multiples of the tile, and more than one tile each way


def matrices(dtype: Any, hidden: int = HIDDEN, width: int = WIDTH) -> list[npt.NDArray[Any]]:
    rng = np.random.default_rng(3)
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", SERVING_DTYPES)
def test_bytes_are_as_documented(dtype: ServingDtype) -> None:
    gate, up, down = matrices(numpy_dtype(dtype))
    content = canonical_from_projections(gate, up, down, dtype)
    documented = np.concatenate([gate.T, up.T], axis=1).tobytes() + down.T.tobytes()
    assert content.dtype == np.uint8
    assert content.tobytes() == documented
    assert content.size == expert_bytes(HIDDEN, WIDTH, dtype)
    assert canonical_digest(content) == hashlib.sha256(documented).hexdigest()
    assert canonical_digest(memoryview(documented)) == hashlib.sha256(documented).hexdigest()


def test_the_size_formula() -> None:
    assert expert_bytes(128, 64, "float32") == 98_304
    assert expert_bytes(7168, 2048, "bfloat16") == 88_080_384


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
def test_values_are_converted_by_rounding(stored: Any, dtype: ServingDtype) -> None:
    gate, up, down = matrices(stored)
    content = canonical_from_projections(gate, up, down, dtype)
    views = canonical_views(content, HIDDEN, WIDTH, dtype)
    kind = numpy_dtype(dtype)
    assert np.array_equal(views.gate_up[:, :WIDTH], gate.T.astype(kind))
    assert np.array_equal(views.gate_up[:, WIDTH:], up.T.astype(kind))
    assert np.array_equal(views.down, down.T.astype(kind))


def test_an_expert_computed_from_the_views_is_the_model_s() -> None:
    gate, up, down = matrices(np.float64)
    x = np.random.default_rng(4).standard_normal((5, HIDDEN))
    silu = (x @ gate.T) / (1 + np.exp(-(x @ gate.T)))
    expected = (silu * (x @ up.T)) @ down.T
    views = canonical_views(
        canonical_from_projections(gate, up, down, "float32"), HIDDEN, WIDTH, "float32"
    )
    g, u = np.split(x @ views.gate_up, 2, axis=1)
    assert np.allclose((g / (1 + np.exp(-g)) * u) @ views.down, expected, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("dtype", SERVING_DTYPES)
def test_views_share_memory_with_the_buffer(dtype: ServingDtype) -> None:
    buffer = bytearray(expert_bytes(3, 2, dtype))
    views = canonical_views(memoryview(buffer), 3, 2, dtype)
    views.gate_up[0, 0] = 1
    views.down[1, 2] = 1
    one = np.ones(1, numpy_dtype(dtype)).tobytes()
    assert buffer[: len(one)] == one
    assert buffer[-len(one) :] == one
    assert sum(buffer) == 2 * sum(one)


def test_views_of_a_read_only_buffer_are_read_only() -> None:
    views = canonical_views(bytes(expert_bytes(3, 2, "float32")), 3, 2, "float32")
    with pytest.raises(ValueError, match="read-only"):
        views.down[0, 0] = 1


@pytest.mark.parametrize("difference", [-1, 1, -4, 4])
def test_a_buffer_of_another_length_is_refused(difference: int) -> None:
    buffer = bytes(expert_bytes(3, 2, "float32") + difference)
    with pytest.raises(ShapeMismatch, match=f"a buffer of {len(buffer)} bytes .* has 72 bytes"):
        canonical_views(buffer, 3, 2, "float32")


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_matrix_of_another_shape_is_refused(which: int) -> None:
    made = matrices(np.float32, 3, 2)
    made[which] = made[which][:-1] if which else made[which][:, 0]
    with pytest.raises(ShapeMismatch, match=("gate", "up", "down")[which]):
        canonical_from_projections(*made, "float32")


def test_a_transposed_matrix_is_refused() -> None:
    views = canonical_views(bytearray(expert_bytes(3, 2, "float32")), 3, 2, "float32")
    with pytest.raises(ShapeMismatch, match=r"down matrix has shape \[2, 3\], expected \[3, 2\]"):
        write_projection(views, "down", np.zeros((2, 3), np.float32))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", SERVING_DTYPES)
def test_the_first_non_finite_value_is_found(dtype: ServingDtype, value: float) -> None:
    limits = ml_dtypes.finfo(numpy_dtype(dtype))
    matrix = np.full((700, 600), limits.max, numpy_dtype(dtype))
    matrix[:, 1::2] = limits.smallest_subnormal
    assert first_non_finite(matrix) is None
    for place in ((699, 599), (690, 3), (0, 7), (0, 0)):
        matrix[place] = value
        assert first_non_finite(matrix) == place


def test_a_part_of_a_matrix_is_scanned_without_its_rest() -> None:
    matrix = np.zeros((4, 6), np.float32)
    matrix[2, 4] = np.nan
    assert first_non_finite(matrix[:, :3]) is None
    assert first_non_finite(matrix[:, 3:]) == (2, 1)


def test_serving_dtypes_are_checked() -> None:
    assert [serving_dtype(name) for name in SERVING_DTYPES] == list(SERVING_DTYPES)
    with pytest.raises(UnsupportedCheckpoint, match="'float64' is not supported: choose one of"):
        serving_dtype("float64")
