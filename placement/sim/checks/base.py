"""What a checker is, and how facts reach it.

Responsible for giving each fact to those who want its kind, in order. Called by the runner and by
whoever reads the lines of real processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from placement.messages.history import Fact


class InvariantBroken(AssertionError):
    """A promise does not hold; the text begins with its name."""


Rules = Mapping[type[Fact], Callable[[Any], None]]


class Checker(Protocol):
    """Reads facts in order."""

    def rules(self) -> Rules:
        """What it does with each kind of fact that it wants; raises InvariantBroken."""
        ...

    def finish(self) -> None:
        """All facts were read, and the service had come to rest. Raises InvariantBroken."""
        ...


def check_facts(
    facts: Iterable[Fact], checkers: Iterable[Checker], *, at_rest: bool = True
) -> None:
    """Give the facts to the checkers. at_rest: False where the facts end in the middle of
    something. Raises InvariantBroken."""
    checkers = list(checkers)
    wanted: dict[type[Fact], list[Callable[[Any], None]]] = {}
    for checker in checkers:
        for kind, rule in checker.rules().items():
            wanted.setdefault(kind, []).append(rule)
    nobody: list[Callable[[Any], None]] = []
    for fact in facts:
        for rule in wanted.get(type(fact), nobody):
            rule(fact)
    if at_rest:
        for checker in checkers:
            checker.finish()
