"""Exit codes, what they mean, and which of our errors becomes which.

Responsible for these mappings alone. Called by the command group around every command, for the help
of each, and for the reference page.
"""

from __future__ import annotations

from enum import IntEnum
from types import MappingProxyType
from typing import Final

from moe_serve.config import ConfigInvalid
from moe_serve.errors import InvalidArgument, MoeServeError, Unavailable


class ExitCode(IntEnum):
    """What the process says to a script. 2 is also what the argument parser uses."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    CHANGES = 4
    DEGRADED = 5
    INTERRUPTED = 130


MEANINGS: Final = MappingProxyType(
    {
        ExitCode.OK: "done",
        ExitCode.FAILED: "refused or failed, the error says why",
        ExitCode.USAGE: "wrong arguments or a wrong service file",
        ExitCode.UNREACHABLE: "no service is recorded, or its controller does not answer, or not "
        "yet: try again later",
        ExitCode.CHANGES: "`plan --exit-code` found something to move",
        ExitCode.DEGRADED: "`status --check` found something wrong, `explain --check` something "
        "slow",
        ExitCode.INTERRUPTED: "Ctrl-C",
    }
)
"""What each code means."""
EPILOG: Final = (
    f"Exit codes: {'; '.join(f'{code.value} {text}' for code, text in MEANINGS.items())}."
)
"""Under the help of every command."""


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
