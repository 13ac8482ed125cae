"""One sub-call on its way to a shard, and what its end says: an answer, the shard's fault, or the
request's.

Busy is no fault: the shard works, and refuses what it cannot take. Neither is what the request did
wrong, nor that nobody waits any more. A fault is what the shard itself failed at: its connection,
silence, a malformed answer, its word that it cannot compute.

Responsible for telling these apart. Must never retry or count. Called by `dispatch`.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_serve.errors import MoeServeError, ResourceExhausted, Unavailable, WireLost
from moe_serve.ports import FAULT_WORDS, SubCall, SubReply
from moe_serve.router.flight import well_formed
from moe_serve.router.lanes import Lane
from placement.roles.calls import Ended


@dataclass(frozen=True, slots=True)
class Lost:
    """How a sub-call ended without an answer: `why`, and `fault` where it counts against the shard.
    `error`: the request cannot be served by anybody."""

    why: Ended = Ended.LOST
    fault: bool = False
    error: MoeServeError | None = None
    malformed: bool = False


CANCELLED = Lost()
"""Nobody waits for it any more."""


async def ask(lane: Lane, sub_call: SubCall) -> SubReply | Lost:
    """Send a sub-call and wait for its end: a well-formed answer, or none. Raises nothing of what
    shard, wire or request may do wrong."""
    try:
        reply = await lane.channel.forward(sub_call)
    except WireLost:
        if lane.broken or not lane.channel.connected:
            lane.broken = True  # looked at again until it is connected
            return Lost(why=Ended.LOST, fault=True)
        return Lost(why=Ended.SILENT, fault=True)
    except Unavailable:
        return Lost(why=Ended.FAILED, fault=True)
    except ResourceExhausted as error:
        # A message that is too large names its field and is so for every shard.
        return Lost(error=error) if error.violations else Lost(why=Ended.REFUSED)
    except MoeServeError as error:
        return Lost(error=error)
    if not well_formed(reply, sub_call):
        return Lost(fault=True, malformed=True)
    if reply.detail.startswith(FAULT_WORDS) and not len(reply.partial):
        return Lost(why=Ended.FAILED, fault=True)
    return reply
