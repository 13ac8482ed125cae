"""Placements in files: in this service's own form, and in those that other engines start from.

Responsible for files, for telling the forms apart, and for saying what of a file does not fit the
service. What the forms mean is said in `placement.adapters`. Asks no service. Called by the export
and import commands.

| format | file | is read by |
|---|---|---|
| `moe-serve` | JSON, ranks by number | `moe-serve import` |
| `sglang` | JSON or `.pt`, `physical_to_logical_map` | SGLang's `--init-expert-location` |
| `vllm` | JSON, a list a layer | vLLM's EPLB policies, as an array |
| `trtllm` | YAML, `initial_global_assignments` | TensorRT-LLM's MoE `load_balancer` |
"""

from moe_serve.cli.layouts.holding import Holding, LayoutFormat, holding_of, parse_layers
from moe_serve.cli.layouts.reading import ReadLayout, read_layout
from moe_serve.cli.layouts.writing import save, text_of, written

__all__ = [
    "Holding",
    "LayoutFormat",
    "ReadLayout",
    "holding_of",
    "parse_layers",
    "read_layout",
    "save",
    "text_of",
    "written",
]
