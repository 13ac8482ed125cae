"""What the weights must be: dtype, shape, size and digest of every tensor of every expert.

Responsible for: the manifest's structure, and comparing bytes with it.
Must never: read weights (that is `build`) or files (that is `manifest_cache`).
Called by: `checkpoint`, `build`, `manifest_cache`; the controller and shard for digests.

Two digests an expert, because bytes are checked twice: each tensor's digest is over its bytes as
stored in the checkpoint (is the file what it was?), the canonical digest over the expert as held in
a slot in the serving dtype (is the copy what was sent?).
"""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from moe_serve.weights.dtypes import ServingDtype
from moe_serve.weights.errors import DigestMismatch, UnknownExpert, shown

MANIFEST_FORMAT: Final = 1
"""Raised by one whenever the structure or the canonical form changes; older ones are recomputed."""


class TensorDigest(msgspec.Struct, frozen=True):
    """One stored tensor. `dtype` is the safetensors code, `sha256` hex over the stored bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    sha256: str


class ExpertDigest(msgspec.Struct, frozen=True):
    """One expert. `layer` is the MoE-layer ordinal; `canonical_sha256` is in the serving dtype."""

    layer: int
    expert: int
    gate: TensorDigest
    up: TensorDigest
    down: TensorDigest
    canonical_sha256: str


class FileFingerprint(msgspec.Struct, frozen=True):
    """By what a file is recognised as unchanged without reading it."""

    name: str
    size_bytes: int
    mtime_ns: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """All experts of a checkpoint in one serving dtype; `experts[layer * num_experts + expert]`.

    `expert_bytes` is the length of one canonical expert. `files` are those it was computed from.
    """

    format: int
    serving_dtype: ServingDtype
    num_layers: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    expert_bytes: int
    files: tuple[FileFingerprint, ...]
    experts: tuple[ExpertDigest, ...]

    def expert(self, layer: int, expert: int) -> ExpertDigest:
        """Entry of one expert; `UnknownExpert` if there is none."""
        check_expert(layer, expert, self.num_layers, self.num_experts)
        return self.experts[layer * self.num_experts + expert]

    def weights_digest(self) -> str:
        """SHA-256 hex over all canonical digests in order: equal on every node that serves the same
        experts in the same dtype, wherever its files lie. Names the weights version."""
        joined = "\n".join(entry.canonical_sha256 for entry in self.experts)
        return hashlib.sha256(joined.encode()).hexdigest()


def check_expert(layer: int, expert: int, num_layers: int, num_experts: int) -> None:
    """Raise `UnknownExpert` unless layer and expert are in range."""
    if not (0 <= layer < num_layers and 0 <= expert < num_experts):
        raise UnknownExpert(
            f"expert {expert} of MoE layer {layer} does not exist: layers are 0..{num_layers - 1}, "
            f"experts 0..{num_experts - 1}"
        )


def check_tensor_digest(entry: TensorDigest, file: str, sha256: str) -> None:
    """Raise `DigestMismatch` unless `sha256`, over bytes read from `file`, is the entry's."""
    if sha256 != entry.sha256:
        raise DigestMismatch(
            f"tensor {shown(entry.name)} in {file} has SHA-256 {sha256}, the manifest says "
            f"{entry.sha256}: the file was altered or is damaged; fetch it again, or delete the "
            "manifest cache if the change was intended"
        )


def check_canonical_digest(manifest: Manifest, layer: int, expert: int, sha256: str) -> None:
    """Raise `DigestMismatch` unless `sha256`, over canonical bytes, is what the manifest says."""
    entry = manifest.expert(layer, expert)
    if sha256 != entry.canonical_sha256:
        raise DigestMismatch(
            f"expert {expert} of MoE layer {layer} ({shown(entry.gate.name)} ...) in "
            f"{manifest.serving_dtype} has SHA-256 {sha256}, the manifest says "
            f"{entry.canonical_sha256}: read or copy it again"
        )
