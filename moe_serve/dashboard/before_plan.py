"""The frame just before the newest plan began: what "change since the last plan" is measured from.

Windows and decisions arrive over two streams, in either order, so the last few frames are kept
until it is known which plan began after which of them.

Responsible for choosing that frame by the controller's own seconds. Must never pass off a later one
for it. Called by `feed`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from moe_serve.rpc import placement_pb2

FRAMES_MAX = 8
"""Frames that wait for a decision; a decision is never so many windows late."""
SKEW_S = 30.0
"""By which the page's clock may be ahead of the controller's."""


@dataclass(frozen=True, slots=True)
class KeptFrame:
    """A frame's document, its version, and when its window closed: the controller's second, and
    since the Unix epoch."""

    end_s: float
    wall_s: float
    version: int
    body: bytes


class BeforePlan:
    """Tell it every window and every decision; `frame` is what is looked for."""

    def __init__(self) -> None:
        self.plan_id = ""
        """The newest plan that began, "" where none was seen."""
        self.frame: KeptFrame | None = None
        """The newest frame that closed before it began, None where there was none."""
        self._began_s = self._began_wall_s = 0.0
        self._recent: deque[KeptFrame] = deque(maxlen=FRAMES_MAX)

    def closed(self, frame: KeptFrame) -> None:
        """A window has closed."""
        if self._recent and frame.end_s < self._recent[-1].end_s:
            # The controller's seconds began anew: no older frame can be compared any more.
            self._recent.clear()
            self._began_s = 0.0
        self._recent.append(frame)
        if self._is_before(frame):
            self.frame = frame

    def note(self, record: placement_pb2.DecisionRecord) -> None:
        """A decision that was not told before; those of the controller come in order."""
        if record.outcome != "started" or not record.plan_id or record.move_id >= 0:
            return
        if record.plan_id == self.plan_id:
            return
        self.plan_id = record.plan_id
        self._began_s, self._began_wall_s = record.at_s, record.wall_time_s
        earlier = [frame for frame in self._recent if self._is_before(frame)]
        self.frame = earlier[-1] if earlier else None

    def _is_before(self, frame: KeptFrame) -> bool:
        # By date too, and loosely: a plan of the controller's last life has a second that means
        # nothing in this one, and clocks of two nodes differ.
        soon_enough = frame.wall_s <= self._began_wall_s + SKEW_S
        return bool(self.plan_id) and frame.end_s <= self._began_s and soon_enough
