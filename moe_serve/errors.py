"""Typed errors of the service: what, where, the limit, the next step. Mapped to gRPC status codes
at the edges.

Raised anywhere in the shell; `rpc` turns them into google.rpc.Status with BadRequest field details.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field that is wrong: its path in the request, and a sentence with the limit and the next
    step."""

    field: str
    description: str


class MoeServeError(Exception):
    """Base. `code` is the gRPC status name it becomes at the edge; `violations` the fields it
    names."""

    code = "INTERNAL"

    def __init__(self, message: str, *, violations: tuple[FieldViolation, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.violations = violations


class InvalidArgument(MoeServeError):
    """The request is wrong whatever the state of the service."""

    code = "INVALID_ARGUMENT"


class ResourceExhausted(MoeServeError):
    """A limit was reached (message size, queue, budget). `retry_after_s` where waiting helps."""

    code = "RESOURCE_EXHAUSTED"

    def __init__(
        self,
        message: str,
        *,
        violations: tuple[FieldViolation, ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, violations=violations)
        self.retry_after_s = retry_after_s


class FailedPrecondition(MoeServeError):
    """Right request, wrong state (plan gone stale, paused, floor not reachable)."""

    code = "FAILED_PRECONDITION"


class NotFound(MoeServeError):
    """The named thing does not exist."""

    code = "NOT_FOUND"


class Unavailable(MoeServeError):
    """No ready replica, no ready part; a retry elsewhere or later may succeed."""

    code = "UNAVAILABLE"


class DeadlineExceeded(MoeServeError):
    """The caller's time is over. Nothing partial is returned."""

    code = "DEADLINE_EXCEEDED"


class Unauthenticated(MoeServeError):
    """No token, or not one of the live tokens."""

    code = "UNAUTHENTICATED"


class PermissionDenied(MoeServeError):
    """The token's role may not do this."""

    code = "PERMISSION_DENIED"


class StaleTerm(MoeServeError):
    """A command came from a controller whose term is lower than one already seen. `term` is the
    higher one."""

    code = "ABORTED"

    def __init__(self, message: str, *, term: int) -> None:
        super().__init__(message)
        self.term = term


class WireLost(MoeServeError):
    """The connection to a shard is gone, or it did not answer in time. Whether the work ran is not
    known."""

    code = "UNAVAILABLE"


class StartRefused(MoeServeError):
    """`up` (or a part) will not start: one clear line with the reason and the next step."""

    code = "FAILED_PRECONDITION"


def first_line(error: BaseException) -> str:
    """What an error of others says first; its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
