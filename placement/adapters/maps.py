"""Placements as the maps that other engines read: per layer a list of slots, each an expert, the
slots of a rank side by side, as many of every layer on every rank.

Responsible for turning keys by rank into such a map and back, and for refusing what the form cannot
say. Pure. Called by whoever writes or reads such files, with the module of the engine.

Example, one layer of three experts on two ranks:

>>> physical_map([[0, 1], [2, 0]], num_layers=1, num_experts=3).tolist()
[[0, 1, 2, 0]]
>>> rows_of([[0, 1, 2, 0]], num_ranks=2, num_experts=3).rows
((0, 1), (0, 2))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from placement.adapters.counts import check_cells, check_sizes
from placement.eplb.errors import EplbError
from placement.eplb.tensors import IntArray, to_int

EMPTY: Final = -1
"""An expert's place in a map whose slot holds nothing."""
NAMED_MAX: Final = 4
"""Layers or ranks that one sentence names."""


@dataclass(frozen=True, slots=True)
class MapRows:
    """`rows`: keys (layer * num_experts + expert) by rank, ascending, each once. `twice`: slots
    left out because their rank holds the expert already: there it is the same to a router that
    knows ranks."""

    rows: tuple[tuple[int, ...], ...]
    twice: int


def physical_map(
    rows: Sequence[Sequence[int]],
    *,
    num_layers: int,
    num_experts: int,
    ranks: Sequence[int] | None = None,
) -> IntArray:
    """`physical_to_logical`, int64 [layers, physical], of keys by rank, in their order.

    ranks: what the ranks are called in a refusal; None = by their place. Raises EplbError where the
    ranks do not have as many slots of every layer each, and where an expert has none.
    """
    called = list(range(len(rows))) if ranks is None else list(ranks)
    held = [_by_layer(keys, num_layers, num_experts) for keys in rows]
    counts = np.array([[len(one) for one in layers] for layers in held], dtype=np.int64)
    problems = list(_uneven(counts, called))
    if problems:
        raise EplbError(
            "the placement",
            "has no such form, in which every rank has as many slots of every layer: "
            + "; ".join(problems),
            "set rebalance.uniform: true in the service file, start again and let it balance, or "
            "export with --format moe-serve",
        )
    found = np.array(
        [[expert for layers in held for expert in layers[layer]] for layer in range(num_layers)],
        dtype=np.int64,
    )
    for layer, row in enumerate(found):
        lost = np.setdiff1d(np.arange(num_experts), row)
        if len(lost):
            raise EplbError(
                "the placement",
                f"has no replica of layer {layer} expert {int(lost[0])}"
                + (f" and {len(lost) - 1} more of that layer" if len(lost) > 1 else ""),
                "wait until it is repaired; see `moe-serve status`",
            )
    return found


def _by_layer(keys: Sequence[int], num_layers: int, num_experts: int) -> list[list[int]]:
    layers: list[list[int]] = [[] for _ in range(num_layers)]
    for key in keys:
        layer, expert = divmod(key, num_experts)
        layers[layer].append(expert)
    return layers


def _uneven(counts: IntArray, called: Sequence[int]) -> Iterator[str]:
    """counts: slots [ranks, layers]."""
    if not counts.size:
        yield "there is no rank"
        return
    usual = int(np.bincount(counts.ravel()).argmax())
    odd = np.argwhere(usual != counts.T)
    for layer, place in odd[:NAMED_MAX].tolist():
        yield (
            f"rank {called[place]} has {int(counts[place, layer])} of layer {layer}, most have "
            f"{usual}"
        )
    if len(odd) > NAMED_MAX:
        layers, ranks = len(set(odd[:, 0].tolist())), len(set(odd[:, 1].tolist()))
        yield f"and so on: {layers} layers and {ranks} ranks differ"
    if not len(odd) and not usual:
        yield "no rank holds anything"


def rows_of(
    physical_to_logical: object,
    *,
    num_ranks: int,
    num_experts: int,
    where: str = "physical_to_logical_map",
    may_be_empty: bool = False,
) -> MapRows:
    """Keys by rank of a map [layers, physical]. may_be_empty: -1 stands for a slot that holds
    nothing.

    Raises EplbError where it is no such map, names an expert that the model has not, or has slots
    that do not share out among the ranks.
    """
    check_cells(where, physical_to_logical)
    found = to_int(where, physical_to_logical)
    if found.ndim != 2 or 0 in found.shape:
        raise EplbError(
            where, f"must be [layers, slots], got {list(found.shape)}", "pass one row a layer"
        )
    layers, slots = found.shape
    check_sizes(where, layers=layers, experts=slots)
    if slots % num_ranks:
        raise EplbError(
            where,
            f"has {slots} slots a layer, which {num_ranks} ranks cannot share equally",
            "it is of a service with another number of ranks: add or remove some, or convert it",
        )
    low = EMPTY if may_be_empty else 0
    bad = np.argwhere((found < low) | (found >= num_experts))
    if len(bad):
        layer, slot = bad[0].tolist()
        raise EplbError(
            f"{where}[{layer}][{slot}]",
            f"experts must lie in [0, {num_experts}), got {int(found[layer, slot])}",
            "it is of another model",
        )
    own = slots // num_ranks
    rows, twice = [], 0
    for rank in range(num_ranks):
        block = found[:, rank * own : (rank + 1) * own]
        keys = (block + np.arange(layers)[:, None] * num_experts)[block != EMPTY]
        once = np.unique(keys)
        twice += len(keys) - len(once)
        rows.append(tuple(once.tolist()))
    return MapRows(tuple(rows), twice)
