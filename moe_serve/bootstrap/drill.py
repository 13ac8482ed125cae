"""What tests order from a whole service, as data: where its controllers die, through what its
routers reach the shards, what stands between the controller and its parts.

Responsible for naming it. Services outside tests order nothing. Passed to `service.deploy`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moe_serve.ports import Fleet


def as_it_is(fleet: Fleet) -> Fleet:
    """The fleet itself."""
    return fleet


@dataclass(frozen=True, slots=True)
class Drill:
    """What is ordered."""

    fail_points: tuple[str, ...] = ()
    """The n-th is where the controller of term n dies (`ControllerSettings.fail_points`)."""
    socks_proxy: str = ""
    """host:port of the SOCKS5 proxy through which routers reach shards; "" = straight."""
    fleet: Callable[[Fleet], Fleet] = as_it_is
    """What the controller is given in the place of its fleet. The result is pickled into it."""


NO_DRILL = Drill()
