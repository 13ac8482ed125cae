"""Checks the arguments of the public function and turns them into a `Problem`.

Responsible for: every typed refusal, so that what follows may assume. Must never plan. Called by
`placement.eplb`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from placement.eplb.errors import EplbError
from placement.eplb.tensors import FloatArray, IntArray, to_float, to_int
from placement.split import RANKS_MAX

COUNT_MAX: Final = 1 << 20
"""Largest number of replicas, groups, nodes, gpus: a guard against a mistaken argument."""
GPUS_MAX: Final = RANKS_MAX
"""Largest num_gpus: what the splitter takes that scores a plan."""
EMPTY: Final = -1
"""A slot of `current` that holds nothing."""


class Counts(NamedTuple):
    """The whole numbers of a call, checked. `num_groups` and `num_nodes` are 1 where the public
    function's hierarchical rule does not apply."""

    num_replicas: int
    num_groups: int
    num_nodes: int
    num_gpus: int

    @property
    def slots(self) -> int:
        """Slots a gpu."""
        return self.num_replicas // self.num_gpus


class Problem(NamedTuple):
    """A call that can be planned.

    load: float64 [layers, experts]. current: int64 [layers, replicas] or None, EMPTY where a slot
    holds nothing. history: float64 [intervals, layers, experts] or None. max_moves: slot writes a
    layer or None.
    """

    load: FloatArray
    counts: Counts
    current: IntArray | None
    history: FloatArray | None
    max_moves: int | None


def check(
    weight: object,
    counts: tuple[int, int, int, int],
    current: object,
    history: object,
    max_moves: int | None,
) -> Problem:
    """The call as a Problem. counts: num_replicas, num_groups, num_nodes, num_gpus.

    Raises EplbError naming the argument, the limit and the next step.
    """
    load = _loads("weight", weight, "[layers, experts]", 2)
    num_layers, num_experts = load.shape
    checked = _check_counts(counts, num_experts)
    past = None
    if history is not None:
        past = _loads("history", history, "[intervals, layers, experts]", 3)
        if past.shape[1:] != load.shape:
            raise EplbError(
                "history",
                f"must have shape [intervals, {num_layers}, {num_experts}] as weight has, got "
                f"{past.shape}",
                "pass the same layers and experts, oldest interval first",
            )
    if max_moves is not None:
        max_moves = whole("max_moves", max_moves, 0)
    held = None if current is None else _check_current(current, load.shape, checked)
    return Problem(load, checked, held, past, max_moves)


def _loads(name: str, values: object, axes: str, ndim: int) -> FloatArray:
    array = to_float(name, values)
    if array.ndim != ndim or 0 in array.shape:
        raise EplbError(
            name, f"must have shape {axes}, none of them 0, got {array.shape}", "pass counted load"
        )
    for said, bad in (("finite", ~np.isfinite(array)), ("at least 0", array < 0)):
        if bad.any():
            at = tuple(int(i) for i in np.argwhere(bad)[0])
            raise EplbError(
                f"{name}{list(at)}", f"must be {said}, got {array[at]}", "pass counted load"
            )
    return array


def _check_counts(counts: tuple[int, int, int, int], num_experts: int) -> Counts:
    names = ("num_replicas", "num_groups", "num_nodes", "num_gpus")
    replicas, groups, nodes, gpus = (
        whole(name, value, 1) for name, value in zip(names, counts, strict=True)
    )
    if replicas < num_experts:
        raise EplbError(
            "num_replicas",
            f"{replicas} replicas cannot hold {num_experts} experts",
            f"pass at least {num_experts}, rounded up to a multiple of num_gpus {gpus}",
        )
    if gpus > GPUS_MAX:
        raise EplbError(
            "num_gpus", f"must be in [1, {GPUS_MAX}], got {gpus}", "pass the real number"
        )
    if replicas % gpus != 0:
        raise EplbError(
            "num_replicas",
            f"{replicas} replicas do not divide by num_gpus {gpus}",
            f"pass {-(-replicas // gpus) * gpus}",
        )
    if groups % nodes != 0 or nodes == 1:
        return Counts(replicas, 1, 1, gpus)
    if num_experts % groups != 0:
        raise EplbError(
            "num_groups",
            f"{num_experts} experts do not divide into {groups} groups",
            "pass the model's number of expert groups, or 1 to plan without groups",
        )
    if gpus % nodes != 0:
        raise EplbError(
            "num_gpus",
            f"{gpus} gpus do not divide over num_nodes {nodes}",
            "pass num_nodes 1 to plan without nodes",
        )
    return Counts(replicas, groups, nodes, gpus)


def whole(name: str, value: int, least: int) -> int:
    """`value` as int, in [least, COUNT_MAX]. Raises EplbError."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise EplbError(name, f"must be an integer, got {type(value).__name__}", "pass an int")
    if not least <= value <= COUNT_MAX:
        raise EplbError(
            name, f"must be in [{least}, {COUNT_MAX}], got {value}", "pass the real number"
        )
    return int(value)


def _check_current(current: object, shape: tuple[int, ...], counts: Counts) -> IntArray:
    num_layers, num_experts = shape
    held = to_int("current", current)
    if held.shape != (num_layers, counts.num_replicas):
        raise EplbError(
            "current",
            f"must have shape [{num_layers}, {counts.num_replicas}], physical_to_logical as it is "
            f"now, got {held.shape}",
            "leave current out where the number of layers or replicas has changed",
        )
    unknown = (held < EMPTY) | (held >= num_experts)
    if unknown.any():
        layer, slot = (int(i) for i in np.argwhere(unknown)[0])
        raise EplbError(
            f"current[{layer}, {slot}]",
            f"names expert {int(held[layer, slot])}, weight has experts 0 to {num_experts - 1}",
            "pass expert ids of weight, or -1 where a slot holds nothing",
        )
    for layer in range(num_layers):
        count = np.bincount(held[layer][held[layer] >= 0], minlength=num_experts)
        if (count == 0).any():
            raise EplbError(
                f"current[{layer}]",
                f"has no replica of expert {int(np.argmin(count))}, every expert needs one",
                "leave current out to plan from nothing",
            )
    return held
