"""How far long work is: a bar on stderr where somebody looks, lines of text elsewhere.

Responsible for never writing a bar into a pipe, a file or a log. Called by commands that take
longer than a person waits without asking.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar, overload

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from moe_serve.cli.output import Output

_T = TypeVar("_T")


class Steps:
    """Work whose steps have names. Each is a line of text, as `Output.note` writes it; on a
    terminal the one that goes on has a clock, and a bar once it is known how much it is."""

    def __init__(
        self, out: Output, progress: Progress | None = None, task: TaskID | None = None
    ) -> None:
        self._out = out
        self._progress = progress
        self._task = task

    def say(self, text: str) -> None:
        """The next step begins."""
        self._out.note(text)
        if self._progress is not None:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(text, total=None)

    def tell(self, done: int, total: int) -> None:
        """How much of the step is done, where there is a terminal to show it on."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, total=total)


@contextmanager
def steps(out: Output) -> Iterator[Steps]:
    """Show steps until the end of the context; what is drawn is gone then, the lines stay."""
    console = out.progress_console
    if not console.is_terminal:
        yield Steps(out)
        return
    with _drawn(out) as progress:
        yield Steps(out, progress)


@contextmanager
def bar(out: Output, text: str, total: int | None) -> Iterator[Steps]:
    """Show one step, its size known or told later; in a pipe nothing at all."""
    if not out.progress_console.is_terminal:
        yield Steps(out)
        return
    with _drawn(out) as progress:
        yield Steps(out, progress, progress.add_task(text, total=total))


class Tally:
    """How many are done of what goes on elsewhere, in words: a line at each change; on a terminal a
    bar beside the words, of which the last stay."""

    def __init__(self, out: Output, progress: Progress | None = None) -> None:
        self._out = out
        self._progress = progress
        self._task = None if progress is None else progress.add_task("", total=None)
        self.said = ""

    def tell(self, text: str, done: int, total: int) -> None:
        """The words of now. total: 0 = not known yet."""
        if self._progress is not None and self._task is not None:
            # A bar of 0 of 0 would be drawn as done.
            self._progress.update(self._task, description=text, completed=done, total=total or None)
        elif text != self.said:
            self._out.note(text)
        self.said = text


@contextmanager
def tally(out: Output) -> Iterator[Tally]:
    """Show how many are done until the end of the context."""
    if not out.progress_console.is_terminal:
        yield Tally(out)
        return
    progress = _drawn(out)
    told = Tally(out, progress)
    try:
        with progress:
            yield told
    finally:
        if told.said:
            out.note(told.said)


def _drawn(out: Output) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=out.progress_console,
        transient=True,
        # What others print meanwhile goes where they print it.
        redirect_stdout=False,
        redirect_stderr=False,
    )


@contextmanager
def counted(out: Output, text: str, things: Sequence[_T], *, passes: int) -> Iterator[Sequence[_T]]:
    """The same things, shown as they are gone through. passes: how many times that will be."""
    with bar(out, text, passes * len(things)) as shown:
        yield _Counted(things, shown, passes)


class _Counted(Sequence[_T]):
    """A sequence that tells how far each walk through it is."""

    def __init__(self, things: Sequence[_T], shown: Steps, passes: int) -> None:
        self._things = things
        self._shown = shown
        self._total = passes * len(things)
        self._done = 0

    def __len__(self) -> int:
        return len(self._things)

    @overload
    def __getitem__(self, at: int) -> _T: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[_T]: ...
    def __getitem__(self, at: int | slice) -> _T | Sequence[_T]:
        return self._things[at]

    def __iter__(self) -> Iterator[_T]:
        for thing in self._things:
            yield thing
            self._done += 1
            self._shown.tell(self._done, self._total)
