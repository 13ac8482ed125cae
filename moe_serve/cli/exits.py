"""Exit codes, and which of our errors becomes which.

Responsible for this mapping alone. Called by the command group around every command.
"""

from __future__ import annotations

from enum import IntEnum

from moe_serve.config import ConfigInvalid
from moe_serve.errors import InvalidArgument, MoeServeError, Unavailable


class ExitCode(IntEnum):
    """What the process says to a script. 2 is also what the argument parser uses."""

    OK = 0
    FAILED = 1
    USAGE = 2
    """Wrong arguments or a wrong service file."""
    UNREACHABLE = 3
    """No service is recorded, or its controller does not answer, or not yet: try again later."""
    CHANGES = 4
    """`plan --exit-code` found something to move."""
    DEGRADED = 5
    """`status --check` found something wrong."""
    INTERRUPTED = 130


class CannotReach(MoeServeError):
    """There is no controller to talk to: none is recorded, or it does not answer."""

    code = "UNAVAILABLE"


def exit_code_of(error: MoeServeError | ConfigInvalid) -> ExitCode:
    """Exit code of a command that ended with this error."""
    if isinstance(error, CannotReach | Unavailable):
        return ExitCode.UNREACHABLE
    if isinstance(error, ConfigInvalid | InvalidArgument):
        return ExitCode.USAGE
    return ExitCode.FAILED


def error_lines(error: MoeServeError | ConfigInvalid) -> list[str]:
    """What a person reads: one line, and one for each field the error names, unless the first says
    the same."""
    if isinstance(error, ConfigInvalid):
        return [str(fault) for fault in error.faults]
    fields = [f"{one.field}: {one.description}" for one in error.violations]
    return [f"error: {error.message}", *(f"  {one}" for one in fields if one != error.message)]
