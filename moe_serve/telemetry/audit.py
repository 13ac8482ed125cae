"""The audit log: who did what to the service, and who was turned away.

Lines of admin calls are always written: each comes from a caller with a live token and did a real
thing. Lines of refused callers are bounded, because strangers choose their number: at most
`REFUSALS_PER_S` a second, and the next line says how many were left out.

Responsible for the form of the lines and their bound. Must never hold a token. Called by the
interceptors of `rpc`; made by the admin server and by routers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from moe_serve.rpc.audit import METHOD_CHARS_MAX, AuditLine
from moe_serve.telemetry.logs import LogFile, LogSink, make_logger

FILE_NAME = "audit.log"
REFUSALS_PER_S = 10


class AuditLog:
    """Writes lines to what `open_sink` gives, opened with the first line; None is stderr, and so
    is a sink that cannot be opened or written. now_s: a monotonic clock, seconds."""

    def __init__(
        self,
        open_sink: Callable[[], LogSink] | None = None,
        *,
        part: str,
        node: str = "",
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_sink = open_sink
        self._part, self._node = part, node
        self._sink: LogSink | None = None
        self._now_s = now_s
        self._second = -1
        self._written = 0
        self._left_out = 0

    def note(self, line: AuditLine) -> None:
        """An admin call that ended."""
        self._write("admin call", line, {"epoch": line.epoch})

    def refuse(self, line: AuditLine) -> None:
        """A call that was not let in."""
        second = int(self._now_s())
        if second != self._second:
            self._second, self._written = second, 0
        if self._written >= REFUSALS_PER_S:
            self._left_out += 1
            return
        self._written += 1
        left_out, self._left_out = self._left_out, 0
        self._write("call refused", line, {"left_out": left_out} if left_out else {})

    def close(self) -> None:
        """Close the file, where there is one."""
        if isinstance(self._sink, LogFile):
            self._sink.close()
        self._sink = None

    def _write(self, event: str, line: AuditLine, more: dict[str, int | str]) -> None:
        fields = {
            "who": line.who,
            "peer": line.peer,
            "method": line.method[:METHOD_CHARS_MAX],
            "result": line.result,
            **more,
        }
        try:
            if self._sink is None and self._open_sink is not None:
                self._sink = self._open_sink()
            make_logger(self._sink, part=self._part, node=self._node).info(event, **fields)
            if self._sink is not None:
                self._sink.flush()
        except OSError as error:  # a full disk must neither end a call nor lose the line
            log = make_logger(part=self._part, node=self._node)
            log.warning(event, **fields, audit_file=str(error.strerror))


def audit_file(state_dir: Path) -> LogFile:
    """`audit.log` of a controller: mode 0600, bounded, older ones kept beside it. Raises OSError
    where the folder takes no file."""
    return LogFile(state_dir / FILE_NAME)
