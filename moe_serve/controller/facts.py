"""What a controller notes of itself for a history: the beginning and the end of a term, and what
its engine does (`placement.engine.EngineFacts`).

Responsible for the two ends. Called by the service, where settings name a folder.
"""

from __future__ import annotations

import os

from moe_serve.controller.beginning import Beginning
from moe_serve.controller.settings import ControllerSettings
from moe_serve.telemetry.fact_log import FactLog, LifeLog
from placement.engine import EngineFacts
from placement.messages.history import Began, Died, RouterHeard


class ControllerFacts:
    """Of one term."""

    def __init__(self, log: FactLog, settings: ControllerSettings, beginning: Beginning) -> None:
        self._life: LifeLog = log.life(f"controller/{beginning.term}")
        self._beginning = beginning
        self._began = self._ended = False
        self.engine = EngineFacts(beginning.engine, settings.spec, self._life.note)

    def began(self) -> None:
        """The journal is the term's own; nothing is commanded yet."""
        beginning, self._began = self._beginning, True
        self._life.note(Began, term=beginning.term, place="controller", pid=os.getpid())
        self.engine.recovered(journal=beginning.going_on, torn=beginning.journal_torn)

    def router_heard(self, router: str, incarnation: int) -> None:
        """A router's report has come."""
        self._life.note(RouterHeard, term=self._beginning.term, life=f"{router}/{incarnation}")

    def died(self, cause: str) -> None:
        """The term is over. cause: left | fenced | words of what went wrong. Idempotent."""
        if self._began and not self._ended:
            self._ended = True
            self._life.note(Died, term=self._beginning.term, cause=cause)
