"""Bearer tokens: the file they come from, the roles they give, and the interceptor that asks for
them.

A token file holds one `role token` a line, `#` starts a comment, and at most two live tokens a role
(the old and the new one while they are rotated). It must be a regular file that others cannot read.
It is looked at again when its modification time changes, so rotation needs no restart; a file that
has become unreadable keeps the tokens last read and says so.

Responsible for fail-closed authentication of every method of every kind. Must never log a token or
compare one in time that depends on it. Called by routers and the controller's admin port (server
side), and by clients.
"""

from __future__ import annotations

import hmac
import logging
import os
import stat
from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn, Protocol

import grpc
import grpc.aio

from moe_serve.errors import MoeServeError, PermissionDenied, StartRefused, Unauthenticated
from moe_serve.rpc import dispatch_pb2, placement_pb2
from moe_serve.rpc.audit import AuditLine, AuditSink, authorization_of, caller
from moe_serve.rpc.status import abort

TOKENS_PER_ROLE_MAX = 2
TOKEN_CHARS_MIN = 16
TOKEN_CHARS_MAX = 512
_FILE_BYTES_MAX = 16_384
_HEALTH_CHECK = "/grpc.health.v1.Health/Check"
_log = logging.getLogger(__name__)


class Role(StrEnum):
    """What a token may do. ADMIN may read too; neither may dispatch."""

    DISPATCH = "dispatch"
    READ = "read"
    ADMIN = "admin"


class TokenChecker(Protocol):
    """Says what the bearer of an `authorization` header may do."""

    def roles(self, authorization: str | None) -> frozenset[Role]:
        """Roles of the bearer. Raises Unauthenticated."""
        ...


class TokenFile:
    """Tokens of one file, read anew when it changes.

    Raises StartRefused where the file is missing, empty, not regular, readable by others,
    unreadable or malformed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp, self._tokens = _load(path)
        self.fault = ""
        """Why the newest form of the file was refused, "" while it is in use."""

    def roles(self, authorization: str | None) -> frozenset[Role]:
        """Roles of the bearer of an `authorization` header ("Bearer TOKEN"). Raises
        Unauthenticated.
        """
        self._refresh()
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise Unauthenticated("this method needs the header authorization: Bearer TOKEN")
        given = token.strip().encode()
        # No early exit: every known token is compared, so time does not tell which one came near.
        found = [role for role, known in self._tokens if hmac.compare_digest(given, known)]
        if not found:
            raise Unauthenticated("the bearer token is not one of the live tokens")
        granted = set(found)
        if Role.ADMIN in granted:
            granted.add(Role.READ)
        return frozenset(granted)

    def token(self, role: Role) -> str:
        """The first token of a role, for a client that shares the file. Raises StartRefused where
        there is none.
        """
        self._refresh()
        for known, token in self._tokens:
            if known is role:
                return token.decode()
        raise StartRefused(
            f"token file {self._path.name} has no token of role {role}; add a line `{role} TOKEN`"
        )

    def _refresh(self) -> None:
        fault = ""
        try:
            if _stamp(os.stat(self._path)) == self._stamp:
                return
            self._stamp, self._tokens = _load(self._path)
        except StartRefused as error:
            fault = error.message
        except OSError as error:
            fault = f"token file {self._path.name} cannot be read: {error.strerror}"
        if fault and fault != self.fault:
            # Once a fault: the file is looked at with every call.
            _log.warning("token file refused, the tokens last read stay live: %s", fault)
        self.fault = fault


def bearer_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Metadata a client sends with each call."""
    return (("authorization", f"Bearer {token}"),)


