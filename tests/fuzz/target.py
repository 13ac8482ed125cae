"""What a fuzz target is: a function that takes any bytes, and what may come of them.

A target reads its input with one decoder of the product, as production does, and lets nothing pass
but that decoder's typed errors. Where bytes are taken, it looks at what was made of them: limits
hold, and an encoder gives bytes that are read as the same. It returns whether they were taken.
"""

from __future__ import annotations

import atexit
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from moe_serve.errors import MoeServeError

ERROR_CHARS_MAX = 4096
"""Longest text of a typed error: what is foreign in it is cut."""

Mutate = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True, slots=True)
class Target:
    """One decode path.

    run: reads bytes; True where they were taken. seeds: valid inputs, all of them taken. mutate:
    changes an input within its form. An input of n bytes, at most max_bytes, may allocate
    base_bytes + factor * n bytes. examples: of one test run.
    """

    name: str
    run: Callable[[bytes], bool]
    seeds: Callable[[], list[bytes]]
    mutate: Mutate
    base_bytes: int = 256 << 10
    factor: int = 200
    max_bytes: int = 8192
    examples: int = 300


@cache
def scratch() -> Path:
    """A folder, in memory where there is such a place, for decoders that read files; gone when the
    process ends."""
    memory = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if memory.is_dir() else None))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def refused(error: Exception) -> bool:
    """False, for what was refused as it should be: in a text that says something and is bounded."""
    text = str(error)
    assert text.strip(), f"{type(error).__name__} says nothing"
    assert len(text) <= ERROR_CHARS_MAX, f"{type(error).__name__} of {len(text)} characters"
    if isinstance(error, MoeServeError):
        assert all(violation.field for violation in error.violations), text
    return False


def pieces(data: bytes, most: int) -> list[bytes]:
    """At most `most` byte strings out of one: a byte says how many follow, two bytes of length
    stand before each of them, and the last is what is left."""
    found: list[bytes] = []
    rest = data[1:]
    for _ in range(data[0] % most if data else 0):
        size = int.from_bytes(rest[:2], "little")
        found.append(rest[2 : 2 + size])
        rest = rest[2 + size :]
    return [*found, rest]


def joined(parts: list[bytes]) -> bytes:
    """What `pieces` takes apart."""
    sized = [len(part).to_bytes(2, "little") + part for part in parts[:-1]]
    return bytes([len(sized)]) + b"".join(sized) + parts[-1]
