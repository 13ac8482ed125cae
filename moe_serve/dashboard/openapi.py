"""The OpenAPI 3.1 document of the page's API, made from the endpoints themselves.

Responsible for translating `Endpoint` into that form. Must never name a path by hand. Called by
`app`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from moe_serve.dashboard.answers import CODES, JSON
from moe_serve.dashboard.endpoints import Endpoint, Schema
from moe_serve.dashboard.schemas import ERROR

ANY_COOKIE = "SESSION_COOKIE"
"""Stands for the name of the session's cookie, which depends on the page's port."""
EVERYWHERE = (400, 403, 405, 406)
"""What any path may answer: a wrong parameter, a foreign asker, a wrong method or Accept header."""
WORDS = {
    400: "the request is wrong; `field` says where",
    403: "a foreign host, origin or site, or not an operator",
    404: "there is no such thing",
    405: "the path does not take that method",
    406: "the path gives no such type",
    408: "the body came too slowly",
    409: "right request, wrong state",
    413: "too large",
    415: "the body must be JSON",
    429: "too often; Retry-After says how long to wait",
    500: "a fault of the page",
    503: "nothing known yet, or the controller is away; Retry-After says how long to wait",
}
"""When a status is answered, by status."""
_TAG = {"ETag": {"schema": {"type": "string"}, "description": "send it as If-None-Match"}}
_WAIT = {"Retry-After": {"schema": {"type": "integer"}, "description": "seconds"}}


def document(endpoints: Iterable[Endpoint], version: str) -> Schema:
    """The whole document. Endpoints of one path become one item."""
    endpoints = list(endpoints)
    bodies = [endpoint.body for endpoint in endpoints if endpoint.body is not None]
    _, schemas = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "moe_serve page",
            "version": version,
            "description": "Load, placement, moves and causes of one service; commands for "
            "operators. Binds loopback only; answers to its own Host and Origin only.",
        },
        "paths": paths,
        "components": {
            "schemas": {"Error": ERROR, **schemas},
            "securitySchemes": {
                "session": {
                    "type": "apiKey",
                    "in": "cookie",
                    "name": ANY_COOKIE,
                    "description": "set by POST /api/v1/session",
                }
            },
        },
    }


def _operation(endpoint: Endpoint) -> Schema:
    statuses = sorted({*EVERYWHERE, *endpoint.errors})
    made: Schema = {
        "operationId": f"{endpoint.method.lower()}_{endpoint.path.rpartition('/')[2]}".replace(
            ".", "_"
        ),
        "summary": endpoint.about,
        "responses": {
            "200": _success(endpoint),
            **({"304": {"description": "as If-None-Match says"}} if endpoint.tagged else {}),
            **{str(status): _error(status) for status in statuses},
            "default": _error(500),
        },
    }
    parameters = [
        {
            "name": param.name,
            "in": "query",
            "required": param.default is None,
            "description": param.about,
            "schema": param.schema,
        }
        for param in endpoint.params
    ]
    if endpoint.csrf:
        made["security"] = [{"session": []}]
        parameters.append(
            {
                "name": "X-CSRF-Token",
                "in": "header",
                "required": True,
                "description": "`csrf` of GET /api/v1/session",
                "schema": {"type": "string"},
            }
        )
    if parameters:
        made["parameters"] = parameters
    if endpoint.body is not None:
        ref = {"$ref": f"#/components/schemas/{endpoint.body.__name__}"}
        made["requestBody"] = {"required": True, "content": {JSON: {"schema": ref}}}
    return made


def _success(endpoint: Endpoint) -> Schema:
    schema = {"type": "string"} if endpoint.schema is None else endpoint.schema
    made: Schema = {"description": "done", "content": {endpoint.media: {"schema": schema}}}
    return made | {"headers": _TAG} if endpoint.tagged else made


def _error(status: int) -> Schema:
    ref = {"$ref": "#/components/schemas/Error"}
    made: Schema = {
        "description": f"{CODES[status]}: {WORDS[status]}",
        "content": {JSON: {"schema": ref}},
    }
    return made | {"headers": _WAIT} if status in {429, 503} else made
