"""Checks one safetensors header before anything is allocated from it.

Responsible for: the declared size, JSON, names, dtypes, shapes and byte ranges of one file.
Must never: trust a declared number, allocate by it, or read tensor bytes.
Called by: `safetensors_index`.

File format: 8 bytes little-endian header size N; N bytes of JSON, padded with spaces; then the
data, where each tensor occupies `[begin, end)` counted from the end of the header. Checked here:
N is within the limit and the file; the ranges cover all the data with no hole and no overlap; the
product of the shape times the bits of the dtype is 8 x (end - begin), in integers that do not
overflow.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from moe_serve.weights.dtypes import STORED_BITS
from moe_serve.weights.errors import BadHeader, TruncatedFile, shown
from moe_serve.weights.paths import CheckpointRoot, FileStamp, open_file, read_exactly

HEADER_BYTES_MAX: Final = 16 * 1024 * 1024
"""Largest header read. 92,000 tensors, all those of a 671B model, need 13 MB in one file."""

DIM_MAX: Final = 2**31 - 1
"""Largest extent of one dimension, also of an empty tensor."""

RANK_MAX: Final = 8
"""Most dimensions of a tensor."""

NAME_CHARS_MAX: Final = 512
"""Longest name of a tensor; those of published models stay below 100 characters."""

_PREFIX_BYTES: Final = 8
_METADATA: Final = "__metadata__"
_MAGIC: Final = (
    (b"PK\x03\x04", "a zip archive, probably a pickled PyTorch file"),
    (b"\x80", "a Python pickle"),
    (b"\x93NUMPY", "a numpy file"),
    (b"GGUF", "a GGUF file"),
    (b"version ", "a Git LFS pointer: fetch the real file"),
)

_Extent = Annotated[int, msgspec.Meta(ge=0, le=DIM_MAX)]
_Offset = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[list[_Extent], msgspec.Meta(max_length=RANK_MAX)]
    data_offsets: tuple[_Offset, _Offset]


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies. `dtype` is the safetensors code; `offset_bytes` counts from the start
    of file `file`; `num_bytes` equals the product of `shape` times the size of the dtype."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset_bytes: int
    num_bytes: int


def read_header(root: CheckpointRoot, file: str) -> tuple[FileStamp, list[TensorInfo]]:
    """Stamp and tensors of one safetensors file, in file order.

    Raises `BadHeader`, `TruncatedFile`, and what `open_file` raises.
    """
    with open_file(root, file) as (descriptor, stamp):
        if stamp.size_bytes < _PREFIX_BYTES:
            raise TruncatedFile(
                f"file {file} has {stamp.size_bytes} bytes, fewer than the {_PREFIX_BYTES} that "
                "hold the header size; fetch the file again"
            )
        prefix = bytearray(_PREFIX_BYTES)
        read_exactly(descriptor, file, 0, memoryview(prefix))
        header_bytes = _checked_header_size(bytes(prefix), file, stamp.size_bytes)
        text = bytearray(header_bytes)
        read_exactly(descriptor, file, _PREFIX_BYTES, memoryview(text))
    data_start = _PREFIX_BYTES + header_bytes
    tensors = _parse(bytes(text), file, data_start)
    _check_ranges(tensors, file, data_start, stamp.size_bytes)
    return stamp, tensors


def _checked_header_size(prefix: bytes, file: str, file_bytes: int) -> int:
    size = int.from_bytes(prefix, "little")
    if size > HEADER_BYTES_MAX:
        looks = next((what for magic, what in _MAGIC if prefix.startswith(magic)), None)
        raise BadHeader(
            f"file {file} declares a header of {size} bytes, more than the limit of "
            f"{HEADER_BYTES_MAX}; "
            + (f"it looks like {looks}" if looks else "it is not a safetensors file")
        )
    if _PREFIX_BYTES + size > file_bytes:
        raise TruncatedFile(
            f"file {file} has {file_bytes} bytes, but its header alone needs "
            f"{_PREFIX_BYTES + size}; fetch the file again"
        )
    return size


def _parse(text: bytes, file: str, data_start: int) -> list[TensorInfo]:
    try:
        entries = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        # Readers differ in which of two entries they take: then front end and shards would not see
        # the same bytes.
        json.loads(text, object_pairs_hook=_distinct)
    except (msgspec.DecodeError, RecursionError, ValueError) as fault:
        raise BadHeader(
            f"the header of {file} is not a JSON object of tensors ({fault!s:.200}); fetch the "
            "file again"
        ) from fault
    tensors = [
        _tensor(name, raw, file, data_start) for name, raw in entries.items() if name != _METADATA
    ]
    tensors.sort(key=lambda tensor: (tensor.offset_bytes, tensor.num_bytes))
    return tensors


def _distinct(pairs: list[tuple[str, object]]) -> None:
    """Keeps nothing of an object of JSON; ValueError where it has a name twice."""
    if len({name for name, _ in pairs}) == len(pairs):
        return
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise ValueError(f"{shown(name)} is there twice")
        seen.add(name)


def _tensor(name: str, raw: msgspec.Raw, file: str, data_start: int) -> TensorInfo:
    where = f"tensor {shown(name)} in the header of {file}"
    if len(name) > NAME_CHARS_MAX:
        raise BadHeader(
            f"{where} has a name longer than {NAME_CHARS_MAX} characters; fetch the file again"
        )
    try:
        entry = msgspec.json.decode(raw, type=_Entry)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as fault:
        raise BadHeader(f"{where} is malformed: {fault!s:.200}; fetch the file again") from fault
    if entry.dtype not in STORED_BITS:
        raise BadHeader(
            f"{where} has the unknown dtype {shown(entry.dtype)}; known are "
            f"{', '.join(STORED_BITS)}; convert the checkpoint"
        )
    begin, end = entry.data_offsets
    num_bits = math.prod(entry.shape) * STORED_BITS[entry.dtype]
    if num_bits != 8 * (end - begin):
        raise BadHeader(
            f"{where} declares shape {entry.shape} of {entry.dtype}, that is {num_bits // 8} bytes,"
            f" but the byte range [{begin}, {end}); fetch the file again"
        )
    return TensorInfo(name, entry.dtype, tuple(entry.shape), file, data_start + begin, end - begin)


def _check_ranges(tensors: list[TensorInfo], file: str, data_start: int, file_bytes: int) -> None:
    position = data_start
    for tensor in tensors:
        begin, end = tensor.offset_bytes, tensor.offset_bytes + tensor.num_bytes
        if begin != position:
            kind = "leaves a hole before" if begin > position else "overlaps the one before"
            raise BadHeader(
                f"tensor {shown(tensor.name)} in {file} begins at byte {begin} where {position} is "
                f"expected: it {kind} it; fetch the file again"
            )
        if end > file_bytes:
            raise TruncatedFile(
                f"file {file} has {file_bytes} bytes, but tensor {shown(tensor.name)} ends at byte "
                f"{end}: {end - file_bytes} bytes or more are missing; fetch the file again"
            )
        position = end
    if position != file_bytes:
        raise BadHeader(
            f"file {file} has {file_bytes - position} bytes after its last tensor; "
            "fetch the file again"
        )
