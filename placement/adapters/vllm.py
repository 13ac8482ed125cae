"""The planner behind vLLM's EPLB policy interface, and a placement as vLLM maps it.

Responsible for the two forms that `vllm.distributed.eplb.policy` has had: `rebalance_experts`
returns the physical-to-logical map alone (`EplbPolicy`), and, in older versions, three maps
(`EplbMapsPolicy`). Must never import vLLM. Registered by the user's own code in the table that vLLM
looks policies up in, under a name that its configuration accepts:

    from vllm.distributed.eplb.policy import EPLB_POLICIES
    EPLB_POLICIES["default"] = EplbPolicy
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Final

import msgspec
import numpy as np

from placement.adapters.counts import check_cells, check_sizes
from placement.eplb import EplbError, Split, inverse
from placement.eplb.arguments import check
from placement.eplb.plan import plan
from placement.eplb.tensors import IntArray, TensorLike, in_kind_of, summed, to_float, to_int

MAP: Final = "physical_to_logical_map"
LIVE: Final = "old_global_expert_indices"
NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {"current": LIVE, "history": "weight", "num_gpus": "num_ranks"}
)
"""What an argument is called here and in vLLM."""


def expert_map_json(physical_to_logical: object) -> str:
    """The map as JSON, a list of slots a layer: the array that `EplbPolicy` is given as live, and
    what vLLM's proposed option for an initial map reads. No released version reads a file.

    >>> expert_map_json([[0, 1, 0, 2]])
    '[[0,1,0,2]]'
    """
    return msgspec.json.encode(to_int("physical_to_logical", physical_to_logical).tolist()).decode()


def read_expert_map(found: object, *, num_layers: int) -> IntArray:
    """Rows [layers, slots] of a loaded map: a list of layers, one list for all `num_layers` of
    them, or a mapping that holds either as `physical_to_logical_map`, as vLLM calls it. -1 is a
    slot that holds nothing.

    Raises EplbError for a mapping without that key; what rows hold is checked by `maps.rows_of`.
    """
    if isinstance(found, Mapping):
        if MAP not in found:
            raise EplbError(
                "the file",
                f"has no {MAP} (it has {', '.join(sorted(map(str, found)))[:200] or 'nothing'})",
                "pass a map of slots, a list a layer",
            )
        found = found[MAP]
    check_cells(MAP, found)
    rows = to_int(MAP, found)
    if rows.ndim == 1:
        check_sizes(MAP, layers=num_layers, experts=max(1, len(rows)))
        rows = np.broadcast_to(rows, (num_layers, len(rows)))
    return rows


class EplbPolicy:
    """vLLM's policy: few slot writes from the map that is live, under the equal split vLLM runs.

    max_moves: most slots of a layer written a rebalance, None = what pays. Set both in a subclass:

    >>> class Gentle(EplbPolicy):
    ...     max_moves = 8
    """

    max_moves: ClassVar[int | None] = None
    split: ClassVar[Split] = "equal"

    @classmethod
    def rebalance_experts(
        cls,
        weight: TensorLike,
        num_replicas: int,
        num_groups: int,
        num_nodes: int,
        num_ranks: int,
        old_global_expert_indices: TensorLike | None = None,
    ) -> Any:
        """physical_to_logical: int64 [layers, num_replicas], on the host.

        weight: [layers, logical experts], or [steps, layers, logical experts], oldest first, from
        which a forecast is made. old_global_expert_indices: [layers, num_replicas], the live map,
        -1 where a slot holds nothing. Where its number of slots differs from num_replicas (ranks
        came or went) slots cannot be told apart and the plan starts from nothing.

        Raises EplbError naming argument, limit and next step.
        """
        return in_kind_of(
            weight,
            cls._plan(
                weight, (num_replicas, num_groups, num_nodes, num_ranks), old_global_expert_indices
            ),
        )

    @classmethod
    def _plan(
        cls, weight: TensorLike, counts: tuple[int, int, int, int], live: TensorLike | None
    ) -> IntArray:
        load = to_float("weight", weight)
        history = None
        if load.ndim == 3:
            history, load = load, summed(load)
        current = None if live is None else to_int(LIVE, live)
        if current is not None and current.ndim == 2 and current.shape[1] != counts[0]:
            current = None
        try:
            return plan(check(load, counts, current, history, cls.max_moves), cls.split)
        except EplbError as fault:
            raise _renamed(fault) from fault


def _renamed(fault: EplbError) -> EplbError:
    """The refusal with the arguments called as vLLM calls them."""
    argument, problem, remedy = fault.argument, fault.problem, fault.remedy
    for ours, theirs in NAMES.items():
        word = re.compile(rf"\b{ours}\b")
        argument, problem, remedy = (word.sub(theirs, text) for text in (argument, problem, remedy))
    return EplbError(argument, problem, remedy)


class EplbMapsPolicy(EplbPolicy):
    """The same for versions of vLLM whose interface returns three maps."""

    @classmethod
    def rebalance_experts(
        cls,
        weight: TensorLike,
        num_replicas: int,
        num_groups: int,
        num_nodes: int,
        num_ranks: int,
        old_global_expert_indices: TensorLike | None = None,
    ) -> Any:
        """(physical_to_logical, logical_to_physical, expert_count), as
        `placement.eplb.rebalance_experts` returns them; otherwise as `EplbPolicy`."""
        physical = cls._plan(
            weight, (num_replicas, num_groups, num_nodes, num_ranks), old_global_expert_indices
        )
        maps = (physical, *inverse(physical, to_float("weight", weight).shape[-1]))
        return tuple(in_kind_of(weight, each) for each in maps)
