"""Why a move is in its plan: the words of `Move.reason`.

Responsible for figures that a reader can check against the load. Decides nothing. Called by
`compose`.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from placement.layout import ExpertLayout
from placement.planner.drafts import Draft
from placement.planner.plan import MoveKind
from placement.planner.price import served_load

FloatArray = npt.NDArray[np.float64]


class Shares:
    """How much of a layer's load an expert has, and how much each rank carries before and after
    the plan; the latter is reckoned once, and only where words ask for it."""

    def __init__(self, current: ExpertLayout, after: ExpertLayout, demand: FloatArray) -> None:
        self._layouts, self._demand = (current, after), demand
        self._total: FloatArray = demand.sum(axis=1)

    def of_expert(self, layer: int, expert: int) -> float | None:
        """The expert's share, None where no load is known."""
        total = float(self._total[layer])
        return float(self._demand[layer, expert]) / total if total > 0.0 else None

    def of_rank(self, layer: int, rank: int) -> tuple[float, float]:
        """The rank's share before and after. Only where load is known."""
        before, after = (loads[rank, layer] / self._total[layer] for loads in self._carried)
        return float(before), float(after)

    @cached_property
    def _carried(self) -> tuple[FloatArray, FloatArray]:
        before, after = (served_load(layout, self._demand) for layout in self._layouts)
        return before, after


def reason_of(draft: Draft, current: ExpertLayout, shares: Shares, prefix: str) -> str:
    """Why the draft is in the plan, in words; `prefix` is who asked ("" for automatic plans)."""
    layer, expert = divmod(draft.key, current.num_experts)
    count = int(current.replica_counts[layer, expert])
    share = shares.of_expert(layer, expert)
    words = "no load known" if share is None else f"{100.0 * share:.1f}% of the layer's load"
    if draft.urgent:
        words = "it has no replica"
    elif draft.kind is MoveKind.REPLICATE:
        words += f" on {count} replica{'s' if count != 1 else ''}"
    elif draft.kind is MoveKind.EVICT:
        words += f"; {count - 1} replica{'s' if count != 2 else ''} left"
    elif draft.source == draft.target:
        words += f"; to another slot of rank {draft.target}"
    elif share is not None:
        words += "".join(
            f"{sign} rank {rank} from {100.0 * before:.1f}% to {100.0 * after:.1f}%"
            for sign, rank in ((";", draft.source), (",", draft.target))
            for before, after in [shares.of_rank(layer, rank)]
        )
    return f"{prefix}: {words}" if prefix else words
