"""Chooses the few inputs of many that are worth keeping: the smallest that together reach every
step between lines of the decoders that any of them reaches."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from tests.fuzz.target import Target

FILES_MAX = 40
BYTES_MAX = 9_000
"""Of one target."""
ROOT = Path(__file__).resolve().parents[2]
_OURS = (f"{ROOT}/moe_serve/", f"{ROOT}/placement/")

Step = tuple[str, int, int]


def steps(one: Target, data: bytes) -> set[Step]:
    """(file, line before, line) of every step taken in the product's code."""
    found: set[Step] = set()

    def enter(frame: FrameType, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(_OURS):
            return None
        last = frame.f_code.co_firstlineno

        def follow(inner: FrameType, kind: str, value: Any) -> Any:
            nonlocal last
            if kind == "line":
                found.add((file, last, inner.f_lineno))
                last = inner.f_lineno
            elif kind == "return":
                found.add((file, last, -1))
            return follow

        return follow

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        taken = one.run(data)
    finally:
        sys.settrace(before)
    found.add((one.name, 0, int(taken)))
    return found


def smallest(one: Target, inputs: Iterable[bytes]) -> dict[str, bytes]:
    """The chosen by the name of their file, which is made of their bytes."""
    for data in one.seeds():
        one.run(data)
    seen: set[Step] = set()
    for data in one.seeds():
        seen |= steps(one, data)
    chosen: dict[str, bytes] = {}
    for data in sorted(set(inputs), key=lambda each: (len(each), each)):
        new = steps(one, data) - seen
        size = sum(map(len, chosen.values())) + len(data)
        if not new or len(chosen) >= FILES_MAX or size > BYTES_MAX:
            continue
        seen |= new
        chosen[hashlib.sha256(data).hexdigest()[:16]] = data
    return chosen
