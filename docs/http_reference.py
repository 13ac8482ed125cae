"""The page of the HTTP API, docs/reference/http.md, from the endpoints of the page itself.

Called by `docs.make_reference`. Says what GET /api/v1/openapi.json says, for people.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from moe_serve import dashboard
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
        "Some errors say more than their status, by a code of their own: " + _own_codes() + ".",
        "",
    ]
    settings = DashboardSettings(admin_address="127.0.0.1:1")
    for endpoint, _ in Page(Feed(settings), settings, {}).served():
        lines += _section(endpoint)
    return "\n".join(lines)


def _own_codes() -> str:
    found: dict[int, set[str]] = defaultdict(set)
    for file in sorted(Path(dashboard.__path__[0]).glob("*.py")):
        for status, code in own_codes(file.read_text(encoding="utf-8")):
            found[status].add(code)
    return "; ".join(
        f"{', '.join(f'`{code}`' for code in sorted(found[status]))} ({status})"
        for status in sorted(found)
    )


def own_codes(source: str) -> Iterator[tuple[int, str]]:
    """(status, code) of each error that a module makes with a code of its own. Raises ValueError
    where either is not written out: this page could not name it."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id="ApiError" | "unavailable" as name)):
                given = next((word.value for word in node.keywords if word.arg == "code"), None)
            case _:
                continue
        # `unavailable` hands on the code that it was given.
        if given is None or (isinstance(given, ast.Name) and given.id == "code"):
            continue
        status = ast.Constant(503) if name == "unavailable" else node.args[0]
        match status, given:
            case ast.Constant(value=int(number)), ast.Constant(value=str(code)):
                yield number, code
            case _:
                raise ValueError(f"line {node.lineno}: {ast.unparse(node)}")


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
