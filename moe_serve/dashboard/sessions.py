"""Who has shown an operator's token: sessions, their cookies, and how often one may guess.

A session is a random number in a cookie that scripts cannot read, and a second one (CSRF) that only
the page knows and sends as a header. It ends after a while without use, after a while in any case,
or when the controller no longer takes its token.

Responsible for who is an operator. Must never log or show a token; must never ask the controller.
Called by `operating`.
"""

from __future__ import annotations

import hmac
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

SESSIONS_MAX = 16
"""Sessions at once; one more ends the one that was used longest ago."""
IDLE_S = 1800.0
"""A session that nobody uses for so long ends."""
LIFE_S = 8 * 3600.0
"""And in any case after so long."""
FAILURES_MAX = 5
"""Logins that fail within FAILURES_S; further ones wait, wrong or right."""
FAILURES_S = 60.0
ID_BYTES = 32


@dataclass(slots=True)
class Session:
    """One operator's. token: what the admin port takes, "" where it asks for none."""

    session_id: str = field(repr=False)
    csrf: str = field(repr=False)
    token: str = field(repr=False)
    number: int
    """For the log: tells sessions apart and gives nothing away."""
    began_s: float
    used_s: float

    def ends_in_s(self, now_s: float) -> float:
        """Seconds it lives if nobody uses it."""
        return min(self.used_s + IDLE_S, self.began_s + LIFE_S) - now_s


class Sessions:
    """Live sessions of one page. clock_s: monotonic seconds."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._live: list[Session] = []
        self._begun = 0

    def now_s(self) -> float:
        """The clock that sessions age by."""
        return self._clock_s()

    def begin(self, token: str) -> Session:
        """A new session for a token that the controller has taken."""
        self._forget_ended()
        while len(self._live) >= SESSIONS_MAX:
            self._live.remove(min(self._live, key=lambda s: s.used_s))
        self._begun += 1
        now_s = self._clock_s()
        made = Session(
            session_id=secrets.token_urlsafe(ID_BYTES),
            csrf=secrets.token_urlsafe(ID_BYTES),
            token=token,
            number=self._begun,
            began_s=now_s,
            used_s=now_s,
        )
        self._live.append(made)
        return made

    def find(self, session_id: str) -> Session | None:
        """The live session of a cookie's value; it counts as used now."""
        self._forget_ended()
        found = None
        for session in self._live:  # no early exit: time does not tell which one came near
            if same(session.session_id, session_id):
                found = session
        if found is not None:
            found.used_s = self._clock_s()
        return found

    def end(self, session: Session) -> None:
        """Forget a session."""
        self._live = [kept for kept in self._live if kept is not session]

    def count(self) -> int:
        """Sessions that live."""
        self._forget_ended()
        return len(self._live)

    def _forget_ended(self) -> None:
        now_s = self._clock_s()
        self._live = [s for s in self._live if s.ends_in_s(now_s) > 0]


class Guesses:
    """Counts logins until they are known to be right: those in flight count as failed."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._failed_s: deque[float] = deque()

    def wait_s(self) -> float:
        """Seconds until another may be tried, 0 = now."""
        now_s = self._clock_s()
        while self._failed_s and self._failed_s[0] <= now_s - FAILURES_S:
            self._failed_s.popleft()
        if len(self._failed_s) < FAILURES_MAX:
            return 0.0
        return self._failed_s[0] + FAILURES_S - now_s

    def begin(self) -> float:
        """A try begins; give the answer to `forgive` where it was no wrong token."""
        now_s = self._clock_s()
        self._failed_s.append(now_s)
        return now_s

    def forgive(self, begun_s: float) -> None:
        """That try was right, or nobody could say."""
        if begun_s in self._failed_s:
            self._failed_s.remove(begun_s)


def same(known: str, given: str) -> bool:
    """Whether two texts are the same, in a time that does not depend on where they differ."""
    return hmac.compare_digest(known.encode(), given.encode("utf-8", "surrogateescape"))
