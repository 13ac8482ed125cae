"""Kinds of faults, and how long each lasts. Words only; `nemesis` brings them about."""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType


class FaultKind(StrEnum):
    """What may befall a service."""

    # network
    DELAY = "delay"
    LOSS = "loss"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    PARTITION = "partition"
    """Nothing passes from one part to another, in one direction."""
    BLACKOUT = "blackout"
    """Nothing reaches a node's parts and nothing leaves them."""
    # shards
    SHARD_CRASH = "shard_crash"
    SHARD_PAUSE = "shard_pause"
    SHARD_SLOW = "shard_slow"
    NODE_LOSS = "node_loss"
    COPY_SLOW = "copy_slow"
    COPY_STUCK = "copy_stuck"
    COPY_CORRUPT = "copy_corrupt"
    OUT_OF_MEMORY = "out_of_memory"
    # routers
    ROUTER_CRASH = "router_crash"
    ROUTER_PAUSE = "router_pause"
    ROUTER_LEAVES = "router_leaves"
    # the controller
    CONTROLLER_CRASH = "controller_crash"
    """Between an event and the journal, or between the journal and the commands."""
    CONTROLLER_TORN = "controller_torn"
    """In the middle of writing a record."""
    CONTROLLER_PAUSE = "controller_pause"
    CONTROLLER_RIVAL = "controller_rival"
    """Another controller with a higher term takes over while the old one stands still or hears
    nothing, and then goes on."""
    DISK_FULL = "disk_full"
    CLOCK_JUMP = "clock_jump"
    # what people and traffic do
    TRAFFIC_SHIFT = "traffic_shift"
    OVERLOAD = "overload"
    BUDGET = "budget"
    RANK_LEAVES = "rank_leaves"
    """A rank is drained, and its shard ends once it is empty."""
    RANK_JOINS = "rank_joins"
    """A rank that was never seen joins, or one that had left comes back."""
    RESTART_ALL = "restart_all"
    """Every process is killed at once."""


LASTS_S = MappingProxyType(
    {
        FaultKind.DELAY: 1.5,
        FaultKind.LOSS: 1.5,
        FaultKind.DUPLICATE: 2.0,
        FaultKind.REORDER: 2.0,
        FaultKind.PARTITION: 1.6,
        FaultKind.BLACKOUT: 0.8,
        FaultKind.SHARD_PAUSE: 0.8,
        FaultKind.SHARD_SLOW: 2.0,
        FaultKind.COPY_SLOW: 2.0,
        FaultKind.COPY_STUCK: 1.5,
        FaultKind.COPY_CORRUPT: 1.5,
        FaultKind.OUT_OF_MEMORY: 1.0,
        FaultKind.ROUTER_PAUSE: 0.8,
        FaultKind.CONTROLLER_PAUSE: 0.8,
        FaultKind.CONTROLLER_RIVAL: 1.4,
        FaultKind.DISK_FULL: 1.5,
        FaultKind.CLOCK_JUMP: 1.5,
        FaultKind.OVERLOAD: 0.8,
        FaultKind.BUDGET: 2.0,
        FaultKind.RANK_LEAVES: 2.0,
    }
)
"""Usual seconds until it is mended; kinds without a time are over at once."""
