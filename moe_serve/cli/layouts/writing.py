"""Placements into files.

Responsible for never writing what an engine would read as something else. Called by the export
command.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Final

from moe_serve.cli.layouts.holding import Holding, LayoutFormat
from moe_serve.cli.whole_file import write_whole
from moe_serve.errors import InvalidArgument
from placement.adapters import maps, own, sglang, trtllm, vllm
from placement.eplb import EplbError
from placement.eplb.tensors import IntArray

TORCH_SUFFIX: Final = ".pt"


def written(form: LayoutFormat, held: Holding, layers: tuple[int, ...] | None) -> str | IntArray:
    """Text of the file; of the engines that load tensors, the map that belongs into one.

    layers: numbers of the MoE layers in the model, where the form counts its dense layers too.
    Raises InvalidArgument where the form cannot say what is held.
    """
    if form is LayoutFormat.OWN:
        return own.placement_json(
            zip(held.ranks, held.rows, strict=True),
            model=held.model,
            weights_version=held.weights_version,
            num_layers=held.num_layers,
            num_experts=held.num_experts,
        )
    try:
        found = maps.physical_map(
            held.rows,
            num_layers=held.num_layers,
            num_experts=held.num_experts,
            ranks=held.ranks,
        )
        if form is LayoutFormat.TRTLLM:
            numbers = layers or tuple(range(held.num_layers))
            return trtllm.load_balancer_yaml(found, layer_ids=numbers)
    except EplbError as error:
        raise InvalidArgument(str(error)) from error
    return _with_dense(found, layers) if form is LayoutFormat.SGLANG else found


def _with_dense(found: IntArray, layers: tuple[int, ...] | None) -> IntArray:
    """A row for every layer of the model up to the last MoE layer; those of dense layers are never
    used, and hold what the first MoE layer does."""
    if layers is None:
        return found
    place = {number: row for row, number in enumerate(layers)}
    rows: IntArray = found[[place.get(number, 0) for number in range(layers[-1] + 1)]]
    return rows


def save(file: Path, form: LayoutFormat, content: str | IntArray) -> None:
    """Write the file, whole or not at all. A name that ends in .pt gets tensors, which SGLang
    reads. Raises InvalidArgument."""
    write_whole(file, _bytes(file, form, content), "--file")


def _bytes(file: Path, form: LayoutFormat, content: str | IntArray) -> bytes:
    if file.suffix != TORCH_SUFFIX:
        return text_of(form, content).encode()
    if form is not LayoutFormat.SGLANG:
        raise InvalidArgument(f"{file}: only SGLang reads a placement from {TORCH_SUFFIX} files")
    import torch

    buffer = io.BytesIO()
    torch.save({sglang.MAP: torch.tensor(content)}, buffer)
    return buffer.getvalue()


def text_of(form: LayoutFormat, content: str | IntArray) -> str:
    """Text that `written` made, or makes of a map."""
    if isinstance(content, str):
        return content
    if form is LayoutFormat.SGLANG:
        return sglang.location_json(content) + "\n"
    return vllm.expert_map_json(content) + "\n"
