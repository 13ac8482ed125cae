"""`moe-serve completion`: what makes TAB work in a shell."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer

from moe_serve.cli.completions import completion_script


class Shell(StrEnum):
    """Shells there is a script for."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    shell: Annotated[Shell, typer.Argument(metavar="bash|zsh|fish", help="The shell.")],
) -> None:
    """Print a script that makes TAB complete commands, options and recorded services.

    bash: `source <(moe-serve completion bash)`. zsh: the same after `compinit`. fish: write it to
    ~/.config/fish/completions/moe-serve.fish.
    """
    sys.stdout.write(completion_script(shell.value) + "\n")
