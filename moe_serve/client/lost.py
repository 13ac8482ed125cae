"""What a failed call means: a typed answer of the router, or a lost connection; and what several
failed calls mean together.

Responsible for these distinctions. Must never retry. Called by `link`, `lane`, `aio`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

from moe_serve.errors import MoeServeError, Unavailable
from moe_serve.rpc.status import DETAILS_KEY, from_rpc_error

OTHER_CHARS_MAX = 120
"""Of the message of each further router, in one error."""


class RouterLost(Unavailable):
    """The router did not answer: whatever it would have said of the request is not known."""


def lost_or_typed(error: grpc.RpcError) -> MoeServeError:
    """The typed error of a call that the client itself did not cancel.

    Besides UNAVAILABLE, a connection that goes shows in two ways: the server cancels the calls it
    has open, or gRPC fails to write and calls that INTERNAL. Our routers never send CANCELLED, and
    INTERNAL only with details.
    """
    code, trailing = _told(error, "code"), _told(error, "trailing_metadata") or ()
    if code is grpc.StatusCode.CANCELLED:
        return RouterLost("the router ended the call")
    if DETAILS_KEY not in {key for key, _ in trailing}:
        if code is grpc.StatusCode.INTERNAL:
            return RouterLost(f"the connection to the router broke: {_told(error, 'details')}")
        if code is grpc.StatusCode.UNAVAILABLE:
            return RouterLost(f"the router is not reached: {_told(error, 'details')}")
    return from_rpc_error(error)


def of_all(tries: Sequence[tuple[str, MoeServeError]]) -> MoeServeError:
    """What to tell the caller after several routers failed, oldest try first: what the last router
    that answered said, else how the last one was lost; and the addresses of the others.

    A router that answered "no replica of expert 3" says more than one that is dead.
    """
    answered = [one for one in tries if not isinstance(one[1], RouterLost)]
    address, chosen = (answered or tries)[-1]
    others = {other: error for other, error in tries if other != address}
    kind = Unavailable if isinstance(chosen, RouterLost) else type(chosen)
    if not others:
        return kind(chosen.message, violations=chosen.violations)
    told = "; ".join(
        f"{other}: {error.message[:OTHER_CHARS_MAX]}" for other, error in others.items()
    )
    return kind(
        f"{chosen.message} (router {address}; also asked {told})", violations=chosen.violations
    )


def _told(error: grpc.RpcError, what: str) -> Any:
    """What an error of a call says; RpcError itself declares nothing."""
    tell = getattr(error, what, None)
    return tell() if callable(tell) else None


def elsewhere(error: MoeServeError) -> bool:
    """Whether another router may succeed where this one failed: by code, since WireLost has it
    too."""
    return error.code == Unavailable.code
