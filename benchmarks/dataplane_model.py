"""What the data path benchmark serves and asks: synthetic checkpoints and random batches.

Responsible for sizes, weights and batches, all from a seed. Must never measure. Called by the other
dataplane modules.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from moe_serve.shard.compute.base import ExpertSpec
from moe_serve.shard.compute.build import BackendName
from placement.topology import DeviceProfile, MoeSpec

MODEL = "dataplane"
VERSION = "v1"
NO_TIME = DeviceProfile(
    name="no time", flops_per_s=math.inf, memory_bytes_per_s=math.inf, copy_bytes_per_s=1e9
)
"""Device of the emulated backend: it adds no time to a forward."""


@dataclass(frozen=True)
class ModelSize:
    """One MoE layer: H, F, experts, the most experts a token may have, and who computes. float32.

    "emulated" experts are the identity: the output is the row times the sum of its gates.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    backend: BackendName

    @property
    def expert(self) -> ExpertSpec:
        """Shape of one expert."""
        return ExpertSpec(self.hidden_size, self.intermediate_size)

    def spec(self) -> MoeSpec:
        """The facts a router is told."""
        expert = self.expert
        return MoeSpec(
            model=MODEL,
            weights_version=VERSION,
            num_layers=1,
            num_experts=self.num_experts,
            top_k=self.top_k,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            expert_bytes=expert.canonical_bytes,
            slot_bytes=expert.held_bytes,
        )


ECHO = ModelSize(1024, 8, 64, 8, backend="emulated")
"""Rows of full width and identity experts that take no time: what is left is the data path."""
FULL = ModelSize(1024, 512, 16, 4, backend="numpy")
"""Real experts of 6.3 MB each."""


@dataclass(frozen=True)
class TokenBatch:
    """hidden float32 [T, H], ids int32 [T, k] distinct in a row, gates float32 [T, k]."""

    hidden: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int32]
    gates: npt.NDArray[np.float32]

    @property
    def tokens(self) -> int:
        """Rows."""
        return int(self.hidden.shape[0])

    @property
    def top_k(self) -> int:
        """Experts of a row."""
        return int(self.ids.shape[1])

    @property
    def label(self) -> str:
        """For people: 64 x 1024, top-4."""
        return f"{self.tokens} x {self.hidden.shape[1]}, top-{self.top_k}"


def token_batch(size: ModelSize, tokens: int, top_k: int, seed: int) -> TokenBatch:
    """A batch whose experts are uniform over all; gates of a token sum to 1."""
    rng = np.random.default_rng((seed, tokens, top_k))
    ids = np.argsort(rng.random((tokens, size.num_experts)), axis=1)[:, :top_k]
    gates = rng.random((tokens, top_k), dtype=np.float32)
    return TokenBatch(
        hidden=rng.standard_normal((tokens, size.hidden_size), dtype=np.float32),
        ids=np.ascontiguousarray(ids, np.int32),
        gates=gates / gates.sum(axis=1, keepdims=True),
    )


def write_checkpoint(folder: Path, size: ModelSize, seed: int) -> Path:
    """A checkpoint folder with random experts, as Hugging Face names them; returns the folder."""
    rng = np.random.default_rng((seed, size.intermediate_size))
    hidden, inner = size.hidden_size, size.intermediate_size
    scale = np.float32(hidden**-0.5)
    tensors: dict[str, npt.NDArray[Any]] = {}
    for expert in range(size.num_experts):
        for name, shape in (
            ("gate", (inner, hidden)),
            ("up", (inner, hidden)),
            ("down", (hidden, inner)),
        ):
            values = rng.standard_normal(shape, dtype=np.float32) * scale
            tensors[f"model.layers.0.mlp.experts.{expert}.{name}_proj.weight"] = values
    settings = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": hidden,
        "num_hidden_layers": 1,
        "num_experts": size.num_experts,
        "num_experts_per_tok": size.top_k,
        "moe_intermediate_size": inner,
        "intermediate_size": inner,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder
