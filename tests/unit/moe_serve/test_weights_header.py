"""A safetensors header is believed only after every number in it was checked."""

from __future__ import annotations

import json
import pickle
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_serve.weights.errors import BadHeader, TruncatedFile, WeightsError
from moe_serve.weights.header import DIM_MAX, HEADER_BYTES_MAX, TensorInfo, read_header
from moe_serve.weights.paths import find_root
from tests.checkpoint_builder import encode, entry, raw_file

FILE = "model.safetensors"
REFUSAL_BYTES_MAX = 1 << 20


def parsed(tmp_path: Path, content: bytes) -> list[TensorInfo]:
    (tmp_path / FILE).write_bytes(content)
    return read_header(find_root(tmp_path), FILE)[1]


def refused(
    tmp_path: Path, kind: type[WeightsError], match: str, header: Mapping[str, Any], data: bytes
) -> None:
    with pytest.raises(kind, match=match):
        parsed(tmp_path, raw_file(header, data))


def test_a_file_of_the_library_is_understood(tmp_path: Path) -> None:
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(3, dtype=np.float16)
    content = encode({"a": a, "b": b})
    found = {tensor.name: tensor for tensor in parsed(tmp_path, content)}
    assert (found["a"].dtype, found["a"].shape, found["a"].num_bytes) == ("F32", (2, 3), 24)
    assert (found["b"].dtype, found["b"].shape, found["b"].num_bytes) == ("F16", (3,), 6)
    for name, array in (("a", a), ("b", b)):
        start = found[name].offset_bytes
        assert content[start : start + array.nbytes] == array.tobytes()
        assert found[name].file == FILE


def test_metadata_scalars_and_empty_tensors_are_fine(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "empty": entry(0, 0, [0, 7]),
        "scalar": entry(0, 4, []),
        "last": entry(4, 4, [0]),
    }
    found = parsed(tmp_path, raw_file(header, bytes(4)))
    assert [(tensor.name, tensor.shape) for tensor in found] == [
        ("empty", (0, 7)),
        ("scalar", ()),
        ("last", (0,)),
    ]


def test_a_header_over_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    content = raw_file({"a": entry(0, 4, [1])}, bytes(4), declared=HEADER_BYTES_MAX + 1)
    (tmp_path / FILE).write_bytes(content)
    with (tmp_path / FILE).open("r+b") as file:
        file.truncate(HEADER_BYTES_MAX * 2)  # sparse: the declared bytes really are there
    tracemalloc.start()
    with pytest.raises(BadHeader, match=f"{HEADER_BYTES_MAX + 1} bytes, more than the limit"):
        read_header(find_root(tmp_path), FILE)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < REFUSAL_BYTES_MAX


def test_a_header_at_the_limit_is_read(tmp_path: Path) -> None:
    text = json.dumps({"a": entry(0, 4, [1])}).encode()
    assert parsed(tmp_path, raw_file(text.ljust(HEADER_BYTES_MAX), bytes(4)))[0].name == "a"


@pytest.mark.parametrize("declared", [2**63, 2**64 - 1])
def test_a_header_size_that_would_overflow_is_refused(tmp_path: Path, declared: int) -> None:
    with pytest.raises(BadHeader, match=str(declared)):
        parsed(tmp_path, raw_file({}, b"", declared=declared))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"PK\x03\x04" + bytes(100), "zip archive"),
        (pickle.dumps({"a": 1}, protocol=4), "pickle"),
        (b"\x93NUMPY\x01\x00" + bytes(100), "numpy"),
        (b"GGUF\x03\x00\x00\x00" + bytes(100), "GGUF"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ],
)
def test_another_format_is_named(tmp_path: Path, content: bytes, what: str) -> None:
    with pytest.raises(BadHeader, match=what):
        parsed(tmp_path, content)


@pytest.mark.parametrize("size", [0, 1, 7])
def test_a_file_without_a_whole_header_size_is_truncated(tmp_path: Path, size: int) -> None:
    with pytest.raises(TruncatedFile, match=f"has {size} bytes, fewer than the 8"):
        parsed(tmp_path, bytes(size))


def test_a_file_cut_in_its_header_is_truncated(tmp_path: Path) -> None:
    content = raw_file({"a": entry(0, 4, [1])}, b"")
    with pytest.raises(TruncatedFile, match=f"its header alone needs {len(content)}"):
        parsed(tmp_path, content[:-1])


