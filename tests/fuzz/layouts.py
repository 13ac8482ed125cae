"""Targets of placements in files, as the import command reads them."""

from __future__ import annotations

import random

from moe_serve.cli.layouts import (
    Holding,
    LayoutFormat,
    ReadLayout,
    read_layout,
    text_of,
    written,
)
from moe_serve.errors import MoeServeError
from tests.fuzz import mutations
from tests.fuzz.target import Target, refused, scratch

HELD = Holding("m", "v", 2, 4, 3, (0, 2), ((0, 1, 2, 4, 5, 6), (3, 0, 1, 7, 4, 5)))
"""Two layers of four experts; the second of three ranks has left."""


def layout_file(data: bytes) -> bool:
    """A placement that somebody sent: read as keys by rank, each once a rank, or refused; what was
    read and fits the form is written and read again as the same."""
    path = scratch() / "layout"
    path.write_bytes(data)
    try:
        found = read_layout(path, None, HELD, None)
    except MoeServeError as error:
        return refused(error)
    _check(found)
    path.write_text(text_of(LayoutFormat.OWN, written(LayoutFormat.OWN, _holding(found), None)))
    assert read_layout(path, None, HELD, None).rows == found.rows
    return True


def _holding(found: ReadLayout) -> Holding:
    return Holding("m", "v", 2, 4, 3, (0, 1, 2), found.rows)


def _check(found: ReadLayout) -> None:
    assert len(found.rows) == HELD.num_ranks
    for keys in found.rows:
        assert list(keys) == sorted(set(keys))
        assert all(type(key) is int and 0 <= key < 8 for key in keys)


def layout_seeds() -> list[bytes]:
    """One file of each format."""
    texts = [text_of(form, written(form, HELD, None)) for form in LayoutFormat]
    return [text.encode() for text in (*texts, "[0, 1, 2, 3, -1, 2]")]


def _changed(data: bytes, rng: random.Random) -> bytes:
    if data[:1] in (b"{", b"["):
        return mutations.json_text(data, rng)
    return mutations.yaml_text(data, rng)


TARGETS = (
    Target(
        "layout_file",
        layout_file,
        layout_seeds,
        _changed,
        base_bytes=4 << 20,
        factor=4096,
        max_bytes=4096,
        examples=100,
    ),
)
