"""What a failed call means: a typed answer of the router, or a lost connection.

Responsible for this one distinction. Must never retry. Called by `link`, `lane`, `aio`.
"""

from __future__ import annotations

import grpc

from moe_serve.errors import MoeServeError, Unavailable
from moe_serve.rpc.status import from_rpc_error


def lost_or_typed(error: grpc.RpcError) -> MoeServeError:
    """The typed error of a call that the client itself did not cancel."""
    code = getattr(error, "code", None)
    if callable(code) and code() is grpc.StatusCode.CANCELLED:
        # A server that goes down cancels the calls it has open.
        return Unavailable("the router ended the call")
    return from_rpc_error(error)


def elsewhere(error: MoeServeError) -> bool:
    """Whether another router may succeed where this one failed: by code, since WireLost has it
    too."""
    return error.code == Unavailable.code
