"""What a failed call means: a typed answer of the router, or a lost connection.

Responsible for this one distinction. Must never retry. Called by `link`, `lane`, `aio`.
"""

from __future__ import annotations

from typing import Any

import grpc

from moe_serve.errors import MoeServeError, Unavailable
from moe_serve.rpc.status import DETAILS_KEY, from_rpc_error


def lost_or_typed(error: grpc.RpcError) -> MoeServeError:
    """The typed error of a call that the client itself did not cancel.

    Besides UNAVAILABLE, a connection that goes shows in two ways: the server cancels the calls it
    has open, or gRPC fails to write and calls that INTERNAL. Our routers never send CANCELLED, and
    INTERNAL only with details.
    """
    code, trailing = _told(error, "code"), _told(error, "trailing_metadata") or ()
    if code is grpc.StatusCode.CANCELLED:
        return Unavailable("the router ended the call")
    if code is grpc.StatusCode.INTERNAL and DETAILS_KEY not in {key for key, _ in trailing}:
        return Unavailable(f"the connection to the router broke: {_told(error, 'details')}")
    return from_rpc_error(error)


def _told(error: grpc.RpcError, what: str) -> Any:
    """What an error of a call says; RpcError itself declares nothing."""
    tell = getattr(error, what, None)
    return tell() if callable(tell) else None


def elsewhere(error: MoeServeError) -> bool:
    """Whether another router may succeed where this one failed: by code, since WireLost has it
    too."""
    return error.code == Unavailable.code
