"""What each supported model family calls its experts.

Responsible for: the table of families, and from `config.json` to layers, sizes and tensor names.
Must never: open files or look at tensors.
Called by: `binding`, `checkpoint`.

Example, Mixtral: gate, up and down of expert 5 in layer 3 are
`model.layers.3.block_sparse_moe.experts.5.w1.weight`, `...w3.weight` and `...w2.weight`. A model's
dense layers are skipped: DeepSeek-V3 (`first_k_dense_replace` 3) has MoE layers 3..60, which are
ordinals 0..57 everywhere else in the system.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple

from moe_serve.weights.errors import BadConfig, UnsupportedCheckpoint, shown, shown_value

CONFIG_FILE: Final = "config.json"

_LAYERS_MAX = 4096
_EXPERTS_MAX = 65536
_WIDTH_MAX = 1 << 20
_SUPPORTED_ACTIVATION = "silu"


class LayerRule(Enum):
    """How a family says which of its layers have experts."""

    ALL = "every layer"
    QWEN = "decoder_sparse_step and mlp_only_layers"
    DEEPSEEK = "first_k_dense_replace and moe_layer_freq"


class ExpertNames(NamedTuple):
    """Checkpoint names of an expert's three matrices: gate [F, H], up [F, H], down [H, F]."""

    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class Family:
    """One row of the table: how a family names things in `config.json` and in its tensors."""

    model_type: str
    architecture: str
    layer_rule: LayerRule
    experts_keys: tuple[str, ...]
    width_key: str
    block: str
    projections: tuple[str, str, str]

    def expert_names(self, layer_id: int, expert: int) -> ExpertNames:
        """Tensor names of `expert` in checkpoint layer `layer_id`."""
        prefix = f"model.layers.{layer_id}.{self.block}.experts.{expert}"
        return ExpertNames(*(f"{prefix}.{projection}.weight" for projection in self.projections))


_PROJ = ("gate_proj", "up_proj", "down_proj")
_EXPERTS = ("num_experts", "num_local_experts")
_ROUTED = ("n_routed_experts", *_EXPERTS)

FAMILIES: Final[tuple[Family, ...]] = (
    Family(
        "mixtral",
        "MixtralForCausalLM",
        LayerRule.ALL,
        _EXPERTS,
        "intermediate_size",
        "block_sparse_moe",
        ("w1", "w3", "w2"),
    ),
    Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        LayerRule.QWEN,
        _EXPERTS,
        "moe_intermediate_size",
        "mlp",
        _PROJ,
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        LayerRule.QWEN,
        _EXPERTS,
        "moe_intermediate_size",
        "mlp",
        _PROJ,
    ),
    Family("olmoe", "OlmoeForCausalLM", LayerRule.ALL, _EXPERTS, "intermediate_size", "mlp", _PROJ),
    Family(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        LayerRule.DEEPSEEK,
        _ROUTED,
        "moe_intermediate_size",
        "mlp",
        _PROJ,
    ),
    Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        LayerRule.DEEPSEEK,
        _ROUTED,
        "moe_intermediate_size",
        "mlp",
        _PROJ,
    ),
)
"""Every family that is served. A new one is one row here and one test."""

_ROUTED_EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(.+)")
_ANY_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class MoeConfig:
    """What `config.json` says about the experts. `layer_ids[ordinal]` is the checkpoint's number of
    a MoE layer; sizes are H = `hidden_size` and F = `intermediate_size` (width of one expert)."""

    family: Family
    num_hidden_layers: int
    layer_ids: tuple[int, ...]
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int

    def expert_names(self, layer: int, expert: int) -> ExpertNames:
        """Tensor names of `expert` in MoE layer ordinal `layer`."""
        return self.family.expert_names(self.layer_ids[layer], expert)


def routed_expert_layer(tensor: str) -> int | None:
    """Checkpoint layer of a tensor that belongs to routed experts, also by a name no family uses;
    None for all others (shared experts included)."""
    match = _ROUTED_EXPERT.fullmatch(tensor)
    return int(match[1]) if match else None


def layer_of(tensor: str) -> int | None:
    """Checkpoint layer of any tensor of a decoder layer; None for embeddings, norm and head."""
    match = _ANY_LAYER.match(tensor)
    return int(match[1]) if match else None


