"""Who asked for what of the admin methods, and how it ended: one audit line a call.

A caller is named by a tag of its token, never by the token: eight hex digits of its SHA-256, which
tell two tokens of a role apart while they are rotated and give neither of them away.

Responsible for seeing every call of a method of role ADMIN end. Must never change an answer. Called
by the admin server, behind the check of tokens; refused callers are noted by that check itself.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio

METHOD_CHARS_MAX = 128
"""A caller chooses the method's name, so what is kept of it is bounded."""


@dataclass(frozen=True, slots=True)
class AuditLine:
    """One call. result: name of its gRPC status. epoch: of the table when it ended, -1 = unknown
    or not asked for."""

    who: str
    peer: str
    method: str
    result: str
    epoch: int = -1


class AuditSink(Protocol):
    """Takes audit lines; must not raise."""

    def note(self, line: AuditLine) -> None:
        """An admin call that ended."""
        ...

    def refuse(self, line: AuditLine) -> None:
        """A call that was not let in."""
        ...


def caller(authorization: str | None) -> str:
    """How a bearer is called in audit lines: "token 1a2b3c4d", or "no token"."""
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        return "no token"
    return f"token {hashlib.sha256(token.strip().encode('utf-8', 'replace')).hexdigest()[:8]}"


def authorization_of(metadata: Any) -> str | None:
    """The `authorization` header of a call, None where there is none of text."""
    for key, value in metadata or ():
        if key == "authorization":
            return value if isinstance(value, str) else None
    return None


class AuditInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc,unused-ignore]
    """Notes every call of the methods in `audited` when it ends, however it ends.

    audited: full names ("/package.Service/Method") of unary methods. epoch: of the newest table;
    asked when a call has ended, so it is the one that the call may have led to or been refused in.
    """

    def __init__(self, sink: AuditSink, audited: frozenset[str], epoch: Callable[[], int]) -> None:
        self._sink = sink
        self._audited = audited
        self._epoch = epoch

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's own handler; those of audited methods leave a line."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method not in self._audited:
            return handler
        assert handler.unary_unary is not None, f"{method} is audited and not unary"
        who = caller(authorization_of(handler_call_details.invocation_metadata))
        return grpc.unary_unary_rpc_method_handler(
            self._noted(handler.unary_unary, method, who),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _noted(self, answer: Callable[[Any, Any], Awaitable[Any]], method: str, who: str) -> Any:
        async def noted(request: Any, context: Any) -> Any:
            result = "UNKNOWN"
            try:
                given = await answer(request, context)
                result = "OK"
                return given
            except asyncio.CancelledError:
                result = "CANCELLED"
                raise
            finally:
                if result == "UNKNOWN":
                    result = _name(context.code())
                line = AuditLine(who, context.peer(), method, result, self._epoch())
                self._sink.note(line)

        return noted


def _name(code: Any) -> str:
    """Name of a status as a grpc.aio context tells it: a StatusCode, its number, or nothing."""
    if isinstance(code, grpc.StatusCode):
        return code.name
    return _NAMES.get(code, "UNKNOWN")


_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


def admin_methods(roles: Mapping[str, str]) -> frozenset[str]:
    """Of the roles each method needs, the methods that change something."""
    return frozenset(method for method, role in roles.items() if role == "admin")
