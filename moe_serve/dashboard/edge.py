"""Who may ask at all: the Host that was bound, our own Origin, no page of another site.

Every path and method passes here first, known or not: a page elsewhere must not reach this one
through a name of its own (DNS rebinding) or through somebody's browser (cross-site requests).

Responsible for the edge. Must never answer with CORS headers. Called by `app`.
"""

from __future__ import annotations

import os
import traceback

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from moe_serve.dashboard.answers import API, ApiError, of_controller, of_http
from moe_serve.errors import MoeServeError

Log = structlog.typing.FilteringBoundLogger
READING = frozenset({"GET", "HEAD"})
_SITES = frozenset({"same-origin", "none"})


def allowed_hosts(host: str, port: int) -> frozenset[str]:
    """Values of the Host header that name what was bound: the address and `localhost`.

    >>> sorted(allowed_hosts("127.0.0.1", 8266))
    ['127.0.0.1:8266', 'localhost:8266']
    """
    name = f"[{host}]" if ":" in host else host
    return frozenset({f"{name}:{port}", f"localhost:{port}"})


def shape(log: Log) -> Middleware:
    """Outermost middleware: every error becomes an answer of one form, a fault of ours a line of
    the log and a 500 without details.
    """

    @web.middleware
    async def shaped(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as refused:
            error = refused
        except MoeServeError as refused:
            error = of_controller(refused)
        except web.HTTPException as refused:
            error = of_http(refused)
        except ConnectionError:
            raise  # the asker has gone
        except Exception as fault:
            where = request.match_info.route.resource
            path = "" if where is None else where.canonical
            log.error("the page failed", path=path, error=type(fault).__name__, at=place_of(fault))
            error = ApiError(500, "the page failed")
        return error.response(as_json=request.path.startswith(API))

    return shaped


def place_of(fault: BaseException) -> str:
    """file:line of the last frame of a fault, and no value that was in it."""
    frames = traceback.extract_tb(fault.__traceback__)
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


def guard(hosts: frozenset[str]) -> Middleware:
    """Middleware: foreign Host, Origin or site 403; on the page's own paths any method but GET and
    HEAD 405.
    """
    here = ", ".join(sorted(hosts))

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.headers.getall("Host", []) not in [[host] for host in hosts]:
            raise ApiError(
                403,
                f"this page answers as {here} only",
                code="foreign_host",
                next_step="forward the same port number",
            )
        origins = request.headers.getall("Origin", [])
        if origins not in [[], *([f"{request.scheme}://{host}"] for host in hosts)]:
            raise ApiError(403, "requests from other origins are refused", code="foreign_origin")
        if _from_elsewhere(request):
            raise ApiError(403, "requests from other sites are refused", code="foreign_site")
        if request.method not in READING and not request.path.startswith(API):
            raise ApiError(
                405, "this path is read-only", headers={"Allow": ", ".join(sorted(READING))}
            )
        return await handler(request)

    return check


def _from_elsewhere(request: web.Request) -> bool:
    # Another port of this machine is the same site, and a page of somebody else all the same.
    if request.headers.get("Sec-Fetch-Site", "none") in _SITES:
        return False
    # A link to the page from a chat or a wiki opens it; nothing else from elsewhere does.
    opens = (
        request.method in READING
        and request.headers.get("Sec-Fetch-Mode") == "navigate"
        and request.headers.get("Sec-Fetch-Dest") == "document"
    )
    return not (opens and request.path == "/")