def method_roles() -> dict[str, Role]:
    """Role each method of our services needs, by full name ("/package.Service/Method"), made from
    the descriptors.

    A method of PlacementService that is not known to read only is ADMIN's, so a new one is closed
    until it is named here.
    """
    roles: dict[str, Role] = {}
    for service in dispatch_pb2.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            roles[f"/{service.full_name}/{method.name}"] = Role.DISPATCH
    for service in placement_pb2.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            reads = method.name.startswith(("Get", "Watch", "List", "Explain"))
            roles[f"/{service.full_name}/{method.name}"] = Role.READ if reads else Role.ADMIN
    return roles


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc,unused-ignore]
    """Lets a call through only with a live token of the role its method needs; health Check alone
    is open.

    Methods that `needed` does not name (health Watch, reflection) take any live token.
    """

    def __init__(
        self,
        checker: TokenChecker,
        needed: Mapping[str, Role] | None = None,
        audit: AuditSink | None = None,
    ) -> None:
        self._checker = checker
        self._needed = method_roles() if needed is None else dict(needed)
        self._audit = audit

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the method's own handler, or one that ends the call before anything is read."""
        method = handler_call_details.method
        if method == _HEALTH_CHECK:
            return await continuation(handler_call_details)
        authorization = authorization_of(handler_call_details.invocation_metadata)
        try:
            self._admit(method, authorization)
        except MoeServeError as error:
            return self._refusing(error, method, caller(authorization))
        return await continuation(handler_call_details)

    def _admit(self, method: str, authorization: str | None) -> None:
        granted = self._checker.roles(authorization)
        needed = self._needed.get(method)
        if needed is not None and needed not in granted:
            raise PermissionDenied(f"{method} needs a token of role {needed}")

    def _refusing(self, error: MoeServeError, method: str, who: str) -> Any:
        async def refuse(_requests: Any, context: Any) -> NoReturn:
            if self._audit is not None:
                self._audit.refuse(AuditLine(who, context.peer(), method, error.code))
            await abort(context, error)
            raise AssertionError("abort always raises")

        # Stream to stream fits every kind of method: nothing is read and nothing but the status is
        # written.
        return grpc.stream_stream_rpc_method_handler(refuse)


def _stamp(info: os.stat_result) -> tuple[int, int, int, int]:
    return info.st_mtime_ns, info.st_ino, info.st_size, info.st_mode


def _load(path: Path) -> tuple[tuple[int, int, int, int], list[tuple[Role, bytes]]]:
    what = f"token file {path.name}"
    try:
        with path.open("rb") as file:
            # Of the open file, so that the file that was checked is the one that is read.
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise StartRefused(f"{what} is not a regular file")
            if info.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
                mode = f"{stat.S_IMODE(info.st_mode):04o}"
                raise StartRefused(f"{what} is open to others (mode {mode}); run: chmod 600")
            data = file.read(_FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        raise StartRefused(
            f"{what} is missing; write lines of `role token` and chmod 600"
        ) from None
    except OSError as error:
        raise StartRefused(f"{what} cannot be read: {error.strerror}") from error
    if len(data) > _FILE_BYTES_MAX:
        raise StartRefused(f"{what} is larger than {_FILE_BYTES_MAX} bytes")
    return _stamp(info), _parse(what, data)


def _parse(what: str, data: bytes) -> list[tuple[Role, bytes]]:
    tokens: list[tuple[Role, bytes]] = []
    for number, line in enumerate(data.splitlines(), 1):
        words = line.split(b"#")[0].split()
        if not words:
            continue
        if len(words) != 2 or words[0].decode("ascii", "replace") not in set(Role):
            raise StartRefused(f"{what}, line {number}: must be `role token`, role {_ROLES}")
        role, token = Role(words[0].decode()), words[1]
        if not TOKEN_CHARS_MIN <= len(token) <= TOKEN_CHARS_MAX or not token.isascii():
            size = f"{TOKEN_CHARS_MIN} to {TOKEN_CHARS_MAX} ASCII characters"
            raise StartRefused(f"{what}, line {number}: a token has {size}")
        tokens.append((role, token))
        if sum(known is role for known, _ in tokens) > TOKENS_PER_ROLE_MAX:
            raise StartRefused(
                f"{what}, line {number}: at most {TOKENS_PER_ROLE_MAX} live tokens of role {role}"
            )
    if not tokens:
        raise StartRefused(f"{what} is empty; write lines of `role token`")
    return tokens


_ROLES = " | ".join(Role)
