"""All fuzz targets, by name: one a decode path of the product."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz import edge, files, layouts, placement, wire
from tests.fuzz.target import Target

CORPUS = Path(__file__).parent / "corpus"
"""Inputs worth keeping, in a folder a target: each adds something to what the others reach."""

TARGETS: tuple[Target, ...] = (
    *edge.TARGETS,
    *wire.TARGETS,
    *placement.TARGETS,
    *files.TARGETS,
    *layouts.TARGETS,
)


def target(name: str) -> Target:
    """A target by its name. Raises KeyError with the names there are."""
    for one in TARGETS:
        if one.name == name:
            return one
    raise KeyError(f"{name} is no target; there are {', '.join(one.name for one in TARGETS)}")


def kept(name: str) -> list[bytes]:
    """The inputs kept for a target, in a fixed order."""
    return [file.read_bytes() for file in sorted((CORPUS / name).glob("*"))]
