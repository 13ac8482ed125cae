"""All tensors of a checkpoint, found by name over one or many safetensors files.

Responsible for: which files belong to the checkpoint, which file holds a tensor, reading its bytes.
Must never: load a file as a whole, read pickled formats, or return bytes of a file that is not the
one that was indexed.
Called by: `checkpoint`, `build`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from moe_serve.weights.dtypes import stored_numpy_dtype
from moe_serve.weights.errors import (
    BadConfig,
    BadHeader,
    ChangedFile,
    MissingFile,
    ShapeMismatch,
    UnsupportedCheckpoint,
    shown,
)
from moe_serve.weights.header import TensorInfo, read_header
from moe_serve.weights.near_names import missing_tensor
from moe_serve.weights.paths import (
    CheckpointRoot,
    FileStamp,
    check_name,
    has_file,
    open_file,
    read_exactly,
    read_small_file,
)

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"

INDEX_BYTES_MAX: Final = 64 * 1024 * 1024
"""Largest index file read; that of a 671B model has 9 MB."""

FILES_MAX: Final = 4096
"""Most safetensors files of one checkpoint; a 671B model has 163."""

_PICKLE_SUFFIXES: Final = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")


class _IndexFile(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


@dataclass(frozen=True)
class SafetensorsIndex:
    """Tensors by name, and the stamp of every file they lie in (in the order of file names)."""

    root: CheckpointRoot
    tensors: Mapping[str, TensorInfo]
    stamps: Mapping[str, FileStamp]

    def read_into(
        self,
        tensor: TensorInfo,
        out: memoryview,
        came: Callable[[int], None] = lambda _num_bytes: None,
    ) -> None:
        """Fill `out`, exactly `tensor.num_bytes` bytes, with the tensor's bytes as stored. `came`
        is told the bytes of each chunk and may raise to end the reading.

        Raises `ChangedFile` if the file was replaced since it was indexed, `TruncatedFile`.
        """
        if len(out) != tensor.num_bytes:
            raise ShapeMismatch(
                f"tensor {shown(tensor.name)} has {tensor.num_bytes} bytes, the buffer given for "
                f"it {len(out)}; give a buffer of that length"
            )
        with open_file(self.root, tensor.file) as (descriptor, stamp):
            if stamp != self.stamps[tensor.file]:
                raise ChangedFile(
                    f"file {tensor.file}, read for tensor {shown(tensor.name)}, was replaced or "
                    "written after the checkpoint was opened; open the checkpoint again"
                )
            read_exactly(descriptor, tensor.file, tensor.offset_bytes, out, came)

    def read(self, tensor: TensorInfo) -> npt.NDArray[Any]:
        """The tensor as a new array of its shape, in its stored dtype."""
        dtype = stored_numpy_dtype(tensor.dtype, tensor.name)
        content = np.empty(tensor.num_bytes, np.uint8)
        self.read_into(tensor, content.data)
        return content.view(dtype).reshape(tensor.shape)


def open_index(root: CheckpointRoot) -> SafetensorsIndex:
    """Index the checkpoint's tensors by reading headers only.

    `model.safetensors` goes before `model.safetensors.index.json`, the order in which the
    transformers library looks, so that front end and shards read the same bytes. Raises
    `MissingFile`, `UnsupportedCheckpoint` (only pickled weights there), `BadConfig`, `BadHeader`,
    `MissingTensor`, `RenamedTensor`, `TruncatedFile`, `UnsafePath`.
    """
    if has_file(root, SINGLE_FILE):
        return _index_files(root, [SINGLE_FILE])
    if has_file(root, INDEX_FILE):
        weight_map = _read_weight_map(root)
        index = _index_files(root, sorted(set(weight_map.values())))
        _check_weight_map(weight_map, index)
        return index
    raise _no_weights(root)


def _index_files(root: CheckpointRoot, files: Iterable[str]) -> SafetensorsIndex:
    tensors: dict[str, TensorInfo] = {}
    stamps: dict[str, FileStamp] = {}
    for file in files:
        stamps[file], found = read_header(root, file)
        for tensor in found:
            twin = tensors.setdefault(tensor.name, tensor)
            if twin is not tensor:
                raise BadHeader(
                    f"tensor {shown(tensor.name)} is in both {twin.file} and {file}; "
                    "remove the file that does not belong to the checkpoint"
                )
    return SafetensorsIndex(root, MappingProxyType(tensors), MappingProxyType(stamps))


def _read_weight_map(root: CheckpointRoot) -> dict[str, str]:
    content, _ = read_small_file(root, INDEX_FILE, INDEX_BYTES_MAX)
    try:
        weight_map = msgspec.json.decode(content, type=_IndexFile).weight_map
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as fault:
        raise BadConfig(
            f"{INDEX_FILE} is malformed: {fault}; it must hold an object weight_map of tensor name "
            "-> file name; fetch the file again"
        ) from fault
    files = set(weight_map.values())
    if not 1 <= len(files) <= FILES_MAX:
        raise BadConfig(
            f"{INDEX_FILE} names {len(files)} files, allowed are 1 to {FILES_MAX}; "
            "fetch the file again"
        )
    for file in files:
        check_name(file, f"file name in {INDEX_FILE}")
        if not file.endswith(".safetensors"):
            raise UnsupportedCheckpoint(
                f"{INDEX_FILE} names {file}: only .safetensors files are read; "
                "convert the checkpoint"
            )
    return weight_map


def _check_weight_map(weight_map: dict[str, str], index: SafetensorsIndex) -> None:
    for name, file in weight_map.items():
        tensor = index.tensors.get(name)
        if tensor is not None and tensor.file == file:
            continue
        if tensor is not None:
            raise BadConfig(
                f"{INDEX_FILE} says tensor {shown(name)} is in {file}, but it is in {tensor.file}; "
                "fetch the checkpoint again"
            )
        unlisted = (other for other in index.tensors if other not in weight_map)
        raise missing_tensor(
            name, unlisted, f"{INDEX_FILE} says it is in {file}, whose header lacks it"
        )


def _no_weights(root: CheckpointRoot) -> MissingFile | UnsupportedCheckpoint:
    with os.scandir(root.folder) as entries:
        names = sorted(entry.name for entry in entries)
    pickles = [name for name in names if name.lower().endswith(_PICKLE_SUFFIXES)]
    if pickles:
        return UnsupportedCheckpoint(
            f"checkpoint folder {shown(root.folder)} has pickled weights only "
            f"({shown(pickles[0])}); such files are never loaded: save the model as safetensors"
        )
    return MissingFile(
        f"neither {SINGLE_FILE} nor {INDEX_FILE} is in checkpoint folder {shown(root.folder)}; "
        "fetch the checkpoint again"
    )


def tensor_info(index: SafetensorsIndex, name: str) -> TensorInfo:
    """The entry of tensor `name`; `RenamedTensor` or `MissingTensor` if there is none."""
    tensor = index.tensors.get(name)
    if tensor is None:
        raise missing_tensor(name, index.tensors, "no file of the checkpoint has it")
    return tensor
