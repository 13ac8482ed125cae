"""A placement as this service writes it down for itself: ranks by number, experts by layer.

Responsible for that text and for reading it. Pure. Called by the command line's export and import.

It says what other engines' forms cannot: ranks with different numbers of slots, and ranks that hold
nothing. Which slot of a rank holds which expert is not said, for it means nothing.

>>> text = placement_json(
...     [(0, (0, 1)), (3, (2,))], model="m", weights_version="v", num_layers=1, num_experts=3
... )
>>> read_placement(text).ranks
(RankRow(rank=0, layers=((0, 1),)), RankRow(rank=3, layers=((2,),)))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Final, Literal

import msgspec

from placement.adapters.counts import EXPERTS_MAX, LAYERS_MAX
from placement.eplb.errors import EplbError

RANKS_MAX: Final = 16_384
FORM: Final = "moe-serve/placement"

_Layer = Annotated[
    tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=EXPERTS_MAX)
]


class RankRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank: its experts by layer."""

    rank: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    layers: Annotated[tuple[_Layer, ...], msgspec.Meta(max_length=LAYERS_MAX)]

    def keys(self, num_experts: int) -> tuple[int, ...]:
        """layer * num_experts + expert, ascending."""
        return tuple(
            sorted(
                layer * num_experts + expert
                for layer, row in enumerate(self.layers)
                for expert in row
            )
        )


class OwnPlacement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file. model, weights_version: of the service that wrote it, for people."""

    form: Literal["moe-serve/placement"] = msgspec.field(name="format")
    version: Literal[1]
    model: str = ""
    weights_version: str = ""
    num_layers: Annotated[int, msgspec.Meta(ge=1, le=LAYERS_MAX)]
    num_experts: Annotated[int, msgspec.Meta(ge=1, le=EXPERTS_MAX)]
    ranks: Annotated[tuple[RankRow, ...], msgspec.Meta(min_length=1, max_length=RANKS_MAX)]


def placement_json(
    rows: Iterable[tuple[int, Sequence[int]]],
    *,
    model: str,
    weights_version: str,
    num_layers: int,
    num_experts: int,
) -> str:
    """Text of the file, one line a rank. rows: (rank, its keys)."""
    lines = []
    for rank, keys in rows:
        layers: list[list[int]] = [[] for _ in range(num_layers)]
        for key in sorted(keys):
            layers[key // num_experts].append(key % num_experts)
        lines.append(msgspec.json.encode({"rank": rank, "layers": layers}).decode())
    head = {
        "format": FORM,
        "version": 1,
        "model": model,
        "weights_version": weights_version,
        "num_layers": num_layers,
        "num_experts": num_experts,
    }
    return msgspec.json.encode(head).decode()[:-1] + ',"ranks":[\n' + ",\n".join(lines) + "\n]}\n"


def read_placement(text: str | bytes) -> OwnPlacement:
    """What the file says. Raises EplbError naming the field, and where ranks, layers or experts do
    not fit what it says of itself."""
    remedy = "pass a file that `moe-serve export` wrote"
    try:
        found = msgspec.json.decode(text, type=OwnPlacement)
    except (msgspec.DecodeError, RecursionError, ValueError) as fault:
        raise EplbError("the file", f"is no placement ({fault})", remedy) from fault
    seen: set[int] = set()
    for number, row in enumerate(found.ranks):
        where = f"ranks[{number}]"
        if row.rank in seen:
            raise EplbError(where, f"names rank {row.rank} again", "name each once")
        seen.add(row.rank)
        if len(row.layers) != found.num_layers:
            raise EplbError(
                f"{where}.layers",
                f"has {len(row.layers)}, num_layers is {found.num_layers}",
                remedy,
            )
        for layer, experts in enumerate(row.layers):
            high = max(experts, default=0)
            if high >= found.num_experts:
                raise EplbError(
                    f"{where}.layers[{layer}]",
                    f"names expert {high}, num_experts is {found.num_experts}",
                    remedy,
                )
            if len(set(experts)) != len(experts):
                raise EplbError(f"{where}.layers[{layer}]", "names an expert twice", "name it once")
    return found
