"""Joins the configuration and the files: which tensor is which matrix of which expert.

Responsible for: proving, from headers alone, that every expert is there and complete, and that the
files hold no expert tensor the configuration does not account for.
Must never: skip a tensor it does not understand, or read tensor bytes.
Called by: `checkpoint`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from moe_serve.weights.dtypes import STORED_TO_SERVING, ServingDtype
from moe_serve.weights.errors import (
    MissingTensor,
    ShapeMismatch,
    UnexpectedTensor,
    UnsupportedCheckpoint,
    shown,
)
from moe_serve.weights.header import TensorInfo
from moe_serve.weights.naming import MoeConfig, layer_of, routed_expert_layer
from moe_serve.weights.near_names import missing_tensor

_NUMBERS: Final = re.compile(r"model\.layers\.([0-9]{1,9})\.[a-z_]+\.experts\.([0-9]{1,9})\.")
_STACKED: Final = ("gate_up_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "w13")


class ExpertTensors(NamedTuple):
    """Where an expert's matrices lie: gate [F, H], up [F, H], down [H, F]."""

    gate: TensorInfo
    up: TensorInfo
    down: TensorInfo


class Binding(NamedTuple):
    """`experts[layer * num_experts + expert]`, and the one dtype all of them are stored in."""

    experts: tuple[ExpertTensors, ...]
    dtype: ServingDtype


def bind_experts(config: MoeConfig, tensors: Mapping[str, TensorInfo]) -> Binding:
    """Find every matrix of every expert.

    Raises `UnsupportedCheckpoint` (FP8, MXFP4, stacked experts, other or mixed dtypes),
    `RenamedTensor`, `MissingTensor`, `ShapeMismatch`, `UnexpectedTensor`.
    """
    served = set(config.layer_ids)
    routed = {name for name in tensors if routed_expert_layer(name) in served}
    for name in sorted(routed):
        _refuse_format(name, tensors[name])
    experts = []
    unclaimed = set(routed)
    # Up to the first that is missing: the files, not the configuration, bound the work.
    for layer in range(len(config.layer_ids)):
        for expert in range(config.num_experts):
            names = config.expert_names(layer, expert)
            missing = next((name for name in names if name not in tensors), None)
            if missing is not None:
                raise _missing(missing, config, tensors)
            unclaimed.difference_update(names)
            experts.append(ExpertTensors(*(tensors[name] for name in names)))
            _check_shapes(config, experts[-1])
    if unclaimed:
        raise _unexpected(config, sorted(unclaimed))
    return Binding(tuple(experts), _common_dtype(experts))


def non_expert_tensors(
    config: MoeConfig, tensors: Mapping[str, TensorInfo]
) -> Iterator[TensorInfo]:
    """Tensors a front end loads: everything but routed experts and layers past the last one (the
    multi-token-prediction layers of DeepSeek-V3 are stored as such), in order of name."""
    for name in sorted(tensors):
        layer = layer_of(name)
        if layer is not None and layer >= config.num_hidden_layers:
            continue
        if routed_expert_layer(name) is None:
            yield tensors[name]


def _refuse_format(name: str, tensor: TensorInfo) -> None:
    """Refuse by name what is known not to be served, before its parts look like missing ones."""
    advice = "convert the weights to bfloat16"
    if name.endswith(("_blocks", "_scales")):
        raise UnsupportedCheckpoint(
            f"tensor {shown(name)} belongs to an MXFP4 checkpoint, which is not supported; {advice}"
        )
    if tensor.dtype.startswith("F8") or name.endswith(("weight_scale_inv", "weight_scale")):
        raise UnsupportedCheckpoint(
            f"tensor {shown(name)} ({tensor.dtype}) belongs to an FP8 checkpoint, which is not "
            f"supported; {advice}"
        )
    last = name.partition(".experts.")[2]
    if last.removesuffix(".weight") in _STACKED:
        raise UnsupportedCheckpoint(
            f"tensor {shown(name)} stacks all experts of a layer, which is not supported; load the "
            "model with transformers >= 5 and save it with save_pretrained, which separates them"
        )
    if tensor.dtype not in STORED_TO_SERVING:
        raise UnsupportedCheckpoint(
            f"tensor {shown(name)} is stored as {tensor.dtype}; experts are read from "
            f"{', '.join(STORED_TO_SERVING)}; {advice}"
        )


def _check_shapes(config: MoeConfig, expert: ExpertTensors) -> None:
    wide = (config.intermediate_size, config.hidden_size)
    for tensor, shape in zip(expert, (wide, wide, wide[::-1]), strict=True):
        if tensor.shape != shape:
            raise ShapeMismatch(
                f"tensor {shown(tensor.name)} in {tensor.file} has shape {list(tensor.shape)}, but "
                f"by config.json it must be {list(shape)}; config.json and the weights do not "
                "belong together: fetch the checkpoint again"
            )


def _missing(missing: str, config: MoeConfig, tensors: Mapping[str, TensorInfo]) -> MissingTensor:
    # Not only routed names: a rename may have changed the part they are recognised by.
    unclaimed = [name for name in tensors if not _is_expected(config, name)]
    expected = 3 * len(config.layer_ids) * config.num_experts
    absent = expected - (len(tensors) - len(unclaimed))
    more = f" ({absent} expert tensors are missing in all)" if absent > 1 else ""
    return missing_tensor(missing, unclaimed, f"no file of the checkpoint has it{more}")


def _is_expected(config: MoeConfig, name: str) -> bool:
    """Whether a tensor is one of the three of an expert that the configuration describes."""
    match = _NUMBERS.match(name)
    if match is None or int(match[2]) >= config.num_experts:
        return False
    layer_id, expert = int(match[1]), int(match[2])
    return layer_id in config.layer_ids and name in config.family.expert_names(layer_id, expert)


def _unexpected(config: MoeConfig, names: list[str]) -> UnexpectedTensor:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return UnexpectedTensor(
        f"tensor {shown(names[0])}{more} is not part of any expert that config.json describes "
        f"(layers {config.layer_ids[0]}..{config.layer_ids[-1]}, {config.num_experts} experts, "
        "three weights each and no bias); serving without it would compute something else: "
        "config.json and the weights do not belong together"
    )


def _common_dtype(experts: list[ExpertTensors]) -> ServingDtype:
    first = experts[0].gate
    for expert in experts:
        for tensor in expert:
            if tensor.dtype != first.dtype:
                raise UnsupportedCheckpoint(
                    f"tensor {shown(tensor.name)} is stored as {tensor.dtype} but "
                    f"{shown(first.name)} as {first.dtype}; experts of mixed dtypes are not "
                    "supported: save the checkpoint in one dtype"
                )
    return STORED_TO_SERVING[first.dtype]
