"""What a shard serves: the model's shape, and where an expert's canonical bytes and digests come
from.

Responsible for the facts that checks, copies and digests need. Must never hold weights. Called by
the shard's core and commands; made at start from checkpoint and manifest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from moe_serve.shard.compute.base import ExpertSpec
from moe_serve.weights.checkpoint import Checkpoint
from moe_serve.weights.manifest import Manifest
from moe_serve.weights.reading import UNINTERRUPTED, Reading


class ExpertSource(Protocol):
    """Canonical bytes and digests of experts, in the serving dtype of the shard."""

    def read_into(
        self, layer: int, expert: int, out: memoryview, reading: Reading = UNINTERRUPTED
    ) -> None:
        """Fill `out` with the expert's canonical bytes. Raises WeightsError, OSError, and what
        `reading` raises."""

    def canonical_sha256(self, layer: int, expert: int) -> str:
        """SHA-256, in hex, that the canonical bytes must have."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Shape of the model and the weights version all of a shard's slots hold."""

    num_layers: int
    num_experts: int
    top_k: int
    weights_version: str
    expert: ExpertSpec

    @property
    def num_keys(self) -> int:
        """Number of (layer, expert) keys: num_layers * num_experts."""
        return self.num_layers * self.num_experts

    def key(self, layer: int, expert: int) -> int:
        """Flat id of (layer, expert)."""
        return layer * self.num_experts + expert

    def holds(self, layer: int, expert: int) -> bool:
        """Whether the model has that expert."""
        return 0 <= layer < self.num_layers and 0 <= expert < self.num_experts


class CheckpointSource:
    """Experts from a checkpoint folder on this node, compared with the manifest as they are
    read."""

    def __init__(self, checkpoint: Checkpoint, manifest: Manifest) -> None:
        self._checkpoint = checkpoint
        self._manifest = manifest

    def read_into(
        self, layer: int, expert: int, out: memoryview, reading: Reading = UNINTERRUPTED
    ) -> None:
        """Read, check stored and canonical digests. See `ExpertSource`."""
        self._checkpoint.read_expert_into(
            layer, expert, self._manifest.serving_dtype, out, self._manifest, reading
        )

    def canonical_sha256(self, layer: int, expert: int) -> str:
        """From the manifest. See `ExpertSource`."""
        return self._manifest.expert(layer, expert).canonical_sha256


def served_model(checkpoint: Checkpoint, manifest: Manifest, weights_version: str) -> ServedModel:
    """The facts of a checkpoint in the manifest's serving dtype."""
    spec = checkpoint.spec
    return ServedModel(
        num_layers=spec.num_layers,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        weights_version=weights_version,
        expert=ExpertSpec(
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            dtype=manifest.serving_dtype,
        ),
    )
