"""Lines of Python's own logging as the same JSON lines that parts write.

Modules of ours that may run in anybody's process (a client's, a test's) log as libraries do, to
the logger of their name; what else stands in a line is in the record's `extra`. A part's process
has its lines written in our form.

Responsible for that handler. Must never touch a logger that is not ours. Called by the parts'
actors, once a process.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from moe_serve.telemetry.logs import Level, LogSink, make_logger

LIBRARY: Final = "moe_serve"
"""Logger above all of ours."""
_PLAIN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""What a record holds without `extra`."""


class JsonLines(logging.Handler):
    """Writes records as lines of `make_logger` with these fields."""

    def __init__(self, sink: LogSink | None = None, **fields: Any) -> None:
        super().__init__()
        self._log = make_logger(sink, level=Level.DEBUG, **fields)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; one that cannot be written is told as `logging` does."""
        try:
            extra = {name: value for name, value in vars(record).items() if name not in _PLAIN}
            if record.exc_info:
                extra["exc_info"] = record.exc_info
            extra.setdefault("logger", record.name)
            level = min(max(record.levelno // 10 * 10, Level.DEBUG), Level.ERROR)
            self._log.log(int(level), record.getMessage(), **extra)
        except Exception:
            self.handleError(record)


def write_as_json(*, sink: LogSink | None = None, level: Level = Level.INFO, **fields: Any) -> None:
    """From now on lines of this process' modules of ours are written with these fields, once each.
    Called again, the newest fields hold."""
    library = logging.getLogger(LIBRARY)
    for handler in [one for one in library.handlers if isinstance(one, JsonLines)]:
        library.removeHandler(handler)
    library.addHandler(JsonLines(sink, **fields))
    library.setLevel(int(level))
    library.propagate = False
