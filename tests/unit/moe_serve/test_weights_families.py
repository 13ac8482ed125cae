"""Checkpoints saved by the transformers library itself open and hold what its models compute with.

This is what proves the table of names: the models are made, saved and held by the other library.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_serve.weights import Checkpoint, canonical_views
from moe_serve.weights.dtypes import SERVING_DTYPES, ServingDtype, numpy_dtype
from moe_serve.weights.errors import UnsupportedCheckpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

HIDDEN, WIDTH, EXPERTS = 16, 8, 4

COMMON: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": HIDDEN,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
}
MLA: dict[str, Any] = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": WIDTH,
    "intermediate_size": 24,
}
QWEN: dict[str, Any] = {
    "num_experts": EXPERTS,
    "moe_intermediate_size": WIDTH,
    "intermediate_size": 24,
}

# name of the class, its settings, the layers with experts
CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "mixtral": (
        "Mixtral",
        {"num_local_experts": EXPERTS, "intermediate_size": WIDTH, "num_hidden_layers": 2},
        (0, 1),
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {**QWEN, "num_hidden_layers": 3, "mlp_only_layers": [1]},
        (0, 2),
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {**QWEN, "num_hidden_layers": 4, "decoder_sparse_step": 2},
        (1, 3),
    ),
    "olmoe": (
        "Olmoe",
        {"num_experts": EXPERTS, "intermediate_size": WIDTH, "num_hidden_layers": 2},
        (0, 1),
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {**MLA, "num_hidden_layers": 3, "first_k_dense_replace": 1},
        (1, 2),
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {**MLA, "num_hidden_layers": 3, "first_k_dense_replace": 1},
        (1, 2),
    ),
}


@contextmanager
def default_dtype(dtype: Any) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def random_model(model_type: str, dtype: ServingDtype) -> Any:
    prefix, settings, _ = CASES[model_type]
    config = getattr(transformers, f"{prefix}Config")(**COMMON, **settings)
    torch.manual_seed(5)
    with default_dtype(getattr(torch, dtype)):
        model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    for layer in CASES[model_type][2]:  # the library leaves fused experts uninitialised
        experts = model.model.layers[layer].mlp.experts
        torch.nn.init.normal_(experts.gate_up_proj)
        torch.nn.init.normal_(experts.down_proj)
    return model


def bits(tensor: Any) -> bytes:
    return bytes(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())


@pytest.fixture(scope="module", params=sorted(CASES))
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Any, Path]:
    """A model in float32 and the folder it was saved in."""
    model_type = request.param
    model = random_model(model_type, "float32")
    folder = tmp_path_factory.mktemp(model_type)
    model.save_pretrained(folder)
    return model_type, model, folder


def assert_same_experts(checkpoint: Checkpoint, model: Any, dtype: ServingDtype) -> None:
    for layer, layer_id in enumerate(checkpoint.spec.layer_ids):
        experts = model.model.layers[layer_id].mlp.experts
        for expert in range(EXPERTS):
            content = checkpoint.read_expert(layer, expert, dtype)
            gate_up, down = experts.gate_up_proj[expert], experts.down_proj[expert]
            assert content.tobytes() == bits(gate_up.T) + bits(down.T)


def test_every_expert_is_the_model_s(saved: tuple[str, Any, Path]) -> None:
    model_type, model, folder = saved
    checkpoint = Checkpoint.open(folder, model_name="tiny")
    spec = checkpoint.spec
    assert spec.model_type == model_type
    assert spec.layer_ids == CASES[model_type][2]
    assert (spec.num_experts, spec.top_k) == (EXPERTS, 2)
    assert (spec.hidden_size, spec.intermediate_size) == (HIDDEN, WIDTH)
    assert_same_experts(checkpoint, model, "float32")


def test_an_expert_computes_what_the_model_computes(saved: tuple[str, Any, Path]) -> None:
    _, model, folder = saved
    checkpoint = Checkpoint.open(folder, model_name="tiny")
    content = checkpoint.read_expert(1, 3, "float32")
    views = canonical_views(content, HIDDEN, WIDTH, "float32")
    rows = torch.randn(5, HIDDEN)
    experts = model.model.layers[checkpoint.spec.layer_ids[1]].mlp.experts
    chosen = torch.full((5, 1), 3)
    with torch.no_grad():
        expected = experts(rows, chosen, torch.ones(5, 1)).numpy()
    gate, up = np.split(rows.numpy() @ views.gate_up, 2, axis=1)
    computed = (gate / (1 + np.exp(-gate)) * up) @ views.down
    assert np.allclose(computed, expected, rtol=1e-4, atol=1e-4)


def test_the_other_tensors_are_all_the_model_needs(saved: tuple[str, Any, Path]) -> None:
    _, model, folder = saved
    checkpoint = Checkpoint.open(folder, model_name="tiny")
    listed = {tensor.name for tensor in checkpoint.non_expert_tensors()}
    needed = {name for name in model.state_dict() if ".mlp.experts." not in name}
    if "mixtral" in checkpoint.spec.model_type:
        needed = {
            name.replace(".mlp.", ".block_sparse_moe.") for name in needed
        }  # as published, and as saved
    assert listed == needed
    embedding = checkpoint.read_tensor("model.embed_tokens.weight")
    assert embedding.tobytes() == bits(model.model.embed_tokens.weight)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [name for name in SERVING_DTYPES if name != "float32"])
def test_half_precision_checkpoints(tmp_path: Path, model_type: str, dtype: ServingDtype) -> None:
    model = random_model(model_type, dtype)
    model.save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path, model_name="tiny")
    assert checkpoint.spec.dtype == dtype
    assert_same_experts(checkpoint, model, dtype)
    widened = canonical_views(checkpoint.read_expert(0, 0, "float32"), HIDDEN, WIDTH, "float32")
    exact = canonical_views(checkpoint.read_expert(0, 0, dtype), HIDDEN, WIDTH, dtype)
    assert np.array_equal(widened.gate_up.astype(numpy_dtype(dtype)), exact.gate_up)


def test_a_sharded_checkpoint(tmp_path: Path) -> None:
    model = random_model("qwen3_moe", "float32")
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert_same_experts(Checkpoint.open(tmp_path, model_name="tiny"), model, "float32")


def test_gpt_oss_is_refused_by_name(tmp_path: Path) -> None:
    config = transformers.GptOssConfig(num_hidden_layers=1)
    config.architectures = ["GptOssForCausalLM"]
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "gpt_oss"
    with pytest.raises(UnsupportedCheckpoint, match="GPT-OSS"):
        Checkpoint.open(tmp_path, model_name="tiny")
