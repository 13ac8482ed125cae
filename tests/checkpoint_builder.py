"""Small checkpoints for the weights tests: good ones, and raw files that are wrong on purpose."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import safetensors.numpy

Tensors = dict[str, npt.NDArray[Any]]

CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 3,
        "intermediate_size": 4,
    },
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 3,
        "moe_intermediate_size": 4,
        "intermediate_size": 12,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 3,
        "moe_intermediate_size": 4,
        "intermediate_size": 12,
    },
    "olmoe": {
        "architectures": ["OlmoeForCausalLM"],
        "num_experts": 3,
        "intermediate_size": 4,
    },
    "deepseek_v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "n_routed_experts": 3,
        "moe_intermediate_size": 4,
        "intermediate_size": 12,
        "first_k_dense_replace": 0,
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "n_routed_experts": 3,
        "moe_intermediate_size": 4,
        "intermediate_size": 12,
        "first_k_dense_replace": 0,
    },
}


def config(model_type: str = "qwen3_moe", **changes: Any) -> dict[str, Any]:
    """`config.json` of a model with 2 layers, 3 experts, top-2, hidden size 6 and width 4."""
    common = {
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": 6,
        "num_hidden_layers": 2,
        "num_experts_per_tok": 2,
    }
    return {**common, **CONFIGS[model_type], **changes}


def expert_name(layer_id: int, expert: int, projection: str, model_type: str = "qwen3_moe") -> str:
    """Tensor name, written out again here so that the tests do not trust the tested table."""
    if model_type == "mixtral":
        letter = {"gate": "w1", "down": "w2", "up": "w3"}[projection]
        return f"model.layers.{layer_id}.block_sparse_moe.experts.{expert}.{letter}.weight"
    return f"model.layers.{layer_id}.mlp.experts.{expert}.{projection}_proj.weight"


def tensors(
    model_type: str = "qwen3_moe",
    layer_ids: tuple[int, ...] = (0, 1),
    dtype: str = "float32",
    seed: int = 1,
) -> Tensors:
    """Random weights that fit `config()`, with an embedding and a gate a layer besides."""
    rng = np.random.default_rng(seed)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    def draw(*shape: int) -> npt.NDArray[Any]:
        return rng.standard_normal(shape).astype(kind)

    made = {"model.embed_tokens.weight": draw(5, 6)}
    for layer_id in layer_ids:
        made[f"model.layers.{layer_id}.mlp.gate.weight"] = draw(3, 6)
        for expert in range(3):
            for projection, shape in (("gate", (4, 6)), ("up", (4, 6)), ("down", (6, 4))):
                made[expert_name(layer_id, expert, projection, model_type)] = draw(*shape)
    return made


def encode(made: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """The safetensors library's own encoding of the tensors."""
    return safetensors.numpy.save(dict(made))


def write_checkpoint(
    folder: Path,
    *,
    settings: dict[str, Any] | None = None,
    made: Mapping[str, npt.NDArray[Any]] | None = None,
) -> Path:
    """A checkpoint folder with one weights file; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config() if settings is None else settings))
    (folder / "model.safetensors").write_bytes(encode(tensors() if made is None else made))
    return folder


def write_sharded(folder: Path, made: Tensors, num_files: int = 2) -> Path:
    """The same over several files with an index; tensors go round the files in order."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config()))
    files = [f"model-{i + 1:05}-of-{num_files:05}.safetensors" for i in range(num_files)]
    placed = {name: files[i % num_files] for i, name in enumerate(made)}
    for file in files:
        content = encode({name: made[name] for name, where in placed.items() if where == file})
        (folder / file).write_bytes(content)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return folder


def raw_file(header: Mapping[str, Any] | bytes, data: bytes, declared: int | None = None) -> bytes:
    """A safetensors file with any header; `declared` replaces the true header size."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if declared is None else declared
    return size.to_bytes(8, "little") + text + data


def entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    """One tensor of a raw header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
