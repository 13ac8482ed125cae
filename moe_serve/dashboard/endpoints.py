"""What an endpoint is: its path, what it takes within which bounds, what it answers.

One `Endpoint` beside each handler is all there is: the router, the checks of parameters and bodies
and the OpenAPI document are made from it, so that they cannot say different things.

Responsible for checking what arrives, by name. Must never know what is behind an endpoint. Called
by `app`, the handlers and `openapi`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from moe_serve.dashboard.answers import CODES, JSON, ApiError

Given = dict[str, Any]
"""Values of parameters by name."""
Handler = Callable[[web.Request, Given], Awaitable[web.StreamResponse]]
Schema = dict[str, Any]

INTEGER_MAX = 10**15
"""Greatest number of a record, version or window that is taken: exact in every JSON reader."""
_INTEGER = re.compile(r"[0-9]{1,18}")
BODY_BYTES_MAX = 8192
"""Largest body: a token of 512 characters and a reason of 200, escaped, fit twice."""


@dataclass(frozen=True, slots=True)
class Param:
    """One query parameter. kind: integer | text. default None: it must be given.

    An integer lies in [low, high]; text is one of `choices`, or has at most `high` characters.
    """

    name: str
    kind: str
    about: str
    default: Any = None
    low: int = 0
    high: int = INTEGER_MAX
    choices: tuple[str, ...] = ()

    def read(self, text: str) -> Any:
        """The value of a text. Raises ApiError naming the parameter and its bounds."""
        if self.kind == "text":
            fits = text in self.choices if self.choices else len(text) <= self.high
            if not fits:
                wanted = " | ".join(self.choices) or f"at most {self.high} characters"
                raise self._refused(f"must be {wanted}")
            return text
        if not (_INTEGER.fullmatch(text) and self.low <= int(text) <= self.high):
            raise self._refused(f"must be an integer from {self.low} to {self.high}")
        return int(text)

    def _refused(self, why: str) -> ApiError:
        return ApiError(400, f"{self.name} {why}", field=self.name)

    def missing(self) -> ApiError:
        """The error where it must be given and is not."""
        return self._refused("must be given")

    @property
    def schema(self) -> Schema:
        """JSON schema of its value."""
        made: Schema
        if self.kind == "text":
            made = {"type": "string"}
            made |= {"enum": list(self.choices)} if self.choices else {"maxLength": self.high}
        else:
            made = {"type": self.kind, "minimum": self.low, "maximum": self.high}
        return made if self.default is None else made | {"default": self.default}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path.

    schema: of its 200 as JSON, None where that is no JSON (`media` says what). body: msgspec Struct
    of what it takes. errors: other statuses it answers beside those that every path does. tagged:
    it has an ETag. csrf: it changes something, so it asks for X-CSRF-Token.
    """

    method: str
    path: str
    about: str
    schema: Schema | None
    params: tuple[Param, ...] = ()
    body: type[msgspec.Struct] | None = None
    media: str = JSON
    errors: tuple[int, ...] = ()
    tagged: bool = False
    csrf: bool = False

    def __post_init__(self) -> None:
        assert all(status in CODES for status in self.errors), self.path

    def given(self, request: web.Request) -> Given:
        """Checked parameters of a request, defaults filled in. Raises ApiError."""
        known = {param.name: param for param in self.params}
        for name in request.query:
            if name not in known:
                wanted = ", ".join(known) or "none"
                raise ApiError(400, f"{name[:40]} is no parameter; known: {wanted}", field="query")
        found: Given = {}
        for param in self.params:
            texts = request.query.getall(param.name, [])
            if len(texts) > 1:
                raise ApiError(400, f"{param.name} is given twice", field=param.name)
            if not texts and param.default is None:
                raise param.missing()
            found[param.name] = param.read(texts[0]) if texts else param.default
        return found

    def check_accept(self, request: web.Request) -> None:
        """Raises ApiError 406 where the asker does not take what this gives."""
        parts = [part.strip() for part in request.headers.get("Accept", "").split(",")]
        wanted = [part for part in parts if part]
        if wanted and not any(_takes(part, self.media) for part in wanted):
            raise ApiError(406, f"this path gives {self.media}")


def _takes(part: str, media: str) -> bool:
    kind, *options = [word.strip().lower() for word in part.split(";")]
    if any(re.fullmatch(r"q=0(\.0*)?", option) for option in options):
        return False
    return kind in {media, "*/*", f"{media.partition('/')[0]}/*"}


async def read_body(request: web.Request, kind: type[msgspec.Struct], timeout_s: float) -> Any:
    """The body as a `kind`. Raises ApiError: another type 415, too large 413, too slow 408, not as
    declared 400.
    """
    if request.content_type != JSON:
        raise ApiError(415, "the body must be JSON")
    try:
        async with asyncio.timeout(timeout_s):
            data = await request.read()
    except TimeoutError:
        raise ApiError(
            408, f"the body did not come within {timeout_s:g} s", headers={"Connection": "close"}
        ) from None
    try:
        found = msgspec.json.decode(data)
        if isinstance(found, dict):
            # 3.0 is an integer in JSON schema, and in the JSON of some writers.
            found = {name: _whole(value) for name, value in found.items()}
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise _misfit(str(error)) from None
    except (msgspec.DecodeError, RecursionError):
        # Its words may quote what was sent.
        raise ApiError(400, "the body is no JSON", field="body") from None


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _misfit(words: str) -> ApiError:
    """The error of a body that is JSON and not as declared: msgspec says where, after "at `$.`"."""
    what, _, where = words.partition(" - at `$")
    # `[...]` where it had not come to a name yet.
    name = where.rstrip("`").lstrip(".") if "[" not in where else ""
    if what.startswith("Object contains unknown field"):
        # Not named: what was sent in its place may be a token.
        return ApiError(400, "a field of the body is not known", field=name or "body")
    missing = re.fullmatch(r"Object missing required field `(\w+)`", what)
    if missing:
        return ApiError(400, f"{missing[1]} must be given", field=missing[1])
    return ApiError(400, f"{name or 'body'}: {what[:160]}", field=name or "body")
