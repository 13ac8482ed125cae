"""Files that a command writes because an option asks for them: whole, or not at all. `-` is
standard output.

Responsible for that, and for naming the option where a file cannot be written. Called by the
commands that draw or export.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from moe_serve.errors import InvalidArgument

STANDARD_OUTPUT = Path("-")


def write_stdout(data: bytes) -> None:
    """Write these bytes to standard output as they are."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def check_binary_stdout(option: str) -> None:
    """Raise InvalidArgument where standard output is a terminal, which bytes would leave in
    disorder."""
    if sys.stdout.isatty():
        raise InvalidArgument(f"{option} - writes bytes, and standard output is a terminal")


def write_whole(file: Path, data: bytes, option: str) -> None:
    """Replace a file by these bytes, or leave it as it was. A symbolic link stays, and what it
    points to is replaced. Raises InvalidArgument where it cannot be written, or is no regular
    file."""
    try:
        if file.exists() and not file.is_file():
            raise InvalidArgument(
                f"{option} {file} cannot be written: it is no regular file; name one in a folder "
                "that exists"
            )
        target = file.resolve()
        fresh = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            fresh.write_bytes(data)
            fresh.replace(target)
        finally:
            fresh.unlink(missing_ok=True)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: links in a circle
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidArgument(
            f"{option} {file} cannot be written: {reason}; name a file in a folder that exists"
        ) from error
