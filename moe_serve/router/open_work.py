"""What a router has in work, bounded twice: in requests and in rows.

Responsible for the two counts. Must never queue: what does not fit is refused at once, and the
caller decides. Called by `dispatch`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from moe_serve.errors import ResourceExhausted

BUSY_RETRY_S = 0.05
"""Wait that a refused caller is told."""


class OpenWork:
    """Requests and rows between acceptance and answer.

    Worked example: OpenWork(2, 100) takes requests of 60 and 40 rows, refuses any third one, and
    after the first has ended refuses 61 rows and takes 60. A request alone always fits: what one
    request may hold is the message limit's business.
    """

    def __init__(self, requests_max: int, rows_max: int) -> None:
        self._requests_max = requests_max
        self._rows_max = rows_max
        self.requests = 0
        self.rows = 0
        self.refused = 0
        """Requests that did not fit."""

    @contextmanager
    def taken(self, rows: int) -> Iterator[None]:
        """Count a request of `rows` while it is in work. Raises ResourceExhausted."""
        problem = ""
        if self.requests >= self._requests_max:
            problem = f"{self.requests} requests are open, the limit of this router"
        elif self.requests and self.rows + rows > self._rows_max:
            problem = f"{self.rows} rows are in work, {rows} more pass the limit {self._rows_max}"
        if problem:
            self.refused += 1
            raise ResourceExhausted(f"{problem}; retry or use another", retry_after_s=BUSY_RETRY_S)
        self.requests += 1
        self.rows += rows
        try:
            yield
        finally:
            self.requests -= 1
            self.rows -= rows
