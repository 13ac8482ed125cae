"""Conversion between wire dtypes and float32."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from moe_serve.shard.rows import element_bytes, from_float32, raw_dtype, to_float32

SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.5, 3e38, -3e38, 1e-40, 65504.0, 65520.0, np.inf, -np.inf, np.nan],
    np.float32,
)


def _float32_patterns() -> np.ndarray:
    """Random bit patterns (NaNs of any payload and denormals among them), and exact ties."""
    random_bits = np.random.default_rng(3).integers(0, 2**32, 20000, dtype=np.uint32)
    ties = (np.arange(0, 0x7F80, 7, dtype=np.uint32) << np.uint32(16)) | np.uint32(0x8000)
    return np.concatenate([random_bits, ties]).view(np.float32)


def _same(actual: np.ndarray, expected: np.ndarray) -> bool:
    both_nan = np.isnan(actual) & np.isnan(expected)
    bits = np.uint16 if actual.dtype.itemsize == 2 else np.uint32
    return bool(np.all(both_nan | (actual.view(bits) == expected.view(bits))))


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in cast:RuntimeWarning")
def test_bfloat16_rounds_as_ml_dtypes_does() -> None:
    for values in (_float32_patterns(), SPECIAL):
        raw = from_float32(values, "bfloat16")
        assert raw.dtype == np.uint16
        assert _same(
            raw.view(ml_dtypes.bfloat16).astype(np.float32),
            values.astype(ml_dtypes.bfloat16).astype(np.float32),
        )


def test_every_bfloat16_and_float16_widens_exactly_and_comes_back() -> None:
    raw = np.arange(2**16, dtype=np.uint16)
    assert _same(to_float32(raw, "bfloat16"), raw.view(ml_dtypes.bfloat16).astype(np.float32))
    half = raw.view(np.float16)
    assert _same(to_float32(half, "float16"), half.astype(np.float32))
    finite = raw[(raw & 0x7F80) != 0x7F80]
    assert np.array_equal(from_float32(to_float32(finite, "bfloat16"), "bfloat16"), finite)
    assert _same(from_float32(to_float32(half, "float16"), "float16"), half)


def test_float16_overflow_is_infinite_without_a_warning() -> None:
    assert from_float32(np.array([1e6, -1e6], np.float32), "float16").tolist() == [np.inf, -np.inf]


def test_float32_is_not_copied() -> None:
    values = np.ones((2, 3), np.float32)
    assert np.shares_memory(to_float32(values, "float32"), values)
    assert np.shares_memory(from_float32(values, "float32"), values)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_shapes_are_kept_and_out_is_written(dtype: str) -> None:
    values = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)
    raw = from_float32(values, dtype)
    assert (raw.shape, raw.dtype, raw.itemsize) == (
        (3, 4),
        raw_dtype(dtype),
        element_bytes(dtype),
    )
    raw_out = np.zeros_like(raw)
    assert from_float32(values, dtype, out=raw_out) is raw_out
    assert np.array_equal(raw_out, raw)
    wide = np.zeros((3, 4), np.float32)
    assert to_float32(raw, dtype, out=wide) is wide
    assert np.allclose(wide, values, rtol=1e-2)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_read_only_strided_and_unaligned_input(dtype: str) -> None:
    raw = from_float32(np.arange(8, dtype=np.float32).reshape(2, 4), dtype)
    shifted = np.frombuffer(b"x" + raw.tobytes(), raw.dtype, offset=1).reshape(2, 4)
    assert to_float32(shifted, dtype).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert to_float32(raw[:, ::2], dtype).tolist() == [[0, 2], [4, 6]]


def test_wrong_input_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="raw: must be an array of uint16"):
        to_float32(np.zeros(2, np.float32), "bfloat16")
    with pytest.raises(TypeError, match="values: must be an array of float32"):
        from_float32(np.zeros(2), "float16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype: must be one of"):
        raw_dtype("float8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="out: must be C-contiguous"):
        to_float32(np.zeros((2, 2), np.float16), "float16", out=np.zeros((4,), np.float32))
