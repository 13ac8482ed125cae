"""From config.json to layers, sizes and tensor names; what is not served is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from moe_serve.weights.errors import BadConfig, UnsupportedCheckpoint
from moe_serve.weights.naming import FAMILIES, layer_of, parse_config, routed_expert_layer
from tests.checkpoint_builder import CONFIGS, config, expert_name


def test_every_family_of_the_table_has_a_case_here() -> None:
    assert {family.model_type for family in FAMILIES} == set(CONFIGS)


@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_sizes_and_names_of_a_family(model_type: str) -> None:
    found = parse_config(config(model_type))
    assert found.family.model_type == model_type
    assert found.layer_ids == (0, 1)
    assert (found.num_experts, found.top_k) == (3, 2)
    assert (found.hidden_size, found.intermediate_size) == (6, 4)
    assert found.expert_names(1, 2) == tuple(
        expert_name(1, 2, projection, model_type) for projection in ("gate", "up", "down")
    )


@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_a_family_is_found_by_architecture_or_else_by_model_type(model_type: str) -> None:
    settings = config(model_type)
    renamed = {**settings, "model_type": "derived"}
    assert parse_config(renamed).family.model_type == model_type
    del settings["architectures"]
    assert parse_config(settings).family.model_type == model_type


def test_the_code_named_by_the_architecture_decides() -> None:
    with pytest.raises(UnsupportedCheckpoint, match="MyQwen"):
        parse_config(config("qwen3_moe", architectures=["MyQwen"]))


@pytest.mark.parametrize(
    ("changes", "layer_ids"),
    [
        ({}, (0, 1, 2, 3, 4, 5)),
        ({"mlp_only_layers": [0, 3]}, (1, 2, 4, 5)),
        ({"mlp_only_layers": None}, (0, 1, 2, 3, 4, 5)),
        ({"decoder_sparse_step": 2}, (1, 3, 5)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, (5,)),
    ],
)
@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_moe"])
def test_dense_layers_of_qwen_are_skipped(
    model_type: str, changes: dict[str, Any], layer_ids: tuple[int, ...]
) -> None:
    found = parse_config(config(model_type, num_hidden_layers=6, **changes))
    assert found.layer_ids == layer_ids
    assert f"layers.{layer_ids[0]}." in found.expert_names(0, 0).gate


@pytest.mark.parametrize(
    ("changes", "layer_ids"),
    [
        ({"first_k_dense_replace": 0}, (0, 1, 2, 3, 4, 5)),
        ({"first_k_dense_replace": 3}, (3, 4, 5)),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, (2, 4)),
    ],
)
@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_dense_layers_of_deepseek_are_skipped(
    model_type: str, changes: dict[str, Any], layer_ids: tuple[int, ...]
) -> None:
    found = parse_config(config(model_type, num_hidden_layers=6, **changes))
    assert found.layer_ids == layer_ids


def test_a_model_without_moe_layers_is_refused() -> None:
    with pytest.raises(UnsupportedCheckpoint, match="no layer has experts"):
        parse_config(config("deepseek_v3", first_k_dense_replace=2))


@pytest.mark.parametrize("key", ["num_local_experts", "num_experts"])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "olmoe"])
def test_the_number_of_experts_is_read_under_both_names(model_type: str, key: str) -> None:
    settings = config(model_type)
    for known in ("num_local_experts", "num_experts"):
        settings.pop(known, None)
    with pytest.raises(BadConfig, match="none of num_experts"):
        parse_config(settings)
    assert parse_config({**settings, key: 5}).num_experts == 5


def test_contradicting_numbers_of_experts_are_refused() -> None:
    with pytest.raises(BadConfig, match="contradict"):
        parse_config(config("qwen3_moe", num_local_experts=4))
    assert parse_config(config("qwen3_moe", num_local_experts=3)).num_experts == 3


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]}, "GPT-OSS"),
        ({"model_type": "gpt_oss", "architectures": None}, "GPT-OSS"),
        ({"quantization_config": {"quant_method": "fp8"}}, "FP8 checkpoints are not supported"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "MXFP4 checkpoints are not"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq' checkpoints are not"),
        ({"quantization_config": "odd"}, "quantised"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"hidden_act": None}, "hidden_act is 'None'"),
    ],
)
def test_what_is_not_served_is_refused_by_name(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=match):
        parse_config({**config("mixtral"), **changes})


@pytest.mark.parametrize(
    ("model_type", "key"),
    [
        ("mixtral", "num_hidden_layers"),
        ("mixtral", "hidden_size"),
        ("mixtral", "intermediate_size"),
        ("qwen3_moe", "moe_intermediate_size"),
        ("mixtral", "num_experts_per_tok"),
        ("deepseek_v3", "first_k_dense_replace"),
    ],
)
@pytest.mark.parametrize("value", [None, -1, 2**40, 1.5, "4", True, "absent"])
def test_a_number_that_is_none_is_refused_with_its_field(
    model_type: str, key: str, value: Any
) -> None:
    settings = config(model_type, **{key: value})
    if value == "absent":
        del settings[key]
    with pytest.raises(BadConfig, match=f"{key} must be a whole number"):
        parse_config(settings)


def test_top_k_is_at_most_the_number_of_experts() -> None:
    with pytest.raises(BadConfig, match="num_experts_per_tok must be a whole number from 1 to 3"):
        parse_config(config(num_experts_per_tok=4))
    assert parse_config(config(num_experts_per_tok=3)).top_k == 3


@pytest.mark.parametrize(
    "changes",
    [{"mlp_only_layers": "0"}, {"mlp_only_layers": ["0"]}, {"architectures": "X"}],
)
def test_lists_are_checked(changes: dict[str, Any]) -> None:
    with pytest.raises(BadConfig, match=next(iter(changes))):
        parse_config(config(**changes))


@pytest.mark.parametrize(
    ("tensor", "routed", "layer"),
    [
        ("model.layers.12.mlp.experts.3.up_proj.weight", 12, 12),
        ("model.layers.12.mlp.experts.gate_up_proj", 12, 12),
        ("model.layers.4.block_sparse_moe.experts.0.w1.weight", 4, 4),
        ("model.layers.4.mlp.shared_experts.up_proj.weight", None, 4),
        ("model.layers.4.mlp.shared_expert.up_proj.weight", None, 4),
        ("model.layers.4.mlp.gate.weight", None, 4),
        ("model.embed_tokens.weight", None, None),
    ],
)
def test_routed_experts_are_told_from_the_rest(
    tensor: str, routed: int | None, layer: int | None
) -> None:
    assert routed_expert_layer(tensor) == routed
    assert layer_of(tensor) == layer
