"""The page's way to the controller: channels, and calls with deadlines.

`Calls` is for what one asks once: explanations with the page's own token of role `read`, commands
with the operator's token and no other. It has a connection of its own, so that a command that takes
long delays no stream and a stream's end no command.

Responsible for tokens, deadlines and typed errors. Must never send the page's token with a command.
Called by `feed` and the handlers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Iterator
from typing import TypeVar

import grpc
import grpc.aio

from moe_serve.dashboard.settings import DashboardSettings
from moe_serve.errors import (
    InvalidArgument,
    MoeServeError,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from moe_serve.rpc import placement_pb2 as pb
from moe_serve.rpc import placement_pb2_grpc
from moe_serve.rpc.auth import bearer_metadata
from moe_serve.rpc.options import channel_credentials, channel_options
from moe_serve.rpc.status import from_rpc_error

READ_TIMEOUT_S = 5.0
COMMAND_TIMEOUT_S = 15.0
PLAN_TIMEOUT_S = 60.0
"""A plan is computed in the controller; its own deadline is 30 s."""
_RECONNECT_MS = (100, 1000)
"""Between two tries to connect, at least and at most: an operator waits for the answer."""
READERS_MAX = 8
"""Calls with the page's own token that may be open at once: no reader floods the controller."""
_T = TypeVar("_T")
_Metadata = tuple[tuple[str, str], ...] | None


class NotServed(MoeServeError):
    """The controller is of a version that lacks the call."""

    code = "UNIMPLEMENTED"


class TooManyReaders(MoeServeError):
    """READERS_MAX questions are open already."""

    code = "RESOURCE_EXHAUSTED"


def open_channel(settings: DashboardSettings) -> grpc.aio.Channel:
    """A new connection to the controller; inside a running loop only. Raises StartRefused."""
    options = [
        *channel_options(),
        # With the shared pool a new channel would inherit the back-off of the one that failed.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", _RECONNECT_MS[0]),
        ("grpc.min_reconnect_backoff_ms", _RECONNECT_MS[0]),
        ("grpc.max_reconnect_backoff_ms", _RECONNECT_MS[1]),
    ]
    if settings.tls_authority is None:
        return grpc.aio.insecure_channel(settings.admin_address, options=options)
    credentials = channel_credentials(settings.tls_authority)
    return grpc.aio.secure_channel(settings.admin_address, credentials, options=options)


def metadata_of(token: str) -> _Metadata:
    """Metadata of a call; None without a token."""
    return bearer_metadata(token) if token else None


class Calls:
    """Single calls over one channel, opened with the first. Each raises MoeServeError."""

    def __init__(self, settings: DashboardSettings) -> None:
        self._settings = settings
        self._channel: grpc.aio.Channel | None = None
        self._readers = 0

    async def close(self) -> None:
        """End the connection."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    # ---- with the page's token

    async def explain(self, seconds: float) -> pb.ExplainResponse:
        """Why it is slow now."""
        request = pb.ExplainRequest(seconds=seconds)
        with self._reader():
            return await _done(
                self._stub().Explain(
                    request, timeout=READ_TIMEOUT_S, metadata=metadata_of(self._settings.token)
                )
            )

    async def explain_plan(self, plan_id: str) -> pb.ExplainPlanResponse:
        """All that is known of a plan, "" = the newest."""
        request = pb.ExplainPlanRequest(plan_id=plan_id)
        with self._reader():
            return await _done(
                self._stub().ExplainPlan(
                    request, timeout=READ_TIMEOUT_S, metadata=metadata_of(self._settings.token)
                )
            )

    @contextlib.contextmanager
    def _reader(self) -> Iterator[None]:
        if self._readers >= READERS_MAX:
            raise TooManyReaders(f"{READERS_MAX} questions to the controller are open already")
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1

    # ---- with the operator's token

    async def check_operator(self, token: str) -> None:
        """Raises Unauthenticated or PermissionDenied where a token may not command.

        Asks for a check of no plan at all: it needs the role admin and can change nothing.
        """
        request = pb.ApplyPlanRequest(plan_id="", validate_only=True)
        with contextlib.suppress(InvalidArgument):
            await _done(
                self._stub().ApplyPlan(
                    request, timeout=COMMAND_TIMEOUT_S, metadata=metadata_of(token)
                )
            )

    async def pause(self, token: str, reason: str) -> None:
        """Stop automatic plans."""
        request = pb.PauseRequest(reason=reason)
        await _done(
            self._stub().Pause(request, timeout=COMMAND_TIMEOUT_S, metadata=metadata_of(token))
        )

    async def resume(self, token: str) -> None:
        """Let automatic plans run again."""
        request = pb.ResumeRequest()
        await _done(
            self._stub().Resume(request, timeout=COMMAND_TIMEOUT_S, metadata=metadata_of(token))
        )

    async def compute_plan(self, token: str, policy: str, max_moves: int) -> pb.PlanView:
        """A plan; nothing moves. "" and 0: as configured."""
        request = pb.ComputePlanRequest(policy=policy, max_moves=max_moves)
        answer = await _done(
            self._stub().ComputePlan(request, timeout=PLAN_TIMEOUT_S, metadata=metadata_of(token))
        )
        return answer.plan

    async def apply_plan(self, token: str, plan_id: str, validate_only: bool) -> str:
        """Run a computed plan, or only check it. Returns the controller's sentence."""
        request = pb.ApplyPlanRequest(plan_id=plan_id, validate_only=validate_only)
        answer = await _done(
            self._stub().ApplyPlan(request, timeout=COMMAND_TIMEOUT_S, metadata=metadata_of(token))
        )
        return answer.message

    async def drain(self, token: str, rank: int) -> pb.DrainRankResponse:
        """Move everything off a rank."""
        request = pb.DrainRankRequest(rank=rank)
        return await _done(
            self._stub().DrainRank(request, timeout=COMMAND_TIMEOUT_S, metadata=metadata_of(token))
        )

    async def undrain(self, token: str, rank: int) -> None:
        """Let a drained rank hold replicas again."""
        request = pb.UndrainRankRequest(rank=rank)
        await _done(
            self._stub().UndrainRank(
                request, timeout=COMMAND_TIMEOUT_S, metadata=metadata_of(token)
            )
        )

    def _stub(self) -> placement_pb2_grpc.PlacementServiceAsyncStub:
        if self._channel is None:
            self._channel = open_channel(self._settings)
        return placement_pb2_grpc.PlacementServiceStub(self._channel)


async def _done(call: Awaitable[_T]) -> _T:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise NotServed(
                "the controller is of another version; update it and the page together"
            ) from None
        if error.code() is grpc.StatusCode.CANCELLED:
            # Not by us, which would be a CancelledError: it ends, and its open calls with it.
            raise Unavailable("it ended during the call") from None
        raise from_rpc_error(error) from None


def is_refusal(error: MoeServeError) -> bool:
    """Whether the controller does not take the token."""
    return isinstance(error, Unauthenticated | PermissionDenied)
