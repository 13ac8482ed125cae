"""Every end of an admin call leaves one line, with the name of its status."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from moe_serve.rpc.audit import AuditInterceptor, AuditLine

METHOD = "/moe_serve.rpc.v1.PlacementService/Pause"


@dataclass
class Lines:
    """Keeps what it is told."""

    noted: list[AuditLine] = field(default_factory=list)

    def note(self, line: AuditLine) -> None:
        self.noted.append(line)

    def refuse(self, line: AuditLine) -> None:
        raise AssertionError("refused callers are noted elsewhere")


@dataclass
class Details:
    method: str
    invocation_metadata: tuple[tuple[str, str], ...] = (("authorization", "Bearer secret"),)


@dataclass
class Context:
    """What a call's context tells of it. given: its status as grpc.aio gives it."""

    given: Any = None

    def code(self) -> Any:
        return self.given

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"


async def call(
    answer: Callable[[Any, Any], Awaitable[Any]], context: Context, method: str = METHOD
) -> tuple[list[AuditLine], Any]:
    """Lines of one call behind the interceptor, and how it ended."""
    lines = Lines()
    audit = AuditInterceptor(lines, frozenset({METHOD}), lambda: 5)

    async def continuation(_details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(answer)

    handler = await audit.intercept_service(continuation, Details(method))
    (end,) = await asyncio.gather(handler.unary_unary("asked", context), return_exceptions=True)
    return lines.noted, end


async def well(request: Any, _context: Any) -> Any:
    return f"{request} and answered"


async def aborted(_request: Any, _context: Any) -> Any:
    raise RuntimeError("as abort does")


async def cancelled(_request: Any, _context: Any) -> Any:
    raise asyncio.CancelledError


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("answer", "code", "result"),
    [
        (well, None, "OK"),
        (aborted, grpc.StatusCode.NOT_FOUND, "NOT_FOUND"),
        (aborted, grpc.StatusCode.NOT_FOUND.value[0], "NOT_FOUND"),
        (aborted, None, "UNKNOWN"),
        (cancelled, None, "CANCELLED"),
    ],
)
async def test_an_end_has_a_name_and_stays_what_it_is(answer: Any, code: Any, result: str) -> None:
    lines, end = await call(answer, Context(code))
    (line,) = lines
    assert (line.method, line.result, line.epoch) == (METHOD, result, 5)
    assert line.who.startswith("token ")
    assert "secret" not in line.who
    assert end == "asked and answered" if answer is well else isinstance(end, BaseException)


@pytest.mark.asyncio
async def test_methods_that_change_nothing_leave_no_line() -> None:
    lines, end = await call(well, Context(), method="/moe_serve.rpc.v1.PlacementService/GetLoad")
    assert (lines, end) == ([], "asked and answered")
