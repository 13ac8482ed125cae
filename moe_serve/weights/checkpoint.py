"""A checkpoint on disk, opened and proved complete, read one expert at a time.

Responsible for: what the model is (`CheckpointSpec`), canonical bytes of single experts, and the
tensors a front end needs.
Must never: hold more than one tensor beyond what the caller gave room for, or return bytes that
hold a NaN or an infinity.
Called by: bootstrap and CLI (spec, manifest), the shard (experts), front ends (other tensors).

`layer` is everywhere the ordinal of a MoE layer, 0..num_layers-1; `layer_ids[layer]` is the
checkpoint's own number. Objects are immutable, may be used from many threads, and keep no file
open.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from moe_serve.weights.binding import ExpertTensors, bind_experts, non_expert_tensors
from moe_serve.weights.canonical import (
    PROJECTIONS,
    ExpertViews,
    Projection,
    canonical_digest,
    canonical_views,
    expert_bytes,
    write_projection,
)
from moe_serve.weights.dtypes import ServingDtype, first_non_finite, numpy_dtype, serving_dtype
from moe_serve.weights.errors import BadConfig, NonFiniteTensor, ShapeMismatch, shown
from moe_serve.weights.header import TensorInfo
from moe_serve.weights.manifest import (
    ExpertDigest,
    FileFingerprint,
    Manifest,
    TensorDigest,
    check_canonical_digest,
    check_expert,
    check_tensor_digest,
)
from moe_serve.weights.naming import CONFIG_FILE, MoeConfig, parse_config
from moe_serve.weights.paths import (
    CheckpointRoot,
    FileStamp,
    check_name,
    default_model_name,
    find_root,
    read_small_file,
)
from moe_serve.weights.reading import UNINTERRUPTED, Reading
from moe_serve.weights.safetensors_index import SafetensorsIndex, open_index, tensor_info

CONFIG_BYTES_MAX: Final = 1024 * 1024
"""Largest `config.json` read."""


@dataclass(frozen=True)
class CheckpointSpec:
    """What a checkpoint serves. `dtype` is the format the experts are stored in, the natural
    serving dtype; `layer_ids[layer]` is the checkpoint's number of MoE layer `layer`."""

    model_name: str
    model_type: str
    num_layers: int
    layer_ids: tuple[int, ...]
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    dtype: ServingDtype

    def expert_bytes(self, dtype: ServingDtype) -> int:
        """Bytes of one expert in serving dtype `dtype`."""
        return expert_bytes(self.hidden_size, self.intermediate_size, serving_dtype(dtype))


