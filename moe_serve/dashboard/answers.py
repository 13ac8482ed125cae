"""Answers of the page: errors in one shape, bodies with tags, headers of every response.

Under /api an error is `{"error": {"code", "message", "field"?, "next_step"}}`; the page's own paths
answer with a line of text.

Responsible for form. Must never decide what is allowed. Called by every handler and the edge.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import msgspec
from aiohttp import web

from moe_serve.documents.explanation import does_not_start, is_away
from moe_serve.errors import (
    FailedPrecondition,
    InvalidArgument,
    MoeServeError,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
)

SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
API = "/api/"
RETRY_AFTER_S = 5
"""Wait that a 503 names: the page's own back-off to the controller is not longer."""
TAG_CHARS = 20
JSON = "application/json"
CODES = {
    400: "invalid_argument",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    406: "not_acceptable",
    408: "slow_body",
    409: "conflict",
    413: "too_large",
    415: "unsupported_media_type",
    429: "too_many",
    500: "internal",
    503: "unavailable",
}
"""Code of an error that names none of its own, by status."""
NEXT_STEPS = {
    400: "correct the request as the message says",
    403: "ask from the page itself",
    404: "see /api/v1/openapi.json for what there is",
    405: "use a method of the Allow header",
    406: "ask for what this path gives, or send no Accept header",
    408: "send the body at once",
    409: "look at the present state, then ask anew",
    413: "send or ask for less",
    415: "send Content-Type: application/json",
    429: "wait as Retry-After says",
    500: "see the log of the page's process",
    503: "ask again as Retry-After says",
}


class ApiError(Exception):
    """An answer that is no success: status, its code, words for people, the field where one is
    wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str = "",
        field: str = "",
        next_step: str = "",
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code or CODES[status]
        self.field = field
        self.next_step = next_step or NEXT_STEPS[status]
        self.headers = dict(headers or {})

    def response(self, *, as_json: bool) -> web.Response:
        """The answer, as JSON or as a line of text."""
        if as_json:
            error = {"code": self.code, "message": self.message, "next_step": self.next_step}
            if self.field:
                error["field"] = self.field
            body = msgspec.json.encode({"error": error})
            return web.Response(
                status=self.status, body=body, content_type=JSON, headers=self.headers
            )
        text = f"{self.message}; {self.next_step}\n"
        return web.Response(status=self.status, text=text, headers=self.headers)


def unavailable(message: str, *, code: str = "", next_step: str = "") -> ApiError:
    """503 with a wait."""
    return ApiError(
        503,
        message,
        code=code,
        next_step=next_step,
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )


def of_controller(error: MoeServeError) -> ApiError:
    """What a typed error of the controller is here. Its text is for people and has no secrets."""
    field = error.violations[0].field if error.violations else ""
    if does_not_start(error):
        return unavailable(error.message, next_step="mend what its log names, then ask again")
    if is_away(error):
        return unavailable(f"the controller does not answer: {error.message}")
    match error:
        case InvalidArgument():
            return ApiError(400, error.message, field=field)
        case NotFound():
            return ApiError(404, error.message, next_step="see /api/v1/events for what there was")
        case FailedPrecondition():
            return ApiError(409, error.message, field=field)
        case ResourceExhausted():
            wait_s = max(1, math.ceil(error.retry_after_s or 1.0))
            return ApiError(429, error.message, headers={"Retry-After": str(wait_s)})
        case Unauthenticated() | PermissionDenied():
            return ApiError(
                403, error.message, code="not_operator", next_step="log in with an admin token"
            )
    return unavailable(f"the controller could not do it: {error.message}")


def of_question(error: MoeServeError) -> ApiError:
    """The same where the page only asks: what state the controller is in is no fault of the
    reader's."""
    answer = of_controller(error)
    return unavailable(answer.message) if answer.status == 409 else answer


def of_nothing(error: NotFound) -> ApiError:
    """What it is here that a document was asked of something that is not there."""
    field = error.violations[0].field if error.violations else ""
    return ApiError(404, error.message, field=field)


def of_http(error: web.HTTPException) -> ApiError:
    """What an error of the web server is here; its own words may repeat what was sent."""
    kept = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
    words = {
        404: "there is no such path",
        405: "this path does not take that method",
        413: "the body is too large",
    }
    status = error.status if error.status in CODES else 400
    return ApiError(status, words.get(error.status, error.reason or "refused"), headers=kept)


def tagged(request: web.Request, body: bytes, etag: str, content_type: str) -> web.Response:
    """A body with its tag, or 304 where the asker has it."""
    headers = {"ETag": etag, "Cache-Control": "no-cache"}
    wanted = [tag.strip() for tag in request.headers.get("If-None-Match", "").split(",")]
    if etag in wanted or f"W/{etag}" in wanted:
        return web.Response(status=304, headers=headers)
    charset = "utf-8" if content_type != JSON else None
    return web.Response(body=body, content_type=content_type, charset=charset, headers=headers)


def tag_of(body: bytes) -> str:
    """Tag of a body that has no number of its own."""
    return f'"{hashlib.sha256(body).hexdigest()[:TAG_CHARS]}"'


def answered(document: Any) -> web.Response:
    """A document as JSON."""
    return web.Response(body=msgspec.json.encode(document), content_type=JSON)


async def add_headers(_request: web.Request, response: web.StreamResponse) -> None:
    """Headers of every response. On prepare, not in a middleware: streams and errors get them."""
    response.headers.update(SECURITY_HEADERS)
    response.headers.setdefault("Cache-Control", "no-store")
