"""Figures by expert: one of them as a document, all of them as CSV.

Words: *pairs* are tokens x chosen experts (demand). *Share* is of the pairs of the expert's layer,
*fair share* 1 / experts of a layer. *Rank in layer*: 1 = hottest, the lower id first of equals.

Responsible for these figures. Called by page and command line.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from moe_serve.documents.replicas import Holders, Ranks
from moe_serve.documents.views import Json
from moe_serve.documents.window import PHASES, Counts, counts_of
from moe_serve.errors import FieldViolation, NotFound
from moe_serve.rpc import placement_pb2 as pb

CSV_COLUMNS = "layer,expert,pairs,share,rank_in_layer,replicas,ranks"


def shares_of(pairs: Counts) -> npt.NDArray[np.float64]:
    """Share of each expert in its layer, float64 [layers, experts] in [0, 1]; 0 in a layer without
    load.

    >>> shares_of(np.array([[6, 2], [0, 0]])).tolist()
    [[0.75, 0.25], [0.0, 0.0]]
    """
    total = pairs.sum(axis=-1, keepdims=True)
    found: npt.NDArray[np.float64] = pairs / np.maximum(total, 1)
    return found


def ranks_in_layer(pairs: Counts) -> Counts:
    """Rank in its layer of each expert, int64 [layers, experts].

    >>> ranks_in_layer(np.array([[4, 6, 4]])).tolist()
    [[2, 1, 3]]
    """
    hottest_first = np.argsort(-pairs, axis=-1, kind="stable")
    return np.argsort(hottest_first, axis=-1).astype(np.int64) + 1


def expert_document(
    load: pb.GetLoadResponse,
    holders: Holders,
    nodes: dict[int, str],
    *,
    layer: int,
    expert: int,
) -> Json:
    """Share, rank in the layer and replicas of one expert in a window. Raises NotFound, field
    `layer` or `expert`."""
    if not (layer < load.num_layers and expert < load.num_experts):
        text = (
            f"layer {layer} expert {expert} does not exist; "
            f"there are {load.num_layers} layers of {load.num_experts} experts"
        )
        field = "layer" if layer >= load.num_layers else "expert"
        raise NotFound(text, violations=(FieldViolation(field, text),))
    demand = counts_of(load, "demand")
    row = demand[:, layer].sum(axis=0)
    return {
        "layer": layer,
        "expert": expert,
        "window": load.window,
        "pairs": int(row[expert]),
        "share": float(shares_of(row)[expert]),
        "fair_share": 1.0 / load.num_experts,
        "rank_in_layer": int(ranks_in_layer(row)[expert]),
        "experts": load.num_experts,
        "by_phase": {
            name.value: int(demand[number, layer, expert])
            for name, number in PHASES.items()
            if number < len(demand)
        },
        "replicas": [
            {"rank": rank, "slot": slot, "state": state, "node": nodes.get(rank, "")}
            for rank, slot, state in holders.get((layer, expert), [])
        ],
    }


def csv_parts(pairs: Counts, ranks: Ranks, layer: int | None = None) -> Iterator[str]:
    """All experts, or those of one layer, as CSV (RFC 4180): the head, then the rows of a layer at
    a time, layers in order. `ranks`: of listed replicas, apart by blanks."""
    yield f"{CSV_COLUMNS}\r\n"
    for number in range(len(pairs)) if layer is None else (layer,):
        yield "".join(_rows(number, pairs[number], ranks))


def _rows(layer: int, row: npt.NDArray[np.int64], ranks: Ranks) -> Iterator[str]:
    figures = zip(row.tolist(), shares_of(row).tolist(), ranks_in_layer(row).tolist(), strict=True)
    for expert, (pairs, share, place) in enumerate(figures):
        held = ranks.get((layer, expert), ())
        yield (
            f"{layer},{expert},{pairs},{share:.8f},{place},"
            f"{len(held)},{' '.join(map(str, held))}\r\n"
        )
