"""Requests whose answer does not come: whether they were heard is not known, and that is said.

Responsible for saying so, whatever ends the wait for the answer: Ctrl-C, a call's deadline, a
connection that broke. Called by the commands that ask for a change once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from moe_serve.cli.exits import CannotReach
from moe_serve.cli.output import Output
from moe_serve.errors import DeadlineExceeded

NOT_KNOWN = "whether it was heard is not known: `moe-serve status` says so"


@contextmanager
def told_if_unheard(out: Output, words: str = NOT_KNOWN) -> Iterator[None]:
    """Make one request in it. A refusal is an answer, and raised as it is."""
    try:
        yield
    except (CannotReach, DeadlineExceeded, KeyboardInterrupt):
        out.note(words)
        raise
