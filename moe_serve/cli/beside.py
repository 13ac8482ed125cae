"""Options that have no say beside another: refused, never ignored.

Who gives one believes that it was heard. Only what was typed counts: a default is for everybody,
and a variable of the environment for many commands. What a `--dry-run` carries into the command
that it prints is heard, and so is a permission (`--yes`, `--accept-...`) that was not needed.

Responsible for telling what was typed, and for one sentence. Called by commands.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from moe_serve.errors import InvalidArgument


def typed(ctx: Any, name: str) -> bool:
    """Whether a parameter of the command stands on its command line."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_beside(ctx: Any, names: Collection[str], other: str, why: str) -> None:
    """Raise InvalidArgument where one of these parameters was typed. other: what takes its say
    away. why: what is so there, and what to do."""
    found = [
        param.opts[0]
        for param in ctx.command.params
        if param.name in names and typed(ctx, param.name)
    ]
    if found:
        verb = "has" if len(found) == 1 else "have"
        raise InvalidArgument(f"{', '.join(found)} {verb} no say beside {other}: {why}")