def test_one_byte_short_names_the_tensor_that_is_cut(tmp_path: Path) -> None:
    content = encode({"a": np.zeros(4, np.float32), "b": np.zeros(4, np.float32)})
    with pytest.raises(TruncatedFile, match=r"tensor 'b' ends at byte \d+: 1 bytes or more"):
        parsed(tmp_path, content[:-1])


def test_one_byte_too_many_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadHeader, match="1 bytes after its last tensor"):
        parsed(tmp_path, encode({"a": np.zeros(4, np.float32)}) + b"x")


def test_a_hole_is_refused(tmp_path: Path) -> None:
    header = {"a": entry(0, 4, [1]), "b": entry(5, 9, [1])}
    refused(tmp_path, BadHeader, "tensor 'b'.*leaves a hole before", header, bytes(9))
    refused(tmp_path, BadHeader, "tensor 'a'.*hole", {"a": entry(4, 8, [1])}, bytes(8))


def test_an_overlap_is_refused(tmp_path: Path) -> None:
    header = {"a": entry(0, 4, [1]), "b": entry(3, 7, [1])}
    refused(tmp_path, BadHeader, "tensor 'b'.*overlaps", header, bytes(7))
    same = {"a": entry(0, 4, [1]), "b": entry(0, 4, [1])}
    refused(tmp_path, BadHeader, "overlaps", same, bytes(4))


@pytest.mark.parametrize(
    "shape",
    [
        [2**31, 2**31],
        [DIM_MAX + 1],
        [0, 2**31],
        [0, 2**63],
        [0, 2**70],
        [-1, 4],
        [-1, -4],
        [1.5],
        ["4"],
        [True],
        [1] * 9,
    ],
)
def test_a_shape_out_of_range_is_refused_before_allocation(
    tmp_path: Path, shape: list[Any]
) -> None:
    tracemalloc.start()
    refused(tmp_path, BadHeader, "tensor 'a'.*malformed", {"a": entry(0, 4, shape)}, bytes(4))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < REFUSAL_BYTES_MAX


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ([DIM_MAX, DIM_MAX], "F32"),
        ([DIM_MAX] * 8, "F64"),  # the product wraps to a small number in 64 bits
        ([2], "F32"),
        ([1], "F64"),
        ([1], "F16"),
        ([0], "F32"),
        ([7], "F4"),
        ([2**16, 2**16, 2**16, 2**16], "F32"),  # 2**66 bytes: 0 in 64 bits
    ],
)
def test_a_shape_that_does_not_make_the_bytes_is_refused(
    tmp_path: Path, shape: list[int], dtype: str
) -> None:
    header = {"a": entry(0, 4, shape, dtype)}
    refused(tmp_path, BadHeader, r"tensor 'a'.*byte range \[0, 4\)", header, bytes(4))


def test_a_shape_that_is_no_bytes_only_by_overflow_is_refused(tmp_path: Path) -> None:
    header = {"a": entry(0, 0, [2**16] * 4)}  # 2**66 bytes, which is 0 in 64 bits
    refused(tmp_path, BadHeader, r"73786976294838206464 bytes, but", header, b"")


@pytest.mark.parametrize("offsets", [[-1, 3], [4, 0], [0], [0, 4, 8], "04", [0, 2**63]])
def test_offsets_that_are_no_range_are_refused(tmp_path: Path, offsets: Any) -> None:
    header = {"a": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}
    refused(tmp_path, BadHeader, "tensor 'a'", header, bytes(4))


def test_a_range_past_the_file_is_a_truncation(tmp_path: Path) -> None:
    header = {"a": entry(0, 4 * DIM_MAX, [DIM_MAX])}
    refused(tmp_path, TruncatedFile, "tensor 'a'.*are missing", header, bytes(4))


def test_an_unknown_dtype_or_field_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, BadHeader, "unknown dtype 'F99'", {"a": entry(0, 4, [1], "F99")}, bytes(4))
    extra = {"a": {**entry(0, 4, [1]), "scale": 2}}
    refused(tmp_path, BadHeader, "tensor 'a'.*scale", extra, bytes(4))


@pytest.mark.parametrize(
    "text", [b"", b"not json", b"[]", b"\xff\xfe{}", b"[" * 100_000, b'{"a": ' * 100_000]
)
def test_text_that_is_not_an_object_is_refused(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(BadHeader, match="not a JSON object of tensors"):
        parsed(tmp_path, raw_file(text, b""))


def test_a_long_name_is_cut_in_the_message(tmp_path: Path) -> None:
    with pytest.raises(BadHeader, match="100000 characters") as fault:
        parsed(tmp_path, raw_file({"x" * 100_000: entry(0, 4, [2])}, bytes(4)))
    assert len(str(fault.value)) < 1000
