"""Where text goes: data to stdout as a table, JSON or YAML, progress and errors to stderr.

Responsible for streams, colour and width. Knows nothing of what is shown: views make the tables.
Colour is off where the stream is no terminal or NO_COLOR is set. Called by every command.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from math import isfinite
from typing import Any, TextIO

import yaml
from rich.console import Console, RenderableType
from rich.table import Table

WIDE = 200
"""Columns where nobody looks: a table in a pipe is never folded at 80."""


class OutputFormat(StrEnum):
    """`-o`: a table for people, JSON or YAML for programs."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


def console(stream: TextIO) -> Console:
    """Console on a stream, without markup: names and reasons come from outside and may hold
    brackets."""
    seen = stream.isatty()
    return Console(
        file=stream,
        width=None if seen else WIDE,
        no_color=not seen or bool(os.environ.get("NO_COLOR")),
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=not seen,
    )


class Output:
    """The two streams of one command. Made in the command, so that the streams are today's."""

    def __init__(self, form: OutputFormat = OutputFormat.TABLE) -> None:
        self.form = form
        self.out = console(sys.stdout)
        self._err = console(sys.stderr)

    @property
    def for_programs(self) -> bool:
        """Whether programs read stdout."""
        return self.form is not OutputFormat.TABLE

    @property
    def progress_console(self) -> Console:
        """Of stderr, for what is drawn over and over while something goes on."""
        return self._err

    def data(self, plain: Any, shown: Sequence[RenderableType]) -> None:
        """The command's answer: `plain` (dicts, lists, numbers) for programs, or `shown` one under
        the other."""
        if self.form is OutputFormat.JSON:
            self._whole(_json(plain, indent=2) + "\n")
        elif self.form is OutputFormat.YAML:
            self._whole(_yaml(plain))
        else:
            for part in shown:
                _show(self.out, part)

    def line(self, plain: Any, shown: RenderableType) -> None:
        """One entry of a stream: a line of JSON, a document of YAML, or what is shown for it."""
        if self.form is OutputFormat.JSON:
            self._whole(_json(plain) + "\n")
        elif self.form is OutputFormat.YAML:
            self._whole("---\n" + _yaml(plain))
        else:
            _show(self.out, shown)

    def _whole(self, text: str) -> None:
        """Text that no terminal folds."""
        self.out.file.write(text)
        self.out.file.flush()

    def note(self, text: str) -> None:
        """Progress, to stderr."""
        self._err.print(text)

    def note_part(self, part: RenderableType) -> None:
        """A table that belongs to progress, to stderr."""
        _show(self._err, part)

    def error(self, text: str) -> None:
        """Why the command failed, to stderr."""
        self._err.print(text, style="bold red" if text.startswith("error:") else None)


def _json(plain: Any, indent: int | None = None) -> str:
    try:
        return json.dumps(plain, indent=indent, ensure_ascii=False, allow_nan=False)
    except ValueError:  # of a controller of ours never; JSON has no word for them
        return json.dumps(_numbers_only(plain), indent=indent, ensure_ascii=False, allow_nan=False)


def _numbers_only(plain: Any) -> Any:
    """The same with null for what is no number, or without an end."""
    if isinstance(plain, dict):
        return {key: _numbers_only(value) for key, value in plain.items()}
    if isinstance(plain, list | tuple):
        return [_numbers_only(value) for value in plain]
    return None if isinstance(plain, float) and not isfinite(plain) else plain


def _yaml(plain: Any) -> str:
    # By way of JSON: the writer of YAML takes plain types only, and so both forms hold the same.
    tree = json.loads(_json(plain))
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=WIDE)


def _show(console: Console, part: RenderableType) -> None:
    """Print; in a pipe or a file without the blanks that fill a table's last column."""
    if console.is_terminal:
        console.print(part)
        return
    with console.capture() as held:
        console.print(part)
    for line in held.get().splitlines() or [""]:
        console.file.write(line.rstrip() + "\n")
    console.file.flush()


def columns(headers: Sequence[str], *, right: Sequence[str] = ()) -> Table:
    """A table without lines, its columns two blanks apart; `right` names those of numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for header in headers:
        table.add_column(header, justify="right" if header in right else "left", no_wrap=True)
    return table
