"""TensorRT-LLM's file of initial expert assignments, the `load_balancer` of its MoE configuration.

Responsible for that file's text, and for what a loaded one says. Must never parse YAML nor open a
file: whoever calls does. Called by the command line, and by users' own scripts.

The file holds `num_slots`, and for each MoE layer, by its number in the model, the expert in each
slot; dense layers are counted and have no entry. The engine takes it where every layer has
`num_slots` entries, these name every expert, and the ranks share the slots equally. With
`layer_updates_per_iter: 0` the engine leaves the assignment as it is.

>>> text = load_balancer_yaml([[0, 1, 0, 2]], layer_ids=[3])
>>> print(text, end="")
num_slots: 4
layer_updates_per_iter: 0
initial_global_assignments:
  3: [0, 1, 0, 2]
>>> loaded = {"num_slots": 4, "initial_global_assignments": {3: [0, 1, 0, 2]}}
>>> read_load_balancer(loaded)
{3: [0, 1, 0, 2]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from placement.adapters.counts import EXPERTS_MAX, LAYERS_MAX
from placement.eplb.errors import EplbError
from placement.eplb.tensors import to_int

ASSIGNMENTS: Final = "initial_global_assignments"
SLOTS: Final = "num_slots"
UPDATES: Final = "layer_updates_per_iter"
WRAPPERS: Final = ("moe_config", "load_balancer")
"""Keys under which the engine's own option file has the same mapping."""


def load_balancer_yaml(physical_to_logical: object, *, layer_ids: Sequence[int]) -> str:
    """Text of the file. physical_to_logical: int [layers, slots]; layer_ids: the layers' numbers in
    the model, ascending.

    Raises EplbError where these do not belong together.
    """
    found = to_int("physical_to_logical", physical_to_logical)
    if found.ndim != 2 or 0 in found.shape:
        raise EplbError(
            "physical_to_logical", f"must be [layers, slots], got {list(found.shape)}", "see above"
        )
    if len(layer_ids) != len(found) or list(layer_ids) != sorted(set(layer_ids)):
        raise EplbError(
            "layer_ids",
            f"must be {len(found)} ascending numbers, one a layer, got {list(layer_ids)[:8]}",
            "name the model's MoE layers",
        )
    lines = [f"{SLOTS}: {found.shape[1]}", f"{UPDATES}: 0", f"{ASSIGNMENTS}:"]
    lines += [f"  {n}: {row}" for n, row in zip(layer_ids, found.tolist(), strict=True)]
    return "\n".join(lines) + "\n"


def read_load_balancer(loaded: object) -> dict[int, list[int]]:
    """Expert by slot of each MoE layer, by its number in the model, ascending.

    loaded: the mapping of the file, or of an option file that holds it under `moe_config:
    load_balancer:`. Raises EplbError naming key and layer.
    """
    for name in WRAPPERS:
        if isinstance(loaded, Mapping) and ASSIGNMENTS not in loaded and name in loaded:
            loaded = loaded[name]
    if not isinstance(loaded, Mapping) or ASSIGNMENTS not in loaded:
        named = sorted(map(str, loaded)) if isinstance(loaded, Mapping) else [type(loaded).__name__]
        raise EplbError(
            "the file",
            f"has no {ASSIGNMENTS} (it has {', '.join(named)[:200] or 'nothing'})",
            "pass the load balancer's YAML of TensorRT-LLM",
        )
    layers = loaded[ASSIGNMENTS]
    if not isinstance(layers, Mapping) or not 1 <= len(layers) <= LAYERS_MAX:
        raise EplbError(
            ASSIGNMENTS, f"must map 1 to {LAYERS_MAX} layers to lists", "see TensorRT-LLM's example"
        )
    found = {_layer(key): _slots(f"{ASSIGNMENTS}[{key}]", row) for key, row in layers.items()}
    slots = loaded.get(SLOTS, len(next(iter(found.values()))))
    for layer, row in sorted(found.items()):
        if len(row) != slots:
            raise EplbError(
                f"{ASSIGNMENTS}[{layer}]",
                f"has {len(row)} slots, {SLOTS} is {str(slots)[:20]}",
                "every layer must have as many",
            )
    return dict(sorted(found.items()))


def _layer(key: Any) -> int:
    if type(key) is not int or not 0 <= key < 1 << 31:
        raise EplbError(
            ASSIGNMENTS, f"has the key {str(key)[:40]!r}, which is no layer", "number the layers"
        )
    return key


def _slots(where: str, row: Any) -> list[int]:
    if not isinstance(row, list) or not 1 <= len(row) <= EXPERTS_MAX:
        raise EplbError(where, f"must be a list of 1 to {EXPERTS_MAX} experts", "check the file")
    wrong = next((n for n, one in enumerate(row) if type(one) is not int), None)
    if wrong is not None:
        raise EplbError(
            f"{where}[{wrong}]",
            f"must be an expert, got {str(row[wrong])[:40]!r}",
            "check the file",
        )
    return list(row)
