"""The transformers library: its experts registry, and which modules of a model are experts.

Responsible for everything that is the library's convention and not ours. Must never be imported
where transformers is optional without calling `registry` first, which says what is missing. Called
by `transformers` and `loading`.
"""

from __future__ import annotations

import re
from typing import Any

from moe_serve.errors import StartRefused


def registry() -> Any:
    """The library's experts functions by name. Raises StartRefused without transformers >= 5."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise StartRefused(
            "this front end needs transformers >= 5: pip install 'transformers>=5'"
        ) from error
    return ALL_EXPERTS_FUNCTIONS


def experts_modules(model: Any) -> dict[str, Any]:
    """Fused experts modules by name, in order of layers: what the library's decorator marks."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "num_experts") and hasattr(module, "is_concatenated")
    }


def checkpoint_layer(name: str) -> int | None:
    """Number of the decoder layer in a module's name: 3 of `model.layers.3.mlp.experts`."""
    found = re.search(r"\.layers\.(\d+)\.", f".{name}")
    return None if found is None else int(found[1])
