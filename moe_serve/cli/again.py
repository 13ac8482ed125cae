"""The command that somebody typed, as text to run again.

Responsible for leaving out nothing that was given, and for quoting. Called by commands that say
what to run next.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

import typer

from moe_serve.cli import PROGRAM
from moe_serve.cli.beside import typed

NOTHING: Mapping[str, str] = {}


def command_of(
    ctx: typer.Context, leave_out: Collection[str] = (), put: Mapping[str, str] = NOTHING
) -> str:
    """The command line of a context, with the options of the program before its own.

    leave_out: names of parameters that do not come again. put: values by name that stand in place
    of what was given, or was not; of a flag, that it is set.
    """
    outer = [] if ctx.parent is None else _given(ctx.parent, (), NOTHING)
    own = _given(ctx, leave_out, put)
    return shlex.join([PROGRAM, *outer, str(ctx.info_name), *own])


def _given(ctx: Any, leave_out: Collection[str], put: Mapping[str, str]) -> list[str]:
    options: list[str] = []
    arguments: list[str] = []
    for param in ctx.command.params:
        if param.name in leave_out or not (typed(ctx, param.name) or param.name in put):
            continue
        value = put.get(param.name, ctx.params.get(param.name))
        words = str(value.value if isinstance(value, Enum) else value)
        if param.param_type_name == "argument":
            arguments.append(words)
        elif param.is_flag:
            options.append(param.opts[0])
        else:
            options += [param.opts[0], words]
    # What begins with a dash is an option elsewhere.
    mark = ["--"] if any(word.startswith("-") for word in arguments) else []
    return [*options, *mark, *arguments] if mark else [*arguments, *options]
