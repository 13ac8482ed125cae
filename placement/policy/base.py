"""What a policy sees and returns: `propose(PolicyInput) -> ExpertLayout`.

A policy is a pure function: same input, same layout. It validates what it is given and what it
returns, breaks ties by lowest id, and knows nothing of steps, copies or time.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from placement.layout import ExpertLayout
from placement.topology import MoeSpec, Topology


class PolicyError(ValueError):
    """The input admits no layout: names what is short (slots, ranks, bytes) and by how much."""


class PolicyInput(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Everything a policy may look at.

    layout: the live layout (lists only what is listed or will be). May be empty at first start.
    scenarios: float64 [num_scenarios, phases, layers, experts], forecast pairs a second; `weights`
    float64 [num_scenarios] sums to 1. All zero = nothing known: a policy then treats experts as
    equally loaded. max_moves / max_bytes: limits on slot writes against `layout` (None = no limit).
    Repairs of experts below the floor and slots that must be given up come first and do not count.
    staging_slots: empty slots to leave on every usable rank. floor: failure domains every expert
    should reach. layers: the layers to plan, ascending; the others are in balance and only give way
    where slots are shared. None = all.
    """

    spec: MoeSpec
    topology: Topology
    layout: ExpertLayout
    scenarios: npt.NDArray[np.float64]
    weights: npt.NDArray[np.float64]
    floor: int = 1
    staging_slots: int = 1
    max_moves: int | None = None
    max_bytes: int | None = None
    byte_price: float = 0.0
    balance_enough: float = 0.97
    max_cross_node_bytes: int | None = None
    uniform: bool = False
    batch_tokens: tuple[float, float] = (0.0, 0.0)
    layers: tuple[int, ...] | None = None


class Policy(Protocol):
    """A named rule that proposes a layout."""

    def __call__(self, request: PolicyInput, /) -> ExpertLayout:
        """Layout that `ExpertLayout.validate` accepts for the request's topology, floor and staging
        slots."""
        ...