def parse_config(config: Mapping[str, Any]) -> MoeConfig:
    """Check a decoded `config.json` and extract what serving experts needs.

    Raises `UnsupportedCheckpoint` (family, quantisation, activation, no MoE layer) and `BadConfig`
    (field missing, of another type, out of range, contradicting another).
    """
    _refuse_gpt_oss(config)
    _refuse_quantised(config)
    family = _find_family(config)
    activation = config.get("hidden_act", _SUPPORTED_ACTIVATION)
    if activation != _SUPPORTED_ACTIVATION:
        raise UnsupportedCheckpoint(
            f"{CONFIG_FILE}: hidden_act is {shown_value(activation)}; only experts with "
            f"{_SUPPORTED_ACTIVATION} are served: choose another model"
        )
    num_hidden_layers = _integer(config, "num_hidden_layers", 1, _LAYERS_MAX)
    num_experts = _one_of(config, family.experts_keys, 1, _EXPERTS_MAX)
    layer_ids = _layer_ids(config, family.layer_rule, num_hidden_layers)
    if not layer_ids:
        raise UnsupportedCheckpoint(
            f"{CONFIG_FILE}: no layer has experts by {family.layer_rule.value}; "
            "there is nothing to serve"
        )
    return MoeConfig(
        family=family,
        num_hidden_layers=num_hidden_layers,
        layer_ids=layer_ids,
        num_experts=num_experts,
        top_k=_integer(config, "num_experts_per_tok", 1, num_experts),
        hidden_size=_integer(config, "hidden_size", 1, _WIDTH_MAX),
        intermediate_size=_integer(config, family.width_key, 1, _WIDTH_MAX),
    )


def _architectures(config: Mapping[str, Any]) -> list[str]:
    found = config.get("architectures") or []
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise BadConfig(f"{CONFIG_FILE}: architectures must be a list of names; correct the file")
    return found


def _find_family(config: Mapping[str, Any]) -> Family:
    """Family by architecture, which says what the code computes; by model_type if none is named."""
    architectures = _architectures(config)
    model_type = config.get("model_type")
    for family in FAMILIES:
        if family.architecture in architectures:
            return family
        if not architectures and family.model_type == model_type:
            return family
    raise UnsupportedCheckpoint(
        f"{CONFIG_FILE}: model_type {shown_value(model_type)} with architectures "
        f"{shown(str(architectures))} is not supported; supported are "
        f"{', '.join(family.architecture for family in FAMILIES)}"
    )


def _refuse_gpt_oss(config: Mapping[str, Any]) -> None:
    if config.get("model_type") == "gpt_oss" or "GptOssForCausalLM" in _architectures(config):
        raise UnsupportedCheckpoint(
            f"{CONFIG_FILE}: GPT-OSS checkpoints are not supported (stacked experts with biases "
            "and a clamped activation); choose another model"
        )


def _refuse_quantised(config: Mapping[str, Any]) -> None:
    for key in ("quantization_config", "compression_config"):
        if not config.get(key):
            continue
        section = config[key]
        method = section.get("quant_method") if isinstance(section, dict) else None
        text = shown_value(method)
        title = {"'fp8'": "FP8", "'mxfp4'": "MXFP4"}.get(text, text)
        raise UnsupportedCheckpoint(
            f"{CONFIG_FILE}: {key} says the weights are quantised ({title}); {title} checkpoints "
            "are not supported: convert the weights to bfloat16 and remove that section"
        )


def _layer_ids(config: Mapping[str, Any], rule: LayerRule, num_layers: int) -> tuple[int, ...]:
    if rule is LayerRule.QWEN:
        step = _integer(config, "decoder_sparse_step", 1, _LAYERS_MAX, default=1)
        dense = config.get("mlp_only_layers") or []
        if not isinstance(dense, list) or not all(type(number) is int for number in dense):
            raise BadConfig(f"{CONFIG_FILE}: mlp_only_layers must be a list of layer numbers")
        dense = set(dense)
        return tuple(
            layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0
        )
    if rule is LayerRule.DEEPSEEK:
        # Required, not defaulted: published code disagrees on the default (0 and 3).
        first = _integer(config, "first_k_dense_replace", 0, _LAYERS_MAX)
        every = _integer(config, "moe_layer_freq", 1, _LAYERS_MAX, default=1)
        return tuple(layer for layer in range(first, num_layers) if layer % every == 0)
    return tuple(range(num_layers))


def _one_of(config: Mapping[str, Any], keys: tuple[str, ...], low: int, high: int) -> int:
    """The value of the key that is there; libraries save the same number under several names."""
    present = {key: _integer(config, key, low, high) for key in keys if key in config}
    if not present:
        raise BadConfig(f"{CONFIG_FILE}: none of {', '.join(keys)} is given; fetch the file again")
    if len(set(present.values())) > 1:
        raise BadConfig(f"{CONFIG_FILE}: {present} contradict each other; keep the right one")
    return next(iter(present.values()))


def _integer(
    config: Mapping[str, Any], key: str, low: int, high: int, default: int | None = None
) -> int:
    value = config.get(key, default)
    if type(value) is not int or not low <= value <= high:
        raise BadConfig(
            f"{CONFIG_FILE}: {key} must be a whole number from {low} to {high}, got "
            f"{shown_value(value)}; correct it or fetch the file again"
        )
    return value
