"""What a log line may hold: figures, names and short text; never a payload, never a secret.

Responsible for replacing values before they are written. Pure. Called by logs.

Worked example: `{"token": "abc", "rows": array of float32 [8, 64], "tokens": 512}` becomes
`{"token": "***", "rows": "<float32 [8, 64]>", "tokens": 512}`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

TEXT_MAX = 500
"""Characters of one value."""
ITEMS_MAX = 32
"""Entries of one list or dict."""
DEPTH_MAX = 4
HIDDEN = "***"

_SECRET_NAMES = frozenset({"token", "authorization", "secret", "password", "bearer", "metadata"})
_SECRET_ENDS = ("_token", "_secret", "_password", "_key", "_keys", "_credentials")
_BEARER = re.compile(r"(?i)\b(bearer)\s+\S+")


def scrub(name: str, value: Any, depth: int = 0) -> Any:
    """The form in which a value of that name may be written."""
    if is_secret(name) and not isinstance(value, bool | int | float):
        return HIDDEN
    if isinstance(value, Enum):
        value = value.value
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str | PurePath):
        return _clipped(_BEARER.sub(rf"\1 {HIDDEN}", str(value)))
    if isinstance(value, Mapping | list | tuple | set | frozenset) and depth < DEPTH_MAX:
        return _items(value, depth + 1)
    return _payload(value)


def _items(value: Any, depth: int) -> Any:
    if isinstance(value, Mapping):
        kept = list(value.items())[:ITEMS_MAX]
        return {str(key): scrub(str(key), item, depth) for key, item in kept}
    return [scrub("", item, depth) for item in list(value)[:ITEMS_MAX]]


def _payload(value: Any) -> Any:
    """What is known of a value without showing it: anything else may print what it holds."""
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return f"<{type(value).__name__}>"
    # A number of numpy is a figure; an array or tensor is payload.
    return value.item() if shape == () else f"<{dtype} {list(shape)}>"


def is_secret(name: str) -> bool:
    """Whether text under this name is a secret. "tokens" is a count, "token" is not."""
    low = name.lower()
    return low in _SECRET_NAMES or low.endswith(_SECRET_ENDS)


def _clipped(text: str) -> str:
    return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 3] + "..."
