"""What torch raises where memory is too short, made one error.

Responsible for telling that from a device that failed. Must never hide another error. Called by the
torch backend around everything that may allocate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

_WORDS: Final = ("out of memory", "ALLOC_FAILED", "can't allocate memory", "not enough memory")
"""What plain RuntimeErrors say: pinned host memory, a library's workspace, the CPU's allocator."""


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raises MemoryError for every way in which torch says that memory is too short."""
    try:
        yield
    except RuntimeError as error:
        if not is_memory(error):
            raise
        raise MemoryError(str(error).partition("\n")[0]) from error


def is_memory(error: RuntimeError) -> bool:
    """Whether it says that memory is too short."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    return any(words in text for words in _WORDS)
