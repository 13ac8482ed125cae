"""A transformers model without its routed experts, from a checkpoint.

Responsible for what the library would do when it loads a model: names, dtypes, tied weights,
computed buffers, generation settings. Must never read an expert tensor. Called by front ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moe_serve.errors import InvalidArgument, StartRefused
from moe_serve.frontends.library import experts_modules, registry
from moe_serve.weights import Checkpoint

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16")


def load_front_end(checkpoint: str, *, dtype: str = "float32") -> Any:
    """A model (eval mode, no gradients) with everything but its routed experts, whose parameters
    are empty: it can be moved to a device, and computes only once it is attached.

    Args:
        checkpoint: folder of a Hugging Face checkpoint (safetensors).
        dtype: float32, bfloat16 or float16. What the library keeps in float32 stays so (the gate of
            DeepSeek-V3).

    Raises:
        StartRefused: transformers is absent or older than 5, or the model has a part that the
            checkpoint lacks.
        WeightsError: the checkpoint is unsafe, unsupported or incomplete.
        InvalidArgument: another dtype.
    """
    registry()
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if dtype not in DTYPES:
        raise InvalidArgument(f"dtype: is {dtype!r}; want one of {', '.join(DTYPES)}")
    opened = Checkpoint.open(checkpoint)
    config = AutoConfig.from_pretrained(opened.folder, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.load_state_dict(_tensors(opened, model), strict=False, assign=True)
    model.tie_weights()
    _rebuild_rotary(model, config)
    _drop_experts(model)
    _check_complete(model, checkpoint)
    _read_generation_config(model, opened.folder)
    return model.requires_grad_(False).eval()


def _tensors(opened: Checkpoint, model: Any) -> dict[str, torch.Tensor]:
    """Non-expert tensors by the model's names, in the model's dtypes."""
    declared = model.state_dict()
    found = {}
    for info in opened.non_expert_tensors():
        name = _module_name(info.name)
        if name not in declared:
            continue  # computed by this version of the library (older ones stored rotary tables)
        tensor = _torch_tensor(opened.read_tensor(info.name))
        # What loses too much in half precision is declared float32 whatever the model's dtype.
        found[name] = tensor.to(declared[name].dtype)
    return found


def _module_name(tensor: str) -> str:
    """Name in the library's module tree: Mixtral's published tensors call `mlp` by an older
    name."""
    return tensor.replace(".block_sparse_moe.", ".mlp.")


def _torch_tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def _rebuild_rotary(model: Any, config: Any) -> None:
    """Rotary tables are computed, not stored: a model built on `meta` has none."""
    for name, module in list(model.named_modules()):
        parent, _, own = name.rpartition(".")
        on_meta = any(b is not None and b.is_meta for b in module.buffers(recurse=False))
        if on_meta and own.startswith("rotary"):
            setattr(model.get_submodule(parent), own, type(module)(config))


def _drop_experts(model: Any) -> None:
    """Empty parameters instead of ones on `meta`, which no `.to(device)` can move."""
    import torch

    for module in experts_modules(model).values():
        for name, parameter in list(module.named_parameters(recurse=False)):
            empty = torch.empty(0, dtype=parameter.dtype)
            setattr(module, name, torch.nn.Parameter(empty, requires_grad=False))


def _check_complete(model: Any, checkpoint: str) -> None:
    lost = [
        name
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if tensor.is_meta
    ]
    if lost:
        others = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        raise StartRefused(f"{checkpoint} lacks {lost[0]}{others} of the model")


def _read_generation_config(model: Any, folder: str) -> None:
    """The checkpoint's own settings of `generate`, where it has any."""
    from transformers import GenerationConfig
    from transformers.utils import GENERATION_CONFIG_NAME

    if (Path(folder) / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
