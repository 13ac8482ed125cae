"""The page of the HTTP API, docs/reference/http.md, from the endpoints of the page itself.

Called by `docs.make_reference`. Says what GET /api/v1/openapi.json says, for people.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from moe_serve.dashboard.answers import CODES, JSON
from moe_serve.dashboard.app import Page
from moe_serve.dashboard.endpoints import Endpoint, Param
from moe_serve.dashboard.feed import Feed
from moe_serve.dashboard.openapi import EVERYWHERE, WORDS
from moe_serve.dashboard.settings import DashboardSettings


def http_page(note: str) -> str:
    """The page. `note`: the line that says who writes it."""
    lines = [
        "# The HTTP API",
        "",
        note,
        "",
        "Served by the page (`up` prints its address) on loopback; the page, `curl` and the tests "
        "use the same one, and `GET /api/v1/openapi.json`",
        "describes it in OpenAPI 3.1. Whoever reaches the port may read; commands need an "
        "operator's session ([security](../security.md#the-page)).",
        "Arrays are base64 of little-endian bytes, row-major. Where an answer has an ETag, send it "
        "as `If-None-Match` and get 304 until it changes.",
        "",
        "## Errors",
        "",
        'One form: `{"error": {"code", "message", "field"?, "next_step"}}`. Any path may answer '
        + ", ".join(str(status) for status in EVERYWHERE)
        + ".",
        "",
        "| Status | Code | When |",
        "|---|---|---|",
        *(f"| {status} | `{code}` | {WORDS[status]} |" for status, code in CODES.items()),
        "",
        "Codes of their own: `foreign_host`, `foreign_origin`, `foreign_site`, `not_operator`, "
        "`wrong_token`, `csrf` (403); `no_plan` (404);",
        "`nothing_yet`, `not_served`, `page_token_refused`, `too_many_streams` (503).",
        "",
    ]
    settings = DashboardSettings(admin_address="127.0.0.1:1")
    for endpoint, _ in Page(Feed(settings), settings, {}).served():
        lines += _section(endpoint)
    return "\n".join(lines)


def _section(endpoint: Endpoint) -> Iterator[str]:
    yield from (f"## {endpoint.method} {endpoint.path}", "", endpoint.about, "")
    if endpoint.params or endpoint.body is not None or endpoint.csrf:
        yield from ("| Takes | Kind | Default | Meaning |", "|---|---|---|---|")
        for param in endpoint.params:
            yield f"| `{param.name}` | {_bounds(param)} | {_default(param)} | {param.about} |"
        if endpoint.body is not None:
            yield from _body(endpoint.body)
        if endpoint.csrf:
            yield "| header `X-CSRF-Token` | text | must be given | `csrf` of the session |"
        yield ""
    schema = endpoint.schema or {}
    names = ", ".join(f"`{name}`" for name in schema.get("properties", {}))
    what = endpoint.media if endpoint.media != JSON else names or "JSON"
    also = [str(status) for status in endpoint.errors]
    yield f"Answers {what}{' with an ETag' if endpoint.tagged else ''}."
    if also:
        yield f"Also answers {', '.join(also)}."
    yield ""


def _bounds(param: Param) -> str:
    if param.choices:
        return " or ".join(f"`{choice}`" for choice in param.choices)
    if param.kind == "text":
        return f"at most {param.high} characters"
    return f"{param.kind}, {param.low} to {param.high}"


def _default(param: Param) -> str:
    return "must be given" if param.default is None else _shown(param.default)


def _shown(default: Any) -> str:
    return "none" if default == "" else f"`{msgspec.json.encode(default).decode()}`"


def _body(body: type[msgspec.Struct]) -> Iterator[str]:
    _, schemas = msgspec.json.schema_components([body])
    made: dict[str, Any] = schemas[body.__name__]
    for name, schema in made["properties"].items():
        bounds = [str(schema["type"])]
        if "maxLength" in schema:
            bounds.append(f"{schema.get('minLength', 0)} to {schema['maxLength']} characters")
        if "maximum" in schema:
            bounds.append(f"{schema['minimum']} to {schema['maximum']}")
        default = _shown(schema["default"]) if "default" in schema else "must be given"
        yield f"| body `{name}` | {', '.join(bounds)} | {default} | as its name says |"
