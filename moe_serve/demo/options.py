"""What `moe-serve demo` can be asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """seconds: how long text is written. json_file: where the figures go. inject: "", "drop-one" or
    "double-one": a deliberate fault in combining, which must make the demo fail. dashboard: open
    the page. quiet: no text."""

    seconds: float = 60.0
    json_file: Path | None = None
    inject: str = ""
    dashboard: bool = True
    quiet: bool = False
