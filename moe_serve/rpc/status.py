"""Errors of the service as google.rpc.Status, and back to the same typed error at the caller.

BadRequest carries the fields, RetryInfo the wait, ErrorInfo the class and what else the class needs
(a term). Text that goes out is only what a typed error says: no path, no stack, no payload.

Responsible for this mapping. Must never decide whether to retry. Called by every gRPC server and
client of the service.
"""

from __future__ import annotations

import math
import re
from typing import Any, Protocol

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2  # type: ignore[import-untyped]

from moe_serve.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    FieldViolation,
    InvalidArgument,
    MoeServeError,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    StaleTerm,
    Unauthenticated,
    Unavailable,
    WireLost,
)
from moe_serve.rpc import dispatch_pb2

DOMAIN = "moe_serve"
DETAILS_KEY = "grpc-status-details-bin"
VIOLATIONS_MAX = 16
"""Fields named in one error: trailing metadata is limited to 8 KiB by common peers."""
TEXT_MAX = 300
"""Characters of one message or description, for the same reason."""

_BY_CODE: dict[str, type[MoeServeError]] = {
    "INVALID_ARGUMENT": InvalidArgument,
    "OUT_OF_RANGE": InvalidArgument,
    "RESOURCE_EXHAUSTED": ResourceExhausted,
    "FAILED_PRECONDITION": FailedPrecondition,
    "NOT_FOUND": NotFound,
    "UNAVAILABLE": Unavailable,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "UNAUTHENTICATED": Unauthenticated,
    "PERMISSION_DENIED": PermissionDenied,
}
_NUMBERS: dict[str, int] = {name: int(number) for name, number in code_pb2.Code.items()}
_NAMES: dict[int, str] = {number: name for name, number in _NUMBERS.items()}
_NUMBER = re.compile("[0-9]{1,19}")
"""A term as it is written into the details."""


class Abortable(Protocol):
    """What of a grpc.aio ServicerContext is used here."""

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()
    ) -> Any:
        """End the call with a status; raises."""
        ...


def status_code(error: MoeServeError) -> grpc.StatusCode:
    """gRPC status code of an error."""
    return grpc.StatusCode[error.code]


def to_status(error: MoeServeError) -> status_pb2.Status:
    """google.rpc.Status with code, message and details of an error."""
    status = status_pb2.Status(code=_NUMBERS[error.code], message=_clip(error.message))
    info = error_details_pb2.ErrorInfo(reason=type(error).__name__, domain=DOMAIN)
    if isinstance(error, StaleTerm):
        info.metadata["term"] = str(error.term)
    _attach(status, info)
    if error.violations:
        fields = [
            error_details_pb2.BadRequest.FieldViolation(
                field=_clip(v.field), description=_clip(v.description)
            )
            for v in error.violations[:VIOLATIONS_MAX]
        ]
        _attach(status, error_details_pb2.BadRequest(field_violations=fields))
    wait_s = retry_after_s(error)
    if wait_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(wait_s * 1e9))
        _attach(status, error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def from_status(status: status_pb2.Status) -> MoeServeError:
    """The typed error that `to_status` was given; the nearest class for a status from elsewhere."""
    violations: tuple[FieldViolation, ...] = ()
    wait_s: float | None = None
    info = error_details_pb2.ErrorInfo()
    bad = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    for detail in status.details:
        try:
            if detail.Unpack(bad):
                violations = tuple(
                    FieldViolation(v.field, v.description) for v in bad.field_violations
                )
            elif detail.Unpack(retry):
                wait_s = _positive(retry.retry_delay.ToNanoseconds() / 1e9)
            else:
                detail.Unpack(info)
        except DecodeError:
            continue  # a detail from elsewhere: code and message say what is wrong without it
    name = _NAMES.get(status.code, "UNKNOWN")
    term = info.metadata["term"]
    if info.reason == StaleTerm.__name__ and _NUMBER.fullmatch(term):
        return StaleTerm(status.message, term=int(term))
    if info.reason == WireLost.__name__:
        return WireLost(status.message, violations=violations)
    return _build(name, status.message, violations, wait_s)


async def abort(context: Abortable, error: MoeServeError) -> None:
    """End a grpc.aio call with the status and details of an error. Always raises."""
    status = to_status(error)
    await context.abort(
        status_code(error), status.message, ((DETAILS_KEY, status.SerializeToString()),)
    )


def from_rpc_error(error: grpc.RpcError) -> MoeServeError:
    """The typed error behind a failed call of a sync or asyncio client stub.

    Failures that gRPC itself found (connection refused, message too large, deadline) keep their
    code and text.
    """
    code = _code(error)
    details = getattr(error, "details", None)
    text = (details() if callable(details) else None) or str(code)
    trailing = getattr(error, "trailing_metadata", None)
    for key, value in (trailing() if callable(trailing) else None) or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                status = status_pb2.Status.FromString(value)
            except DecodeError:
                break  # not ours: the code and text of the call itself are left
            if _NAMES.get(status.code) == code:
                return from_status(status)
    if code == grpc.StatusCode.UNIMPLEMENTED.name:
        return FailedPrecondition(
            f"that port does not serve this call ({text}): requests go to a router, commands to "
            "the controller's admin port, at the addresses that `moe-serve up` printed; or it is "
            "of another version"
        )
    return _build(code, text, (), None)


def to_item_error(error: MoeServeError) -> dispatch_pb2.ItemError:
    """Error of one item of a stream."""
    return dispatch_pb2.ItemError(
        code=_NUMBERS[error.code],
        message=_clip(error.message),
        fields=[
            dispatch_pb2.FieldError(field=_clip(v.field), description=_clip(v.description))
            for v in error.violations[:VIOLATIONS_MAX]
        ],
        retry_after_s=retry_after_s(error) or 0.0,
    )


def from_item_error(item: dispatch_pb2.ItemError) -> MoeServeError:
    """The typed error of one item of a stream."""
    violations = tuple(FieldViolation(f.field, f.description) for f in item.fields)
    wait_s = _positive(item.retry_after_s)
    return _build(_NAMES.get(item.code, "UNKNOWN"), item.message, violations, wait_s)


def retry_after_s(error: MoeServeError) -> float | None:
    """Seconds after which a retry may succeed, None where the error does not say."""
    return error.retry_after_s if isinstance(error, ResourceExhausted) else None


def _positive(wait_s: float) -> float | None:
    """A wait that may be slept; None for any other number a peer may send."""
    return wait_s if 0 < wait_s < math.inf else None


def _build(
    name: str, text: str, violations: tuple[FieldViolation, ...], wait_s: float | None
) -> MoeServeError:
    kind = _BY_CODE.get(name)
    if kind is None:
        return MoeServeError(f"{name}: {text}", violations=violations)
    if kind is ResourceExhausted:
        return ResourceExhausted(text, violations=violations, retry_after_s=wait_s)
    return kind(text, violations=violations)


def _code(error: grpc.RpcError) -> str:
    code = getattr(error, "code", None)
    value = code() if callable(code) else None
    return value.name if isinstance(value, grpc.StatusCode) else "UNKNOWN"


def _attach(status: status_pb2.Status, detail: Any) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)


def _clip(text: str) -> str:
    return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 3] + "..."
