"""Structured logs: one JSON object a line, to stderr or to a file that is bounded.

Lines of all parts have the same keys, in this order and where they are known: `ts` (UTC), `level`,
`event`, `part`, `node`, `term`, `epoch`, `request_id`; then the other fields bound to the logger
and those of the call. Responsible for the form; `scrub` decides what of a value may be written.
Holds no global logger: whoever composes a part makes one and hands it on. Called by part actors
and CLI.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, Protocol

import structlog

from moe_serve.telemetry.scrub import scrub

FILE_BYTES_MAX = 16 << 20
FILES_KEPT = 3
"""A full file becomes `NAME.1`, that one `NAME.2`; older ones go."""
FIRST_FIELDS: Final = ("ts", "level", "event", "part", "node", "term", "epoch", "request_id")
"""Of every line, in this order, where they are known."""


NODE_LABEL: Final = "moe.node"
"""Optional label of a node with its name for people; else the first characters of its Ray id are
its name."""


class Level(IntEnum):
    """Least severity that is written."""

    DEBUG = 10
    INFO = 20
    WARNING = 30
    ERROR = 40


class LogSink(Protocol):
    """Where lines go: stderr, or a LogFile."""

    def write(self, text: str, /) -> Any:
        """Take text that ends in a line break."""
        ...

    def flush(self) -> Any:
        """Let it be seen."""
        ...


class LogFile:
    """A file that never grows beyond `bytes_max`, with `kept` older ones beside it; mode 0600."""

    def __init__(
        self, path: Path, *, bytes_max: int = FILE_BYTES_MAX, kept: int = FILES_KEPT
    ) -> None:
        self._path, self._bytes_max, self._kept = path, bytes_max, kept
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._open()

    def write(self, text: str) -> int:
        """Append; a file that would grow over its limit is set aside first."""
        data = text.encode("utf-8", "replace")
        if self._size and self._size + len(data) > self._bytes_max:
            self._turn()
        self._size += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        """Let what was written be seen."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _open(self) -> None:
        self._path.touch(mode=0o600, exist_ok=True)
        self._file = self._path.open("ab")
        self._size = self._path.stat().st_size

    def _turn(self) -> None:
        self._file.close()
        for number in range(self._kept - 1, 0, -1):
            older = self._numbered(number - 1) if number > 1 else self._path
            if older.exists():
                older.replace(self._numbered(number))
        if self._kept <= 1:
            self._path.unlink()
        self._open()

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


def make_logger(
    sink: LogSink | None = None, *, level: Level = Level.INFO, **fields: Any
) -> structlog.typing.FilteringBoundLogger:
    """A logger with fields bound to it; `sink` None is stderr.

    `log.info("plan started", plan_id="3-1", moves=4)` writes one line; lines below `level` cost a
    comparison. An exception is named by type and message, without its stack.
    """
    logger: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(
        structlog.WriteLogger(sys.stderr if sink is None else sink),  # type: ignore[arg-type]
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
            _name_exception,
            _scrub_all,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(int(level)),
        cache_logger_on_first_use=False,
        **fields,
    )
    return logger


def _name_exception(
    _logger: Any, _method: str, entry: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """`exc_info` becomes `error`: a stack's source lines may show values."""
    given = entry.pop("exc_info", None)
    error = sys.exc_info()[1] if given is True else given
    if isinstance(error, tuple):
        error = error[1]
    if isinstance(error, BaseException):
        entry["error"] = f"{type(error).__name__}: {error}"
    return entry


def _scrub_all(_logger: Any, _method: str, entry: MutableMapping[str, Any]) -> Mapping[str, Any]:
    first = {name: scrub("", entry.pop(name)) for name in FIRST_FIELDS if name in entry}
    return {**first, **{name: scrub(name, value) for name, value in entry.items()}}