class Checkpoint:
    """An opened checkpoint. Make it with `Checkpoint.open`."""

    def __init__(
        self,
        spec: CheckpointSpec,
        config: MoeConfig,
        index: SafetensorsIndex,
        experts: tuple[ExpertTensors, ...],
        files: tuple[FileFingerprint, ...],
    ) -> None:
        """`experts[layer * num_experts + expert]`; `files` are all the files that were opened."""
        self.spec: Final = spec
        self.files: Final = files
        self._config: Final = config
        self._index: Final = index
        self._experts: Final = experts

    @classmethod
    def open(cls, path: str | os.PathLike[str], model_name: str | None = None) -> Checkpoint:
        """Open the checkpoint folder `path`: reads configuration and headers, no weights.

        `model_name` defaults to the folder's name. Raises a `WeightsError` that names the file or
        tensor if anything is missing, renamed, of the wrong shape, unsafe or not supported.
        """
        root = find_root(path)
        name = default_model_name(root) if model_name is None else model_name
        check_name(name, "model name")
        config, config_stamp = _read_config(root)
        index = open_index(root)
        binding = bind_experts(config, index.tensors)
        spec = CheckpointSpec(
            model_name=name,
            model_type=config.family.model_type,
            num_layers=len(config.layer_ids),
            layer_ids=config.layer_ids,
            num_experts=config.num_experts,
            top_k=config.top_k,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            dtype=binding.dtype,
        )
        files = tuple(
            FileFingerprint(stamp.name, stamp.size_bytes, stamp.mtime_ns)
            for stamp in (config_stamp, *index.stamps.values())
        )
        return cls(spec, config, index, binding.experts, files)

    @property
    def folder(self) -> str:
        """Absolute path of the checkpoint folder, links resolved."""
        return self._index.root.folder

    def expert_tensors(self, layer: int, expert: int) -> ExpertTensors:
        """Where the three matrices of an expert lie. Raises `UnknownExpert`."""
        check_expert(layer, expert, self.spec.num_layers, self.spec.num_experts)
        return self._experts[layer * self.spec.num_experts + expert]

    def read_expert(
        self, layer: int, expert: int, dtype: ServingDtype, manifest: Manifest | None = None
    ) -> npt.NDArray[np.uint8]:
        """Canonical bytes of one expert as a new uint8 array; see `read_expert_into`."""
        out = np.empty(self.spec.expert_bytes(dtype), np.uint8)
        self.read_expert_into(layer, expert, dtype, out.data, manifest)
        return out

    def read_expert_into(
        self,
        layer: int,
        expert: int,
        dtype: ServingDtype,
        out: memoryview,
        manifest: Manifest | None = None,
        reading: Reading = UNINTERRUPTED,
    ) -> None:
        """Fill `out` (writable, `spec.expert_bytes(dtype)` bytes) with an expert's canonical bytes.

        With a `manifest` (of the same dtype) the stored bytes of each tensor and the canonical
        bytes are compared with it. Needs memory for one stored tensor besides. `out` holds
        undefined bytes when an error is raised.

        Raises `UnknownExpert`, `ShapeMismatch`, `NonFiniteTensor`, `DigestMismatch`,
        `ChangedFile`, `TruncatedFile`, and what `reading` raises.
        """
        if manifest is None:
            self._fill(layer, expert, dtype, out, None, reading)
            return
        if manifest.serving_dtype != dtype:
            raise ShapeMismatch(
                f"the manifest is for serving dtype {manifest.serving_dtype}, the expert is wanted "
                f"in {dtype}; build the manifest for {dtype}"
            )
        self._fill(layer, expert, dtype, out, manifest.expert(layer, expert), reading)
        check_canonical_digest(manifest, layer, expert, canonical_digest(out))

    def digest_expert(self, layer: int, expert: int, dtype: ServingDtype) -> ExpertDigest:
        """Read one expert and describe it for the manifest. Raises as `read_expert_into`."""
        out = np.empty(self.spec.expert_bytes(dtype), np.uint8)
        sha256s = self._fill(layer, expert, dtype, out.data, None, UNINTERRUPTED)
        gate, up, down = (
            TensorDigest(tensor.name, tensor.dtype, tensor.shape, tensor.num_bytes, sha256)
            for tensor, sha256 in zip(self.expert_tensors(layer, expert), sha256s, strict=True)
        )
        return ExpertDigest(layer, expert, gate, up, down, canonical_digest(out))

    def non_expert_tensors(self) -> Iterator[TensorInfo]:
        """Tensors a front end needs, in order of name: all but routed experts and the layers past
        the last one. Read them with `read_tensor`."""
        return non_expert_tensors(self._config, self._index.tensors)

    def read_tensor(self, name: str) -> npt.NDArray[Any]:
        """Any tensor of the checkpoint as stored (bfloat16 through `ml_dtypes`).

        Raises `MissingTensor`, `UnsupportedCheckpoint` for a dtype numpy lacks.
        """
        return self._index.read(tensor_info(self._index, name))

    def _fill(
        self,
        layer: int,
        expert: int,
        dtype: ServingDtype,
        out: memoryview,
        expected: ExpertDigest | None,
        reading: Reading,
    ) -> list[str]:
        """Write the canonical bytes; returns the SHA-256 of each tensor's stored bytes."""
        tensors = self.expert_tensors(layer, expert)
        spec = self.spec

        def came(num_bytes: int) -> None:
            reading.advance(num_bytes * spec.expert_bytes(dtype) // spec.expert_bytes(spec.dtype))

        views = canonical_views(out, spec.hidden_size, spec.intermediate_size, serving_dtype(dtype))
        sha256s = []
        # The three matrices have one size: one piece of memory serves them in turn.
        stored = np.empty(tensors.gate.num_bytes, np.uint8)
        for which, tensor in zip(PROJECTIONS, tensors, strict=True):
            with reading.blocking():
                self._index.read_into(tensor, stored.data, came)
            sha256s.append(hashlib.sha256(stored.data).hexdigest())
            if expected is not None:
                check_tensor_digest(getattr(expected, which), tensor.file, sha256s[-1])
            matrix = stored.view(numpy_dtype(spec.dtype)).reshape(tensor.shape)
            _write_finite(views, which, matrix, tensor)
        return sha256s


def _read_config(root: CheckpointRoot) -> tuple[MoeConfig, FileStamp]:
    content, stamp = read_small_file(root, CONFIG_FILE, CONFIG_BYTES_MAX)
    try:
        config = msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as fault:
        raise BadConfig(
            f"{CONFIG_FILE} is not a JSON object ({fault}); fetch the file again"
        ) from fault
    return parse_config(config), stamp


def _write_finite(
    views: ExpertViews, which: Projection, matrix: npt.NDArray[Any], tensor: TensorInfo
) -> None:
    bad = first_non_finite(matrix)
    if bad is not None:
        raise NonFiniteTensor(
            f"tensor {shown(tensor.name)} in {tensor.file} holds {matrix[bad]} at row {bad[0]}, "
            f"column {bad[1]}; weights must be finite: fetch or export the checkpoint again"
        )
    write_projection(views, which, matrix)
    written = views.projection(which)
    if written.dtype == matrix.dtype:
        return
    bad = first_non_finite(written)
    if bad is not None:
        row, column = bad[::-1]  # canonical matrices are the transposes of the stored ones
        raise NonFiniteTensor(
            f"tensor {shown(tensor.name)} in {tensor.file} holds {matrix[row, column]} at row "
            f"{row}, column {column}, which is too large for serving dtype {written.dtype}; "
            "serve in bfloat16 or float32"
        )
