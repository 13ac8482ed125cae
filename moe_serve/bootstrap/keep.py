"""Keeps a service up: starts it, looks after it, starts it again whenever it is gone.

Ray restarts the controller, and the controller everything else; nobody restarts Ray. What
`moe-serve up --keep` runs under (systemd, a container's own restart) only has to keep this one
process: after the death of everything, this machine's restart included, the service serves what its
journal committed last.

Responsible for the loop: is it gone, clear away, start, wait longer where it does not start. Must
never end a service that answers, nor decide about experts. A service that was taken down by a
person stays down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from moe_serve.bootstrap.record import ServiceRecord
from moe_serve.errors import StartRefused

LOOK_S = 1.0
"""Between two looks at a service."""
SILENT_S = 30.0
"""How long the admin port may be silent before Ray is asked whether there still is a controller;
Ray needs up to 30 s on a busy machine to restart one."""
PAUSE_FIRST_S = 1.0
PAUSE_MAX_S = 60.0
"""Between two starts: doubles with each that failed or did not last."""
CALM_S = 120.0
"""A service that lived for so long ends the row of failures."""


class Hands(Protocol):
    """What the keeper does to the world."""

    def start(self) -> ServiceRecord:
        """Bring the service up, or take over one that runs. Raises StartRefused."""
        ...

    def record(self) -> ServiceRecord | None:
        """What the record says now, None where somebody takes or took the service down."""
        ...

    def answers(self, record: ServiceRecord) -> bool:
        """Whether its admin port takes a connection."""
        ...

    def cluster_gone(self, record: ServiceRecord) -> bool:
        """Whether the service had a Ray cluster of its own whose head is not alive."""
        ...

    def controller_gone(self, record: ServiceRecord) -> bool:
        """Whether Ray answers and knows no controller of it. Slow."""
        ...

    def clear(self, record: ServiceRecord) -> None:
        """Remove what a dead service left."""
        ...

    def wait(self, seconds: float) -> None:
        """Do nothing for a while."""
        ...

    def now_s(self) -> float:
        """Monotonic seconds."""
        ...


@dataclass(slots=True)
class Keeper:
    """`run` until the service is taken down. `progress` is told each thing that happens."""

    service: str
    hands: Hands
    progress: Callable[[str], None] = lambda line: None
    starts: int = 0
    """Times the service was started or taken over."""

    def run(self, on_up: Callable[[ServiceRecord], None] = lambda record: None) -> None:
        """Start the service and keep it. Returns once somebody took it down.

        The first start that is refused is this call's: raises StartRefused. Each later one is told
        and tried again.
        """
        record = self.hands.start()
        self.starts += 1
        on_up(record)
        pause_s = PAUSE_FIRST_S
        while True:
            began_s = self.hands.now_s()
            last = self._until_gone(record)
            if last is None:
                self.progress(f"service {self.service} was taken down; nothing is left to keep")
                return
            if self.hands.now_s() - began_s >= CALM_S:
                pause_s = PAUSE_FIRST_S
            self.progress(f"service {self.service} is gone; starting it again in {pause_s:g} s")
            self.hands.clear(last)
            record, pause_s = self._until_up(pause_s)
            on_up(record)

    def _until_up(self, pause_s: float) -> tuple[ServiceRecord, float]:
        """Try until it starts. Returns the record and the pause before the next start."""
        while True:
            self.hands.wait(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)
            try:
                record = self.hands.start()
            except StartRefused as error:
                self.progress(f"it does not start: {error.message}; again in {pause_s:g} s")
            else:
                self.starts += 1
                return record, pause_s

    def _until_gone(self, record: ServiceRecord) -> ServiceRecord | None:
        """Wait until the service is gone; its last record, None where somebody took it down."""
        heard_s = self.hands.now_s()
        while True:
            now = self.hands.record()
            if now is None:
                return None
            # Another start of it, or routers elsewhere: what the record says now is what counts.
            record = now
            if self.hands.answers(record):
                heard_s = self.hands.now_s()
            elif self.hands.cluster_gone(record):
                return record
            elif self.hands.now_s() - heard_s >= SILENT_S:
                if self.hands.controller_gone(record):
                    return record
                heard_s = self.hands.now_s()
            self.hands.wait(LOOK_S)
