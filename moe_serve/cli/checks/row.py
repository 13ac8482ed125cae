"""One row of the report. Called by every module of checks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Level(StrEnum):
    """OK and NOTE are facts; WARN may hurt; FAIL will."""

    OK = "ok"
    NOTE = "note"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """A fact about this machine: `topic` groups rows, `next_step` is there where it is bad."""

    topic: str
    name: str
    level: Level
    detail: str
    next_step: str = ""


def shown_path(path: Path | str) -> str:
    """A path with the user's folder as ~: reports are pasted where a user name does not belong."""
    text, home = str(path), str(Path.home())
    return "~" + text[len(home) :] if text == home or text.startswith(home + "/") else text
