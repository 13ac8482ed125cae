"""Tensors of one or many files are found by name, and index and files must agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_serve.weights.errors import (
    BadConfig,
    BadHeader,
    MissingFile,
    MissingTensor,
    RenamedTensor,
    ShapeMismatch,
    UnsafePath,
    UnsupportedCheckpoint,
)
from moe_serve.weights.near_names import missing_tensor
from moe_serve.weights.paths import find_root
from moe_serve.weights.safetensors_index import (
    FILES_MAX,
    INDEX_FILE,
    SafetensorsIndex,
    open_index,
    tensor_info,
)
from tests.checkpoint_builder import encode, tensors, write_sharded

EMBED = "model.embed_tokens.weight"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def sharded(tmp_path: Path) -> Path:
    return write_sharded(tmp_path / "m", tensors())


def opened(folder: Path) -> SafetensorsIndex:
    return open_index(find_root(folder))


def weight_map(folder: Path) -> dict[str, str]:
    placed: dict[str, str] = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    return placed


def write_map(folder: Path, placed: Any) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": placed, "metadata": {}}))


def test_every_tensor_is_read_from_its_file(tmp_path: Path) -> None:
    index = opened(sharded(tmp_path))
    made = tensors()
    assert set(index.tensors) == set(made)
    assert set(index.stamps) == {FIRST, SECOND}
    for name, array in made.items():
        read = index.read(tensor_info(index, name))
        assert read.dtype == array.dtype
        assert np.array_equal(read, array)


def test_the_single_file_goes_before_the_index(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    (folder / "model.safetensors").write_bytes(encode({"a": np.zeros(1, np.float32)}))
    assert set(opened(folder).tensors) == {"a"}


@pytest.mark.parametrize("difference", [-1, 1])
def test_a_buffer_of_another_length_is_refused(tmp_path: Path, difference: int) -> None:
    index = opened(sharded(tmp_path))
    tensor = tensor_info(index, EMBED)
    out = memoryview(bytearray(tensor.num_bytes + difference))
    with pytest.raises(ShapeMismatch, match=EMBED):
        index.read_into(tensor, out)


def test_a_tensor_the_file_lacks_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    write_map(folder, {**weight_map(folder), "lm_head.weight": FIRST})
    with pytest.raises(MissingTensor, match=rf"'lm_head\.weight' is missing: .* in {FIRST}"):
        opened(folder)


def test_a_tensor_the_file_has_under_another_name_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    placed = weight_map(folder)
    placed["model.embed_token.weight"] = placed.pop(EMBED)
    write_map(folder, placed)
    with pytest.raises(RenamedTensor, match=rf"embed_token\.weight' is.*Did you mean '{EMBED}'"):
        opened(folder)


def test_a_tensor_in_another_file_than_the_index_says_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    placed = weight_map(folder)
    placed[EMBED] = SECOND if placed[EMBED] == FIRST else FIRST
    write_map(folder, placed)
    with pytest.raises(BadConfig, match=f"'{EMBED}' is in {SECOND}, but it is in {FIRST}"):
        opened(folder)


def test_a_tensor_in_two_files_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    (folder / SECOND).write_bytes((folder / FIRST).read_bytes())
    with pytest.raises(BadHeader, match=rf"is in both {FIRST} and {SECOND}"):
        opened(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    (folder / SECOND).unlink()
    with pytest.raises(MissingFile, match=SECOND):
        opened(folder)


@pytest.mark.parametrize(
    "file",
    ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "%2e%2e", "x" * 129, "a\0", ""],
)
def test_a_shard_outside_the_folder_is_refused(tmp_path: Path, file: str) -> None:
    folder = sharded(tmp_path)
    write_map(folder, {EMBED: file})
    with pytest.raises(UnsafePath, match=INDEX_FILE):
        opened(folder)


def test_a_shard_of_another_format_is_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    write_map(folder, {EMBED: "pytorch_model.bin"})
    with pytest.raises(UnsupportedCheckpoint, match=r"pytorch_model\.bin: only \.safetensors"):
        opened(folder)


@pytest.mark.parametrize("placed", [None, [], {"a": 1}, {1: ["b"]}, "x"])
def test_a_malformed_index_is_refused(tmp_path: Path, placed: Any) -> None:
    folder = sharded(tmp_path)
    write_map(folder, placed)
    with pytest.raises(BadConfig, match=f"{INDEX_FILE} is malformed"):
        opened(folder)


def test_an_index_names_at_least_one_file_and_not_too_many(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    for count in (0, FILES_MAX + 1):
        write_map(folder, {f"t{i}": f"{i}.safetensors" for i in range(count)})
        with pytest.raises(BadConfig, match=f"names {count} files, allowed are 1 to {FILES_MAX}"):
            opened(folder)


def test_an_index_over_the_limit_is_refused_unread(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    with (folder / INDEX_FILE).open("r+b") as file:
        file.truncate(64 * 1024 * 1024 + 1)
    with pytest.raises(UnsafePath, match="more than the limit"):
        opened(folder)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match=r"neither model\.safetensors nor"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("there", "near"),
    [
        ("model.layers.1.mlp.experts.2.w3.weights", True),
        ("model.layers.1.mlp.experts.2.w1.weight", True),
        ("model.layers.1.mlp.experts.3.w3.weight", False),  # another expert
        ("model.layers.2.mlp.experts.2.w3.weight", False),  # another layer
        ("something.else.1.of.2", False),
    ],
)
def test_a_near_name_has_the_same_numbers(there: str, near: bool) -> None:
    fault = missing_tensor("model.layers.1.mlp.experts.2.w3.weight", [there], "not found")
    assert isinstance(fault, RenamedTensor) is near
    assert (there in str(fault)) is near


def test_the_nearest_name_is_offered() -> None:
    names = ["model.norm.weights.x", "model.norm.weightz", "lm_head.weight"]
    assert "'model.norm.weightz'" in str(missing_tensor("model.norm.weight", names, "why"))
