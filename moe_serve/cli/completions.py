"""What shells ask when TAB is pressed.

Responsible for the two private calls of typer that its own `--install-completion` is made of (they
are there since 0.12): that option would write into files of the user's. Called by `main` where a
shell asks, and by the command `completion`.
"""

from __future__ import annotations

from typer._completion_classes import completion_init
from typer._completion_shared import get_completion_script

from moe_serve.cli import COMPLETE_VARIABLE, PROGRAM


def offer_completions() -> None:
    """Answer instead of running a command, where the environment names a shell that asks."""
    completion_init()


def completion_script(shell: str) -> str:
    """What bash, zsh or fish is to read at its start."""
    return get_completion_script(prog_name=PROGRAM, complete_var=COMPLETE_VARIABLE, shell=shell)
